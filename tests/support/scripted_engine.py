"""A policy for tests that stands where a model would: an Engine that says what a script tells it.

It lives on the tokenizer alone: it reads the newest observation off the prompt's tokens and answers
with the tokens of a text. Log-probs and versions are made up, and different from token to token.
"""

import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from envs.registry import load
from manus_jax.agentgym.prompts import PROMPTS
from manus_jax.agentgym.table import environment
from manus_jax.data.chat import END_OF_TURN, START_OF_TURN, train_tokenizer
from manus_jax.data.tasks import Task
from manus_jax.engines.protocol import EngineError, Generation, Request
from manus_jax.rollout.action_formats import FORMATS, format_for
from manus_jax.rollout.trajectory import EpisodeSpec

Script = Callable[[Request, str], str]
"""(request, newest observation) → what the model says."""


def small_tokenizer() -> Any:
    texts = [part for prompt in PROMPTS.values() for part in (prompt.instruction, *prompt.actions)]
    move = load("maze").oracle(3)("current position is at position 5, 5")
    texts += [FORMATS["react"].render(move.thought, move.action)] * 3
    return train_tokenizer(texts, 700)


def spec_of(item_id: str, member: int = 0, **task: Any) -> EpisodeSpec:
    env, _, item = item_id.rpartition("_")
    return EpisodeSpec(Task(env, int(item), item_id, **task), f"{item_id}#{member}", item_id)


def oracle() -> Script:
    """Plays the environment's own oracle, one for every attempt at an episode."""
    policies: dict[str, Any] = {}

    def script(request: Request, observation: str) -> str:
        episode, attempt, _ = request.session.rsplit("/", 2)
        env, item = re.search(r"(\w+)_(\d+)#", episode).groups()
        key = f"{episode}/{attempt}"
        if key not in policies:
            policies[key] = load(env).oracle(int(item))
        move = policies[key](observation)
        return format_for(environment(env)).render(move.thought, move.action)

    return script


def says(texts: Iterable[str] | str) -> Script:
    """The same text always, or these texts one after the other, over all episodes."""
    if isinstance(texts, str):
        return lambda request, observation: texts
    rest = iter(texts)
    return lambda request, observation: next(rest)


class ScriptedEngine:
    """`stops`: whether its turns end with the end-of-turn token, or run on to their limit."""

    def __init__(self, tokenizer: Any, script: Script, max_length: int = 8192, stops: bool = True):
        self.tokenizer = tokenizer
        self.script = script
        self.version = 7
        self.max_length = max_length
        self.stops = stops
        self.requests: list[Request] = []
        self.generations: list[Generation] = []
        self.open_sessions: set[str] = set()
        self.most_at_once = 0
        self._running = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(8)
        self._stop_id = tokenizer.convert_tokens_to_ids(END_OF_TURN)

    def submit(self, request: Request) -> "Future[Generation]":
        if len(request.prompt_ids) + request.sampling.max_tokens > self.max_length:
            raise EngineError("the prompt and its generation do not fit")
        with self._lock:
            self.requests.append(request)
            self.open_sessions.add(request.session)
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
        return self._threads.submit(self._generate, request)

    def release(self, session: str) -> None:
        self.open_sessions.discard(session)

    def update_weights(self, params: Any, version: int) -> None:
        self.version = version

    def metrics(self) -> dict[str, float]:
        return {"requests": len(self.requests)}

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def observation(self, request: Request) -> str:
        text = self.tokenizer.decode(list(request.prompt_ids))
        return text.rpartition(f"{START_OF_TURN}user\n")[2].partition(END_OF_TURN)[0]

    def _generate(self, request: Request) -> Generation:
        try:
            text = self.script(request, self.observation(request))
            ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            ids = [*ids, self._stop_id] if self.stops else ids * request.sampling.max_tokens
            cut = len(ids) > request.sampling.max_tokens
            ids = ids[: request.sampling.max_tokens]
            log_probs = tuple(-(1 + n % 8) / 8 for n in range(len(ids)))
            versions = (*(self.version for _ in ids[1:]), self.version + 1)
            reason = "length" if cut or not self.stops else "stop"
            made = Generation(tuple(ids), log_probs, versions, reason)
            with self._lock:
                self.generations.append(made)
            return made
        finally:
            with self._lock:
                self._running -= 1
