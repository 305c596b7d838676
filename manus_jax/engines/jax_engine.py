"""The embedded engine: continuous batching in the training process, on the learner's devices.

One thread repeats four steps: it takes new requests, assigns free slots and pages to waiting ones,
prefills a bounded number of prompt tokens, and decodes a few steps of every stream that is ready.
All other operations (submit, cancel, release, new weights) are queued and take effect before the
thread's next dispatch. `layout` describes how weights and cache are spread over the devices.

A generation depends only on its prompt, seed and weights, not on the batch, the slot or timing. On
CPU this is exact to the bit as long as no session is evicted between its turns, because keys and
values recomputed by another program may differ in the last bits; so use at least as many slots as
there are episodes in flight. Not implemented: speculative decoding, and overlap of host work with
the device.
"""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from manus_jax.dispatch import starting
from manus_jax.engines.cached_decoder import (
    MAX_STOP_IDS,
    PREFILL_SHAPE,
    CachedDecoder,
    Decoded,
    empty_chunks,
    empty_lanes,
)
from manus_jax.engines.layout import NO_PAGE, make_layout
from manus_jax.engines.protocol import (
    EngineError,
    FinishReason,
    Generation,
    Request,
    check_request,
)
from manus_jax.engines.slots import Slot, SlotTable, prefill_pieces
from manus_jax.engines.weight_copy import copy_weights
from manus_jax.models.architecture import Architecture
from manus_jax.models.transformer import Params
from manus_jax.status import STATUS

Decode = Callable[[list[int]], str]

# Requests arrive in bursts after a pause; a batch that starts together stays together.
_BURST_SECONDS = 0.002


@dataclasses.dataclass
class Counters:
    """Totals since the engine started; seconds are device time."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    prefill_dispatches: int = 0
    prefill_seconds: float = 0.0
    decode_dispatches: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0


@dataclasses.dataclass(eq=False)
class Job:
    """A request in progress and what has been generated for it."""

    request: Request
    future: "Future[Generation]"
    budget: int
    log_probs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)

    @property
    def generated(self) -> int:
        return len(self.log_probs)


class JaxEngine:
    """An `Engine` on this process's devices.

    Args:
      arch: the model's architecture.
      params: the policy's parameters, version 0; the engine copies them.
      slots: number of streams in the cache, running or idle between turns.
      max_length: maximum number of tokens of a prompt and its generation together.
      cache_tokens: number of tokens in the cache; None: `slots` x `max_length`.
      devices: in the order of the learner's mesh; None: the first of this process.
      tensor: number of devices that share one copy of the weights.
      decode: converts ids to text; required only for stop strings.
      dtype: type of the weights, the cache and the computation.
      queue_size: maximum number of waiting requests; a further one is an `EngineError`.
      max_steps: tokens per stream and dispatch. A larger number reduces overhead, a smaller one
        admits new requests sooner.
    """

    on_learner_device: ClassVar[bool] = True

    def __init__(
        self,
        arch: Architecture,
        params: Params,
        *,
        slots: int = 16,
        max_length: int = 2048,
        cache_tokens: int | None = None,
        devices: Sequence[Any] | None = None,
        tensor: int = 1,
        decode: Decode | None = None,
        dtype: str = "float32",
        queue_size: int = 4096,
        max_steps: int = 8,
    ) -> None:
        self._layout = layout = make_layout(
            arch,
            jax.local_devices()[:1] if devices is None else devices,
            slots=slots,
            max_length=max_length,
            tensor=tensor,
            cache_tokens=cache_tokens,
            dtype=dtype,
        )
        self._decode_text = decode
        self._queue_size = queue_size
        self._max_steps = max_steps

        self._decoder = CachedDecoder(layout, max_steps)
        self._cache = self._decoder.new_cache()
        self._weights = copy_weights(layout, params)
        self._running_version = 0

        self._table = SlotTable(
            layout.slots,
            min_shared=PREFILL_SHAPE[1] // 2,
            copies=layout.copies,
            pages=None if layout.one_page_per_slot else layout.pages,
            page_length=layout.page_length,
        )
        self._counters = Counters()
        self._waiting: deque[Job] = deque()

        # Guards what other threads pass to the engine's thread, and nothing else.
        self._inbox = threading.Condition()
        self._arrived: list[Job] = []
        self._commands: list[Callable[[], None]] = []
        self._version = 0
        self._closed: str | None = None
        self._thread = threading.Thread(target=self._run, name="jax-engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_length(self) -> int:
        return self._layout.max_length

    def submit(self, request: Request) -> "Future[Generation]":
        """Raises EngineError if the request is invalid or the queue is full."""
        how = request.sampling
        problem = None
        if len(how.stop_ids) > MAX_STOP_IDS:
            problem = f"{len(how.stop_ids)} stop ids; the engine supports at most {MAX_STOP_IDS}"
        elif how.stop_strings and self._decode_text is None:
            problem = "stop strings need an engine with `decode`"
        if problem is not None:
            raise EngineError(f"session {request.session!r}: {problem}")
        budget = check_request(request, self.max_length, self._layout.arch.vocab_size)
        job = Job(request, Future(), budget)
        with self._inbox:
            if self._closed is not None:
                raise EngineError(self._closed)
            queued = len(self._arrived) + len(self._waiting)
            if queued >= self._queue_size:
                raise EngineError(
                    f"the queue is full with {queued} requests; lower rollout.max_in_flight"
                )
            self._arrived.append(job)
            self._inbox.notify()
        return job.future

    def release(self, session: str) -> None:
        with self._inbox:
            if self._closed is None:
                self._enqueue(lambda: self._table.release(session))

    def update_weights(self, params: Params, version: int) -> None:
        """Takes effect before the next dispatch. The keys and values of all streams are recomputed
        when they are next used, so that each log-prob is exactly that of its token's version."""
        with starting(self._layout.mesh):
            weights = copy_weights(self._layout, params)

        def swap() -> None:
            self._weights, self._running_version = weights, version
            self._table.invalidate()

        with self._inbox:
            self._enqueue(swap)
            self._version = version

    def close(self) -> None:
        """Stops the thread; waiting and running requests fail."""
        with self._inbox:
            self._closed = self._closed or "the engine is closed"
            self._inbox.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def metrics(self) -> dict[str, float]:
        """Counters since the start, and current gauges."""
        counters = dataclasses.asdict(self._counters)
        busy = len(self._table.busy)
        # Requests that arrive during a dispatch begin after it, as far as there are slots.
        idle = len(self._table.slots) - busy
        return {
            **counters,
            "busy_seconds": counters["prefill_seconds"] + counters["decode_seconds"],
            "evictions": self._table.evictions,
            "active_slots": busy,
            "free_pages": self._table.free_pages,
            "kv_usage": self._table.usage,
            "queue_length": len(self._waiting) + max(0, len(self._arrived) - idle),
        }

    def _enqueue(self, command: Callable[[], None]) -> None:
        with self._inbox:
            if self._closed is not None:
                raise EngineError(self._closed)
            self._commands.append(command)
            self._inbox.notify()

    def _run(self) -> None:
        reason = "the engine is closed"
        try:
            while self._take_inbox():
                with STATUS.working("embedded engine"):
                    self._drop_cancelled()
                    self._admit()
                    self._fill_some()
                    self._decode_some()
        except Exception as error:  # reported to all pending requests
            reason = f"the engine failed: {type(error).__name__}: {error}"
        with self._inbox:
            self._closed = reason
            jobs = [*self._arrived, *self._waiting, *(s.job for s in self._table.busy)]
        for job in jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(EngineError(reason))

    def _take_inbox(self) -> bool:
        """Waits for work and runs queued commands; returns False if the engine is closed."""
        with self._inbox:
            while not (self._arrived or self._commands or self._waiting or self._table.busy):
                if self._closed is not None:
                    return False
                self._inbox.wait()
                while self._arrived and self._inbox.wait(_BURST_SECONDS):
                    pass
            if self._closed is not None:
                return False
            # Taken together, so that a request never overtakes weights set before it.
            arrived, self._arrived = self._arrived, []
            commands, self._commands = self._commands, []
            self._waiting.extend(arrived)
        for command in commands:
            command()
        return True

    def _drop_cancelled(self) -> None:
        for slot in self._table.busy:
            if slot.job.future.cancelled():
                slot.job.future.set_running_or_notify_cancel()
                self._table.finish(slot)
        for job in [j for j in self._waiting if j.future.cancelled()]:
            job.future.set_running_or_notify_cancel()
            self._waiting.remove(job)

    def _admit(self) -> None:
        """Assigns slots and pages; sessions with a cached stream come first: they evict least."""
        kept = {s.session for s in self._table.slots if s.job is None and s.session is not None}
        self._waiting = deque(sorted(self._waiting, key=lambda j: j.request.session not in kept))
        while self._waiting:
            job = self._waiting[0]
            request = job.request
            slot = self._table.admit(request.session, request.prompt_ids, job, job.budget)
            if slot is None:
                return
            self._counters.reused_tokens += slot.filled
            self._waiting.popleft()

    def _fill_some(self) -> None:
        """Prefills about as many tokens as a decode round generates, so that neither delays the
        other for long, and copies prefixes that other slots have."""
        room = self._max_steps * len(self._table.busy)
        while room > 0:
            pending = [s for s in self._table.busy if s.missing > 0]
            for slot in pending:
                copy = self._table.copyable(slot)
                if copy is not None:
                    self._share(slot, *copy)
            ready = [s for s in pending if s.missing > 0 and not self._table.waits(s)]
            if not ready:
                return
            room -= self._fill_pieces(ready)

    def _share(self, slot: Slot, leader: Slot, held: int) -> None:
        """Copies the pages with the first `held` ids of `leader`, on the same copy of the model."""
        count = -(-held // self._layout.page_length)
        pages = np.full((2, self._layout.copies, self._layout.columns), NO_PAGE, np.int32)
        pages[:, slot.copy, :count] = leader.pages[:count], slot.pages[:count]
        with starting(self._layout.mesh):
            self._cache = self._decoder.copy(self._cache, *self._decoder.place(tuple(pages)))
        self._counters.reused_tokens += held - slot.filled
        slot.filled = held

    def _by_copy(self, slots: Sequence[Slot]) -> list[list[Slot]]:
        return [[s for s in slots if s.copy == copy] for copy in range(self._layout.copies)]

    def _fill_pieces(self, slots: Sequence[Slot]) -> int:
        """Runs one prefill dispatch and returns its number of tokens."""
        chunks, tokens = empty_chunks(self._layout), 0
        rows, _ = PREFILL_SHAPE
        found = [prefill_pieces(own, *PREFILL_SHAPE) for own in self._by_copy(slots)]
        for copy, pieces in enumerate(found):
            for row, (slot, start, stop) in enumerate(pieces, copy * rows):
                chunks.pages[row, : len(slot.pages)] = slot.pages
                chunks.tokens[row, : stop - start] = slot.ids[start:stop]
                chunks.positions[row, : stop - start] = range(start, stop)
                tokens += stop - start
        began = time.perf_counter()
        with starting(self._layout.mesh):
            inputs = self._decoder.place(chunks)
            self._cache = self._decoder.fill(self._weights, self._cache, inputs)
        jax.block_until_ready(self._cache)
        self._counters.prefill_seconds += time.perf_counter() - began
        self._counters.prefill_dispatches += 1
        for slot, _, stop in (piece for pieces in found for piece in pieces):
            slot.filled = stop
        self._counters.prefill_tokens += tokens
        return tokens

    def _decode_some(self) -> None:
        """Runs a decode round for all prefilled streams. The round is shorter while many others are
        not prefilled, since a step costs almost the same for few lanes as for many."""
        busy = self._table.busy
        ready = [s for s in busy if s.missing == 0]
        if not ready:
            return
        steps = max(1, self._max_steps * len(ready) ** 2 // len(busy) ** 2)
        by_copy = self._by_copy(ready)
        most = max(map(len, by_copy))
        fewest, widest = self._layout.lanes[0], self._layout.lanes[-1]
        width = fewest if 2 * most <= widest else widest
        for first in range(0, most, width):
            self._decode_lanes([own[first : first + width] for own in by_copy], width, steps)

    def _decode_lanes(self, by_copy: Sequence[Sequence[Slot]], width: int, steps: int) -> None:
        """Runs one decode dispatch."""
        lanes = empty_lanes(self._layout, width)
        placed = {
            copy * width + (slot.index if lanes.pages is None else place): slot
            for copy, slots in enumerate(by_copy)
            for place, slot in enumerate(slots)
        }
        for lane, slot in placed.items():
            job, how = slot.job, slot.job.request.sampling
            if lanes.pages is not None:
                lanes.pages[lane, : len(slot.pages)] = slot.pages
            lanes.tokens[lane] = slot.ids[-1]
            lanes.positions[lane] = len(slot.ids) - 1
            lanes.budget[lane] = job.budget - job.generated
            lanes.stop_ids[lane, : len(how.stop_ids)] = how.stop_ids
            lanes.controls.put(lane, how, job.request.seed)
        began = time.perf_counter()
        with starting(self._layout.mesh):
            inputs = self._decoder.place(lanes), self._decoder.place(np.int32(steps), P())
            self._cache, decoded = self._decoder.decode(self._weights, self._cache, *inputs)
        decoded = jax.device_get(decoded)
        self._counters.decode_seconds += time.perf_counter() - began
        self._counters.decode_dispatches += 1
        self._counters.decode_steps += int(decoded.counts.max())
        for lane, slot in placed.items():
            self._take(slot, decoded, lane)

    def _take(self, slot: Slot, decoded: Decoded, lane: int) -> None:
        """Appends a lane's tokens to its stream, and ends the job if it is complete."""
        job, how = slot.job, slot.job.request.sampling
        count = int(decoded.counts[lane])
        prompt, generated = len(job.request.prompt_ids), job.generated
        slot.ids += decoded.tokens[:count, lane].tolist()
        slot.filled += count
        reason: FinishReason | None = None
        if slot.ids[-1] in how.stop_ids:
            reason = "stop"
        elif generated + count == job.budget:
            reason = "length"
        if how.stop_strings and self._decode_text is not None:
            kept = stop_string_end(
                self._decode_text, slot.ids[prompt:], generated, how.stop_strings
            )
            if kept is not None:
                slot.truncate(prompt + kept)
                count, reason = kept - generated, "stop"
        job.log_probs += decoded.log_probs[:count, lane].tolist()
        job.versions += [self._running_version] * count
        self._counters.generated_tokens += count
        if reason is not None:
            self._table.finish(slot)
            ids = tuple(slot.ids[prompt:])
            generation = Generation(ids, tuple(job.log_probs), tuple(job.versions), reason)
            if job.future.set_running_or_notify_cancel():
                job.future.set_result(generation)


def stop_string_end(
    decode: Decode, ids: Sequence[int], seen: int, stop_strings: Sequence[str]
) -> int | None:
    """The number of `ids` that complete a stop string, given that the first `seen` do not.

    Decodes only as many ids before `seen` as a stop string can span (an id is at least one byte of
    text), plus a few for ids without text.
    """
    reach = max(len(s.encode()) for s in stop_strings) + 8
    first = max(0, seen - reach)
    stopped = lambda end: any(s in decode(list(ids[first:end])) for s in stop_strings)
    if not stopped(len(ids)):
        return None
    return next(end for end in range(seen + 1, len(ids) + 1) if stopped(end))
