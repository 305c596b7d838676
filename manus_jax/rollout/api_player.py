"""A model behind OpenAI's chat API as a policy: `openai:MODEL@URL`.

It gets the same prompts, turn limits and parsers as a trained model, as messages instead of tokens.
Its episodes have no tokens, so they can be evaluated and collected as traces, but not trained on
directly.
"""

from manus_jax.agentgym.table import environment
from manus_jax.config.settings import RolloutSettings
from manus_jax.engines.protocol import EngineError
from manus_jax.rollout.action_formats import format_for
from manus_jax.rollout.llm_player import turn_seed
from manus_jax.rollout.player import Answer, EpisodeContext
from manus_jax.rollout.prompts import TurnPrompt
from manus_jax.rollout.trajectory import Segment
from manus_jax.servers.chat_api import ChatApi, ChatApiError
from manus_jax.status import STATUS

PREFIX = "openai:"


class ApiPolicy:
    """Plays with `api`; `seed` determines the samples of servers that support seeds."""

    def __init__(self, api: ChatApi, seed: int = 0) -> None:
        self._api, self._seed = api, seed

    def check(self, env: str, settings: RolloutSettings) -> None:
        """Accepts every environment, in formats without tools."""
        self._api.head()
        if format_for(environment(env), settings.action_format).tools:
            raise ValueError(
                f"the action format {settings.action_format!r} shows tools through a chat "
                "template, which a policy behind a chat API does not have"
            )

    def require_answer(self) -> None:
        """Raises ChatApiError unless the server completes a chat."""
        self._api.require_answer()

    def player(self, context: EpisodeContext) -> "ApiPlayer":
        return ApiPlayer(self._api, context, self._seed)


class ApiPlayer:
    """Plays one attempt at an episode."""

    prompts_extended = 0
    prompts_forked = 0

    def __init__(self, api: ChatApi, context: EpisodeContext, seed: int) -> None:
        self._api, self._context, self._seed = api, context, seed
        self._messages: list[dict[str, str]] = []

    def observe(
        self, observation: str, replies: bool = False, prompt: TurnPrompt | None = None
    ) -> str:
        if prompt is not None:
            self._messages = [{"role": "user", "content": prompt(observation)}]
        elif self._messages:
            self._messages.append({"role": "user", "content": observation})
        else:
            opening = self._context.opening.messages(observation)
            self._messages = [{"role": m.role, "content": m.content} for m in opening]
        return observation

    def act(self, turn: int) -> Answer:
        settings, cancellation = self._context.settings, self._context.cancellation
        cancellation.check()
        try:
            with STATUS.working("waiting for a chat API"):
                completion = self._api.complete(
                    self._messages,
                    sleep=cancellation.sleep,
                    temperature=settings.temperature,
                    top_p=settings.top_p,
                    max_tokens=settings.max_tokens_per_turn,
                    seed=turn_seed(self._seed, self._context.spec.uid, turn),
                )
        except ChatApiError as error:
            raise EngineError(str(error)) from None
        self._messages.append({"role": "assistant", "content": completion.text})
        return Answer(completion.text, completion.cut)

    def segments(self) -> tuple[Segment, ...]:
        return ()

    def close(self) -> None:
        pass
