"""The 40 BabyAI levels by item number.

An item is `level + 40 * seed`, in AgentGym's order of the levels, so an item of its datasets is the
same room with the same goal here. minigrid seeds a separate generator per level; no global random
state is used.
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
    # AgentGym's table says GoToObjS6, but its recorded episodes show rooms of GoToObjS4.
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
"""In no split: minigrid mistakes the first door of its ordered missions for a wrong second one."""


def _discard(*_: object) -> None:
    """Replaces `print` where minigrid reports each rejected layout on standard output."""


setattr(roomgrid_level, "print", _discard)  # noqa: B010  (a module attribute mypy does not know)


def new_level(item: int) -> Any:
    """The minigrid environment of `item` in its initial state."""
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
