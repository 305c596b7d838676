"""Groups of episodes that are played while the learner works.

Each episode is a job of its own, played by threads that live as long as the run. A group is ready
when all of its episodes have ended, and the learner takes the ready groups that started first.
`Admission` decides when the next group starts, and `limit_episodes` how many episodes are in
flight. Groups that have started but have not been trained on are part of a checkpoint: ready ones
with their episodes, running ones by their tasks, which are played again after a restart.
"""

import dataclasses
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from manus_jax.data.mixture import Mixture
from manus_jax.engines.cancellation import Cancellation
from manus_jax.rollout.admission import Admission
from manus_jax.rollout.runner import GRACE, start_threads
from manus_jax.rollout.trajectory import EpisodeSpec, Outcome
from manus_jax.rollout.trajectory_files import episode_record, parse_episode

Place = tuple[int, int]
"""The source and the row of a task in the mixture."""


@dataclasses.dataclass
class Group:
    """A group; `number` counts groups in the order in which their tasks were drawn."""

    number: int
    place: Place
    outcomes: list[Sequence[Outcome] | None]  # of each spec

    @property
    def complete(self) -> bool:
        return None not in self.outcomes

    def episodes(self) -> list[Outcome]:
        return [outcome for played in self.outcomes if played is not None for outcome in played]


@dataclasses.dataclass(frozen=True)
class Taken:
    """What `GroupStream.take` returns: groups for an update, and groups that were dropped."""

    groups: list[Group]
    dropped: list[Group]


class GroupStream:
    """Plays groups of the mixture's tasks ahead of the learner; all methods are thread-safe.

    Args:
      mixture: the tasks; the stream draws from it.
      admission: the state of a new run.
      specs: (number, task's place) → the episodes of a group.
      play: (spec, number, cancellation) → the scored outcomes of a spec.
      accept: whether a complete group can be trained on.
      threads: episodes in flight, at most.
      max_dropped: dropped groups after which `take` returns an incomplete batch.

    An exception in one of the functions ends the run: the next `take` raises it.
    """

    def __init__(
        self,
        mixture: Mixture,
        admission: Admission,
        specs: Callable[[int, Place], Sequence[EpisodeSpec]],
        play: Callable[[EpisodeSpec, int, Cancellation], Sequence[Outcome]],
        accept: Callable[[Sequence[Outcome]], bool],
        threads: int,
        max_dropped: int,
    ) -> None:
        self._mixture, self._specs, self._play, self._accept = mixture, specs, play, accept
        self._threads, self._max_dropped = threads, max_dropped
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="episode")
        self._cancellation = Cancellation()
        self._jobs: set[Future[None]] = set()
        # Guards everything below.
        self._changed = threading.Condition()
        self._admission = admission
        self._drawn = 0  # groups
        self._interrupted: list[tuple[int, Place]] = []  # running when the checkpoint was saved
        self._running: dict[int, Group] = {}
        self._waiting: deque[tuple[int, int, EpisodeSpec]] = deque()  # episodes of running groups
        self._in_flight, self._limit = 0, threads  # episodes
        self._ready: dict[int, Group] = {}
        self._batches: dict[int, list[Group]] = {}  # taken, by the update that they are for
        self._dropped: list[Group] = []
        self._error: BaseException | None = None
        self._started = False

    @property
    def admission(self) -> Admission:
        with self._changed:
            return self._admission

    @property
    def in_flight(self) -> int:
        """Episodes that are being played."""
        with self._changed:
            return self._in_flight

    def take(self) -> Taken:
        """Waits for a batch of groups; fewer if too many groups had to be dropped.

        A batch may be taken before the update of the previous one. Raises Cancelled when the stream
        is closed meanwhile.
        """
        with self._changed:
            self._started = True
            self._fill()
            size = self._admission.batch_size
            while self._error is None and len(self._ready) < size:
                if self._exhausted and not self._running:
                    break
                self._cancellation.check()
                self._changed.wait()
            if self._error is not None:
                raise self._error
            numbers = sorted(self._ready)[:size]
            groups = [self._ready.pop(number) for number in numbers]
            dropped, self._dropped = self._dropped, []
            self._admission = self._admission.take()
            self._batches[self._admission.taken] = groups
            self._fill()
        return Taken(groups, dropped)

    def publish(self, version: int) -> None:
        """The engine has the weights of update `version`: more groups may start."""
        with self._changed:
            self._admission = self._admission.publish(version)
            self._forget(version)
            self._fill()

    def limit_episodes(self, count: int) -> None:
        """Plays at most `count` episodes at a time; those in flight continue."""
        with self._changed:
            self._limit = count
            self._submit()

    def state(self, step: int) -> dict[str, Any]:
        """Everything that is needed to continue after update `step`, as JSON."""
        with self._changed:
            self._forget(step)
            unfinished = [[g.number, list(g.place)] for g in self._running.values()]
            waiting = [[number, list(place)] for number, place in self._interrupted]
            ready = [*(g for batch in self._batches.values() for g in batch), *self._ready.values()]
            state = {
                "mixture": self._mixture.state(),
                "drawn": self._drawn,
                "running": sorted(unfinished + waiting),
            }
        state["ready"] = [
            {
                "number": group.number,
                "place": list(group.place),
                "episodes": [json.dumps(episode_record(o)) for o in group.episodes()],
            }
            for group in ready
        ]
        return state

    def restore(self, state: dict[str, Any], version: int) -> None:
        """Continues a saved stream after update `version`; call it before the first `take`."""
        with self._changed:
            self._mixture.restore(state["mixture"])
            self._drawn = state["drawn"]
            self._interrupted = [(n, (place[0], place[1])) for n, place in state["running"]]
            for saved in state["ready"]:
                outcomes = [parse_episode(line).outcome for line in saved["episodes"]]
                number, (source, row) = saved["number"], saved["place"]
                self._ready[number] = Group(number, (source, row), [outcomes])
            self._admission = dataclasses.replace(
                self._admission,
                version=version,
                taken=version,
                ready=len(self._ready),
                running=0,
            )

    def close(self) -> None:
        """Cancels all episodes and waits a few seconds for them to release their environments."""
        self._cancellation.cancel()
        with self._changed:
            self._started = False
            self._changed.notify_all()
        self._executor.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + GRACE
        for job in list(self._jobs):
            if not job.cancelled():
                try:
                    job.result(timeout=max(0.0, deadline - time.monotonic()))
                except TimeoutError:
                    return

    def _forget(self, step: int) -> None:
        """Drops the batches up to update `step`, which have been trained on."""
        self._batches = {n: groups for n, groups in self._batches.items() if n > step}

    @property
    def _exhausted(self) -> bool:
        return len(self._dropped) >= self._max_dropped

    def _fill(self) -> None:
        """Starts as many groups as admission allows; interrupted ones come first."""
        while (
            self._started
            and self._error is None
            and not self._exhausted
            and self._admission.room > 0
        ):
            if self._interrupted:
                number, place = self._interrupted.pop(0)
            else:
                number, place = self._drawn, self._mixture.draw()
                self._drawn += 1
            self._admission = self._admission.start()
            specs = self._specs(number, place)
            self._running[number] = Group(number, place, [None] * len(specs))
            self._waiting += [(number, member, spec) for member, spec in enumerate(specs)]
        self._submit()

    def _submit(self) -> None:
        """Starts waiting episodes, in order, up to the limit."""
        startable = lambda: self._started and self._waiting and self._in_flight < self._limit
        if not startable():
            return  # to prepare for new threads takes a while

        def submit() -> None:
            while startable():
                self._in_flight += 1
                job = self._executor.submit(self._work, *self._waiting.popleft())
                self._jobs.add(job)
                job.add_done_callback(self._jobs.discard)

        start_threads(self._threads, submit)

    def _work(self, number: int, member: int, spec: EpisodeSpec) -> None:
        try:
            self._end(number, member, self._play(spec, number, self._cancellation))
        except BaseException as error:  # the learner's next `take` raises it
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _end(self, number: int, member: int, outcomes: Sequence[Outcome]) -> None:
        """An episode has ended; with the last one of a group, the group is ready or dropped."""
        with self._changed:
            self._in_flight -= 1
            self._submit()
            group = self._running.get(number)
            if group is None or not self._started:
                return
            group.outcomes[member] = outcomes
            if not group.complete:
                return
            del self._running[number]
            accepted = self._accept(group.episodes())
            self._admission = self._admission.finish(accepted)
            if accepted:
                self._ready[number] = group
            else:
                self._dropped.append(group)
            self._fill()
            self._changed.notify_all()
