"""Admission control: bounded, without deadlock, and fair for any order of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manus_jax.rollout.admission import Admission


def filled(state: Admission) -> Admission:
    while state.room > 0:
        state = state.start()
    return state


def test_a_synchronous_run_starts_nothing_until_the_new_weights_are_in_the_engine():
    state = filled(Admission(batch_size=2, max_staleness=0))
    assert state.running == 2
    state = state.finish(True).finish(True).take()
    assert state.room == 0
    assert state.publish(1).room == 2


def test_staleness_one_plays_one_batch_ahead():
    state = filled(Admission(batch_size=2, max_staleness=1))
    assert state.running == 4
    state = state.finish(True).finish(True)
    assert state.room == 0  # finished groups keep their places until they are trained on
    state = state.take()
    assert state.room == 0  # they keep them until the engine has the weights of their update
    assert state.publish(1).room == 2


def test_a_dropped_group_leaves_its_place():
    state = filled(Admission(batch_size=2, max_staleness=0))
    assert state.finish(False).room == 1


def test_an_incomplete_batch_counts_as_a_full_one():
    """Otherwise every failure would let the stream run further ahead."""
    state = filled(Admission(batch_size=4, max_staleness=1))
    short = state.finish(True).take().publish(1)
    assert (short.ready, short.running) == (0, 7)
    assert short.room == 1


@pytest.mark.parametrize(
    "event",
    [
        lambda s: filled(s).start(),
        lambda s: s.finish(True),
        lambda s: s.publish(1),
        lambda s: filled(s).finish(True).take().publish(1).publish(0),
    ],
)
def test_events_that_cannot_happen_are_errors(event):
    with pytest.raises(ValueError):
        event(Admission(batch_size=1, max_staleness=1))


class Simulation:
    """A run without threads: groups are numbers; the test chooses which event comes next.

    The learner takes batches early, and the engine gets weights late, or not those of every update.
    """

    def __init__(self, batch_size: int, max_staleness: int) -> None:
        self.state = Admission(batch_size, max_staleness)
        self.drawn = self.updates = 0
        self.interrupted: list[int] = []  # by a kill; they start first
        self.running: list[int] = []
        self.ready: list[int] = []
        self.taken: list[list[int]] = []  # batches that wait for their update
        self.trained: list[int] = []
        self.dropped: list[int] = []
        self.save()

    def fill(self) -> None:
        while self.state.room > 0:
            self.state = self.state.start()
            if self.interrupted:
                self.running.append(self.interrupted.pop(0))
            else:
                self.running.append(self.drawn)
                self.drawn += 1

    def finish(self, which: int, accepted: bool) -> None:
        if self.running:
            number = self.running.pop(which % len(self.running))
            self.state = self.state.finish(accepted)
            (self.ready if accepted else self.dropped).append(number)

    def take(self, exhausted: bool = False) -> None:
        """An incomplete batch, if so many groups were dropped that no other is started."""
        size = self.state.batch_size
        incomplete = exhausted and self.dropped and not self.running and self.state.room > 0
        if len(self.ready) >= size or incomplete:
            self.ready.sort()
            self.taken.append(self.ready[:size])
            self.ready = self.ready[size:]
            self.state = self.state.take()

    def train(self) -> None:
        if self.taken:
            self.trained += self.taken.pop(0)
            self.updates += 1

    def publish(self, which: int = 0) -> None:
        behind = self.updates - self.state.version
        if behind:
            self.state = self.state.publish(self.updates - which % behind)

    def save(self) -> None:
        waiting = [number for batch in self.taken for number in batch]
        self.saved = (
            self.updates,
            self.drawn,
            sorted(self.interrupted + self.running),
            waiting + self.ready,
            list(self.trained),
            list(self.dropped),
        )

    def kill_and_resume(self) -> None:
        self.updates, self.drawn, *lists = self.saved
        self.interrupted, self.ready, self.trained, self.dropped = map(list, lists)
        self.running, self.taken = [], []
        size, bound = self.state.batch_size, self.state.max_staleness
        self.state = Admission(size, bound, self.updates, self.updates, len(self.ready))


EVENTS = st.one_of(
    st.tuples(st.just("finish"), st.integers(0, 50), st.booleans()),
    st.tuples(st.just("take"), st.booleans()),
    st.tuples(st.just("publish"), st.integers(0, 3)),
    st.tuples(st.sampled_from(["fill", "train", "save", "kill_and_resume"])),
)


@given(st.integers(1, 4), st.integers(0, 3), st.lists(EVENTS, max_size=60))
def test_any_order_of_events_keeps_the_bound_and_every_task(batch_size, max_staleness, events):
    run = Simulation(batch_size, max_staleness)
    for name, *arguments in events:
        getattr(run, name)(*arguments)
        state = run.state
        assert (len(run.running), len(run.ready)) == (state.running, state.ready)
        accepted = state.taken * batch_size + state.ready
        assert accepted + state.running <= (max_staleness + state.version + 1) * batch_size
        # Every task that was drawn is in exactly one place.
        waiting = [number for batch in run.taken for number in batch]
        everywhere = run.interrupted + run.running + run.ready + waiting + run.trained + run.dropped
        assert sorted(everywhere) == list(range(run.drawn))
    # No deadlock: whatever has happened, training goes on once groups finish.
    while run.taken:
        run.train()
    run.publish()
    run.fill()
    assert run.running or len(run.ready) >= batch_size
    oldest = min(run.running + run.ready)
    while run.running:
        run.finish(0, accepted=True)
    before = len(run.trained)
    run.take()
    run.train()
    assert len(run.trained) == before + batch_size
    assert oldest in run.trained  # no starvation: the oldest ready group is taken first
