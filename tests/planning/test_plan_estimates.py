"""The formulas of estimates, compared with hand calculations."""

import dataclasses

import jax
import optax
import pytest

from manus_jax.config.commands import read_train_config
from manus_jax.config.settings import OptimizerSettings
from manus_jax.learner.learner import LearnerSpec
from manus_jax.learner.mesh import make_mesh
from manus_jax.learner.optimizer import make_optimizer
from manus_jax.learner.packing import RowShape
from manus_jax.models.architecture import Architecture, ModelError
from manus_jax.models.transformer import Compute, Transformer, abstract_model
from manus_jax.planning import estimates
from manus_jax.planning.architectures import find_architecture
from manus_jax.planning.chips import TPUS
from manus_jax.planning.compiling import state_bytes
from manus_jax.planning.estimates import Workload
from manus_jax.planning.plans import workload_of
from manus_jax.planning.topologies import Topology

# q 4x8=32 wide, k and v 16, MLP 64: 32*16 + 2*16*16 + 16*32 + 3*64*16 = 4,608 a layer.
SMALL = Architecture("qwen2", 100, 16, 64, 3, 4, 2, 8, qkv_bias=True, tie_embeddings=False)
LAYER, HEAD = 4608, 1600


def workload(**changes):
    settings = {
        "arch": SMALL,
        "has_lm_head": True,
        "micro_batches": 2,
        "rows": 8,
        "length": 128,
        "trained": 0.5,
        "remat": "full",
        "itemsize": 2,
        "shards": {"data": 1, "fsdp": 4, "sequence": 1, "tensor": 1},
    }
    return Workload(**{**settings, **changes})


def test_the_public_models_have_their_published_numbers_of_parameters():
    published = {
        "qwen2.5-0.5b": 494_032_768,
        "qwen2.5-1.5b": 1_543_714_304,
        "qwen2.5-7b": 7_615_616_512,
        "qwen2.5-32b": 32_763_876_352,
        "qwen3-8b": 8_190_735_360,
        "llama-3.1-8b": 8_030_261_248,
        "qwen3-30b-a3b": 30_532_122_624,
        "gemma-3-270m": 268_098_176,
        "gemma-3-1b": 999_885_952,
    }
    for name, parameters in published.items():
        assert find_architecture(name).num_params == parameters, name
    assert find_architecture("Qwen/Qwen2.5-7B-Instruct") == find_architecture("qwen2.5-7b")


def test_prompts_per_turn_and_bounded_memory_make_several_sequences_of_an_episode():
    """Two tasks of four episodes of five turns, of which the first three share a sequence if two
    are remembered: 2 x 4 x 3 = 24 sequences of 100 tokens, three per row, two rows at a time.
    """
    settings = ["train.run_dir = 'unused'", "env.names = ['maze']", "train.batch_size = 4"]
    settings += ["algorithm.mini_batch_size = 2", "train.group_size = 4", "data.rows = 2"]
    settings += ["data.max_length = 300", "rollout.max_total_tokens = 100", "rollout.max_turns = 5"]
    mesh = make_mesh(devices=jax.devices()[:1])
    micro_batches = lambda *more: (
        workload_of(read_train_config([], [*settings, *more]), SMALL, mesh, True, 0.3).micro_batches
    )
    assert micro_batches() == 4  # a row per episode
    assert micro_batches("rollout.memory_turns = 2") == 4
    assert micro_batches("rollout.memory_turns = 1") == 6
    assert micro_batches("rollout.memory_turns = 9") == 2
    each = "rollout.prompt_source = 'per_turn'"  # 2 x 4 x 5 = 40 sequences
    assert micro_batches(each) == micro_batches(each, "rollout.memory_turns = 2") == 7


def test_the_error_for_an_unknown_model_lists_the_known_ones(tmp_path):
    with pytest.raises(
        ModelError, match=r"unknown architecture 'gpt-9'.*config\.json.*qwen2\.5-7b"
    ):
        find_architecture("gpt-9")
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        find_architecture(str(broken))


def test_a_models_flops_are_six_per_parameter_and_token_and_attention():
    w = workload()
    tokens = 2 * 8 * 128
    assert w.tokens == tokens
    # Forward, a token sees 64 others on average: 2 products x 2 FLOPs x 32 wide x 64 = 8,192.
    assert estimates.attention_flops(w) == 8192 * tokens * 3
    expected = 6 * tokens * (3 * LAYER + HEAD / 2) + 3 * 8192 * tokens * 3
    assert estimates.model_flops(w) == expected
    assert estimates.model_flops(workload(has_lm_head=False)) == expected - 3 * tokens * HEAD


def test_of_the_experts_those_of_a_token_count():
    arch = Architecture(
        "qwen3_moe", 100, 16, 64, 3, 4, 2, 8, num_experts=8, experts_per_token=2, qk_norm=True
    )
    w = workload(arch=arch)
    attention, expert, router = LAYER - 3 * 64 * 16, 3 * 64 * 16, 8 * 16
    assert w.layer_parameters == attention + 8 * expert + router
    assert w.active_parameters == attention + 2 * expert + router
    products = 6 * w.tokens * (3 * (attention + 2 * expert + router) + HEAD / 2)
    assert estimates.model_flops(w) == products + 3 * estimates.attention_flops(w)


def test_attention_in_a_window_counts_the_keys_that_tokens_see():
    arch = dataclasses.replace(SMALL, sliding_window=32, local_layers=(True, False, True))
    # Of 128 tokens, the first 32 see 16 keys on average and the other 96 see 32.
    keys = 2 * (32 * 32 / 2 + 96 * 32) / 128 + 128 / 2
    assert estimates.attention_flops(workload(arch=arch)) == 4 * 32 * keys * 2 * 8 * 128


def test_full_remat_runs_all_products_but_the_last_again():
    without_down = LAYER - 64 * 16
    tokens, chips = 2 * 8 * 128, 4
    products = 3 * (6 * LAYER + 2 * without_down) * tokens + 8 * HEAD * tokens / 2
    # Kernels: two products forward, again two, seven backward, where the model's count is 2 + 4.
    attention = 8192 * tokens * 3 * 11 / 2
    assert estimates.executed_flops(workload()) == (products + attention) / chips
    minimal = products - 3 * 2 * without_down * tokens + attention * 9 / 11
    assert estimates.executed_flops(workload(remat="minimal")) == minimal / chips


def test_saved_activations_follow_the_remat_policy():
    kept = {
        remat: estimates.saved_per_token(workload(remat=remat))
        for remat in ("full", "attention", "minimal", "none")
    }
    # Two bytes each: its input of 16; q, the attention's result, k and v; then gate and up, and
    # two products as wide as the input.
    assert kept["full"] == 2 * 16
    assert kept["attention"] == 2 * (16 + 2 * 32 + 2 * 16)
    assert kept["minimal"] == 2 * (16 + 2 * 32 + 2 * 16 + 2 * 64 + 2 * 16)
    assert kept["none"] > kept["minimal"]


def test_memory_of_activations_is_split_over_chips_and_grows_with_rows():
    memory = estimates.estimate_temporaries(workload(), "cuda")
    # 8 x 128 tokens over 4 chips, three layers, 32 bytes each.
    assert memory.activations == 3 * 32 * 8 * 128 / 4
    assert memory.copies == 2 * 2 * 3 * LAYER / 4
    doubled = estimates.estimate_temporaries(workload(rows=16), "cuda")
    assert doubled.activations == 2 * memory.activations
    assert doubled.copies == memory.copies


def test_the_optimizers_step_may_need_more_than_the_passes():
    # Few tokens of a large vocabulary: the clipped gradients and the changes of 4 bytes each.
    few = estimates.estimate_temporaries(workload(rows=4, length=1, trained=0.01), "cuda")
    assert few.optimizer == 2 * 4 * (3 * LAYER + 2 * HEAD) / 4
    larger, smaller = max(few.layer, few.head), min(few.layer, few.head)
    passes = few.copies + few.activations + larger + smaller / 2
    assert few.total == max(few.optimizer, passes)
    # On one device, AdamW's step has a copy of the clipped gradients, and Adafactor's has none.
    alone = workload(shards={"data": 1, "fsdp": 1, "sequence": 1, "tensor": 1})
    assert estimates.estimate_temporaries(alone, "cuda").optimizer == 4 * (3 * LAYER + 2 * HEAD)
    adafactor = dataclasses.replace(alone, adafactor=True)
    assert estimates.estimate_temporaries(adafactor, "cuda").optimizer == 0


def test_gradients_that_are_summed_in_place_need_no_copies():
    in_place, full = (
        estimates.estimate_temporaries(workload(remat=remat), "cuda")
        for remat in ("in_place", "full")
    )
    assert full.copies > 0 == in_place.copies and in_place.activations == full.activations


def test_only_the_tpu_compiler_keeps_float32_arrays_and_the_whole_gradient_of_the_embedding():
    gpu, tpu = (estimates.estimate_temporaries(workload(), p) for p in ("cuda", "tpu"))
    assert (gpu.embedding, tpu.embedding) == (0, 4 * HEAD)
    # 256 tokens; q, k, v and the attention's result, three products of the MLP, two inputs.
    assert tpu.layer - gpu.layer == 2 * 256 * 2 * (2 * 48 + 3 * 64 + 2 * 16)


def test_fsdp_gathers_twice_and_scatters_once_a_micro_batch():
    gather, scatter = estimates.estimate_exchanges(workload())
    assert (gather.kind, scatter.kind) == ("all-gather", "reduce-scatter")
    assert gather.axes == scatter.axes == ("fsdp", "sequence")
    assert gather.sent == 2 * 2 * (3 * LAYER + HEAD) * 2 * 3 / 4
    # Gradients in the compute type, the head's in float32.
    assert scatter.sent == 2 * (3 * LAYER * 2 + HEAD * 4) * 3 / 4
    assert gather.count == 2 * 2 * (3 + 1)


def test_tensor_parallelism_sums_activations_and_gathers_less():
    shards = {"data": 1, "fsdp": 2, "sequence": 1, "tensor": 2}
    gather, _, tensor = estimates.estimate_exchanges(workload(shards=shards))
    assert gather.sent == 2 * 2 * (3 * LAYER + HEAD) / 2 * 2 * 1 / 2
    # A pair shares 4 of 8 rows; two sums forward, two backward, two again, per layer.
    assert tensor.count == 2 * 3 * 6
    assert tensor.sent == tensor.count * 2 * (4 * 128 * 16 * 2) / 2


class Place:
    def __init__(self, x, y, slice_index=0):
        self.coords, self.slice_index = (x, y, 0), slice_index


def test_a_groups_bandwidth_follows_the_links_of_its_torus():
    v5e = TPUS["v5e"]
    row = [Place(x, 0) for x in range(8)]
    square = [Place(x, y) for x in range(8) for y in range(8)]
    slice_of = lambda *shape: Topology("v5e", v5e, shape, slices=1, devices=(), compiles=True)
    assert slice_of(8, 8).bandwidth(row) == 45e9
    assert slice_of(8, 8).bandwidth(square) == 90e9
    # A whole side of 16 chips is a ring: both directions.
    ring = [Place(x, 0) for x in range(16)]
    assert slice_of(16, 16).bandwidth(ring) == 90e9
    assert slice_of(8, 8).bandwidth([Place(0, 0), Place(0, 0, 1)]) == v5e.network


def test_the_state_of_the_optimizer_is_counted_where_it_is_kept():
    mesh = make_mesh(fsdp=2, devices=jax.devices()[:2])
    _, shapes = abstract_model(Transformer, SMALL, Compute())
    parameters = sum(x.size for x in jax.tree.leaves(shapes))

    def bytes_of(**settings):
        opt = OptimizerSettings(**settings)
        optimizer = make_optimizer(optax.constant_schedule(1e-3), opt)
        on_host = opt.state == "host"
        spec = LearnerSpec(
            shapes, None, None, optimizer, (), RowShape(2, 8), 1, 1, optimizer_on_host=on_host
        )
        return state_bytes(spec, mesh)

    # Norms are not sharded, so a device has slightly more than half; counters are 4 bytes each.
    default, rounded, host = bytes_of(), bytes_of(moment_dtype="bfloat16"), bytes_of(state="host")
    moments = 2 * default.parameters
    assert default.parameters > 2 * parameters
    assert (default.optimizer - moments, default.optimizer_on_host) == (8, 0)
    assert rounded.optimizer - 8 == 0.75 * moments
    assert (host.optimizer, host.optimizer_on_host) == (8, moments)
