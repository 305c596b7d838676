"""benchmarks/scaling.py on a small model: the update divides over devices."""

import importlib.util
from pathlib import Path

import pytest

from manus_jax.models.architecture import Architecture

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scaling.py"


@pytest.fixture(scope="module")
def rows():
    spec = importlib.util.spec_from_file_location("scaling", SCRIPT)
    scaling = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scaling)
    arch = Architecture("qwen3", 512, 64, 128, 3, 4, 2, 16, qk_norm=True)
    return scaling.compare(arch, scaling.Layout(2, 8, 128), [1, 2, 8])["scaling"]


def test_flops_per_device_fall_as_one_over_n(rows):
    assert [row["flops_ratio"] for row in rows] == pytest.approx([1, 1, 1], rel=0.05)


def test_layers_exchange_the_expected_bytes(rows):
    assert rows[0]["collective_bytes"] == 0
    for row in rows[1:]:
        assert row["layer_collective_bytes"] > 0
        assert row["layer_collective_ratio"] == pytest.approx(1, rel=0.01)


def test_the_head_and_the_embedding_add_no_more_than_expected(rows):
    # Less where XLA gathers the head once for all micro-batches.
    for row in rows[1:]:
        assert 0.8 < row["collective_ratio"] < 1.05


def test_state_and_peak_memory_per_device_fall_as_one_over_n(rows):
    for row in rows[1:]:
        # Norms are whole on every device, and so are the layer and the head that are in use.
        assert row["state_ratio"] == pytest.approx(1, rel=0.05)
        assert row["peak_memory_ratio"] < 1.6
    assert rows[2]["peak_memory"] < rows[1]["peak_memory"] < rows[0]["peak_memory"]
