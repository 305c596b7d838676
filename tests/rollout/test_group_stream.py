"""The stream of groups: plays ahead within its bound, survives failures, and loses no task."""

import contextlib
import json
import random
import threading
import time

import numpy as np
import pytest
from made_trajectories import two_turns

from manus_jax.data.mixture import Mixture
from manus_jax.data.tasks import Task
from manus_jax.engines.cancellation import Cancelled
from manus_jax.rollout.admission import Admission
from manus_jax.rollout.group_stream import GroupStream
from manus_jax.rollout.trajectory import FailedEpisode, Trajectory, group_specs

TASKS = [Task("maze", n, f"maze_{n}") for n in range(12)]


def played(spec, number, cancellation):
    return two_turns(spec.uid, spec=spec)


def open_stream(play=played, batch_size=2, max_staleness=1, max_dropped=10**6, threads=4):
    mixture = Mixture([("maze", TASKS, 1.0)], seed=3)
    return GroupStream(
        mixture,
        Admission(batch_size, max_staleness),
        specs=lambda number, place: group_specs(mixture.task(place), 2, str(number)),
        play=play,
        accept=lambda outcomes: any(isinstance(o, Trajectory) for o in outcomes),
        threads=threads,
        max_dropped=max_dropped,
    )


def tasks_of(taken):
    return [group.episodes()[0].spec.task.item for group in taken.groups]


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def opened():
    streams = []
    yield lambda **how: streams.append(open_stream(**how)) or streams[-1]
    for stream in streams:
        stream.close()


def test_groups_are_played_ahead_of_the_learner_but_not_further(opened):
    stream = opened(max_staleness=2, threads=1)
    wanted = Mixture([("maze", TASKS, 1.0)], seed=3)
    for version in range(1, 5):
        assert tasks_of(stream.take()) == [task.item for task in wanted.next_batch(2)]
        # While the learner works, two more batches are played; the third waits for new weights.
        wait_for(lambda: stream.admission.ready == 4)
        assert stream.admission.running == 0
        stream.publish(version)


def test_a_slow_episode_holds_up_its_own_group_only(opened):
    finish = threading.Event()

    def play(spec, number, cancellation):
        if number == 0 and spec.uid.endswith("#1"):
            assert finish.wait(20)
        return played(spec, number, cancellation)

    stream = opened(play=play, threads=2)
    assert [g.number for g in stream.take().groups] == [1, 2]
    stream.publish(1)
    finish.set()
    wait_for(lambda: stream.admission.running == 0)
    assert [g.number for g in stream.take().groups] == [0, 3]  # the oldest first


def test_dropped_groups_are_replaced_and_reported(opened):
    def play(spec, number, cancellation):
        if number in (0, 2):
            return FailedEpisode(spec, "network", "unreachable")
        return played(spec, number, cancellation)

    stream = opened(play=play, threads=1)
    taken = stream.take()
    assert [g.number for g in taken.groups] == [1, 3]
    assert {g.number for g in taken.dropped} == {0, 2}


def test_a_dead_environment_ends_in_an_incomplete_batch_instead_of_using_up_all_tasks(opened):
    calls = []

    def play(spec, number, cancellation):
        calls.append(number)
        return FailedEpisode(spec, "network", "unreachable")

    stream = opened(play=play, max_dropped=2, threads=1)
    taken = stream.take()
    assert taken.groups == []
    assert len(taken.dropped) <= 2 + 3  # the bound, and those that were running when it was reached
    assert set(calls) == {g.number for g in taken.dropped}


def test_an_error_in_an_episode_is_raised_by_take(opened):
    def play(spec, number, cancellation):
        raise RuntimeError("the reward function is broken")

    with pytest.raises(RuntimeError, match="the reward function is broken"):
        opened(play=play).take()


def test_closing_cancels_episodes(opened):
    cancelled = threading.Event()

    def play(spec, number, cancellation):
        with contextlib.suppress(Cancelled):
            cancellation.sleep(20)
        cancelled.set()
        return FailedEpisode(spec, "cancelled", "the run was cancelled")

    stream = opened(play=play)
    threading.Thread(target=stream.take, daemon=True).start()
    wait_for(lambda: stream.admission.running > 0)
    stream.close()
    assert cancelled.is_set()


def test_a_saved_stream_continues_with_every_task_and_the_same_episodes(opened):
    finish = threading.Event()

    def play(spec, number, cancellation):
        if number in (1, 4):
            assert finish.wait(20)
        return played(spec, number, cancellation)

    stream = opened(play=play, max_staleness=2, threads=16)
    first = [g.number for g in stream.take().groups]
    stream.publish(1)
    wait_for(lambda: stream.admission.ready == 4)
    state = json.loads(json.dumps(stream.state()))  # it is stored as JSON
    ready = {g.number: g for g in stream._ready.values()}
    finish.set()

    resumed = opened(max_staleness=2, threads=1)
    resumed.restore(state, 1)
    assert resumed.state() == state
    taken = [group for _ in range(6) for group in resumed_take(resumed)]
    numbers = first + [g.number for g in taken]
    assert len(set(numbers)) == len(numbers) and set(numbers) >= set(range(8))
    for group in taken:
        assert group.place == (0, TASKS.index(group.episodes()[0].spec.task))
        for new, old in zip(group.outcomes, ready.get(group.number, group).outcomes, strict=True):
            assert new.spec.uid == old.spec.uid and new.turns == old.turns
            for a, b in zip(new.segments, old.segments, strict=True):
                for name in ("token_ids", "loss_mask", "log_probs", "versions", "turn_ids"):
                    np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def resumed_take(stream):
    groups = stream.take().groups
    stream.publish(stream.admission.taken)
    return groups


def test_random_kills_and_failures_train_every_task_once_per_epoch(opened):
    """Each life ends at a random moment; the next one continues from the last saved state."""
    dice = random.Random(5)

    def play(spec, number, cancellation):
        time.sleep(dice.random() * 0.003)
        return played(spec, number, cancellation)

    saved, trained = None, []
    for _ in range(15):
        stream = opened(play=play, max_staleness=dice.choice([1, 2]))
        step = 0
        if saved is not None:
            state, step, count = saved
            stream.restore(state, step)
            del trained[count:]  # a killed learner forgets the updates after its checkpoint
        for _ in range(dice.randrange(1, 6)):
            trained += stream.take().groups
            step += 1
            stream.publish(step)
            if dice.random() < 0.5:
                saved = stream.state(), step, len(trained)
        stream.close()
    state, step, count = saved
    stream = opened(threads=1)
    stream.restore(state, step)
    del trained[count:]
    while not {group.number for group in trained} >= set(range(24)):
        trained += resumed_take(stream)
    tasks = {group.number: group.episodes()[0].spec.task.item for group in trained}
    assert len(tasks) == len(trained)  # no group was trained on twice
    for epoch in (range(12), range(12, 24)):
        assert sorted(tasks[number] for number in epoch) == [task.item for task in TASKS]
