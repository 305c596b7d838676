"""The records that a pool keeps for each vLLM server and each request, and the choice of a server.

A session stays on one server, whose cache holds its earlier turns, unless that server is out of
service or much more loaded than another. A server is in service only while it holds the pool's
current weights; one that fails is marked down (`servers.health`) and returns by loading them.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future

from manus_jax.engines.protocol import EngineError, Generation, Request
from manus_jax.models.architecture import Architecture
from manus_jax.servers.health import HEALTHY, BackOff, Health
from manus_jax.vllm.client import IncompatibleServer, ServerFailure, ServerLoad, VllmServer
from manus_jax.weights.manifest import Identity, label_of

_log = logging.getLogger(__name__)
_NEW = Health(problem="not reached yet")
MAX_BAD_ANSWERS = 3
"""Generations in a row that cannot be used, before a server is marked down."""


@dataclasses.dataclass
class ServerCounters:
    """Totals of a server since it joined."""

    requests: int = 0
    tokens: int = 0
    failures: int = 0
    updates: int = 0
    paused_seconds: float = 0.0
    busy_seconds: float = 0.0  # with a request in flight


@dataclasses.dataclass(eq=False)
class Member:
    """A server of the pool. `loading` serialises the calls that read or change its weights; all
    other fields are guarded by the pool's lock."""

    server: VllmServer
    ready: bool = False  # in service
    capacity: int = 1
    in_flight: int = 0
    health: Health = _NEW
    weights: Identity | None = None  # the version that it last loaded
    served: tuple[str, str] | None = None  # model path and label of weights that it keeps
    bad_answers: int = 0  # in a row
    incompatible: bool = False  # it cannot serve until it is started differently
    loading: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    counters: ServerCounters = dataclasses.field(default_factory=ServerCounters)
    load: ServerLoad = dataclasses.field(default_factory=ServerLoad)
    busy_since: float = 0.0
    check_at: float = 0.0  # time of the next health check
    attended: bool = False  # the pool runs a maintenance task on it
    to_abort: list[str] = dataclasses.field(default_factory=list)
    aborting: bool = False

    def due(self, now: float) -> bool:
        """Whether the server is out of service and may be tried again."""
        return not self.ready and self.health.may_retry(now)

    def come_up(self, capacity: int) -> None:
        """The server answers and holds the current weights."""
        self.ready, self.capacity, self.health = True, capacity, HEALTHY

    def go_down(self, problem: str, now: float, back_off: BackOff) -> None:
        """The server failed; its requests in flight are sent to other servers."""
        self.set_in_flight(0)
        # A server that answers nonsense comes up each time; its back-off must grow all the same.
        failures = max(self.health.incidents, self.bad_answers - MAX_BAD_ANSWERS)
        health = dataclasses.replace(self.health, incidents=failures)
        self.ready, self.health = False, health.mark_down(problem, now, back_off)

    def examine(
        self, max_length: int, push: bool, model: Architecture | None, dtype: str | None
    ) -> tuple[int, str]:
        """The server's capacity and the label of its weights; ServerFailure if incompatible.

        `push`: the pool gives it weights. Another type than `dtype` is reported. A server in
        service that still holds the weights it was given is not examined again.
        """
        label = self.server.weight_label() if self.ready else None
        if label is not None and self.weights is not None and label == label_of(self.weights):
            return self.capacity, label
        capacity = self.server.examine(max_length, push, model)
        label = self.server.weight_label()
        if dtype not in (None, self.server.dtype):
            _log.warning(
                "%s computes in %s and engine.dtype is %s: start it with --dtype %s or set "
                'engine.dtype = "%s"',
                *(self.server.url, self.server.dtype, dtype, dtype, self.server.dtype),
            )
        if not push:
            if self.served not in (None, (self.server.model_path, label)):
                raise IncompatibleServer(self._other_weights(label))
            self.served = (self.server.model_path, label)
        return capacity, label

    def find_problem(self) -> str | None:
        """What is wrong with a server that should be in service."""
        try:
            self.server.check_health()
            label = self.server.weight_label()
            if self.served is not None:
                self.server.read_model()
        except ServerFailure as error:
            return str(error)
        if self.served not in (None, (self.server.model_path, label)):
            return self._other_weights(label)
        if self.weights is not None and label != label_of(self.weights):
            return (
                f"{self.server.url} was restarted: it holds weights {label!r} and was given "
                f"{label_of(self.weights)!r}"
            )
        return None

    def _other_weights(self, label: str) -> str:
        """The message about a server that should keep its weights and does not."""
        assert self.served is not None
        path, before = self.served
        return (
            f"{self.server.url} serves {self.server.model_path} with weights {label!r} now, and "
            f"served {path} with {before!r}: it was restarted; start it as before"
        )

    def set_in_flight(self, count: int) -> None:
        """Also updates the total time with requests in flight."""
        now = time.monotonic()
        if self.in_flight:
            self.counters.busy_seconds += now - self.busy_since
        self.in_flight, self.busy_since = count, now

    def metrics(self) -> dict[str, float]:
        totals = dataclasses.asdict(self.counters)
        return {
            **totals,
            "tokens_per_second": _rate(totals["tokens"], totals["busy_seconds"]),
            "prefix_cache_hit_rate": _rate(self.load.hits, self.load.queries),
            "kv_usage": self.load.kv_usage,
            "in_flight": self.in_flight,
            "ready": self.ready,
        }


def choose(
    members: Iterable[Member], home: str | None, imbalance: int, avoid: Collection[str] = ()
) -> Member | None:
    """The server for a session that was on `home`, a URL; None while none has room.

    The session moves if its server has over `imbalance` more requests than the least loaded one.
    Servers to `avoid`, on which the request failed, are used if no other is in service.
    """
    ready = [m for m in members if m.ready]
    others = [m for m in ready if m.server.url not in avoid]
    open_now = [m for m in others or ready if m.in_flight < m.capacity]
    if not open_now:
        return None
    least = min(open_now, key=lambda m: m.in_flight)
    own = next((m for m in open_now if m.server.url == home), None)
    if own is not None and own.in_flight <= least.in_flight + imbalance:
        return own
    return least


@dataclasses.dataclass(eq=False)
class Job:
    """A request. `attempt_id` names the attempt whose answer counts, `member` its server."""

    request: Request
    future: "Future[Generation]"
    failures: int = 0
    failed_on: set[str] = dataclasses.field(default_factory=set)  # URLs of servers
    attempt_id: str = ""
    member: Member | None = None

    def fail(self, problem: str) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(EngineError(problem))


def _rate(count: float, of: float) -> float:
    return count / of if of else 0.0
