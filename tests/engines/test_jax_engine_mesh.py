"""The embedded engine with a paged cache and on several devices, against a single device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from manus_jax.engines.cached_decoder import CachedDecoder
from manus_jax.engines.jax_engine import JaxEngine
from manus_jax.engines.layout import make_layout, split_devices
from manus_jax.engines.protocol import EngineError, Request, Sampling
from manus_jax.engines.weight_copy import copy_weights
from manus_jax.learner.mesh import make_mesh, param_shardings
from manus_jax.models.architecture import Architecture
from manus_jax.models.transformer import Compute, Transformer, init_params

VOCAB, LENGTH, SESSIONS = 96, 300, 8
ARCH = Architecture("qwen2", VOCAB, 32, 64, 2, 4, 2, 8, qkv_bias=True, initializer_range=0.3)
PARAMS = init_params(Transformer, ARCH, Compute(), 0)


def test_an_engine_with_devices_of_its_own_leaves_the_others_to_the_learner():
    devices = jax.devices()
    assert split_devices(0) == (None, [])
    assert split_devices(2) == (devices[:-2], devices[-2:])
    assert split_devices(2, devices[:3]) == (devices[:1], devices[1:3])
    with pytest.raises(EngineError, match=r"engine\.devices = 8 leaves the learner none of the 8"):
        split_devices(8)


def test_weights_reach_an_engine_on_other_devices_than_the_learners():
    learner, own = split_devices(1)
    mesh = make_mesh(fsdp=1, devices=learner[:1])
    placed = jax.device_put(PARAMS, param_shardings(PARAMS, mesh))
    layout = make_layout(ARCH, own, slots=8, max_length=LENGTH)
    copied = copy_weights(layout, placed)
    assert {d for x in jax.tree.leaves(copied) for d in x.devices()} == set(own)
    here = copy_weights(make_layout(ARCH, learner[:1], slots=8, max_length=LENGTH), placed)
    for a, b in zip(jax.tree.leaves(copied), jax.tree.leaves(here), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def ids_of(seed, length):
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


def episodes(engine, turns=3):
    """Plays all sessions side by side; the tokens and log-probs of each turn of each session."""
    streams = [ids_of(n, 20 + 11 * n) for n in range(SESSIONS)]
    made = []
    for turn in range(turns):
        how = Sampling(temperature=0.8, max_tokens=24)
        futures = [
            engine.submit(Request(stream, how, 100 * turn + n, str(n)))
            for n, stream in enumerate(streams)
        ]
        turns_made = [f.result(timeout=300) for f in futures]
        made += turns_made
        streams = [
            stream + g.token_ids + ids_of(1000 * turn + n, 5)
            for n, (stream, g) in enumerate(zip(streams, turns_made, strict=True))
        ]
    return made


def played(**options):
    engine = JaxEngine(ARCH, PARAMS, slots=SESSIONS, max_length=LENGTH, **options)
    try:
        return episodes(engine), engine.metrics()
    finally:
        engine.close()


@pytest.fixture(scope="module")
def on_one_device():
    return played()[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "tensor", "pages"),
    [(1, 1, 20), (8, 2, None), (8, 4, 10)],
)
def test_pages_and_meshes_do_not_change_generations(devices, tensor, pages, on_one_device):
    copies = devices // tensor
    tokens = None if pages is None else 128 * pages * copies
    made, metrics = played(devices=jax.devices()[:devices], tensor=tensor, cache_tokens=tokens)
    for found, expected in zip(made, on_one_device, strict=True):
        assert found.token_ids == expected.token_ids
        np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=2e-5)
    # Fewer pages than the three per session that a cache without a limit has.
    assert metrics["evictions"] == 0
    if pages is not None:
        held = sum(-(-length // 128) for length in lengths(made))
        assert metrics["free_pages"] == pages * copies - held


def lengths(made):
    """The cached tokens of all sessions after the last turn, whose last token is not cached."""
    return [
        20 + 11 * n + 3 * 5 - 5 + sum(len(g.token_ids) for g in made[n::SESSIONS]) - 1
        for n in range(SESSIONS)
    ]


@pytest.mark.slow
def test_requests_wait_for_pages_and_idle_sessions_give_them_up():
    # 4 pages of 128 tokens: one stream of 300 tokens runs at a time, beside a short one.
    engine = JaxEngine(ARCH, PARAMS, slots=SESSIONS, max_length=LENGTH, cache_tokens=512)
    unbounded = JaxEngine(ARCH, PARAMS, slots=SESSIONS, max_length=LENGTH)
    how = Sampling(temperature=0.8, max_tokens=40)
    prompts = [ids_of(n, 250) for n in range(4)] + [ids_of(9, 20)]
    made = []
    for e in (engine, unbounded):
        futures = [e.submit(Request(p, how, n, str(n))) for n, p in enumerate(prompts)]
        made.append([f.result(timeout=300) for f in futures])
    assert [g.token_ids for g in made[0]] == [g.token_ids for g in made[1]]
    metrics = engine.metrics()
    assert metrics["evictions"] >= 3 and metrics["active_slots"] == 0
    # An evicted session is computed again, and its continuation is the same.
    stream = prompts[0] + made[0][0].token_ids + ids_of(3, 3)
    again = [e.submit(Request(stream, how, 7, "0")).result(300) for e in (engine, unbounded)]
    assert again[0].token_ids == again[1].token_ids
    for e in (engine, unbounded):
        e.close()


@pytest.mark.parametrize(("tensor", "dtype"), [(1, "float32"), (4, "bfloat16")])
def test_weights_of_a_learner_are_cast_and_spread_over_the_engines_devices(tensor, dtype):
    mesh = make_mesh(fsdp=4, tensor=2)
    on_host = jax.tree.map(np.array, PARAMS)
    params = jax.device_put(on_host, param_shardings(PARAMS, mesh))
    layout = make_layout(
        ARCH, list(mesh.devices.flat), slots=8, max_length=64, tensor=tensor, dtype=dtype
    )
    weights, from_host = copy_weights(layout, params), copy_weights(layout, on_host)
    stacked = on_host["backbone"]["layers"]
    for layer in range(2):
        found = weights["layers"][layer]
        for name, x in found.items():
            expected = stacked[name][layer]
            if tensor == 4 and name[0] in "kv":  # two heads of 8 dimensions on four devices
                heads = expected.reshape(2, 8, *expected.shape[1:])
                expected = heads[[0, 0, 1, 1]].reshape(-1, *expected.shape[1:])
            np.testing.assert_array_equal(x, expected.astype(jnp.dtype(dtype)))
            np.testing.assert_array_equal(x, from_host["layers"][layer][name])
        rows = found["gate_proj"].sharding.shard_shape((64, 32))[0]
        columns = found["o_proj"].sharding.shard_shape((32, 32))[1]
        assert (rows, columns) == (64 // tensor, 32 // tensor)
    np.testing.assert_array_equal(weights["embed"], on_host["backbone"]["embed"].astype(dtype))
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(weights))
    assert held == layout.weight_bytes
    for leaf in jax.tree.leaves(params):
        leaf.delete()  # as an update of the learner does
    assert np.isfinite(np.asarray(weights["norm"], np.float32)).all()


def test_the_programs_can_be_lowered_without_weights():
    layout = make_layout(
        ARCH, jax.devices(), slots=8, max_length=LENGTH, tensor=2, cache_tokens=2048
    )
    programs = CachedDecoder(layout, max_steps=4).programs()
    assert set(programs) == {"prefill", "decode"}
    for program, arguments in programs.values():
        cache = arguments[2]
        assert cache[0][0][0].sharding == NamedSharding(layout.mesh, P("data", "tensor"))
        assert "all_reduce" in program.lower(*arguments).as_text()


def test_bytes_per_device():
    layout = make_layout(
        ARCH, jax.devices(), slots=8, max_length=LENGTH, tensor=4, cache_tokens=1024
    )
    # 2 layers x keys and values x 512 tokens per copy x one head of 8 dimensions x 4 bytes.
    assert layout.cache_bytes == 2 * 2 * 512 * 8 * 4
    # Each copy of the model has key and value projections of four heads instead of two.
    repeated = 2 * 2 * 2 * 8 * (32 + 1)
    norms = 5 * 32
    split = (ARCH.num_params + repeated - norms) // 4
    assert layout.weight_bytes == 4 * (split + norms)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 30}, r"slots = 30 is not divisible by 4 copies .*; set it to 28 or 32"),
        ({"slots": 3}, r"slots = 3 is not divisible by 4 copies .* tensor=2.; set it to 4"),
        ({"tensor": 3}, "tensor = 3: the 8 devices are not divisible by it; set .* to 2"),
        ({"tensor": 8}, r"tensor = 8: the model's heads \(4\) is not .*; set .* to 4"),
        (
            {"cache_tokens": 1000},
            "cache_tokens = 1000 cannot hold one stream of 300 tokens in each of 4 copies .*"
            "; set engine.cache_tokens to at least 1536",
        ),
        (
            {"cache_tokens": 2000},
            "cache_tokens = 2000 is not divisible by .* = 512; set it to 1536 or 2048",
        ),
    ],
)
def test_sizes_that_do_not_divide_over_the_devices_are_refused(options, message):
    options = {"slots": 32, "max_length": LENGTH, "tensor": 2, **options}
    with pytest.raises(EngineError, match=message) as caught:
        make_layout(ARCH, jax.devices(), **options)
    assert "\n" not in str(caught.value)
