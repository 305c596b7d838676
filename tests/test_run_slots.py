"""Slots: one thread at a time, in order, and never held by a thread that blocks."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from manus_jax.engines.cancellation import Cancellation, Cancelled
from manus_jax.engines.protocol import EngineError, Generation
from manus_jax.run_slots import SLOTS, RunSlots, Wait

ANSWER = Generation((1,), (-1.0,), (0,), "stop")


def test_members_run_one_at_a_time_in_the_order_in_which_their_waits_end() -> None:
    slots = RunSlots()
    ready = threading.Barrier(9)
    waits: dict[int, Wait] = {}
    inside: list[int] = []
    order: list[int] = []

    def work(number: int) -> None:
        with slots.member():
            waits[number] = wait = Wait(slots)
            slots.leave()
            ready.wait()
            assert wait.block(30)
            inside.append(number)
            assert inside == [number]
            order.append(number)
            inside.remove(number)

    with ThreadPoolExecutor(8) as threads:
        jobs = [threads.submit(work, number) for number in range(8)]
        ready.wait()
        for number in (5, 2, 7, 0, 1, 6, 4, 3):
            waits[number].end()
            waits[number].end()  # an engine may report a cancelled request twice
        for job in jobs:
            job.result(30)
    assert order == [5, 2, 7, 0, 1, 6, 4, 3]


def test_a_thread_that_blocks_in_its_slot_does_not_stop_the_others() -> None:
    slots, release = RunSlots(), threading.Event()

    def blocks() -> None:
        with slots.member():
            release.wait(30)

    def passes() -> None:
        with slots.member():
            pass

    with ThreadPoolExecutor(8) as threads:
        blocked = [threads.submit(blocks) for _ in range(4)]
        for job in [threads.submit(passes) for _ in range(4)]:
            job.result(10)
        assert not any(job.done() for job in blocked)
        release.set()
        for job in blocked:
            job.result(10)


def test_a_wait_without_event_ends_in_time_and_a_thread_outside_needs_no_slot() -> None:
    slots, held = RunSlots(), threading.Event()
    assert not Wait(slots).block(0.01)
    with ThreadPoolExecutor(1) as threads:

        def hold() -> None:
            with slots.member():
                held.wait(30)

        holder = threads.submit(hold)
        wait = Wait(slots)
        wait.end()
        assert wait.block(10)
        held.set()
        holder.result(10)


def test_members_wait_for_generations_until_a_timeout_or_the_cancellation() -> None:
    cancellation = Cancellation()
    futures: list[Future[Generation]] = [Future() for _ in range(300)]

    def wait_for(future: "Future[Generation]", timeout: float) -> Generation | type[Exception]:
        with SLOTS.member():
            try:
                return cancellation.result(future, timeout)
            except (EngineError, Cancelled) as error:
                return type(error)

    with ThreadPoolExecutor(len(futures)) as threads:
        late = threads.submit(wait_for, futures[0], 0.01)
        assert late.result(10) is EngineError
        assert futures[0].cancelled()
        jobs = [threads.submit(wait_for, future, 60.0) for future in futures[1:]]
        for future in futures[1:200]:
            future.set_result(ANSWER)
        assert all(job.result(30) == ANSWER for job in jobs[:199])
        cancellation.cancel()
        assert all(job.result(30) is Cancelled for job in jobs[199:])
    with pytest.raises(Cancelled):
        cancellation.result(Future(), 60.0)


def test_a_thread_gives_its_slot_back_while_it_sleeps() -> None:
    cancellation = Cancellation()
    began = time.monotonic()

    def sleep() -> None:
        with SLOTS.member():
            cancellation.sleep(0.3)

    with ThreadPoolExecutor(20) as threads:
        for job in [threads.submit(sleep) for _ in range(20)]:
            job.result(30)
    assert time.monotonic() - began < 3.0
