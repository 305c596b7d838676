"""The 40 BabyAI levels by item number.

The one idea: an item is `level + 40 * seed`, in the order in which AgentGym numbers the levels, so
that an item of its data sets is the same room with the same goal here. minigrid seeds its own
generator per level; nothing global is touched.
"""

from collections.abc import Sequence
from typing import Any

import gymnasium
import minigrid.envs.babyai.core.roomgrid_level as roomgrid_level

from envs.game import GameError, fixed_splits

LEVELS = (
    "GoToRedBallGrey",
    "GoToRedBall",
    "GoToRedBallNoDists",
    # AgentGym's table says GoToObjS6, but the rooms of its recorded episodes are of GoToObjS4.
    "GoToObjS4",
    "GoToLocalS8N7",
    "GoToObjMazeS7",
    "GoToImpUnlock",
    "GoToSeqS5R2",
    "GoToRedBlueBall",
    "GoToDoor",
    "GoToObjDoor",
    "Open",
    "OpenRedDoor",
    "OpenDoorLoc",
    "OpenRedBlueDoorsDebug",
    "OpenDoorsOrderN4Debug",
    "Pickup",
    "UnblockPickup",
    "PickupLoc",
    "PickupDistDebug",
    "PickupAbove",
    "PutNextLocalS6N4",
    "PutNextS7N4Carrying",
    "Unlock",
    "UnlockLocalDist",
    "KeyInBox",
    "UnlockPickupDist",
    "BlockedUnlockPickup",
    "UnlockToUnlock",
    "ActionObjDoor",
    "FindObjS7",
    "KeyCorridorS6R3",
    "OneRoomS20",
    "MoveTwoAcrossS8N9",
    "SynthS5R2",
    "SynthLoc",
    "SynthSeq",
    "MiniBossLevel",
    "BossLevel",
    "BossLevelNoUnlock",
)
SEEDS = 1000
TEST_SEEDS = range(900, SEEDS)
UNWINNABLE = ("OpenDoorsOrderN4Debug",)
"""In no split: minigrid judges the first door of its ordered missions as the wrong second one."""


def _say_nothing(*_: object) -> None:
    """Takes the place of `print` where minigrid reports each rejected layout on standard output."""


setattr(roomgrid_level, "print", _say_nothing)  # noqa: B010  (a module attribute mypy does not know)


def item_of(level: str, seed: int) -> int:
    """The item number of a level (by its name in `LEVELS`) and a seed."""
    return LEVELS.index(level) + len(LEVELS) * seed


def new_level(item: int) -> Any:
    """The minigrid environment of `item`, at its first state."""
    if not 0 <= item < len(LEVELS) * SEEDS:
        raise GameError(
            f"The data_idx {item} does not exist: babyai has 0 to {len(LEVELS) * SEEDS - 1}."
        )
    name = LEVELS[item % len(LEVELS)]
    level = gymnasium.make(f"BabyAI-{name}-v0", disable_env_checker=True).unwrapped
    level.reset(seed=item // len(LEVELS))
    return level


def _items(seeds: range) -> Sequence[int]:
    return [
        item
        for item in range(seeds.start * len(LEVELS), seeds.stop * len(LEVELS))
        if LEVELS[item % len(LEVELS)] not in UNWINNABLE
    ]


items = fixed_splits(train=_items(range(TEST_SEEDS.start)), test=_items(TEST_SEEDS))
