"""The stream of groups plays ahead within its bound, survives failures and loses no task."""

import contextlib
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

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
    return [two_turns(spec.uid, spec=spec)]


def any_played(outcomes):
    return any(isinstance(o, Trajectory) for o in outcomes)


def open_stream(
    play=played,
    accept=any_played,
    batch_size=2,
    max_staleness=1,
    max_dropped=10**6,
    threads=4,
):
    mixture = Mixture([("maze", TASKS, 1.0)], seed=3)
    return GroupStream(
        mixture,
        Admission(batch_size, max_staleness),
        specs=lambda number, place: group_specs(mixture.task(place), 2, str(number)),
        play=play,
        accept=accept,
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
            return [FailedEpisode(spec, "network", "unreachable")]
        return played(spec, number, cancellation)

    stream = opened(play=play, threads=1)
    taken = stream.take()
    assert [g.number for g in taken.groups] == [1, 3]
    assert {g.number for g in taken.dropped} == {0, 2}


def test_a_dead_environment_ends_in_an_incomplete_batch_instead_of_using_up_all_tasks(opened):
    calls = []

    def play(spec, number, cancellation):
        calls.append(number)
        return [FailedEpisode(spec, "network", "unreachable")]

    stream = opened(play=play, max_dropped=2, threads=1)
    taken = stream.take()
    assert taken.groups == []
    assert len(taken.dropped) <= 2 + 3  # the bound, and those that were running when it was reached
    dropped = {g.number for g in taken.dropped}
    # Groups for the next batch, with higher numbers, may have started since.
    assert {number for number in calls if number <= max(dropped)} == dropped


def test_an_error_in_an_episode_is_raised_by_take(opened):
    def play(spec, number, cancellation):
        raise RuntimeError("the reward function is broken")

    with pytest.raises(RuntimeError, match="the reward function is broken"):
        opened(play=play).take()


def test_an_error_after_an_episode_is_raised_by_take(opened):
    def accept(outcomes):
        raise RuntimeError("a group is damaged")

    stream = opened(accept=accept)
    with ThreadPoolExecutor(1) as learner:
        taking = learner.submit(stream.take)
        try:
            with pytest.raises(RuntimeError, match="a group is damaged"):
                taking.result(20)
        finally:
            stream.close()


def test_closing_cancels_episodes(opened):
    cancelled = threading.Event()

    def play(spec, number, cancellation):
        with contextlib.suppress(Cancelled):
            cancellation.sleep(20)
        cancelled.set()
        return [FailedEpisode(spec, "cancelled", "the run was cancelled")]

    stream = opened(play=play)
    with ThreadPoolExecutor(1) as learner:
        taking = learner.submit(stream.take)
        wait_for(lambda: stream.admission.running > 0)
        stream.close()
        assert cancelled.is_set()
        with pytest.raises(Cancelled):  # a learner that waits for a batch does not wait for ever
            taking.result(20)


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
    state = json.loads(json.dumps(stream.state(1)))  # it is stored as JSON
    finish.set()
    ready = {g.number: g for _ in range(2) for g in stream.take().groups}

    resumed = opened(max_staleness=2, threads=1)
    resumed.restore(state, 1)
    assert resumed.state(1) == state
    taken = [group for _ in range(6) for group in resumed_take(resumed)]
    numbers = first + [g.number for g in taken]
    assert len(set(numbers)) == len(numbers) and set(numbers) >= set(range(8))
    for group in taken:
        assert group.place == (0, TASKS.index(group.episodes()[0].spec.task))
        for new, old in zip(
            group.episodes(), ready.get(group.number, group).episodes(), strict=True
        ):
            assert new.spec.uid == old.spec.uid and new.turns == old.turns
            for a, b in zip(new.segments, old.segments, strict=True):
                for name in ("token_ids", "loss_mask", "log_probs", "versions", "turn_ids"):
                    np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def resumed_take(stream):
    groups = stream.take().groups
    stream.publish(stream.admission.taken)
    return groups


def test_a_batch_that_was_taken_early_is_in_the_checkpoint_of_the_update_before(opened):
    stream = opened(max_staleness=2)
    first, second = stream.take(), stream.take()
    state = stream.state(1)
    held = {saved["number"] for saved in state["ready"]} | {n for n, _ in state["running"]}
    assert held == set(range(6)) - {g.number for g in first.groups}
    assert held > {g.number for g in second.groups}
    stream.publish(2)
    wait_for(lambda: stream.admission.running == 0)
    later = {saved["number"] for saved in stream.state(2)["ready"]}
    assert not later & {g.number for g in (*first.groups, *second.groups)}


def test_the_limit_of_episodes_can_change_while_they_are_played(opened):
    lock, playing, most = threading.Lock(), [], []
    go = threading.Semaphore(0)

    def play(spec, number, cancellation):
        with lock:
            playing.append(spec.uid)
            most.append(len(playing))
        assert go.acquire(timeout=20)
        with lock:
            playing.remove(spec.uid)
        return played(spec, number, cancellation)

    stream = opened(play=play, max_staleness=1, threads=8)  # four groups of two may run
    stream.limit_episodes(1)
    with ThreadPoolExecutor(1) as learner:
        taking = learner.submit(stream.take)
        for ended in range(3):
            wait_for(lambda count=ended + 1: len(most) == count)
            go.release()
        wait_for(lambda: len(most) == 4)
        assert max(most) == 1
        stream.limit_episodes(3)
        wait_for(lambda: len(playing) == 3)
        go.release(8)
        assert len(taking.result(20).groups) == 2
    assert max(most) == 3


@pytest.mark.parametrize("dropping", [0.0, 0.2])
def test_random_kills_and_failures_train_every_task_once_per_epoch(opened, dropping):
    """Each life ends at a random moment; the next one continues from the last saved state.

    The learner takes batches one step early. A group is dropped or not whatever life it is played
    in, as a task is that cannot be played; no other group may be missing.
    """
    dice = random.Random(5)
    unplayable = {number for number in range(500) if dice.random() < dropping}

    def play(spec, number, cancellation):
        time.sleep(dice.random() * 0.003)
        if number in unplayable:
            return [FailedEpisode(spec, "network", "unreachable")]
        return played(spec, number, cancellation)

    saved, trained = None, []
    for life in range(16):
        stream = opened(play=play, max_staleness=dice.choice([1, 2]))
        step = count = 0
        if saved is not None:
            state, step, count = saved
            stream.restore(json.loads(json.dumps(state)), step)
        del trained[count:]  # a killed learner forgets the updates after its checkpoint
        early = stream.take()
        for _ in range(dice.randrange(1, 6) if life < 15 else 20):
            batch, early = early, stream.take()
            trained += batch.groups
            step += 1
            stream.publish(step)
            if dice.random() < 0.5 or life == 15:
                saved = stream.state(step), step, len(trained)
        stream.close()
    tasks = {group.number: group.episodes()[0].spec.task.item for group in trained}
    assert len(tasks) == len(trained)  # no group was trained on twice
    state = saved[0]
    waiting = {n for n, _ in state["running"]} | {group["number"] for group in state["ready"]}
    assert not waiting & tasks.keys()
    assert set(range(state["drawn"])) - waiting - tasks.keys() <= unplayable
    order = Mixture([("maze", TASKS, 1.0)], seed=3)
    drawn = [order.task(order.draw()).item for _ in range(state["drawn"])]
    assert all(drawn[number] == item for number, item in tasks.items())
    for epoch in range(len(drawn) // len(TASKS)):
        chunk = drawn[epoch * len(TASKS) : (epoch + 1) * len(TASKS)]
        assert sorted(chunk) == [task.item for task in TASKS]
