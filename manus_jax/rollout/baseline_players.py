"""Players without a model: the environments' oracles, and chance.

For evaluation: the oracle is the score to reach, chance the one to beat. Both play through the same
loop, prompts and parsers as a model, with text in place of tokens.
"""

import random
import re
import threading
from collections.abc import Callable, Sequence

from envs.game import GameError
from envs.registry import ENVIRONMENTS as EMBEDDED
from envs.registry import load
from manus_jax.agentgym.prompts import PROMPTS
from manus_jax.agentgym.table import environment
from manus_jax.config.settings import RolloutSettings
from manus_jax.rollout.action_formats import ActionFormat
from manus_jax.rollout.llm_player import turn_seed
from manus_jax.rollout.player import Answer, EndEpisode, EpisodeContext
from manus_jax.rollout.trajectory import Segment

Reply = Callable[[Sequence[str]], str | None]
"""All observations so far → the next turn's text; None to give up."""


class TextPlayer:
    """A player that a function speaks for."""

    prompts_extended = 0
    prompts_forked = 0

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._heard: list[str] = []

    def observe(self, observation: str) -> str:
        self._heard.append(observation)
        return observation

    def act(self, turn: int) -> Answer:
        text = self._reply(self._heard)
        if text is None:
            raise EndEpisode("gave_up")
        return Answer(text)

    def segments(self) -> tuple[Segment, ...]:
        return ()

    def close(self) -> None:
        pass


class OraclePolicy:
    """Plays what the environment's own oracle would; for the environments of `envs`."""

    def __init__(self) -> None:
        # What an environment computes once for all its items, many threads would compute at once.
        self._lock = threading.Lock()

    def check(self, env: str, settings: RolloutSettings) -> None:
        if env not in EMBEDDED or load(env).oracle is None:
            raise ValueError(f"{env} has no oracle; those that may have one are {[*EMBEDDED]}")

    def player(self, context: EpisodeContext) -> TextPlayer:
        task = context.spec.task
        assert task.env is not None and task.item is not None
        spec = load(task.env)
        assert spec.oracle is not None
        with self._lock:
            policy = spec.oracle(task.item)

        def reply(observations: Sequence[str]) -> str | None:
            try:
                move = policy(observations[-1])
            except GameError:  # it has no way on from here
                return None
            return context.action_format.render(move.thought, move.action)

        return TextPlayer(reply)


class RandomPolicy:
    """Plays actions that look valid, by chance; the same episode always the same way."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def check(self, env: str, settings: RolloutSettings) -> None:
        """Chance plays everything."""

    def player(self, context: EpisodeContext) -> TextPlayer:
        task, action_format = context.spec.task, context.action_format
        rng = random.Random(turn_seed(self._seed, context.spec.uid, 0))
        assert task.env is not None
        choices = CHOICES.get(task.env, _shown(task.env))

        def reply(observations: Sequence[str]) -> str:
            return _random_turn(choices(observations), action_format, rng)

        return TextPlayer(reply)


def _random_turn(actions: Sequence[str], action_format: ActionFormat, rng: random.Random) -> str:
    # Only random() gives the same numbers in every Python.
    action = actions[int(rng.random() * len(actions))]
    return action_format.render("I try something.", action)


Choices = Callable[[Sequence[str]], Sequence[str]]
"""All observations so far → actions that make sense in this environment."""


def _shown(env: str) -> Choices:
    """What the environment's instruction shows that has nothing left to fill in."""
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
    actions = list(dict.fromkeys(shown))
    return lambda observations: actions


def _textcraft(observations: Sequence[str]) -> Sequence[str]:
    crafts = re.findall(r"^craft .+$", observations[0], re.MULTILINE)
    ingredients = [part for craft in crafts for part in craft.partition(" using ")[2].split(", ")]
    return [*crafts, *(f"get {ingredient}" for ingredient in ingredients), "inventory"]


def _wordle(observations: Sequence[str]) -> Sequence[str]:
    words = re.findall(r"\b[a-z]{5}\b", observations[0].partition("one of:")[2])
    return [" ".join(word) for word in words or ("slate", "crony", "pudgy", "bight", "flame")]


def _webshop(observations: Sequence[str]) -> Sequence[str]:
    parts = [part.strip() for part in observations[-1].split("[SEP]")]
    if "Search" in parts:
        return [f"search[{max(parts, key=len)}]"]
    return [f"click[{part.lower()}]" for part in parts if part] or ["click[back to search]"]


def _listed_actions(observations: Sequence[str]) -> Sequence[str]:
    """babyai and alfworld list what is possible in their observations."""
    found = re.search(
        r"(?:AVAILABLE ACTIONS|[Aa]vailable actions): *\[?([^\]\n]*)", observations[-1]
    )
    listed = [part.strip(" \"'") for part in found[1].split(",")] if found else []
    return [action for action in listed if action] or ["look", "check available actions"]


CHOICES: dict[str, Choices] = {
    "textcraft": _textcraft,
    "wordle": _wordle,
    "babyai": _listed_actions,
    "alfworld": _listed_actions,
    "webshop": _webshop,
}
