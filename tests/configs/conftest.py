"""Configs are read as on a machine with eight GPUs, because some of them split its GPUs."""

import pytest


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight visible GPUs; what a command sets is undone after each test."""
    for name in ("CUDA_DEVICE_ORDER", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
