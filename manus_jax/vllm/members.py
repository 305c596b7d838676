"""The records that a pool keeps for each vLLM server and each request."""

import dataclasses
import threading
import time
from concurrent.futures import Future

from manus_jax.engines.protocol import EngineError, Generation, Request
from manus_jax.vllm.client import PrefixCache, VllmServer
from manus_jax.vllm.routing import VllmServerState
from manus_jax.weights.manifest import Identity


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
    state: VllmServerState
    weights: Identity | None = None  # the version that it last loaded
    incompatible: bool = False  # it cannot serve until it is started differently
    loading: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    counters: ServerCounters = dataclasses.field(default_factory=ServerCounters)
    cache: PrefixCache = dataclasses.field(default_factory=PrefixCache)
    busy_since: float = 0.0
    check_at: float = 0.0  # time of the next health check
    attended: bool = False  # the pool runs a maintenance task on it
    to_abort: list[str] = dataclasses.field(default_factory=list)
    aborting: bool = False

    def become(self, state: VllmServerState) -> None:
        """Changes the state and updates the total time with requests in flight."""
        now = time.monotonic()
        if self.state.in_flight:
            self.counters.busy_seconds += now - self.busy_since
        self.state, self.busy_since = state, now

    def metrics(self) -> dict[str, float]:
        totals = dataclasses.asdict(self.counters)
        return {
            **totals,
            "tokens_per_second": _rate(totals["tokens"], totals["busy_seconds"]),
            "prefix_cache_hit_rate": _rate(self.cache.hits, self.cache.queries),
            "in_flight": self.state.in_flight,
            "ready": self.state.ready,
        }


@dataclasses.dataclass(eq=False)
class Job:
    """A request. `attempt_id` names the attempt whose answer counts, `member` its server."""

    request: Request
    future: "Future[Generation]"
    failures: int = 0
    attempt_id: str = ""
    member: Member | None = None

    def fail(self, problem: str) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(EngineError(problem))


def _rate(count: float, of: float) -> float:
    return count / of if of else 0.0
