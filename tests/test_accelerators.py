"""What commands set up before JAX starts its accelerator plug-ins."""

import os

import jax
import pytest

from manus_jax.accelerators import prepare_accelerators


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    yield
    jax.config.update("jax_platforms", "cpu")


@pytest.mark.parametrize("file", ["nvidia0", "accel0", "vfio/0"])
def test_jax_looks_for_accelerators_where_there_are_any(tmp_path, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    prepare_accelerators(devices=tmp_path)
    assert "JAX_PLATFORMS" not in os.environ


def test_without_accelerators_jax_starts_no_plug_in_unless_the_user_names_it(tmp_path, monkeypatch):
    prepare_accelerators(devices=tmp_path)
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    assert jax.config.jax_platforms == "cpu"
    monkeypatch.setenv("JAX_PLATFORMS", "proxy")
    prepare_accelerators(devices=tmp_path)
    assert os.environ["JAX_PLATFORMS"] == "proxy"


def test_jax_allocates_nine_tenths_of_a_gpu_by_default(tmp_path, monkeypatch):
    prepare_accelerators(devices=tmp_path)
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.9"
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    prepare_accelerators(devices=tmp_path)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ
