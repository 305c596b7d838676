"""Weights reach the engine in the background, in order, and not during frozen work."""

import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from manus_jax.training.engine_weights import EngineWeights


@pytest.fixture
def opened():
    made = []
    yield lambda update: made.append(EngineWeights(update)) or made[-1]
    for weights in made:
        weights.close()


def test_the_engine_gets_a_copy_that_later_updates_do_not_change(opened):
    got = []
    weights = opened(lambda params, version: got.append((params["w"], version)))
    w = jnp.arange(3.0)
    weights.publish({"w": w, "host": np.zeros(1)}, 1)
    weights.wait()
    w.delete()  # as a donated buffer
    assert got[0][1] == 1 and got[0][0].tolist() == [0, 1, 2]


def test_newer_weights_replace_those_that_wait_and_frozen_work_holds_them_back(opened):
    versions, seen = [], []
    begun, end = threading.Event(), threading.Event()
    weights = opened(lambda params, version: versions.append(version))
    weights.publish({}, 1)

    def work():
        begun.set()
        assert end.wait(20)
        seen.append(list(versions))
        return "played"

    result = weights.run_frozen(work)
    assert begun.wait(20)
    for version in (2, 3, 4):  # the learner does not wait
        weights.publish({}, version)
    assert not result.done()
    end.set()
    weights.wait()
    assert result.result(20) == "played"
    assert seen == [[1]] and versions == [1, 4]


def test_an_error_of_the_engine_is_raised_by_the_next_call(opened):
    def update(params, version):
        raise RuntimeError("the server is gone")

    weights = opened(update)
    weights.publish({}, 1)
    for call in (weights.wait, lambda: weights.publish({}, 2), lambda: weights.run_frozen(list)):
        with pytest.raises(RuntimeError, match="the server is gone"):
            call()


def test_an_error_of_frozen_work_is_raised_where_its_result_is_read(opened):
    weights = opened(lambda params, version: None)

    def work():
        raise ValueError("all episodes failed")

    failed = weights.run_frozen(work)
    with pytest.raises(ValueError, match="all episodes failed"):
        failed.result(20)
    weights.publish({}, 1)
    weights.wait()


def test_closing_drops_weights_that_wait(opened):
    versions, end = [], threading.Event()
    weights = opened(lambda params, version: versions.append(version))
    weights.run_frozen(lambda: end.wait(20))
    weights.publish({}, 1)
    threading.Timer(0.05, end.set).start()
    began = time.monotonic()
    weights.close()
    assert time.monotonic() - began < 15 and versions == []
