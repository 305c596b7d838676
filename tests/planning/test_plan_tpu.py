"""Plans for TPUs, compiled by libtpu; no TPU is needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from planned_runs import arguments, planned, write_tiny

from manus_jax import plan
from manus_jax.planning.chips import GIB
from manus_jax.planning.compiling import DoesNotFit, compile_program
from manus_jax.planning.topologies import TopologyError, find_topology, has_tpu_compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_tpu_compiler(), reason="libtpu is not installed"),
]


def test_a_small_plan_for_tpus_is_compiled_with_splash_and_adds_up(tmp_path, capsys):
    made = planned(
        tmp_path, *arguments("v5e:2x2", write_tiny(tmp_path), "algorithm.recipe = 'grpo'")
    )
    text = capsys.readouterr().out
    (update,) = made["updates"]
    assert (made["chips"], made["mesh"]["fsdp"], update["source"]) == (4, 4, "compiled")
    kernels = update["kernels"]
    assert all("splash" in k for k in kernels) and any("dkv" in k for k in kernels)

    # 3 layers: q, o 128 x 128, k, v 64 x 128, MLP 3 x 256 x 128, biases 256, norms 256; embedding
    # 512 x 128, last norm 128. Matrices are split over four chips, biases and norms are not.
    products = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128
    small = 3 * (256 + 256) + 128
    parameters = 4 * ((3 * products + 512 * 128) // 4 + small)
    memory = update["memory"]
    assert memory["parameters"] == parameters
    assert parameters * 2 <= memory["optimizer"] <= parameters * 2 + 64
    assert memory["peak"] > parameters * 4
    assert made["fits"] and memory["usable"] == 15.75 * GIB

    # Four micro-batches; each chip has 2 rows of 256 tokens; 154 of them are trained, in 3 chunks
    # of 64. Full remat runs all but the last product of a layer again.
    tokens = 4 * 2 * 256
    layers = 3 * (8 * products - 2 * 256 * 128) * tokens
    head = 8 * 512 * 128 * 4 * 3 * 64
    # Eleven products of scores, half of 256 x 256 for each row and head.
    attention = 11 * 2 * (4 * 2 * 2) * 256 * 256 / 2 * 64 * 3
    assert update["flops_per_chip"] == pytest.approx(layers + head + attention)

    gathered = sum(c["sent"] for c in update["collectives"] if c["kind"] == "all-gather")
    assert gathered >= 4 * 2 * 3 * products * 2 * 3 / 4
    assert "policy update, per chip (compiled)" in text
    assert "attention: splash" in text and "MFU" in text


def test_the_programs_of_the_embedded_engine_and_a_state_on_the_host_are_compiled(tmp_path):
    params = ("engine.name = 'jax'", "engine.tensor = 2", "engine.slots = 8")
    params += ("engine.cache_tokens = 1024", "engine.dtype = 'bfloat16'")
    params += ("compute.remat = 'offload'", "optimizer.state = 'host'")
    made = planned(tmp_path, *arguments("v5e:2x2", write_tiny(tmp_path), *params))
    memory = made["updates"][0]["memory"]
    assert memory["optimizer_on_host"] == 2 * memory["parameters"]  # AdamW's moments
    assert memory["optimizer"] < 64  # its counters
    assert made["host_memory"]["policy optimizer"] == 4 * memory["optimizer_on_host"]
    programs = {p["name"]: p for p in made["programs"]}
    held = made["updates"][0]["memory"]["resident"]["embedded engine"]
    # 512 tokens of each copy x 3 layers x (key and value) x one head of 64, in bfloat16. Both chips
    # of a copy have the only key-value head, and half of everything else but the norms.
    cache = 512 * 3 * 2 * 64 * 2
    weights = made["parameters"] + 3 * 2 * (64 * 128 + 64) + (3 * 2 + 1) * 128
    assert held == weights + cache
    assert programs["engine: new weights"]["own"] == held + weights
    for name in ("prefill", "decode"):
        assert held < programs[f"engine: {name}"]["own"] < held + 64 * 2**20


def test_an_update_sends_hardly_more_than_fully_sharded_training_must(tmp_path):
    hidden, mlp, vocab, layers, chips = 896, 4864, 32768, 2, 16  # the widths of Qwen2.5-0.5B
    made = planned(
        tmp_path,
        *arguments(
            "v5e:4x4",
            write_tiny(
                tmp_path,
                hidden_size=hidden,
                intermediate_size=mlp,
                vocab_size=vocab,
                num_hidden_layers=layers,
                num_attention_heads=14,
                num_key_value_heads=2,
            ),
            "algorithm.recipe = 'grpo'",
            "data.rows = 16",
        ),
    )
    # Each micro-batch gathers the layers for the forward and for the backward pass and scatters
    # their gradient, all in two bytes; it gathers the head in two bytes and scatters its gradient
    # in four. A chip sends all parts but one.
    products = 2 * hidden * hidden + 2 * 128 * hidden + 3 * mlp * hidden
    each = layers * products * (2 + 2 + 2) + vocab * hidden * (2 + 4)
    theory = made["updates"][0]["micro_batches"] * each * (chips - 1) / chips
    sent = {}
    for c in made["updates"][0]["collectives"]:
        sent[c["kind"]] = sent.get(c["kind"], 0.0) + c["sent"]
    assert theory * 0.95 <= sum(sent.values()) <= theory * 1.1
    # Small matrices are gathered by all-reduces; the gradient of a large one would be more.
    assert sent["all-reduce"] < 0.05 * theory


def test_the_memory_in_the_compilers_error_is_reported():
    device = find_topology("v5e:2x2").devices[0]
    placed = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    # 20 GiB in and as much out, where there are 15.75.
    x = jax.ShapeDtypeStruct((5 * 2**30,), jnp.float32, sharding=placed)
    with pytest.raises(DoesNotFit) as caught:
        compile_program(jax.jit(jnp.sin).lower(x))
    assert caught.value.peak == pytest.approx(40 * GIB, rel=0.01)


def test_a_slice_that_cannot_be_is_refused(tmp_path):
    with pytest.raises(TopologyError, match=r"v5e:3x5.*not divisible.* v5e:2x4 or v5e:4x4$"):
        plan.main(arguments("v5e:3x5", write_tiny(tmp_path)))
    with pytest.raises(TopologyError, match=r"v5p:1x1x1.*nearest slices are v5p:2x2x1$"):
        find_topology("v5p:1x1x1")


def test_slices_are_joined_by_the_data_centre_network():
    two = find_topology("v5e:2x2", slices=2)
    assert two.count == 8
    assert {d.slice_index for d in two.devices} == {0, 1}
