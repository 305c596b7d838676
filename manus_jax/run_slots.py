"""Lets one of many waiting threads run at a time.

Every episode in flight has a thread, which mostly waits. Python executes one thread at a time, and
with thousands of threads that could run, the switches between them cost more than the episodes: at
every system call the interpreter lock goes to another thread. Therefore a thread whose wait for the
engine has ended stays asleep until it gets the slot, and gives it back when it waits for anything.
Responses of environments need no slot: they arrive at the rate at which threads in the slot ask for
them. A thread that blocks without giving the slot back loses it after a moment, so that arbitrary
code can run in an episode.
"""

import collections
import contextlib
import ctypes
import gc
import resource
import threading
import time
from collections.abc import Iterator

_SLOTS = 1
_LIMIT_S = 0.01  # a thread that takes longer has probably blocked
_IDLE_S = 1.0  # after which the thread that watches the slots ends

_MANY_THREADS = 256
_COLLECT_AFTER = 50_000  # new objects; Python's default is 700
_PR_FUTEX_HASH, _SET_SLOTS = 78, 1


class RunSlots:
    """Thread-safe. Threads outside of `member` are not affected."""

    def __init__(self, slots: int = _SLOTS) -> None:
        self._slots = slots
        self._lock = threading.Lock()
        self._members: set[int] = set()
        self._queue: collections.deque[Wait] = collections.deque()
        self._holders: dict[int, float] = {}  # thread → since when it has a slot
        self._watched = False

    @contextlib.contextmanager
    def member(self) -> Iterator[None]:
        """The calling thread runs in a slot, at first and after every `Wait`."""
        thread = threading.get_ident()
        self._members.add(thread)
        wait = Wait(self)
        wait.end()
        wait.block()
        try:
            yield
        finally:
            self.leave()
            self._members.discard(thread)

    def leave(self) -> None:
        """Gives the calling thread's slot back, if it has one; call it before the thread waits."""
        thread = threading.get_ident()
        if thread in self._holders:
            with self._lock:
                self._holders.pop(thread, None)
                self._admit()

    def _end(self, wait: "Wait") -> None:
        with self._lock:
            if wait.ended:
                return
            wait.ended = True
            if wait.thread not in self._members:
                wait.wake.release()
                return
            self._queue.append(wait)
            self._admit()
            if self._queue and not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="run slots", daemon=True).start()

    def _admit(self) -> None:
        while self._queue and len(self._holders) < self._slots:
            wait = self._queue.popleft()
            if wait.thread is not None:
                self._holders[wait.thread] = time.monotonic()
                wait.wake.release()

    def _watch(self) -> None:
        """Takes slots away from threads that have blocked, while others queue for them."""
        needed = time.monotonic()
        while True:
            time.sleep(_LIMIT_S)
            with self._lock:
                now = time.monotonic()
                if self._queue:
                    needed = now
                    for thread, since in [*self._holders.items()]:
                        if now - since > _LIMIT_S:
                            del self._holders[thread]
                    self._admit()
                elif now - needed > _IDLE_S:
                    self._watched = False
                    return


class Wait:
    """A wait of the calling thread for an event that another thread reports with `end`."""

    __slots__ = ("_slots", "ended", "thread", "wake")

    def __init__(self, slots: RunSlots) -> None:
        self._slots = slots
        self.ended = False
        self.thread: int | None = threading.get_ident()  # None: it has given up
        self.wake = threading.Lock()
        self.wake.acquire()

    def end(self) -> None:
        """The event has happened; may be called more than once."""
        self._slots._end(self)

    def block(self, timeout: float = -1) -> bool:
        """Waits for the event and then for a slot; False if the event does not happen in time."""
        self._slots.leave()
        if not self.wake.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
            self.thread = None
        return self.ended


SLOTS = RunSlots()
"""The slots of this process."""


def make_room(threads: int) -> None:
    """Prepares the process for many threads with a connection each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * threads + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):  # then connections fail, and say so
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    if threads < _MANY_THREADS:
        return
    # Every collection visits the new tokens of all episodes.
    young, *others = gc.get_threshold()
    if young:
        gc.set_threshold(max(young, _COLLECT_AFTER), *others)
    # Linux 6.16 and later keep the sleeping threads of a process in 16 lists on a small machine,
    # and a wake-up searches one of them.
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_FUTEX_HASH, _SET_SLOTS, 1 << (threads - 1).bit_length(), 0, 0)
