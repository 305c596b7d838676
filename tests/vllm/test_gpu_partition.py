"""How the GPUs of a machine are split between processes, and splits that are refused."""

import os
import subprocess
import sys

import pytest

from manus_jax.config.server_settings import VllmSettings
from manus_jax.engines.protocol import EngineError
from manus_jax.rollout.build_rollout import ENGINES
from manus_jax.vllm import gpu_partition
from manus_jax.vllm.gpu_partition import group_gpus, split_gpus, visible_gpus

EIGHT = tuple("01234567")


def test_a_number_takes_the_last_gpus_and_names_take_those():
    learner, servers = split_gpus(EIGHT, 4)
    assert learner == ("0", "1", "2", "3")
    assert group_gpus(servers, 2) == [("4", "5"), ("6", "7")]
    learner, servers = split_gpus(EIGHT, ("0", "6"))
    assert group_gpus(servers, 1) == [("0",), ("6",)]
    assert learner == ("1", "2", "3", "4", "5", "7")


@pytest.mark.parametrize(
    "visible, wanted, message",
    [
        (EIGHT, 9, "gives vLLM 9 GPUs, and this process sees 8"),
        (EIGHT, 8, "8 of 8 GPUs, which leaves 0 for the learner"),
        (("0", "1"), ("3",), "gives vLLM the GPU 3; this process sees 0, 1"),
        ((), 2, "gives vLLM 2 GPUs, and this process sees 0: nvidia-smi finds none"),
    ],
)
def test_impossible_splits_are_refused_with_the_arithmetic(visible, wanted, message):
    with pytest.raises(EngineError, match=message):
        split_gpus(visible, wanted)


def claim_gpus(**options):
    return gpu_partition.claim_gpus(VllmSettings(**options))


@pytest.fixture
def gpus(monkeypatch):
    """Sets what this process sees; whatever is changed is put back."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return lambda text: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)


def test_the_learner_keeps_the_rest_and_the_servers_are_named(gpus):
    gpus("2,3,GPU-a,GPU-b")
    settings = claim_gpus(gpus=2, learner_memory_fraction=0.9)
    assert settings.gpus == ("GPU-a", "GPU-b")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.9"
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_all_gpus_are_shared_only_by_fractions_that_fit(gpus):
    gpus("0")
    with pytest.raises(EngineError, match=r"0\.6 \+ learner_memory_fraction 0\.5 = 1\.1"):
        claim_gpus(gpus=1, gpu_memory_utilization=0.6, learner_memory_fraction=0.5)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    shared = {"gpus": 1, "gpu_memory_utilization": 0.5, "learner_memory_fraction": 0.4}
    assert claim_gpus(**shared).gpus == ("0",)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_without_gpus_in_the_options_nothing_is_touched(gpus):
    assert claim_gpus(servers=1) == VllmSettings(servers=1)
    assert ENGINES["jax"].claim(None) is None
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_gpus_are_those_that_nvidia_smi_lists(gpus, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() == ()
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 0\necho 1\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert visible_gpus() == ("0", "1")
    gpus("-1")
    assert visible_gpus() == ()


@pytest.mark.slow
def test_the_command_leaves_the_learner_its_gpus_before_jax_has_looked(tmp_path):
    code = (
        "import os, sys, jax, jax._src.xla_bridge as bridge\n"
        "from manus_jax import train\n"
        "def reached(config, *_):\n"
        "    assert not bridge.backends_are_initialized()\n"
        "    print(os.environ['CUDA_VISIBLE_DEVICES'], config.engine_settings.gpus)\n"
        "    sys.exit(0)\n"
        "train.open_trainer = reached\n"
        "train.main(sys.argv[1:])\n"
    )
    (tmp_path / "a.gin").write_text(
        "train.run_dir = 'a'\nenv.names = ['maze']\nengine.name = 'vllm'\nvllm.gpus = 2\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "0,1,2"}
    done = subprocess.run(
        [sys.executable, "-c", code, f"--gin_file={tmp_path / 'a.gin'}"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "0 ('1', '2')\n", done.stderr
