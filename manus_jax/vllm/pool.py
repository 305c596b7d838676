"""An engine over any number of vLLM servers.

`VllmPool` owns all state: the servers, the queue and the requests in flight, under one lock. A
server is in service while it holds the current weights. A server that is new, was restarted, failed
or missed an update enters service by loading the current version. Requests, health checks and
aborts run on one bounded executor. Requests in flight on a server that fails are sent to another
one with the same seed; an answer that arrives late is dropped.
"""

import contextlib
import dataclasses
import itertools
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from manus_jax.config.server_settings import VllmSettings
from manus_jax.engines.protocol import EngineError, Generation, Request, check_request
from manus_jax.models.architecture import Architecture
from manus_jax.servers.health import BackOff
from manus_jax.status import STATUS
from manus_jax.vllm.adapter_server import connect
from manus_jax.vllm.client import BadAnswer, IncompatibleServer, RequestRefused, ServerFailure
from manus_jax.vllm.members import MAX_BAD_ANSWERS, Job, Member, choose
from manus_jax.weights.adapters import AdapterPublisher
from manus_jax.weights.manifest import Identity, label_of
from manus_jax.weights.publisher import Publisher

_log = logging.getLogger(__name__)
_UPKEEP_WORKERS = 3  # per server: a health check or `_bring_up`, an update, an abort
_CLOSED = "the engine is closed"


class VllmPool:
    """An `Engine` over servers by URL.

    Args:
      urls: the servers, running or not yet; servers can be added and removed later.
      max_length: tokens of a prompt and its generation together; a server with a shorter context
        is incompatible.
      publisher: publishes new weights, whole models or adapters, for `update_weights`.
      root: where weights are published; None: the servers keep their weights, which count as
        version 0.
      target: the version in `root` that servers must hold.
      model: the architecture that servers must serve; None: any.
      dtype: the type that servers should compute in; others are reported. None: any.
      api_key: the key of the servers.
      resources: closed after the pool.
    """

    on_learner_device: ClassVar[bool] = False

    def __init__(
        self,
        urls: Iterable[str],
        max_length: int,
        settings: VllmSettings,
        *,
        publisher: Publisher | AdapterPublisher | None = None,
        root: Path | None = None,
        target: Identity | None = None,
        model: Architecture | None = None,
        dtype: str | None = None,
        api_key: str | None = None,
        resources: contextlib.ExitStack | None = None,
    ) -> None:
        self._settings = settings
        self._back_off = BackOff(first=settings.first_retry, limit=settings.longest_retry)
        self._max_length = max_length
        self._publisher = publisher
        self._root = publisher.root if publisher is not None else root
        self._model = model
        self._dtype = dtype
        self._api_key = api_key
        self._resources = resources or contextlib.ExitStack()
        self._version = 0 if target is None else target.number
        # Everything below is guarded by this lock; changes are notified.
        self._change = threading.Condition()
        self._target = target
        self._versions = {} if target is None else {label_of(target): target.number}
        self._members: dict[str, Member] = {}
        self._homes: dict[str, str] = {}  # session → URL of the server that has its cache
        self._waiting: deque[Job] = deque()
        self._flying: set[Job] = set()
        self._moves = 0
        self._down_since = time.monotonic()  # while no server is in service
        self._closed: str | None = None
        self._attempt_ids = (f"{uuid.uuid4().hex[:8]}-{n}" for n in itertools.count())
        self._workers, self._worker_count = ThreadPoolExecutor(1, "vllm"), 1
        for url in urls:
            self.add_server(url)
        if not self._members:
            raise EngineError("a pool needs the URL of at least one vLLM server")
        self._maintenance = threading.Thread(target=self._maintain, name="vllm-pool", daemon=True)
        self._maintenance.start()

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_length(self) -> int:
        return self._max_length

    def submit(self, request: Request) -> "Future[Generation]":
        """Raises EngineError for a request that can never be served, and when the queue is full."""
        vocab_size = None if self._model is None else self._model.vocab_size
        budget = check_request(request, self._max_length, vocab_size)
        sampling = dataclasses.replace(request.sampling, max_tokens=budget)
        job = Job(dataclasses.replace(request, sampling=sampling), Future())
        with self._change:
            if self._closed is not None:
                raise EngineError(self._closed)
            if len(self._waiting) >= self._settings.queue_size:
                raise EngineError(
                    f"{len(self._waiting)} requests are already waiting, which fills the queue; "
                    "play fewer episodes at once or add servers"
                )
            self._waiting.append(job)
            self._dispatch()
        job.future.add_done_callback(lambda _: self._after(job))
        return job.future

    def release(self, session: str) -> None:
        with self._change:
            self._homes.pop(session, None)

    def update_weights(self, params: Any, version: int) -> None:
        """Publishes the weights; returns when every server in service has loaded them."""
        if self._publisher is None:
            raise EngineError("vllm.push is False: the servers of this pool keep their weights")
        self.load_version(self._publisher.publish(params, version).identity)
        self._version = version
        self.await_service()

    def load_version(self, target: Identity) -> None:
        """Loads a published version on all servers in service; those that fail are marked down."""
        with self._change:
            self._target = target
            self._versions[label_of(target)] = target.number
            ready = [member for member in self._members.values() if member.ready]
            updates = [self._workers.submit(self._bring_up, member) for member in ready]
        for update in updates:
            update.result()

    def await_service(self) -> None:
        """Waits for a server in service.

        Raises EngineError after `patience` seconds, or at once if no server is compatible.
        """
        with self._change:
            ready = lambda: self._serves() or self._none_compatible()
            self._change.wait_for(ready, self._settings.patience)
            if not self._serves():
                raise EngineError(self._why_none_serves())

    def await_all(self) -> None:
        """Waits until every server holds the target; EngineError for one that keeps failing."""
        with self._change:
            for member in self._members.values():
                while member.weights != self._target:
                    if member.incompatible or member.health.incidents > 2:
                        raise EngineError(member.health.problem)
                    self._change.wait(1.0)

    def add_server(self, url: str) -> None:
        """Adds a server, which is used as soon as it holds the current weights."""
        url = _normalised(url)
        with self._change:
            if url not in self._members and self._closed is None:
                server = connect(url, self._settings, self._api_key, self._publisher)
                self._members[url] = Member(server)
                self._grow_workers()
                self._change.notify_all()

    def remove_server(self, url: str) -> None:
        """Removes a server; its requests in flight are sent to other servers."""
        url = _normalised(url)
        with self._change:
            member = self._members.get(url)
            if member is not None and self._closed is None:
                self._mark_down(member, "it was removed")
                del self._members[url]
                member.server.close()

    def close(self) -> None:
        """Closes the pool; queued and running requests fail."""
        with self._change:
            self._closed = _CLOSED
            jobs = [*self._waiting, *self._flying]
            self._waiting.clear()
            self._flying.clear()
            self._change.notify_all()
        for job in jobs:
            job.fail(_CLOSED)
        self._maintenance.join()
        for member in self._members.values():
            member.server.close()
        self._workers.shutdown()
        self._resources.close()

    def problems(self) -> dict[str, str]:
        """Why each server is not in service, by URL; "" if it is."""
        with self._change:
            return {
                url: "" if member.ready else member.health.problem or "starting"
                for url, member in self._members.items()
            }

    def metrics(self) -> dict[str, float]:
        """Current load, and totals per server since it joined."""
        with self._change:
            members = dict(self._members)
            loads = [member.load for member in members.values() if member.ready]
            numbers: dict[str, float] = {
                "queue_length": len(self._waiting) + sum(load.waiting for load in loads),
                "kv_usage": max((load.kv_usage for load in loads), default=0.0),
                "in_flight": len(self._flying),
                "servers": len(members),
                "servers_ready": sum(member.ready for member in members.values()),
                "sessions_moved": self._moves,
            }
        for url, member in members.items():
            name = f"server/{urlsplit(url).netloc}"
            numbers |= {f"{name}/{key}": value for key, value in member.metrics().items()}
        return numbers

    def _maintain(self) -> None:
        """Checks servers in service, retries the others, and fails requests after `patience`."""
        with self._change:
            while self._closed is None:
                now = time.monotonic()
                for member in self._members.values():
                    if member.attended:
                        continue
                    if member.due(now):
                        self._attend(member, self._bring_up)
                    elif member.ready and now >= member.check_at:
                        member.check_at = now + self._settings.check_every
                        self._attend(member, self._check)
                if not self._serves() and now - self._down_since > self._settings.patience:
                    while self._waiting:
                        self._waiting.popleft().fail(self._why_none_serves())
                self._change.wait(self._seconds_to_next(now))

    def _bring_up(self, member: Member) -> None:
        """Puts a server into service with the current weights, or marks it down."""
        with member.loading:
            try:
                push = self._root is not None
                capacity, label = member.examine(self._max_length, push, self._model, self._dtype)
                with STATUS.working(f"vLLM server {member.server.url}: new weights"):
                    while not self._put_in_service(member, self._load(member, label), capacity):
                        pass
            except Exception as error:
                if not isinstance(error, ServerFailure):  # a bug; the server is tried again later
                    _log.exception("%s cannot be brought into service", member.server.url)
                with self._change:
                    member.incompatible = isinstance(error, IncompatibleServer)
                    self._mark_down(member, str(error))

    def _load(self, member: Member, label: str) -> Identity | None:
        target = self._target
        if target is None or self._root is None:
            return target
        if label == label_of(target):
            member.server.resume()
        else:
            member.counters.paused_seconds += member.server.load(self._root, target)
            member.counters.updates += 1
        return target

    def _put_in_service(self, member: Member, loaded: Identity | None, capacity: int) -> bool:
        """False if there are newer weights by now."""
        with self._change:
            if loaded != self._target:
                return False
            member.weights, member.incompatible = loaded, False
            if member.health.down:
                _log.warning("%s is in service again", member.server.url)
            member.come_up(capacity)
            member.check_at = time.monotonic() + self._settings.check_every
            self._grow_workers()
            self._dispatch()
            self._change.notify_all()
            return True

    def _check(self, member: Member) -> None:
        """A health check. It does not take `loading`: an update must not wait for it, and reports
        its own problems."""
        weights = member.weights
        problem = member.find_problem()
        with contextlib.suppress(ServerFailure):  # only metrics; the server works without them
            member.load = member.server.load_metrics()
        with self._change:
            updated = member.loading.locked() or member.weights is not weights
            if problem is not None and member.ready and not updated:
                self._mark_down(member, problem)

    def _serve(self, job: Job, member: Member, attempt_id: str) -> None:
        """One attempt at a request."""
        version_of = self._versions.get if self._root is not None else lambda _: self._version
        vocab_size = None if self._model is None else self._model.vocab_size
        outcome: Generation | EngineError
        try:
            with STATUS.working(f"vLLM server {member.server.url}: generation"):
                outcome = member.server.generate(job.request, attempt_id, version_of, vocab_size)
        except (RequestRefused, ServerFailure) as error:
            outcome = error
        problem = None
        if isinstance(outcome, ServerFailure) and not job.future.done():
            if not self._is_current(job, attempt_id):
                return
            with member.loading:
                problem = member.find_problem()
        with self._change:
            if not self._is_current(job, attempt_id):
                return  # another attempt replaced this one, or the pool is closed
            if isinstance(outcome, BadAnswer):
                member.bad_answers += 1
                if member.bad_answers >= MAX_BAD_ANSWERS:
                    problem = problem or str(outcome)
            if problem is not None:
                self._mark_down(member, problem)
                return
            member.set_in_flight(member.in_flight - 1)
            if isinstance(outcome, ServerFailure) and not job.future.cancelled():
                member.counters.failures += 1
                self._retry(job, str(outcome))
                self._dispatch()
                return
            self._flying.discard(job)
            if isinstance(outcome, Generation):
                member.counters.tokens += len(outcome.token_ids)
                member.bad_answers = 0
            self._dispatch()
        if not isinstance(outcome, Generation):
            job.fail(f"session {job.request.session!r}: {outcome}")
        elif job.future.set_running_or_notify_cancel():
            job.future.set_result(outcome)

    def _is_current(self, job: Job, attempt_id: str) -> bool:
        with self._change:
            return job in self._flying and job.attempt_id == attempt_id

    def _after(self, job: Job) -> None:
        """Drops a cancelled request from the queue, or aborts it on its server."""
        if not job.future.cancelled():
            return
        with self._change:
            if self._closed is not None:
                return
            if job in self._waiting:
                self._waiting.remove(job)
                job.future.set_running_or_notify_cancel()
            elif job.member is not None:
                job.member.to_abort.append(job.attempt_id)
                if not job.member.aborting:
                    job.member.aborting = True
                    self._start(self._abort, job.member)

    def _abort(self, member: Member) -> None:
        while True:
            with self._change:
                attempt_ids, member.to_abort = member.to_abort, []
                if not attempt_ids:
                    member.aborting = False
                    return
            with contextlib.suppress(ServerFailure):  # then the generation runs to its end
                member.server.abort(attempt_ids)

    # The following are called with the lock held.

    def _serves(self) -> bool:
        """Whether any server is in service."""
        return any(member.ready for member in self._members.values())

    def _none_compatible(self) -> bool:
        return bool(self._members) and all(m.incompatible for m in self._members.values())

    def _why_none_serves(self) -> str:
        problems = [member.health.problem for member in self._members.values()]
        why = "; ".join(problems) or "none is left"
        if self._none_compatible():
            return f"no vLLM server can be used: {why}"
        return f"no vLLM server is in service after {self._settings.patience:g} s: {why}"

    def _mark_down(self, member: Member, problem: str) -> None:
        """Takes a server out of service; its requests are sent to others."""
        url = member.server.url
        if self._closed is not None or self._members.get(url) is not member:
            return
        if member.health.problem != problem:
            _log.warning("%s is out of service: %s", url, problem)
        member.counters.failures += 1
        now, served = time.monotonic(), self._serves()
        member.go_down(problem, now, self._back_off)
        if served and not self._serves():
            self._down_since = now
            patience = self._settings.patience
            _log.warning("no vLLM server is in service: waiting up to %g s for one", patience)
        for job in [job for job in self._flying if job.member is member]:
            self._retry(job, problem)
        member.server.break_off()
        self._dispatch()
        self._change.notify_all()

    def _retry(self, job: Job, problem: str) -> None:
        """Puts a request back at the head of the queue, unless it failed too often."""
        self._flying.discard(job)
        if job.member is not None:
            job.failed_on.add(job.member.server.url)
        job.member, job.attempt_id = None, ""
        job.failures += 1
        if job.future.cancelled():
            job.future.set_running_or_notify_cancel()
        elif job.failures < self._settings.attempts:
            self._waiting.appendleft(job)
        else:
            job.fail(f"failed {job.failures} times, last: {problem}")

    def _dispatch(self) -> None:
        """Sends waiting requests, in order, as long as there is a server with room."""
        while self._waiting:
            session, avoid = self._waiting[0].request.session, self._waiting[0].failed_on
            home = self._homes.get(session)
            member = choose(self._members.values(), home, self._settings.imbalance, avoid)
            if member is None:
                return
            job, url = self._waiting.popleft(), member.server.url
            self._moves += home is not None and home != url
            self._homes[session] = url
            member.set_in_flight(member.in_flight + 1)
            member.counters.requests += 1
            job.member, job.attempt_id = member, next(self._attempt_ids)
            self._flying.add(job)
            self._start(self._serve, job, member, job.attempt_id)

    def _attend(self, member: Member, work: Callable[[Member], None]) -> None:
        """Runs maintenance of a server on a worker, one task at a time per server."""
        member.attended = True

        def attended(_: "Future[None]") -> None:
            with self._change:
                member.attended = False
                self._change.notify_all()

        self._start(work, member).add_done_callback(attended)

    def _start(self, work: Callable[..., None], *arguments: Any) -> "Future[None]":
        started = self._workers.submit(work, *arguments)
        started.add_done_callback(_log_bug)
        return started

    def _grow_workers(self) -> None:
        """Provides a worker for each request that the servers can run, and some for maintenance."""
        members = self._members.values()
        count = sum(member.capacity + _UPKEEP_WORKERS for member in members)
        if count > self._worker_count:
            self._workers.shutdown(wait=False)  # submitted work still runs
            self._workers, self._worker_count = ThreadPoolExecutor(count, "vllm"), count

    def _seconds_to_next(self, now: float) -> float:
        """Seconds until the next maintenance task, at most 1."""
        idle = [member for member in self._members.values() if not member.attended]
        times = [m.check_at if m.ready else m.health.retry_at for m in idle]
        if self._waiting and not self._serves():
            times.append(self._down_since + self._settings.patience)
        return min(1.0, max(0.005, min(times, default=now + 1.0) - now))


def _normalised(url: str) -> str:
    return (url if "://" in url else f"http://{url}").rstrip("/")


def _log_bug(task: "Future[None]") -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        _log.error("a worker of the vLLM pool failed", exc_info=error)
