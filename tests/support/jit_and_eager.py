"""Runs a test with and without `jit`.

Without it XLA compiles every operation by itself, which takes several times as long, so
these tests count as slow.
"""

import jax
import pytest

both = pytest.mark.parametrize(
    "variant",
    [
        pytest.param(jax.jit, id="jit"),
        pytest.param(lambda fn: fn, id="eager", marks=pytest.mark.slow),
    ],
)
