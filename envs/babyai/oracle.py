"""The BabyAI oracle: minigrid's bot, with its low-level moves merged into action sentences.

The bot plays a private copy of the level to the end. Its moves are then merged into as few
sentences as possible that pass through the same states ("pickup red key 1" for the walk to the key
and the pickup), and the merged plan is played once to verify that it wins. Where it does not, as in
missions with waypoints, the single moves are used instead. In three levels that the bot cannot
start, a scripted opening precedes it.
"""

from collections.abc import Iterator
from typing import Any

from minigrid.utils.baby_ai_bot import BabyAIBot

from envs.babyai.game import LIST_ACTIONS, BabyAIGame
from envs.babyai.levels import LEVELS, new_level
from envs.babyai.sight import HEADINGS, reach
from envs.game import Move, Policy

Pose = tuple[int, int, int]
WALKING = ("left", "right", "forward")
LOOKS_PER_MOVE = 5_000
"""Limit on the bot's accesses to the level per move. It needs about 200; in rare rooms it never
stops planning."""
_SINGLE = {"left": "turn left", "right": "turn right", "forward": "move forward", "drop": "drop"}


class _BotIsStuck(Exception):
    """The bot exceeded its limit for one move."""


class _Watched:
    """A level that raises `_BotIsStuck` when it is accessed too often for one move."""

    def __init__(self, level: Any) -> None:
        self._level = level
        self.looks = 0

    @property
    def unwrapped(self) -> Any:
        self.looks += 1
        if self.looks > LOOKS_PER_MOVE:
            raise _BotIsStuck
        return self._level

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unwrapped, name)


def oracle(item: int) -> Policy:
    """A policy for `item`. In a few rooms the bot gives up, and the policy then does nothing."""
    plan = iter(_sentences(item))

    def policy(_: str) -> Move:
        action = next(plan, LIST_ACTIONS)
        return Move(_reason(action), action)

    return policy


def _sentences(item: int) -> list[str]:
    moves, poses = _record(item)
    merged = list(_merge(item, moves, poses))
    return merged if _wins(item, merged) else list(_single_moves(item, moves))


def _record(item: int) -> tuple[list[str], list[Pose]]:
    """The minigrid actions that solve `item`; the pose before each and after the last."""
    level = new_level(item)
    moves: list[str] = []
    poses = [_pose(level)]
    for move in _solve(level, LEVELS[item % len(LEVELS)]):
        _, _, terminated, truncated, _ = level.step(level.actions[move])
        moves.append(move)
        poses.append(_pose(level))
        if terminated or truncated:
            break
    return moves, poses


def _solve(level: Any, name: str) -> Iterator[str]:
    """minigrid actions, each to be carried out before the next is asked for."""
    if name == "PutNextS7N4Carrying":
        yield from _put_down(level)
    elif name in ("KeyInBox", "UnlockToUnlock"):
        yield from _unlock_all(level)
    watched = _Watched(level)
    taken = None
    try:
        bot = BabyAIBot(watched)
        while (taken := bot.replan(taken)) != level.actions.done:
            yield taken.name
            watched.looks = 0
    except (_BotIsStuck, AssertionError):
        # The bot fails an assertion when its plan fails.
        return


def _put_down(level: Any) -> Iterator[str]:
    """Drops what the agent carries on the first free cell, turning right."""
    while level.grid.get(*level.front_pos) is not None:
        yield "right"
    yield "drop"


def _unlock_all(level: Any) -> Iterator[str]:
    """Opens all locked doors for which a key can be reached, from a box if necessary."""
    while True:
        things = _things(level)
        ways = reach(level, things)
        doors = [at for at, thing in things.items() if thing.type == "door" and thing.is_locked]
        carried = level.carrying
        fits = [at for at in doors if carried is not None and things[at].color == carried.color]
        keys = [
            at
            for at, thing in things.items()
            if thing.type == "key" and any(things[door].color == thing.color for door in doors)
        ]
        boxes = [at for at, thing in things.items() if thing.type == "box" and thing.contains]
        for targets, move in ((fits, "toggle"), (keys, "pickup"), (boxes, "toggle")):
            target = next((at for at in targets if at in ways), None)
            if target is not None:
                if move == "pickup" and carried is not None:
                    yield from _put_down(level)
                else:
                    yield from ways[target]
                    yield move
                break
        else:
            if carried is not None:
                yield from _put_down(level)
            return


def _things(level: Any) -> dict[tuple[int, int], Any]:
    grid = level.grid
    cells = ((x, y) for x in range(grid.width) for y in range(grid.height))
    return {at: thing for at in cells if (thing := grid.get(*at)) and thing.type != "wall"}


def _merge(item: int, moves: list[str], poses: list[Pose]) -> Iterator[str]:
    """Sentences that pass through the states of `moves`, each covering as many as possible."""
    game = BabyAIGame()
    game.reset(item)
    done = 0
    while done < len(moves):
        until = next((i for i in range(done, len(moves)) if moves[i] not in WALKING), len(moves))
        reached, action = _longest(game, moves, poses, done, until)
        if action is None:
            reached, action = done + 1, _single(game, moves[done])
        yield action
        if game.step(action).done:
            return
        done = reached


def _longest(
    game: BabyAIGame, moves: list[str], poses: list[Pose], done: int, until: int
) -> tuple[int, str | None]:
    """The sentence that covers most of `moves[done:]`: (number of moves then done, sentence).

    `until` is the index of the first move from `done` on that is not walking.
    """
    best: tuple[int, str | None] = (done + 1, None)
    ways = game.ways()
    for action in game.available_actions():
        verb, _, name = _split(action)
        thing = game.sight.things.get(name)
        if thing is None:
            continue
        pose = _walked(poses[done], ways[thing.cell])
        if verb == "go to":
            reached = max((i for i in range(done, until + 1) if poses[i] == pose), default=done)
        elif verb == "go through":
            door = _walked(pose, ["forward"])
            reached = max((i for i in range(done, until + 1) if poses[i] == door), default=done)
        else:
            tail = ["pickup"] if verb == "pickup" else ["toggle", "forward"]
            fits = poses[until] == pose and moves[until : until + len(tail)] == tail
            reached = until + len(tail) if fits else done
        if reached > best[0]:
            best = (reached, action)
    return best


def _split(action: str) -> tuple[str, str, str]:
    for verb in ("toggle and go through", "go through", "go to", "pickup"):
        if action.startswith(f"{verb} "):
            return verb, " ", action.removeprefix(f"{verb} ")
    return action, "", ""


def _single_moves(item: int, moves: list[str]) -> Iterator[str]:
    game = BabyAIGame()
    game.reset(item)
    for move in moves:
        action = _single(game, move)
        yield action
        if game.step(action).done:
            return


def _single(game: BabyAIGame, move: str) -> str:
    """One minigrid action as a sentence."""
    ahead = game.sight.ahead()
    if move == "pickup":
        return "drop" if ahead is None else f"pickup {ahead.name}"
    return _SINGLE.get(move, "toggle")


def _wins(item: int, actions: list[str]) -> bool:
    game = BabyAIGame()
    game.reset(item)
    for action in actions:
        step = game.step(action)
        if step.done:
            return step.reward > 0
    return False


def _walked(pose: Pose, moves: list[str]) -> Pose:
    x, y, heading = pose
    for move in moves:
        if move == "forward":
            x, y = x + HEADINGS[heading][0], y + HEADINGS[heading][1]
        else:
            heading = (heading + (1 if move == "right" else -1)) % 4
    return x, y, heading


def _pose(level: Any) -> Pose:
    return int(level.agent_pos[0]), int(level.agent_pos[1]), int(level.agent_dir)


def _reason(action: str) -> str:
    verb, _, name = _split(action)
    reasons = {
        "go to": f"I can see the {name}, so I walk up to it.",
        "pickup": f"I need the {name}, so I fetch it.",
        "go through": f"The way leads through the {name}.",
        "toggle and go through": f"The way leads through the {name}, which I open first.",
        "turn left": "I turn left to face the way I want to go.",
        "turn right": "I turn right to face the way I want to go.",
        "move forward": "The way ahead is free, so I walk on.",
        "drop": "I put down what I carry here.",
        "toggle": "What I want to open is right in front of me.",
    }
    return reasons.get(verb, "I look at what I can do.")
