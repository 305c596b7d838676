"""`gym:ID`: Gymnasium's environments with text, numbers or vectors, and TextArena's games for one.

An item is the seed of the reset. Keyword arguments of the environment follow a question mark, as in
`gym:FrozenLake-v1?is_slippery=False`, and `gym:my_games:Maze-v0` imports the module that registers
the environment. The reward is the sum so far, divided by the threshold at which Gymnasium calls the
environment solved, and at most 1.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl

from envs.adapters.adapted_game import AdaptedGame
from envs.game import ClientView, EnvironmentSpec, Game, GameError, Step, fixed_splits
from envs.registry import UnknownEnvironment

TRAIN, TEST = range(10_000), range(10_000, 10_500)
_MAX_NUMBERS = 64
_HIGHLIGHT = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
INSTALL = "pip install 'manus-jax[textarena]'"


@functools.cache
def adapted(name: str) -> EnvironmentSpec:
    """The environment ID, possibly with arguments; UnknownEnvironment if it cannot be played."""
    import gymnasium

    identifier, _, query = name.partition("?")
    arguments = {key: _literal(text) for key, text in parse_qsl(query)}
    module, _, identifier = identifier.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        try:
            registered = gymnasium.spec(identifier)
        except gymnasium.error.Error as error:
            reason = " ".join(str(error).split())
            new_game, client, actions = _textarena(identifier, arguments, reason)
        else:
            new_game, client, actions = _gymnasium(registered, arguments)
    except UnknownEnvironment:
        raise
    except Exception as error:  # whatever the environment's constructor raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UnknownEnvironment(f"gym:{name} cannot be made: {reason}") from error
    return EnvironmentSpec(
        name=f"gym:{name}",
        health="ok",
        family="id",
        item_field="data_idx",
        new_game=new_game,
        items=fixed_splits(TRAIN, TEST),
        plausible_actions=(lambda observations: actions) if actions else None,
        client=client,
    )


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


Made = tuple[Callable[[], Game], ClientView, tuple[str, ...]]
"""(new game, what the client needs to know, all actions if they can be listed)"""


def _gymnasium(registered: Any, arguments: dict[str, Any]) -> Made:
    import gymnasium

    def make() -> Any:
        shows = "ansi" in getattr(entry, "metadata", {}).get("render_modes", ())
        return gymnasium.make(registered, **({"render_mode": "ansi"} if shows else {}), **arguments)

    identifier, point = registered.id, registered.entry_point
    entry = gymnasium.envs.registration.load_env_creator(point) if isinstance(point, str) else point
    trial = make()
    _check_spaces(identifier, trial)
    GymnasiumGame(trial).reset(0)  # an observation that is too large is found here
    space = trial.action_space
    actions: tuple[str, ...] = ()
    described = f"a value of {space}, as JSON"
    if isinstance(space, gymnasium.spaces.Discrete):
        first, count = int(space.start), int(space.n)
        if count <= 1000:
            actions = tuple(map(str, range(first, first + count)))
    elif isinstance(space, gymnasium.spaces.Text):
        described = f"a text of {space.min_length} to {space.max_length} characters"
    threshold = trial.spec.reward_threshold
    client = ClientView(
        instruction=_description(type(trial.unwrapped), identifier),
        actions=actions or (described,),
        high=threshold if threshold and threshold > 0 else 1.0,
    )
    trial.close()
    return lambda: GymnasiumGame(make()), client, actions


def _check_spaces(identifier: str, environment: Any) -> None:
    """UnknownEnvironment if actions or observations are not made of texts, numbers and vectors."""
    from gymnasium import spaces

    def parts(space: Any) -> list[Any]:
        if not isinstance(space, spaces.Dict | spaces.Tuple):
            return [space]
        inner = space.values() if isinstance(space, spaces.Dict) else space
        return [leaf for part in inner for leaf in parts(part)]

    for space in parts(environment.action_space):
        if space.dtype is None:  # a Sequence, OneOf or Graph
            raise UnknownEnvironment(f"gym:{identifier}: actions in {space} are not supported")
    for space in (*parts(environment.action_space), *parts(environment.observation_space)):
        if isinstance(space, spaces.Box) and len(space.shape) > 1:
            raise UnknownEnvironment(f"gym:{identifier} has images; there is no text of them")


def _description(environment: type, identifier: str) -> str:
    """The first paragraph of the class's documentation, and its section on actions."""
    text = "\n".join(line.strip() for line in (inspect.getdoc(environment) or "").splitlines())
    first = text.partition("\n\n")[0].strip()
    found = re.search(r"^## Action Space\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return "\n\n".join(
        filter(None, [first or f"You play {identifier}.", found and found[1].strip()])
    )


class GymnasiumGame(AdaptedGame):
    """One environment. The action is a number, a text or JSON, according to its action space."""

    def __init__(self, environment: Any) -> None:
        super().__init__()
        self._environment = environment

    def reset(self, item: int) -> str:
        if item < 0:
            raise GameError(f"An item is a seed of 0 or more, not {item}.")
        observation, _ = self._environment.reset(seed=item)
        return self._started(self._text(observation))

    def step(self, action: str) -> Step:
        self._require_running()
        chosen = self._action(action)
        if chosen is None:
            space = self._environment.action_space
            return self._refused(f"{action[:80]!r} is not an action; it must be in {space}.")
        observation, reward, ended, cut, _ = self._environment.step(chosen)
        return self._stepped(self._text(observation), float(reward), bool(ended or cut))

    def close(self) -> None:
        self._environment.close()

    def _action(self, text: str) -> Any:
        """The action in its space; None if there is none."""
        from gymnasium.spaces import Text

        space = self._environment.action_space
        try:
            value = text if isinstance(space, Text) else _value(space, json.loads(text))
        except (ValueError, TypeError, LookupError, RecursionError):
            return None
        return value if space.contains(value) else None

    def _text(self, observation: Any) -> str:
        shown = _shown(observation)
        if self._environment.render_mode == "ansi":
            picture = str(self._environment.render())
            # A coloured cell is where the agent is.
            picture = _ESCAPE.sub("", _HIGHLIGHT.sub(r"[\1]", picture))
            shown = f"{shown}\n{picture.strip(chr(10))}"
        return shown


def _value(space: Any, given: Any) -> Any:
    """A JSON value in the types of a space; ValueError, TypeError or LookupError if it has none."""
    import numpy as np
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {name: _value(part, given[name]) for name, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_value(part, each) for part, each in zip(space, given, strict=True))
    if isinstance(space, spaces.Text):
        return given
    numbers = np.asarray(given)
    whole = np.issubdtype(space.dtype, np.integer)
    value = numbers.astype(space.dtype)
    if numbers.dtype.kind not in ("iu" if whole else "iuf") or (whole and (value != numbers).any()):
        raise ValueError(given)  # 1.7 is not action 1, and 257 not 1 of 8 bits
    return value.item() if isinstance(space, spaces.Discrete) else value


def _shown(value: Any) -> str:
    import numpy as np

    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_shown(part)}" for key, part in value.items())
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value))
    array = np.asarray(value)
    if array.size > _MAX_NUMBERS:
        raise GameError(f"an observation has {array.size} numbers, more than {_MAX_NUMBERS}")
    return np.array2string(array, precision=3, separator=", ", suppress_small=True)


def _textarena(identifier: str, arguments: dict[str, Any], not_gymnasium: str) -> Made:
    """`not_gymnasium` says why the identifier is not one of Gymnasium's."""
    try:
        import textarena
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError as error:
        raise UnknownEnvironment(
            f"gym:{identifier} is not in Gymnasium ({not_gymnasium}), and TextArena is not "
            f"installed ({error}): {INSTALL}"
        ) from None
    # Without wrappers, an observation is what is new; the conversation has the rest.
    plain = f"{identifier.removesuffix('-raw')}-raw"
    if plain not in ENV_REGISTRY:
        raise UnknownEnvironment(
            f"neither Gymnasium nor TextArena has {identifier!r}: {not_gymnasium}"
        )

    def make() -> Any:
        return textarena.make(plain, **arguments)

    TextArenaGame(make()).reset(0)  # a game of several players is refused here
    client = ClientView(
        instruction="You play a game. Its rules are in the first observation.",
        actions=("what the rules ask for",),
        low=-1.0,
    )
    return lambda: TextArenaGame(make()), client, ()


_RANDOM = threading.Lock()


class TextArenaGame:
    """One game for one player.

    TextArena's games draw from Python's global generator. Each game gets a state of its own, so
    that it depends on its item and actions, and not on what other sessions play meanwhile.
    """

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._random: Any = None
        self._seen: str | None = None
        self._done = False

    def reset(self, item: int) -> str:
        self._random, self._done = random.Random(item).getstate(), False
        with self._own_random():
            self._environment.reset(num_players=1, seed=item)
            self._seen = self._observed()
        return self._seen

    def step(self, action: str) -> Step:
        if self._seen is None or self._done:
            raise GameError("Reset before the next step.")
        reward = 0.0
        with self._own_random():
            ended, _ = self._environment.step(action)
            self._done = bool(ended)
            self._seen = self._observed()
            if self._done:
                rewards, infos = self._environment.close()
                reward = float(rewards[0])
                self._seen = str(infos[0].get("reason", self._seen))
        return Step(self._seen, reward, self._done)

    def observation(self) -> str:
        if self._seen is None:
            raise GameError("Reset before the first observation.")
        return self._seen

    def close(self) -> None:
        pass

    def _observed(self) -> str:
        """The messages since the last action, but not the agent's own."""
        _, messages = self._environment.get_observation()
        return "\n".join(str(text) for sender, text, *_ in messages if sender != 0)

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        with _RANDOM:
            outside = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(outside)
