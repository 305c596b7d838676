"""Baseline players without a model: the environments' oracles and a random policy.

Both use the same episode loop, prompts and parsers as a model, with text instead of tokens. The
oracle's score is an upper reference for training and the random policy's a lower one.
"""

import random
import re
import threading
from collections.abc import Callable, Sequence

from envs.game import GameError, PlausibleActions
from envs.registry import ENVIRONMENTS as EMBEDDED
from envs.registry import load
from manus_jax.agentgym.failures import EnvironmentFailure, FailureKind
from manus_jax.agentgym.prompts import PROMPTS
from manus_jax.agentgym.table import environment
from manus_jax.config.settings import RolloutSettings
from manus_jax.rollout.llm_player import turn_seed
from manus_jax.rollout.player import Answer, EndEpisode, EpisodeContext
from manus_jax.rollout.prompts import TurnPrompt
from manus_jax.rollout.trajectory import Segment

Reply = Callable[[Sequence[str]], str | None]
"""All observations so far → the text of the next turn, or None to give up."""


class TextPlayer:
    """A player whose turns come from a function."""

    prompts_extended = 0
    prompts_forked = 0

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._observations: list[str] = []

    def observe(
        self, observation: str, replies: bool = False, prompt: TurnPrompt | None = None
    ) -> str:
        self._observations.append(observation)
        return observation

    def act(self, turn: int) -> Answer:
        text = self._reply(self._observations)
        if text is None:
            raise EndEpisode("gave_up")
        return Answer(text)

    def segments(self) -> tuple[Segment, ...]:
        return ()

    def close(self) -> None:
        pass


class OraclePolicy:
    """Plays the moves of the environment's oracle, for environments in `envs`."""

    def __init__(self) -> None:
        # Environments cache data shared by all items; the lock makes one thread compute it.
        self._lock = threading.Lock()

    def check(self, env: str, settings: RolloutSettings) -> None:
        if env not in EMBEDDED or load(env).oracle is None:
            known = ", ".join(name for name in EMBEDDED if ":" not in name)
            raise ValueError(f"{env} has no oracle; those that may have one are {known}")

    def player(self, context: EpisodeContext) -> TextPlayer:
        task = context.spec.task
        assert task.env is not None and task.item is not None
        spec = load(task.env)
        assert spec.oracle is not None
        try:
            with self._lock:
                policy = spec.oracle(task.item)
        except (GameError, LookupError) as error:
            detail = f"the oracle does not know item {task.item}: {error!r}"
            raise EnvironmentFailure(
                FailureKind.ITEM, task.env, "this program", "oracle", detail
            ) from error

        def reply(observations: Sequence[str]) -> str | None:
            try:
                move = policy(observations[-1])
            except GameError:  # the oracle is stuck
                return None
            return context.action_format.render(move.thought, move.action)

        return TextPlayer(reply)


class RandomPolicy:
    """Plays random plausible actions; the same episode always gets the same actions."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def check(self, env: str, settings: RolloutSettings) -> None:
        """Accepts every environment."""

    def player(self, context: EpisodeContext) -> TextPlayer:
        task, action_format = context.spec.task, context.action_format
        rng = random.Random(turn_seed(self._seed, context.spec.uid, 0))
        assert task.env is not None
        plausible = _plausible_actions(task.env)

        def reply(observations: Sequence[str]) -> str:
            actions = plausible(observations)
            # Of the generator's methods, only random() is stable across Python versions.
            action = actions[int(rng.random() * len(actions))]
            return action_format.render("I try something.", action)

        return TextPlayer(reply)


def _plausible_actions(env: str) -> PlausibleActions:
    """The environment's own function, else the actions in its prompt."""
    if env in EMBEDDED and (chosen := load(env).plausible_actions) is not None:
        return chosen
    shown = _actions_in_prompt(env)
    return lambda observations: shown


def _actions_in_prompt(env: str) -> list[str]:
    """The actions without placeholders in the environment's prompt."""
    prompt, style = PROMPTS[env], environment(env).action
    shown = [example.action for example in prompt.examples]
    listed = [part.strip() for line in prompt.actions for part in line.partition(":")[0].split(",")]
    plain = [action for action in listed if not re.search(r"[\[\](<]|\bor\b", action)]
    if style == "tool_call":
        tools = [tool for line in prompt.actions for tool in re.findall(r"(\w+)\(\)", line)]
        shown += [f"{tool} with Action Input: {{}}" for tool in tools]
    elif style == "fenced":
        shown += [f"```{action}```" for action in plain]
    elif style in ("line", "plain_line"):
        shown += plain
    return list(dict.fromkeys(shown))
