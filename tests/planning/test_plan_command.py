"""`python -m manus_jax.plan` without a compiler for GPUs: estimates, user errors, alternatives."""

import dataclasses
import os
import re
import subprocess
import sys

import pytest
from planned_runs import SETTINGS, arguments, planned, write_tiny

from manus_jax import plan
from manus_jax.config.binding import ConfigError
from manus_jax.config.commands import read_train_config
from manus_jax.learner.mesh import MeshError
from manus_jax.models.architecture import ModelError
from manus_jax.planning import topologies
from manus_jax.planning.architectures import find_architecture
from manus_jax.planning.plans import Traffic, make_plan
from manus_jax.planning.tables import all_reduce_note
from manus_jax.planning.topologies import TopologyError

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_cuda_compiler(monkeypatch):
    monkeypatch.setattr(topologies, "has_cuda_compiler", lambda: False)


@pytest.fixture
def tiny(tmp_path):
    return write_tiny(tmp_path)


def test_a_plan_for_gpus_is_lowered_with_its_kernel_and_estimated(tmp_path, tiny, capsys):
    made = planned(
        tmp_path, *arguments("cuda:8x80GB", tiny, "algorithm.recipe = 'ppo'", "data.max_length=512")
    )
    text = capsys.readouterr().out
    assert [u["name"] for u in made["updates"]] == ["policy", "critic"]
    assert all(u["source"] == "estimated" for u in made["updates"])
    assert all(u["kernels"] == ["triton"] for u in made["updates"])
    policy, critic = made["updates"]
    beside = policy["memory"]["resident"]
    assert beside["critic parameters"] == critic["memory"]["parameters"]
    assert beside["critic optimizer"] == critic["memory"]["optimizer"]
    assert "estimated, not compiled" in text and "No compiler" in text
    assert "the compiler took 0.75 to 1.4 times" in " ".join(text.split()) and "may fit" in text
    # Residents of a forward pass: everything but the parameters that it reads.
    programs = {p["name"]: p for p in made["programs"]}
    assert list(programs) == [
        "policy update",
        "critic update",
        "old log-probs",
        "reference log-probs",
        "values",
    ]
    model, other = policy["memory"], critic["memory"]
    assert programs["values"]["resident"] == {
        "policy parameters": model["parameters"],
        "policy optimizer": model["optimizer"],
        "critic optimizer": other["optimizer"],
        "reference policy": model["parameters"],
    }
    assert f"during the {max(programs, key=lambda n: programs[n]['peak'])}" in text


def test_a_reference_on_the_host_is_on_the_chips_for_its_log_probs_only(tmp_path, tiny):
    params = ("algorithm.reference = 'host'", "engine.dtype = 'bfloat16'")
    made = planned(tmp_path, *arguments("cuda:2x4x80GB", tiny, *params))
    programs = {p["name"]: p for p in made["programs"]}
    size = made["updates"][0]["memory"]["parameters"]
    assert "reference policy" not in programs["old log-probs"]["resident"]
    old, reference = programs["old log-probs"]["peak"], programs["reference log-probs"]["peak"]
    assert reference == old + size
    # Process 0 keeps the shards of its four GPUs, and the whole model in the engine's type.
    assert made["host_memory"] == {
        "weights, gathered for the engine": 2 * made["parameters"],
        "reference policy": 4 * size,
    }
    # One matrix at a time is whole on each GPU meanwhile: the embedding, 512 x 128 in bfloat16.
    assert programs["gathering of weights"]["own"] == 2 * 512 * 128


def test_without_libtpu_a_tpu_plan_is_an_estimate_and_says_what_to_install(
    tmp_path, tiny, capsys, monkeypatch
):
    monkeypatch.setattr(topologies, "has_tpu_compiler", lambda: False)
    made = planned(tmp_path, *arguments("v5e:2x2", tiny))
    captured = capsys.readouterr()
    assert "pip install 'manus-jax[plan]'" in captured.err
    (update,) = made["updates"]
    assert update["source"] == "estimated"
    assert update["kernels"] and all("splash" in kernel for kernel in update["kernels"])


def test_sums_of_whole_matrices_are_reported_if_they_dominate_the_traffic(tiny):
    topology = topologies.find_topology("cuda:4x80GB")
    config = read_train_config([], [*SETTINGS])
    (update,) = make_plan(config, find_architecture(tiny), topology).updates
    gather, scatter = Traffic("all-gather", 4, 1, 2e9, 0.1), Traffic("reduce-scatter", 4, 1, 1e9, 0)
    summed = Traffic("all-reduce", 4, 1, 2e9, 0.1)
    said = lambda *traffic: all_reduce_note(
        dataclasses.replace(update, compiled=True, traffic=traffic)
    )
    assert said(gather, scatter) is None
    assert said(gather, dataclasses.replace(summed, chips=2)) is None
    assert "over 4 chips send 2.00 GB" in said(gather, summed)


def test_settings_that_do_not_fit_come_with_the_nearest_that_do(tmp_path, capsys):
    params = (
        "data.max_length = 8192",
        "data.rows = 32",
        "compute.remat = 'none'",
        "algorithm.recipe = 'grpo'",
    )
    made = planned(tmp_path, *arguments("cuda:8x80GB", "qwen2.5-7b", *params))
    text = capsys.readouterr().out
    assert not made["fits"]
    nearest = made["nearest"]
    assert nearest["fits"]
    for line in nearest["gin_params"]:
        assert f"--gin_param={line!r}" in text
    # What is proposed, given back, fits as said.
    again = planned(
        tmp_path, *arguments("cuda:8x80GB", "qwen2.5-7b", *params, *nearest["gin_params"])
    )
    assert again["fits"]
    assert again["updates"] == nearest["updates"]
    tokens = [u["rows"] * u["micro_batches"] for u in (made["updates"][0], again["updates"][0])]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    "topology, model, more, proposed, note",
    [
        (
            "cuda:8x80GB",
            "qwen2.5-32b",
            (),
            [
                "optimizer.name = 'adafactor'",
                "algorithm.reference = 'host'",
                "algorithm.reference_dtype = 'bfloat16'",
            ],
            "(optimizer.name = 'adafactor' changes the result of training)",
        ),
        ("cuda:1x80GB", "qwen2.5-14b", (), ["lora.rank = 32"], "(lora.rank = 32 changes the"),
        (
            "cuda:1x80GB",
            "qwen3-8b",
            (
                "optimizer.name = 'adafactor'",
                "algorithm.reference = 'host'",
                "algorithm.reference_dtype = 'bfloat16'",
            ),
            ["compute.remat = 'in_place'"],
            "that fit:",
        ),
        (
            "cuda:1x80GB",
            "qwen2.5-1.5b",
            ("vllm.learner_memory_fraction = 0.42",),
            ["algorithm.reference = 'host'"],
            "that fit:",
        ),
    ],
)
def test_state_is_moved_or_reduced_where_no_mesh_fits(
    tmp_path, capsys, topology, model, more, proposed, note
):
    params = ("data.rows = 8", "algorithm.recipe = 'grpo'", *more)
    made = planned(tmp_path, *arguments(topology, model, *params))
    assert not made["fits"] and made["nearest"]["fits"]
    assert made["nearest"]["gin_params"] == proposed
    assert note in capsys.readouterr().out


def test_a_model_that_cannot_fit_gets_the_number_of_chips_that_suffice(tmp_path, capsys):
    args = lambda *params: ("qwen2.5-32b", "lora.rank = 32", *params)
    made = planned(tmp_path, *arguments("cuda:1xL4", *args("data.rows = 1")))
    assert not made["fits"] and "nearest" not in made
    found = re.search(r"by estimates, (\d+) of them hold the run", capsys.readouterr().out)
    assert found is not None
    more = args(f"data.rows = {found[1]}", f"mesh.fsdp = {found[1]}")
    assert planned(tmp_path, *arguments(f"cuda:1x{found[1]}xL4", *more))["fits"]


def test_the_embedded_engine_takes_its_share_of_every_chip(tmp_path, tiny):
    params = ("engine.name = 'jax'", "engine.slots = 16", "engine.dtype = 'bfloat16'")
    made = planned(tmp_path, *arguments("cuda:4x80GB", tiny, *params))
    (name,) = [n for n in made["updates"][0]["memory"]["resident"] if "engine" in n]
    # Weights of two bytes; 4 slots of each chip x 256 tokens x 3 layers x (key and value) x 64.
    cache = 2 * 4 * 256 * 3 * 2 * 64
    assert made["updates"][0]["memory"]["resident"][name] == 2 * made["parameters"] + cache


def test_a_plan_uses_the_share_of_gpu_memory_that_the_run_gives_to_jax(tmp_path, tiny):
    usable = lambda *params: planned(tmp_path, *arguments("cuda:4x80GB", tiny, *params))["updates"][
        0
    ]["memory"]["usable"]
    assert usable() == 0.9 * 84942979072
    assert usable("vllm.learner_memory_fraction = 0.5") == 0.5 * 84942979072


@pytest.mark.parametrize(
    ("topology", "architecture", "param", "error", "message"),
    [
        ("v9:2x2", "", "", TopologyError, r"unknown topology 'v9:2x2': there are v5e, v5p, v6e"),
        ("v5e:8", "", "", TopologyError, "chips per axis"),
        (
            "cuda:8x16GB",
            "",
            "",
            TopologyError,
            "H200, A100, B200, L4, 4090",
        ),
        ("cuda:8x80GB", "gpt-9", "", ModelError, "unknown architecture 'gpt-9'"),
        ("cuda:8x80GB", "", "mesh.fsdp = 3", MeshError, "needs 3 devices and there are 8"),
        ("cuda:8x80GB", "", "data.rows = 12", MeshError, "set data.rows = 8 or 16"),
        ("cuda:8x80GB", "", "mesh.tensor = 8", MeshError, "2 heads are not divisible by tensor=8"),
        ("cuda:8x80GB", "", "mesh.fspd = 8", ConfigError, "did you mean 'fsdp'"),
    ],
)
def test_mistakes_are_one_line(tiny, topology, architecture, param, error, message):
    params = (param,) if param else ()
    with pytest.raises(error, match=message) as caught:
        plan.main(arguments(topology, architecture or tiny, *params))
    assert "\n" not in str(caught.value)


def test_the_command_runs_by_itself_with_more_devices_than_there_are(tiny, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "manus_jax.plan", *arguments("cuda:2x8x80GB", tiny, "data.rows=16")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache)},
    )
    assert done.returncode == 0, done.stderr
    assert "16 x H100" in done.stdout
    assert not any(cache.iterdir())  # programs for absent devices could not be loaded again
