"""The servers of a pool: which of them serve, and with which weights.

The one idea: a server serves while it holds the current weights, and there is one way into service
for a server that is new, was restarted, failed or missed an update: it is brought to the current
version. One thread looks after all of them.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from manus_jax.engines.protocol import EngineError
from manus_jax.models.architecture import Architecture, ModelError, from_hf_config
from manus_jax.vllm import routing as routing
from manus_jax.vllm.client import (
    PrefixCache,
    ServerFailure,
    ServerInfo,
    ServerMisfit,
    Timeouts,
    VllmServer,
    label_of,
)
from manus_jax.vllm.routing import RoutingPolicy, ServerState
from manus_jax.weights.manifest import Identity

_log = logging.getLogger(__name__)
_NOT_COMPARED = ("max_positions", "initializer_range")  # they change no number that is computed


@dataclasses.dataclass(frozen=True)
class PoolSettings:
    """How much is asked of servers.

    A request is tried `attempts` times. `queue_size` requests may wait; one more is an EngineError.
    When no server has served for `patience` seconds, what waits fails. Servers are looked at every
    `check_every` seconds. `api_key` is what they ask for.
    """

    attempts: int = 4
    queue_size: int = 4096
    patience: float = 600.0
    check_every: float = 5.0
    routing: RoutingPolicy = dataclasses.field(default_factory=RoutingPolicy)
    timeouts: Timeouts = dataclasses.field(default_factory=Timeouts)
    api_key: str | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass
class ServerCounters:
    """What a server has done since it joined."""

    requests: int = 0
    tokens: int = 0
    failures: int = 0
    updates: int = 0
    paused_seconds: float = 0.0
    busy_seconds: float = 0.0  # with a request in flight


@dataclasses.dataclass(eq=False)
class Member:
    """A server of the fleet. `loading` is held while its weights are looked at or changed;
    `misfit`: it cannot serve before it is started otherwise."""

    server: VllmServer
    state: ServerState
    held: Identity | None = None
    misfit: bool = False
    loading: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    counters: ServerCounters = dataclasses.field(default_factory=ServerCounters)
    cache: PrefixCache = dataclasses.field(default_factory=PrefixCache)
    busy_since: float = 0.0

    def become(self, state: ServerState) -> None:
        """Its new state; the time with something to do is counted. Under the fleet's lock."""
        now = time.monotonic()
        if self.state.in_flight:
            self.counters.busy_seconds += now - self.busy_since
        self.state, self.busy_since = state, now


class Fleet:
    """Servers by URL.

    Args:
      urls: of servers that run, or will.
      max_length: the context that each must have.
      root: where weights are published; None when servers keep what they have.
      target: the current weights there.
      model: what they must serve; None: anything.
      change: the lock under which all states are; whoever changes them tells the others.
      on_down: called under the lock with a server that was put aside, and why.
    """

    def __init__(
        self,
        urls: Iterable[str],
        max_length: int,
        root: Path | None,
        target: Identity | None,
        model: Architecture | None,
        settings: PoolSettings,
        change: threading.Condition,
        on_down: Callable[[Member, str], None],
    ) -> None:
        self._max_length = max_length
        self._root = root
        self._target = target
        self._model = model
        self._settings = settings
        self._change = change
        self._on_down = on_down
        self._closing = False
        self.members: dict[str, Member] = {}
        for url in urls:
            self.add(url)
        if not self.members:
            raise EngineError("a pool needs the URL of at least one vLLM server")
        self._watcher = threading.Thread(target=self._watch, name="vllm-fleet", daemon=True)
        self._watcher.start()

    def add(self, url: str) -> None:
        """It serves as soon as it holds the current weights."""
        url = url.rstrip("/")
        with self._change:
            if url not in self.members:
                server = VllmServer(url, self._settings.timeouts, self._settings.api_key)
                self.members[url] = Member(server, ServerState(url))

    def remove(self, url: str) -> None:
        url = url.rstrip("/")
        with self._change:
            if url in self.members:
                self.put_aside(self.members[url], "it was removed")
                del self.members[url]

    @property
    def serves(self) -> bool:
        """Some server is in service. Under the lock."""
        return any(member.state.ready for member in self.members.values())

    def update(self, target: Identity) -> None:
        """Brings all that serve to new weights, at the same time; who fails is put aside."""
        with self._change:
            self._target = target
            ready = [member for member in self.members.values() if member.state.ready]
        with ThreadPoolExecutor(max(1, len(ready)), "vllm-update") as threads:
            list(threads.map(self._bring_up, ready))

    def await_service(self) -> None:
        """Until a server is in service; EngineError when patience is at its end, or waiting is
        for nothing."""
        with self._change:
            self._change.wait_for(lambda: self.serves or self._misfits(), self._settings.patience)
            if not self.serves:
                raise EngineError(self.why_nobody_serves())

    def _misfits(self) -> bool:
        """There are servers, and all of them answer otherwise than they must. Under the lock."""
        return bool(self.members) and all(member.misfit for member in self.members.values())

    def why_nobody_serves(self) -> str:
        why = "; ".join(m.state.problem for m in self.members.values()) or "none is left"
        if self._misfits():
            return f"no vLLM server can be used: {why}"
        return f"no vLLM server is in service after {self._settings.patience:g} s: {why}"

    def put_aside(self, member: Member, problem: str) -> None:
        """Out of service. Under the lock. After the end nobody is to hear of it any more."""
        if self._closing:
            return
        if member.state.problem != problem:
            _log.warning("%s is out of service: %s", member.state.url, problem)
        member.counters.failures += 1
        now = time.monotonic()
        served = self.serves
        member.become(routing.went_down(member.state, problem, now, self._settings.routing))
        if served and not self.serves:
            patience = self._settings.patience
            _log.warning("no vLLM server is in service: waiting up to %g s for one", patience)
        self._on_down(member, problem)
        self._change.notify_all()

    def problem_of(self, member: Member) -> str | None:
        """What is wrong with a server that should serve."""
        with member.loading:
            return self._problem(member)

    def _problem(self, member: Member) -> str | None:
        try:
            member.server.check_health()
            label = member.server.weight_label()
        except ServerFailure as error:
            return str(error)
        if member.held is not None and label != label_of(member.held):
            return (
                f"{member.state.url} was started again: it holds weights {label!r} and was "
                f"given {label_of(member.held)!r}"
            )
        return None

    def close(self) -> None:
        with self._change:
            self._closing = True
            self._change.notify_all()
        self._watcher.join()
        for member in self.members.values():
            member.server.close()

    def _bring_up(self, member: Member) -> None:
        """Into service with the current weights, or put aside."""
        with member.loading:
            try:
                capacity, label = self._examine(member)
                while not self._in_service(member, self._load(member, label), capacity):
                    pass
            except ServerFailure as error:
                with self._change:
                    member.misfit = isinstance(error, ServerMisfit)
                    self.put_aside(member, str(error))

    def _examine(self, member: Member) -> tuple[int, str]:
        """What it works on at once, and the label of its weights; ServerFailure if it does not
        fit. One that is in service, with the weights that it was given, is what it was."""
        label = member.server.weight_label() if member.state.ready else None
        if label is not None and member.held is not None and label == label_of(member.held):
            return member.state.capacity, label
        info = member.server.info()
        self._check_fit(member.server, info)
        return info.max_requests, member.server.weight_label()

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

    def _in_service(self, member: Member, loaded: Identity | None, capacity: int) -> bool:
        """False when there are newer weights by now."""
        with self._change:
            if loaded != self._target:
                return False
            member.held, member.misfit = loaded, False
            if member.state.failures_in_a_row:
                _log.warning("%s is in service again", member.state.url)
            member.become(routing.came_up(member.state, capacity))
            self._change.notify_all()
            return True

    def _check_fit(self, server: VllmServer, info: ServerInfo) -> None:
        if info.max_length < self._max_length:
            raise ServerMisfit(
                f"{server.url} has a context of {info.max_length} tokens and {self._max_length} "
                f"are needed: start it with --max-model-len {self._max_length}"
            )
        if self._root is not None and not info.takes_weights:
            raise ServerMisfit(
                f"{server.url} was started without this project's plug-in and takes no weights: "
                "start it with `python -m manus_jax.serve`"
            )
        if self._model is not None and info.takes_weights:
            different = difference(self._model, server.served_config())
            if different is not None:
                raise ServerMisfit(
                    f"{server.url} serves another model than the one that is trained: {different}; "
                    "start it from that model's directory, or from the versions in weights_dir"
                )

    def _watch(self) -> None:
        """Tries again what is out of service, and looks whether what is in service is well."""
        busy: dict[Member, threading.Thread] = {}
        looked_at = time.monotonic()
        while not self._closing:
            now = time.monotonic()
            look = now - looked_at >= self._settings.check_every
            looked_at = now if look else looked_at
            busy = {member: thread for member, thread in busy.items() if thread.is_alive()}
            with self._change:
                idle = [m for m in self.members.values() if m not in busy]
            for member in idle:
                if routing.due(member.state, now):
                    busy[member] = _beside(self._bring_up, member)
                elif look and member.state.ready:
                    busy[member] = _beside(self._look_at, member)
            with self._change:
                if not self._closing:
                    self._change.wait(0.05)

    def _look_at(self, member: Member) -> None:
        """Without the lock on its weights: an update must not wait for this, and tells itself what
        is wrong."""
        held = member.held
        problem = self._problem(member)
        with contextlib.suppress(ServerFailure):  # numbers to look at; it serves without them
            member.cache = member.server.prefix_cache()
        with self._change:
            updated = member.loading.locked() or member.held is not held
            if problem is not None and member.state.ready and not updated:
                self.put_aside(member, problem)


def difference(model: Architecture, served: Mapping[str, Any]) -> str | None:
    """What a served model, given its `config.json`, has different; None: they compute the same."""
    try:
        other = from_hf_config(dict(served), "its config.json")
    except ModelError as error:
        return str(error)
    names = [field.name for field in dataclasses.fields(model) if field.name not in _NOT_COMPARED]
    values = [(name, getattr(other, name), getattr(model, name)) for name in names]
    unlike = [f"{name} is {there} and not {here}" for name, there, here in values if there != here]
    return ", ".join(unlike) or None


def _beside(work: Callable[[Member], None], member: Member) -> threading.Thread:
    """In a thread that nobody waits for: a server that hangs must not hold up the end."""
    thread = threading.Thread(target=work, args=(member,), name="vllm-watch", daemon=True)
    thread.start()
    return thread
