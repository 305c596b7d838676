"""Slots and pages of the KV cache: which stream each holds, how much is cached, and eviction.

A slot is a stream of ids plus the number of leading ids whose keys and values are cached. Prefill,
reuse between turns, truncation, copying from another slot and invalidation by new weights all
change only that number. A job is admitted when there are pages for its prompt and everything that
it may generate, so a running job never waits for a page, and nothing can deadlock; pages of idle
slots are taken as needed. This is a pure state machine, without I/O or device access, owned by the
engine's thread.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """The length of the common prefix."""
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:  # the first `low` ids are equal; slices compare faster than a loop
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclasses.dataclass(eq=False)
class Slot:
    """`ids[:filled]` are in the cache, in `pages`. `job` is None if the slot is idle.

    `copy` is the copy of the model that the slot belongs to, and `index` its number there. `turn`
    orders slots by when they last received a job. `leader` is a slot that has, or is computing, a
    longer prefix of this stream, and `shared` is the length of the common prefix.
    """

    index: int
    copy: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    session: str | None = None
    ids: list[int] = dataclasses.field(default_factory=list)
    filled: int = 0
    job: Any = None
    turn: int = 0
    leader: "Slot | None" = None
    shared: int = 0

    @property
    def missing(self) -> int:
        """Ids to prefill before decoding; the last id is processed by decoding itself."""
        return len(self.ids) - 1 - self.filled

    def truncate(self, length: int) -> None:
        """Keeps the first `length` ids."""
        del self.ids[length:]
        self.filled = min(self.filled, length)


Piece = tuple[Slot, int, int]
"""A slot, and the start and stop of the ids to prefill."""


class SlotTable:
    """All slots: `count` for each of `copies` of the model.

    A prefix is copied if that saves computing at least `min_shared` ids. Each copy has `pages` of
    `page_length` ids; None: slot i always has page i, for streams of any length.
    """

    def __init__(
        self,
        count: int,
        min_shared: int,
        copies: int = 1,
        pages: int | None = None,
        page_length: int = 1,
    ) -> None:
        self.slots = [Slot(i, copy) for copy in range(copies) for i in range(count)]
        self.evictions = 0
        self._min_shared = min_shared
        self._turns = 0
        self._page_length = page_length
        self._free: list[list[int]] | None = None
        if pages is not None:
            self._free = [list(range(pages)) for _ in range(copies)]
        else:
            for slot in self.slots:
                slot.pages = [slot.index]

    @property
    def busy(self) -> list[Slot]:
        """Slots with a job, oldest job first."""
        return sorted((s for s in self.slots if s.job is not None), key=lambda s: s.turn)

    @property
    def usage(self) -> float:
        """The share of slots, or of pages, that hold a stream."""
        if self._free is None:
            return sum(s.session is not None for s in self.slots) / len(self.slots)
        pages = [(len(s.pages), s.session is not None) for s in self.slots]
        held = sum(count for count, in_use in pages if in_use)
        return held / (self.free_pages + sum(count for count, _ in pages))

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing."""
        return sum(map(len, self._free or ()))

    def admit(self, session: str, prompt: Sequence[int], job: Any, budget: int = 0) -> Slot | None:
        """Assigns a slot and pages, keeping the reusable prefix of `prompt`.

        Prefers the session's own slot, then one without eviction, then the copy of the model with
        the fewest jobs, then the slot that has been idle longest. None if all slots are busy, or
        running jobs leave too few pages for the prompt and `budget` more ids.
        """
        idle = [s for s in self.slots if s.job is None]
        jobs = collections.Counter(s.copy for s in self.slots if s.job is not None)
        needed = -(-(len(prompt) + budget) // self._page_length)
        fitting, evicting = idle, lambda s: s.session is not None
        if self._free is not None:
            free = [len(pages) for pages in self._free]
            held = collections.Counter(dict(enumerate(free)))
            for slot in idle:
                held[slot.copy] += len(slot.pages)
            fitting = [s for s in idle if held[s.copy] >= needed]
            evicting = lambda s: s.session is not None or free[s.copy] + len(s.pages) < needed
        if not fitting:
            return None
        slot = min(fitting, key=lambda s: (s.session != session, evicting(s), jobs[s.copy], s.turn))
        if slot.session not in (None, session):
            self.evictions += 1
        self._turns += 1
        slot.session, slot.job, slot.turn = session, job, self._turns
        ids = list(prompt)
        slot.filled = min(slot.filled, common_prefix(slot.ids, ids), len(ids) - 1)
        slot.ids = ids
        self._resize(slot, needed)
        self._follow(slot)
        return slot

    def _resize(self, slot: Slot, count: int) -> None:
        """Gives the slot `count` pages, if necessary those of the slots idle for longest."""
        if self._free is None:
            return
        free = self._free[slot.copy]
        free += slot.pages[count:]
        del slot.pages[count:]
        idle = (s for s in self.slots if s.copy == slot.copy and s.job is None)
        by_age = iter(sorted(idle, key=lambda s: (s.session is not None, s.turn)))
        while len(free) < count - len(slot.pages):
            other = next(by_age)
            self.evictions += other.session is not None and bool(other.pages)
            other.session, other.filled = None, 0
            self._resize(other, 0)
        while len(slot.pages) < count:
            slot.pages.append(free.pop())

    def _follow(self, slot: Slot) -> None:
        """Finds the slot that has, or is computing, the longest prefix of this slot's ids."""
        slot.leader, slot.shared = None, slot.filled + self._min_shared - 1
        for other in self.slots:
            if other is slot or other.copy != slot.copy:
                continue
            # A longer common prefix must agree where the best one so far ends.
            at, ahead = slot.shared, other.filled if other.job is None else len(other.ids) - 1
            if at >= min(ahead, len(slot.ids) - 1) or slot.ids[at] != other.ids[at]:
                continue
            shared = min(common_prefix(slot.ids, other.ids), ahead, len(slot.ids) - 1)
            if shared > slot.shared:
                slot.leader, slot.shared = other, shared

    def copyable(self, slot: Slot) -> tuple[Slot, int] | None:
        """The slot with at least `min_shared` more cached ids of this stream, and their number."""
        leader = slot.leader
        if leader is None:
            return None
        held = min(slot.shared, leader.filled)
        if held - slot.filled < self._min_shared:
            return None
        return (leader, held) if leader.ids[:held] == slot.ids[:held] else None

    def waits(self, slot: Slot) -> bool:
        """Whether an older job is computing a prefix that this slot can then copy.

        Waiting only for older jobs rules out deadlocks.
        """
        leader = slot.leader
        return (
            leader is not None
            and leader.job is not None
            and leader.turn < slot.turn
            and leader.filled < slot.shared
            and slot.shared - slot.filled >= self._min_shared
            and leader.ids[: slot.shared] == slot.ids[: slot.shared]
        )

    def finish(self, slot: Slot) -> None:
        """Ends the job; what is cached is kept for the session's next request."""
        slot.job = slot.leader = None
        self._resize(slot, -(-slot.filled // self._page_length))

    def release(self, session: str) -> None:
        """Frees the session's slots; a running job continues."""
        for slot in self.slots:
            if slot.session == session:
                slot.session = None

    def invalidate(self) -> None:
        """Invalidates the whole cache, for new weights."""
        for slot in self.slots:
            slot.filled = 0
            if slot.job is None:
                self._resize(slot, 0)


def prefill_pieces(slots: Sequence[Slot], rows: int, chunk: int) -> list[Piece]:
    """The next ids of slots to prefill, in at most `rows` pieces of at most `chunk` ids."""
    pieces = (
        (slot, start, min(start + chunk, len(slot.ids) - 1))
        for slot in slots
        for start in range(slot.filled, len(slot.ids) - 1, chunk)
    )
    return list(itertools.islice(pieces, rows))
