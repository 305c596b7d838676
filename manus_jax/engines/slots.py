"""Which stream is in which slot of the cache, how much of it is there, and who has to go.

The one idea: a slot is a stream of ids and the number of them whose keys and values are in the
cache. Filling a prompt, keeping it between turns, cutting it back, copying it from another slot
and computing it again under new weights are all changes of that number. No I/O and no device: a
state machine that the engine's thread owns.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading ids are the same."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:  # the first `low` are the same; slices compare faster than a loop
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclasses.dataclass(eq=False)
class Slot:
    """`ids[:filled]` are in the cache. `job` is what runs here, None when the slot is idle.

    `turn` is when the slot was last given a job. `leader` is a slot that computes, or has, more of
    this stream's prefix, and `shared` how much of it the two have in common. `stale`: the job goes
    on with keys and values of older weights, which nobody else may use.
    """

    index: int
    session: str | None = None
    ids: list[int] = dataclasses.field(default_factory=list)
    filled: int = 0
    job: Any = None
    turn: int = 0
    leader: "Slot | None" = None
    shared: int = 0
    stale: bool = False

    @property
    def missing(self) -> int:
        """Ids to be filled before decoding, which takes in the last id itself."""
        return len(self.ids) - 1 - self.filled

    def cut(self, length: int) -> None:
        """Keeps the first `length` ids."""
        del self.ids[length:]
        self.filled = min(self.filled, length)


Piece = tuple[Slot, int, int]
"""A slot, and from where to where its ids are to be filled."""


class SlotTable:
    """`min_shared` is the gain in ids from which copying a prefix beats computing it."""

    def __init__(self, count: int, min_shared: int) -> None:
        self.slots = [Slot(i) for i in range(count)]
        self.evictions = 0
        self._min_shared = min_shared
        self._turns = 0

    @property
    def busy(self) -> list[Slot]:
        """Slots with a job, the longest-running first."""
        return sorted((s for s in self.slots if s.job is not None), key=lambda s: s.turn)

    def admit(self, session: str, prompt: Sequence[int], job: Any) -> Slot | None:
        """A slot for the job with what is reusable of `prompt` in place; None if all are busy.

        The session's own slot if it has one, else an empty one, else that of the session which
        has been idle for longest.
        """
        idle = [s for s in self.slots if s.job is None]
        if not idle:
            return None
        slot = min(idle, key=lambda s: (s.session != session, s.session is not None, s.turn))
        if slot.session not in (None, session):
            self.evictions += 1
        self._turns += 1
        slot.session, slot.job, slot.turn = session, job, self._turns
        ids = list(prompt)
        slot.filled = min(slot.filled, common_prefix(slot.ids, ids), len(ids) - 1)
        slot.ids = ids
        self._follow(slot)
        return slot

    def _follow(self, slot: Slot) -> None:
        """Picks the slot that has, or is about to have, the longest prefix of this one's ids."""
        slot.leader, slot.shared = None, slot.filled + self._min_shared - 1
        for other in self.slots:
            if other is slot or other.stale:
                continue
            # Anything longer must agree where the best so far ends.
            at, ahead = slot.shared, other.filled if other.job is None else len(other.ids) - 1
            if at >= min(ahead, len(slot.ids) - 1) or slot.ids[at] != other.ids[at]:
                continue
            shared = min(common_prefix(slot.ids, other.ids), ahead, len(slot.ids) - 1)
            if shared > slot.shared:
                slot.leader, slot.shared = other, shared

    def copyable(self, slot: Slot) -> tuple[Slot, int] | None:
        """The slot whose cache holds at least `min_shared` more of this stream, and how much."""
        leader = slot.leader
        if leader is None or leader.stale:
            return None
        held = min(slot.shared, leader.filled)
        if held - slot.filled < self._min_shared:
            return None
        return (leader, held) if leader.ids[:held] == slot.ids[:held] else None

    def waits(self, slot: Slot) -> bool:
        """Whether a slot before this one is about to compute what this one can then copy.

        Only for an older job, so that no two wait for each other.
        """
        leader = slot.leader
        return (
            leader is not None
            and leader.job is not None
            and not leader.stale
            and leader.turn < slot.turn
            and leader.filled < slot.shared
            and slot.shared - slot.filled >= self._min_shared
            and leader.ids[: slot.shared] == slot.ids[: slot.shared]
        )

    def finish(self, slot: Slot) -> None:
        """The job is done; what is in the cache is kept for the session's next one."""
        slot.job = slot.leader = None
        if slot.stale:
            slot.filled, slot.stale = 0, False

    def release(self, session: str) -> None:
        """The session's slots may be taken by anyone; a job that runs there goes on."""
        for slot in self.slots:
            if slot.session == session:
                slot.session = None

    def invalidate(self, keep: Callable[[Slot], bool]) -> None:
        """New weights: nothing in the cache is valid but what jobs `keep` to the end."""
        for slot in self.slots:
            if slot.job is not None and keep(slot):
                slot.stale = True
            else:
                slot.filled = 0


def cut_pieces(slots: Sequence[Slot], rows: int, chunk: int) -> list[Piece]:
    """The next ids to be filled, in at most `rows` pieces of at most `chunk`."""
    pieces = (
        (slot, start, min(start + chunk, len(slot.ids) - 1))
        for slot in slots
        for start in range(slot.filled, len(slot.ids) - 1, chunk)
    )
    return list(itertools.islice(pieces, rows))
