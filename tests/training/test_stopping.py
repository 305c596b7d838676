"""Signals within and outside the training loop."""

import gc
import io
import signal
import sys
import threading
import time

import pytest

from manus_jax.errors import Terminated, exit_code
from manus_jax.signals import interruptible
from manus_jax.training.job import Job
from manus_jax.training.stopping import stop_requests


def test_sigterm_outside_the_loop_raises_as_ctrl_c_does_and_has_its_own_code():
    before = signal.getsignal(signal.SIGTERM)
    with interruptible(), pytest.raises(Terminated) as stopped:
        signal.raise_signal(signal.SIGTERM)
    assert exit_code(stopped.value) == 143 and exit_code(KeyboardInterrupt()) == 130
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_loop_finishes_its_step_and_a_second_signal_stops_at_once(capsys, number):
    with interruptible(), stop_requests("stopping", Job()) as stop:
        assert not stop.after_step()
        signal.raise_signal(number)
        assert stop.after_step() and stop.exit_code == 128 + number
        assert capsys.readouterr().out == "stopping\n"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


def test_a_signal_whose_exception_python_discards_is_sent_again():
    interrupted = []

    def collecting(phase, info):
        if threading.current_thread() is threading.main_thread() and not interrupted:
            interrupted.append(phase)
            signal.raise_signal(signal.SIGTERM)

    gc.callbacks.append(collecting)
    try:
        with interruptible(), pytest.raises(Terminated):
            while not interrupted:  # another thread may be collecting, which makes this call void
                gc.collect()
            time.sleep(60)
    finally:
        gc.callbacks.remove(collecting)


def test_a_signal_whose_exception_a_closing_file_discards_is_sent_again():
    class Response(io.RawIOBase):  # as those of http.client
        def close(self):
            if not self.closed:
                super().close()
                signal.raise_signal(signal.SIGTERM)

    with interruptible(), pytest.raises(Terminated):
        Response()
        time.sleep(60)


def test_a_signal_that_ends_its_block_is_not_sent_again():
    before = threading.active_count()
    with pytest.raises(Terminated), interruptible():
        signal.raise_signal(signal.SIGTERM)
    with interruptible(), pytest.raises(Terminated):
        signal.raise_signal(signal.SIGTERM)  # handled here, as by the live view of a run
    assert threading.active_count() == before


def test_a_signal_that_arrives_while_one_is_about_to_be_sent_again_is_not_lost(monkeypatch):
    interrupted = []

    def collecting(phase, info):
        if threading.current_thread() is threading.main_thread() and not interrupted:
            interrupted.append(phase)
            signal.raise_signal(signal.SIGTERM)

    class SlowTimer(threading.Timer):
        """Fires before `start` returns, as on a busy machine."""

        def start(self):
            monkeypatch.undo()
            super().start()
            self.join()

    monkeypatch.setattr(threading, "Timer", SlowTimer)
    gc.callbacks.append(collecting)
    try:
        with interruptible(), pytest.raises(Terminated):
            while not interrupted:  # another thread may be collecting, which makes this call void
                gc.collect()
            time.sleep(10)
    finally:
        gc.callbacks.remove(collecting)


def test_a_signal_that_arrives_while_a_discarded_exception_is_reported_is_not_lost(monkeypatch):
    class Broken:
        def __del__(self):
            raise RuntimeError("discarded")

    reported = []

    def report(unraisable):
        signal.raise_signal(signal.SIGTERM)
        reported.append(str(unraisable.exc_value))

    monkeypatch.setattr(sys, "unraisablehook", report)
    with interruptible(), pytest.raises(Terminated):
        Broken()
        time.sleep(10)
    assert reported == ["discarded"]
