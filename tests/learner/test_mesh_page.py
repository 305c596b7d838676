"""The examples of docs/meshes.md make meshes that Qwen2.5-7B divides over."""

import ast
import dataclasses

import pytest
from guide_examples import examples_for
from mesh_devices import gpus, tpus

from manus_jax.config.settings import EngineSettings, MeshSettings
from manus_jax.learner.mesh import check_batch, check_model, make_mesh
from manus_jax.models.architecture import Architecture
from manus_jax.models.attention import pick_implementation
from manus_jax.rollout.build_rollout import embedded_decoder

QWEN_7B = Architecture("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, qkv_bias=True)
EXAMPLES = examples_for(__file__, "docs/meshes.md")
*MESHES, ENGINE = EXAMPLES
# What each example is for, in the page's order, and the sizes that "data" and "fsdp" come to.
DEVICES = [
    (lambda: tpus("v5e:8x8"), (1, 64)),
    (lambda: tpus("v5e:8x8"), (1, 16)),
    (lambda: tpus("v5e:8x8", slices=2), (2, 64)),
    (lambda: gpus(1, 8, 8), (1, 8)),
    (lambda: gpus(1, 8, 8), (1, 2)),
    (lambda: gpus(4, 8, 8), (4, 8)),
]


def values_of(example):
    bindings = dict(line.split(" = ") for line in example.splitlines())
    return {name: ast.literal_eval(value) for name, value in bindings.items()}


def test_the_example_of_an_engine_holds_the_episodes_that_it_names():
    values = {name.removeprefix("engine."): v for name, v in values_of(ENGINE).items()}
    mesh = make_mesh(fsdp=-1, devices=tpus("v5p:2x2x1"))
    layout = embedded_decoder(
        EngineSettings(**values, dtype="bfloat16"), QWEN_7B, 9216, mesh
    ).layout
    assert layout.pages * layout.page_length == layout.slots * 4096
    assert layout.cache_bytes == 524288 * 56 * 2**10 // 4
    assert (layout.tensor, layout.slots, layout.lanes) == (4, 128, (128,))


@pytest.mark.parametrize("index", range(len(DEVICES)))
def test_an_example_fits_the_devices_that_it_names(index):
    assert len(MESHES) == len(DEVICES)
    devices, sizes = DEVICES[index]
    groups = {"mesh": {}, "data": {}}
    for name, value in values_of(MESHES[index]).items():
        group, _, key = name.partition(".")
        groups[group][key] = value
    mesh = make_mesh(**dataclasses.asdict(MeshSettings(**groups["mesh"])), devices=devices())
    assert (mesh.shape["data"], mesh.shape["fsdp"]) == sizes
    kernel = pick_implementation(mesh.devices.flat[0].platform)
    check_model(QWEN_7B, mesh, kernel)
    check_batch(groups["data"]["rows"], groups["data"]["max_length"], mesh, kernel)
