"""An engine over any number of vLLM servers: requests go out to them, weights too.

The one idea: one thread hands requests to servers, and every request in flight has its own. What
was in flight on a server that fails is served elsewhere, with the same seed; an answer that comes
after all is dropped. Which servers there are to choose from is the fleet's business.
"""

import contextlib
import dataclasses
import itertools
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from manus_jax.engines.protocol import EngineError, Generation, Request
from manus_jax.engines.sampling import problem_with
from manus_jax.models.architecture import Architecture
from manus_jax.vllm import routing as routing
from manus_jax.vllm.client import RequestRefused, ServerFailure, VllmServer
from manus_jax.vllm.fleet import Fleet, Member, PoolSettings
from manus_jax.weights.manifest import Identity


class WeightPublisher(Protocol):
    """Where new weights are put for servers to fetch (`weights.publisher.Publisher`)."""

    root: Path

    def publish(self, params: Any, version: int) -> Any: ...


@dataclasses.dataclass(eq=False)
class _Job:
    """A request on its way. `errand` names the attempt whose answer counts, `member` its server."""

    request: Request
    future: "Future[Generation]"
    failures: int = 0
    errand: str = ""
    member: Member | None = None


class VllmPool:
    """An `Engine` over servers by URL.

    Args:
      urls: of servers that run; more may join, and any may leave.
      max_length: tokens that a prompt and its generation may have together; a server whose context
        is shorter does not serve.
      publisher: takes new weights. Without it the servers keep the weights that they have, which
        are called version 0.
      target: what was published last, the first weights.
      model: what the servers must serve; None: anything.
      closing: called, the last first, when the pool is closed.
    """

    def __init__(
        self,
        urls: Iterable[str],
        max_length: int,
        *,
        publisher: WeightPublisher | None = None,
        target: Identity | None = None,
        model: Architecture | None = None,
        settings: PoolSettings | None = None,
        closing: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._settings = settings or PoolSettings()
        self._max_length = max_length
        self._publisher = publisher
        self._version = 0 if target is None else target.number
        self._closing = list(closing)
        # All below is under this lock, and whoever changes it tells the others.
        self._change = threading.Condition()
        self._homes: dict[str, str] = {}
        self._waiting: deque[_Job] = deque()
        self._flying: set[_Job] = set()
        self._moves = 0
        self._served_at = time.monotonic()
        self._closed: str | None = None
        self._errands = (f"{uuid.uuid4().hex[:8]}-{n}" for n in itertools.count())
        self._fleet = Fleet(
            urls,
            max_length,
            None if publisher is None else publisher.root,
            target,
            model,
            self._settings,
            self._change,
            self._server_went_down,
        )
        self._dispatcher = threading.Thread(target=self._dispatch, name="vllm-pool", daemon=True)
        self._dispatcher.start()
        try:
            self._fleet.await_service()
        except EngineError:
            self._closing.clear()  # nothing was handed over yet
            self.close()
            raise

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_length(self) -> int:
        return self._max_length

    @property
    def urls(self) -> list[str]:
        """Of its servers, in service or not."""
        with self._change:
            return list(self._fleet.members)

    def submit(self, request: Request) -> "Future[Generation]":
        """Raises EngineError for a request that can never be served, and when the queue is full."""
        room = self._max_length - len(request.prompt_ids)
        problem = problem_with(request.sampling)
        if not request.prompt_ids or room < 1:
            problem = (
                f"the prompt has {len(request.prompt_ids)} tokens, and the engine's max_length is "
                f"{self._max_length}"
            )
        if problem is not None:
            raise EngineError(f"session {request.session!r}: {problem}")
        most = min(request.sampling.max_tokens, room)
        sampling = dataclasses.replace(request.sampling, max_tokens=most)
        job = _Job(dataclasses.replace(request, sampling=sampling), Future())
        with self._change:
            if self._closed is not None:
                raise EngineError(self._closed)
            if len(self._waiting) >= self._settings.queue_size:
                raise EngineError(
                    f"{len(self._waiting)} requests are waiting already, as many as the queue "
                    "holds; play fewer episodes at once or add servers"
                )
            self._waiting.append(job)
            self._change.notify_all()
        job.future.add_done_callback(lambda _: self._after(job))
        return job.future

    def release(self, session: str) -> None:
        with self._change:
            self._homes.pop(session, None)

    def update_weights(self, params: Any, version: int) -> None:
        """Publishes, and returns when every server in service has loaded the version."""
        if self._publisher is None:
            raise EngineError(
                "this pool was given no directory for weights, so its servers keep theirs"
            )
        self._fleet.update(self._publisher.publish(params, version).identity)
        self._version = version
        self._fleet.await_service()

    def add_server(self, url: str) -> None:
        """It serves as soon as it holds the current weights."""
        self._fleet.add(url)

    def remove_server(self, url: str) -> None:
        """It gets no more requests; those in flight on it are served elsewhere."""
        self._fleet.remove(url)

    def close(self) -> None:
        """Requests that wait or run fail."""
        with self._change:
            self._closed = self._closed or "the engine is closed"
            jobs = [*self._waiting, *self._flying]
            self._waiting.clear()
            self._flying.clear()
            self._change.notify_all()
        for job in jobs:
            _fail(job, "the engine is closed")
        self._dispatcher.join()
        self._fleet.close()
        while self._closing:
            self._closing.pop()()

    def metrics(self) -> dict[str, float]:
        """What goes on now, and per server what was done since it joined."""
        with self._change:
            members = dict(self._fleet.members)
            numbers: dict[str, float] = {
                "queue_length": len(self._waiting),
                "in_flight": len(self._flying),
                "servers": len(members),
                "servers_ready": sum(member.state.ready for member in members.values()),
                "sessions_moved": self._moves,
            }
        for url, member in members.items():
            name = f"server/{urlsplit(url).netloc}"
            counted = dataclasses.asdict(member.counters)
            numbers |= {f"{name}/{key}": value for key, value in counted.items()}
            numbers[f"{name}/tokens_per_second"] = _rate(counted["tokens"], counted["busy_seconds"])
            numbers[f"{name}/prefix_cache_hit_rate"] = _rate(
                member.cache.hits, member.cache.queries
            )
            numbers[f"{name}/in_flight"] = member.state.in_flight
            numbers[f"{name}/ready"] = member.state.ready
        return numbers

    def _dispatch(self) -> None:
        with self._change:
            while self._closed is None:
                self._drop_cancelled()
                if not self._send_one():
                    self._give_up_if_nobody_serves()
                    self._change.wait(1.0)

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._waiting if job.future.cancelled()]:
            job.future.set_running_or_notify_cancel()
            self._waiting.remove(job)

    def _send_one(self) -> bool:
        """The first in the queue to its server; False when it has to wait."""
        if not self._waiting:
            return False
        session = self._waiting[0].request.session
        home = self._homes.get(session)
        states = [member.state for member in self._fleet.members.values()]
        chosen = routing.choose(states, home, self._settings.routing)
        if chosen is None:
            return False
        job = self._waiting.popleft()
        member = self._fleet.members[chosen.url]
        self._moves += home is not None and home != chosen.url
        self._homes[session] = chosen.url
        member.become(routing.sent(member.state))
        member.counters.requests += 1
        job.member, job.errand = member, next(self._errands)
        self._flying.add(job)
        threading.Thread(target=self._serve, args=(job, member, job.errand), daemon=True).start()
        return True

    def _give_up_if_nobody_serves(self) -> None:
        now = time.monotonic()
        if self._fleet.serves:
            self._served_at = now
        elif now - self._served_at > self._settings.patience:
            while self._waiting:
                _fail(self._waiting.popleft(), self._fleet.why_nobody_serves())

    def _serve(self, job: _Job, member: Member, errand: str) -> None:
        """One attempt, in a thread of its own."""
        other_weights = self._version if self._publisher is None else None
        made: Generation | None = None
        failure: EngineError | None = None
        problem = None
        try:
            made = member.server.generate(job.request, errand, other_weights)
        except RequestRefused as error:
            failure = error
        except ServerFailure as error:
            failure = error
            if not job.future.done():  # else it ended because it was told to
                problem = self._fleet.problem_of(member)
        with self._change:
            if job not in self._flying or job.errand != errand:
                return  # it is being served elsewhere, or nobody waits for it
            if problem is not None:
                self._fleet.put_aside(member, problem)
                return
            member.become(routing.answered(member.state))
            if isinstance(failure, ServerFailure) and not job.future.cancelled():
                member.counters.failures += 1
                self._try_again(job, str(failure))
                return
            self._flying.discard(job)
            member.counters.tokens += 0 if made is None else len(made.token_ids)
            self._change.notify_all()
        if made is None:
            _fail(job, f"session {job.request.session!r}: {failure}")
        elif job.future.set_running_or_notify_cancel():
            job.future.set_result(made)

    def _server_went_down(self, member: Member, problem: str) -> None:
        for job in [job for job in self._flying if job.member is member]:
            self._try_again(job, problem)

    def _try_again(self, job: _Job, problem: str) -> None:
        """Back into the queue, at its head, unless it failed too often. Under the lock."""
        self._flying.discard(job)
        job.member, job.errand = None, ""
        job.failures += 1
        if job.failures < self._settings.attempts or job.future.cancelled():
            self._waiting.appendleft(job)
        else:
            _fail(job, f"failed {job.failures} times, last: {problem}")
        self._change.notify_all()

    def _after(self, job: _Job) -> None:
        """Of a request that was cancelled, the server is told; beside, as that may take time."""
        if not job.future.cancelled() or self._closed is not None:
            return
        with self._change:
            member, errand = job.member, job.errand
            self._change.notify_all()
        if member is not None:
            threading.Thread(target=_abort, args=(member.server, errand), daemon=True).start()


def _abort(server: VllmServer, errand: str) -> None:
    with contextlib.suppress(ServerFailure):  # then the server finds out by itself
        server.abort([errand])


def _rate(count: float, of: float) -> float:
    return count / of if of else 0.0


def _fail(job: _Job, problem: str) -> None:
    if job.future.set_running_or_notify_cancel():
        job.future.set_exception(EngineError(problem))
