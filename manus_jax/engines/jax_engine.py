"""The embedded engine: continuous batching in this process, on the learner's own devices.

The one idea: one thread owns the device and repeats four things. It takes what arrived, gives free
slots to waiting requests, fills a bounded number of prompt tokens, and decodes a few steps for
every stream that is ready. Everything else (submitting, cancelling, releasing, new weights) leaves
a note which the thread reads before its next dispatch.

A generation depends on its prompt, seed and weights alone; what else is in the batch, the slot and
the timing do not matter. On CPU this holds to the bit as long as no session is evicted between its
turns (keys and values computed again by another program may differ in their last bits), so give
the engine at least as many slots as there are episodes in flight.

Left out: paging, speculative decoding, and overlapping the host's bookkeeping with the device.
"""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import ClassVar, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from manus_jax.engines.cached_decoder import (
    MAX_STOP_IDS,
    CachedDecoder,
    Decoded,
    empty_chunks,
    empty_lanes,
    lane_sizes,
)
from manus_jax.engines.protocol import EngineError, FinishReason, Generation, Request
from manus_jax.engines.sampling import problem_with
from manus_jax.engines.slots import Slot, SlotTable, cut_pieces
from manus_jax.models.architecture import Architecture
from manus_jax.models.transformer import Params

Decode = Callable[[list[int]], str]
StaleKV = Literal["recompute", "keep"]

# After a pause, requests come in bursts; a batch that starts whole stays in step.
_BURST_SECONDS = 0.002


@dataclasses.dataclass
class Counters:
    """What the engine has done since it started; seconds are those the device was at work."""

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
    """A request on its way, and what has been made of it."""

    request: Request
    future: "Future[Generation]"
    budget: int
    log_probs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)

    @property
    def made(self) -> int:
        return len(self.log_probs)


class JaxEngine:
    """An `Engine` on this process's devices.

    Args:
      arch: the model's architecture.
      params: the policy's parameters; copied, never kept.
      version: their number.
      slots: streams that are kept at once, running or idle between turns.
      max_length: tokens that a prompt and its generation may have together.
      decode: ids to text, wanted only for stop strings.
      dtype: of the weights, the cache and the computation.
      mesh: where to run; by default the first device.
      queue_size: requests that may wait for a slot; one more is an `EngineError`.
      max_steps: tokens per stream and dispatch. More save overhead, fewer let requests in sooner.
      prefill_rows, prefill_chunk: a dispatch fills at most `rows * chunk` prompt tokens. There is
        one shape: another would sum in another order, and bits would depend on the timing.
      stale_kv: what new weights mean for a generation in flight. "recompute" fills its stream
        again, so that every log-prob is exactly that of its token's version. "keep" goes on at
        once: later tokens attend to keys and values of older weights, so their log-probs are
        those of the distribution they were drawn from, which is a mixture of versions.
      compile_ahead: compile every program before the first request is served, in the engine's
        thread, rather than each when it is first needed.
    """

    accepts_streamed_tensors: ClassVar[bool] = False

    def __init__(
        self,
        arch: Architecture,
        params: Params,
        version: int = 0,
        *,
        slots: int = 16,
        max_length: int = 2048,
        decode: Decode | None = None,
        dtype: str = "float32",
        mesh: Mesh | None = None,
        queue_size: int = 4096,
        max_steps: int = 8,
        prefill_rows: int = 8,
        prefill_chunk: int = 64,
        stale_kv: StaleKV = "recompute",
        compile_ahead: bool = False,
    ) -> None:
        if max_length > arch.max_positions:
            raise EngineError(
                f"max_length {max_length} is beyond the model's {arch.max_positions} positions"
            )
        self._max_length = max_length
        self._decode_text = decode
        self._queue_size = queue_size
        self._max_steps = max_steps
        self._prefill_shape = (prefill_rows, prefill_chunk)
        self._stale_kv: StaleKV = stale_kv
        self._compile_ahead = compile_ahead
        self._lane_sizes = lane_sizes(slots)

        self._decoder = CachedDecoder(
            arch, dtype, self._lane_sizes[-1], max_length, max_steps, mesh
        )
        self._cache = self._decoder.new_cache()
        self._weights = self._decoder.weights(params)
        self._running_version = version

        self._table = SlotTable(slots, min_shared=prefill_chunk // 2)
        self._counters = Counters()
        self._waiting: deque[Job] = deque()

        # What other threads leave for the engine's own, and nothing else, is under this lock.
        self._notes = threading.Condition()
        self._arrived: list[Job] = []
        self._errands: list[Callable[[], None]] = []
        self._version = version
        self._closed: str | None = None
        self._thread = threading.Thread(target=self._run, name="jax-engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_length(self) -> int:
        return self._max_length

    def submit(self, request: Request) -> "Future[Generation]":
        """Raises EngineError for a request that can never be served, and when the queue is full."""
        self._check(request)
        budget = min(request.sampling.max_tokens, self._max_length - len(request.prompt_ids))
        job = Job(request, Future(), budget)
        with self._notes:
            if self._closed is not None:
                raise EngineError(self._closed)
            queued = len(self._arrived) + len(self._waiting)
            if queued >= self._queue_size:
                raise EngineError(
                    f"{queued} requests are waiting already, as many as the queue holds; "
                    "play fewer episodes at once or raise queue_size"
                )
            self._arrived.append(job)
            self._notes.notify()
        return job.future

    def release(self, session: str) -> None:
        with self._notes:
            if self._closed is None:
                self._leave(lambda: self._table.release(session))

    def update_weights(self, params: Params, version: int) -> None:
        """Takes effect before the next dispatch. Streams kept for idle sessions are computed again
        when next used; see `stale_kv` for those in flight."""
        weights = self._decoder.weights(params)

        def swap() -> None:
            self._weights, self._running_version = weights, version
            keep = self._stale_kv == "keep"
            self._table.invalidate(keep=lambda slot: keep and slot.job.made > 0)

        with self._notes:
            self._leave(swap)
            self._version = version

    def close(self) -> None:
        """Ends the thread; requests that wait or run fail."""
        with self._notes:
            self._closed = self._closed or "the engine is closed"
            self._notes.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def metrics(self) -> dict[str, float]:
        """Counters since the start, and what goes on now."""
        counters = dataclasses.asdict(self._counters)
        return {
            **counters,
            "busy_seconds": counters["prefill_seconds"] + counters["decode_seconds"],
            "evictions": self._table.evictions,
            "active_slots": len(self._table.busy),
            "queue_length": len(self._arrived) + len(self._waiting),
        }

    def _check(self, request: Request) -> None:
        ids, how = request.prompt_ids, request.sampling
        vocab = self._decoder.arch.vocab_size
        problem = problem_with(how)
        if not ids:
            problem = "the prompt is empty"
        elif len(ids) >= self._max_length:
            problem = (
                f"the prompt has {len(ids)} tokens and the engine's max_length is "
                f"{self._max_length}; nothing can be generated"
            )
        elif min(ids) < 0 or max(ids) >= vocab:
            problem = f"prompt ids must lie in 0..{vocab - 1}: {min(ids)}..{max(ids)}"
        elif len(how.stop_ids) > MAX_STOP_IDS:
            problem = f"{len(how.stop_ids)} stop ids; the engine takes {MAX_STOP_IDS}"
        elif how.stop_strings and self._decode_text is None:
            problem = "stop strings need an engine that was given `decode`"
        if problem is not None:
            raise EngineError(f"session {request.session!r}: {problem}")

    def _leave(self, errand: Callable[[], None]) -> None:
        with self._notes:
            if self._closed is not None:
                raise EngineError(self._closed)
            self._errands.append(errand)
            self._notes.notify()

    def _compile_all(self) -> None:
        """Runs every program there is on nothing; no request compiles anything after it."""
        place = self._decoder.place
        chunks = place(empty_chunks(*self._prefill_shape))
        self._cache = self._decoder.fill(self._weights, self._cache, chunks)
        for width in self._lane_sizes:
            lanes, steps = place((empty_lanes(width, self._decoder.slots), np.int32(0)))
            self._cache, _ = self._decoder.decode(self._weights, self._cache, lanes, steps)
        self._cache = self._decoder.copy(self._cache, *place((np.int32(0), np.int32(0))))

    def _run(self) -> None:
        reason = "the engine is closed"
        try:
            if self._compile_ahead:
                self._compile_all()
            while self._take_notes():
                self._withdraw_cancelled()
                self._admit()
                self._fill_some()
                self._decode_some()
        except Exception as error:  # whoever waits must hear of it, whatever it was
            reason = f"the engine died: {type(error).__name__}: {error}"
        with self._notes:
            self._closed = reason
            jobs = [*self._arrived, *self._waiting, *(s.job for s in self._table.busy)]
        for job in jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(EngineError(reason))

    def _take_notes(self) -> bool:
        """Waits for something to do, and runs the errands; False when the engine is to end."""
        with self._notes:
            while not (self._arrived or self._errands or self._waiting or self._table.busy):
                if self._closed is not None:
                    return False
                self._notes.wait()
                while self._arrived and self._notes.wait(_BURST_SECONDS):
                    pass
            if self._closed is not None:
                return False
            # Together, so that a request never overtakes weights that were there before it.
            arrived, self._arrived = self._arrived, []
            errands, self._errands = self._errands, []
            self._waiting.extend(arrived)
        for errand in errands:
            errand()
        return True

    def _withdraw_cancelled(self) -> None:
        for slot in self._table.busy:
            if slot.job.future.cancelled():
                slot.job.future.set_running_or_notify_cancel()
                self._table.finish(slot)
        for job in [j for j in self._waiting if j.future.cancelled()]:
            job.future.set_running_or_notify_cancel()
            self._waiting.remove(job)

    def _admit(self) -> None:
        """Sessions whose stream is kept come first: nobody need be evicted for them."""
        kept = {s.session for s in self._table.slots if s.job is None and s.session is not None}
        self._waiting = deque(sorted(self._waiting, key=lambda j: j.request.session not in kept))
        while self._waiting:
            job = self._waiting[0]
            slot = self._table.admit(job.request.session, job.request.prompt_ids, job)
            if slot is None:
                return
            self._counters.reused_tokens += slot.filled
            self._waiting.popleft()

    def _fill_some(self) -> None:
        """Fills about as many tokens as a round of decoding makes, so that neither holds up the
        other for long, and copies what other slots have."""
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
        where = self._decoder.place((np.int32(leader.index), np.int32(slot.index)))
        self._cache = self._decoder.copy(self._cache, *where)
        self._counters.reused_tokens += held - slot.filled
        slot.filled = held

    def _fill_pieces(self, slots: Sequence[Slot]) -> int:
        """One dispatch; returns how many tokens it filled."""
        pieces = cut_pieces(slots, *self._prefill_shape)
        chunks = empty_chunks(*self._prefill_shape)
        for row, (slot, start, stop) in enumerate(pieces):
            chunks.rows[row] = slot.index
            chunks.tokens[row, : stop - start] = slot.ids[start:stop]
            chunks.positions[row, : stop - start] = range(start, stop)
        began = time.perf_counter()
        placed = self._decoder.place(chunks)
        self._cache = self._decoder.fill(self._weights, self._cache, placed)
        jax.block_until_ready(self._cache)
        self._counters.prefill_seconds += time.perf_counter() - began
        self._counters.prefill_dispatches += 1
        for slot, _, stop in pieces:
            slot.filled = stop
        tokens = sum(stop - start for _, start, stop in pieces)
        self._counters.prefill_tokens += tokens
        return tokens

    def _decode_some(self) -> None:
        """A round for all streams whose prompt is filled; shorter while many others wait for that,
        since a step costs almost the same for few lanes as for many."""
        busy = self._table.busy
        ready = [s for s in busy if s.missing == 0]
        if not ready:
            return
        steps = max(1, self._max_steps * len(ready) ** 2 // len(busy) ** 2)
        fewest, widest = self._lane_sizes[0], self._lane_sizes[-1]
        width = fewest if 2 * len(ready) <= widest else widest
        for first in range(0, len(ready), width):
            self._decode_lanes(ready[first : first + width], width, steps)

    def _decode_lanes(self, slots: Sequence[Slot], width: int, steps: int) -> None:
        """One dispatch."""
        lanes = empty_lanes(width, self._decoder.slots)
        places = [s.index for s in slots] if lanes.rows is None else range(len(slots))
        for lane, slot in zip(places, slots, strict=True):
            job, how = slot.job, slot.job.request.sampling
            if lanes.rows is not None:
                lanes.rows[lane] = slot.index
            lanes.tokens[lane] = slot.ids[-1]
            lanes.positions[lane] = len(slot.ids) - 1
            lanes.budget[lane] = job.budget - job.made
            lanes.stop_ids[lane, : len(how.stop_ids)] = how.stop_ids
            lanes.controls.put(lane, how, job.request.seed)
        began = time.perf_counter()
        placed, limit = self._decoder.place((lanes, np.int32(steps)))
        self._cache, decoded = self._decoder.decode(self._weights, self._cache, placed, limit)
        decoded = jax.device_get(decoded)
        self._counters.decode_seconds += time.perf_counter() - began
        self._counters.decode_dispatches += 1
        self._counters.decode_steps += int(decoded.counts.max())
        for lane, slot in zip(places, slots, strict=True):
            self._take(slot, decoded, lane)

    def _take(self, slot: Slot, decoded: Decoded, lane: int) -> None:
        """Appends what a lane decoded to its stream, and ends the job if it is complete."""
        job, how = slot.job, slot.job.request.sampling
        count = int(decoded.counts[lane])
        prompt, made = len(job.request.prompt_ids), job.made
        slot.ids += decoded.tokens[:count, lane].tolist()
        slot.filled += count
        reason: FinishReason | None = None
        if slot.ids[-1] in how.stop_ids:
            reason = "stop"
        elif made + count == job.budget:
            reason = "length"
        if how.stop_strings and self._decode_text is not None:
            kept = completed_by(self._decode_text, slot.ids[prompt:], made, how.stop_strings)
            if kept is not None:
                slot.cut(prompt + kept)
                count, reason = kept - made, "stop"
        job.log_probs += decoded.log_probs[:count, lane].tolist()
        job.versions += [self._running_version] * count
        self._counters.generated_tokens += count
        if reason is not None:
            self._table.finish(slot)
            ids = tuple(slot.ids[prompt:])
            made_of = Generation(ids, tuple(job.log_probs), tuple(job.versions), reason)
            if job.future.set_running_or_notify_cancel():
                job.future.set_result(made_of)


def completed_by(
    decode: Decode, ids: Sequence[int], seen: int, stop_strings: Sequence[str]
) -> int | None:
    """How many of `ids` it takes to complete a stop string, given that the first `seen` do not.

    Decodes only as many ids before `seen` as a stop string could reach back, since an id is at
    least a byte of text, and a few more for ids that are none.
    """
    reach = max(len(s.encode()) for s in stop_strings) + 8
    first = max(0, seen - reach)
    stopped = lambda end: any(s in decode(list(ids[first:end])) for s in stop_strings)
    if not stopped(len(ids)):
        return None
    return next(end for end in range(seen + 1, len(ids) + 1) if stopped(end))
