"""Signals within and outside the training loop."""

import gc
import signal
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
    def collecting(phase, info):
        gc.callbacks.remove(collecting)
        signal.raise_signal(signal.SIGTERM)

    with interruptible(), pytest.raises(Terminated):
        gc.callbacks.append(collecting)
        gc.collect()
        time.sleep(60)
