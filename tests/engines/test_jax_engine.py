"""The embedded engine against slow references: a loop that computes everything again for every
token, and the learner's own log-probs. Timing is never waited for: the engine calls `decode` after
each dispatch of a request with stop strings, and tests act from inside that call.
"""

import functools
import threading
from concurrent.futures import CancelledError

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from manus_jax.engines.cached_decoder import CachedDecoder
from manus_jax.engines.jax_engine import JaxEngine, stop_string_end
from manus_jax.engines.protocol import EngineError, Request, Sampling
from manus_jax.learner.objectives import log_probs_of
from manus_jax.models.architecture import Architecture
from manus_jax.models.transformer import Compute, Transformer, abstract_model, init_params

VOCAB, LENGTH = 96, 320
ARCH = Architecture(
    "qwen3", VOCAB, 32, 64, 2, 4, 2, 8, qk_norm=True, tie_embeddings=False, initializer_range=0.3
)
GRAPHDEF, _ = abstract_model(Transformer, ARCH, Compute())
NEVER = ("never said",)


@functools.cache
def params_of(seed):
    return init_params(Transformer, ARCH, Compute(), seed)


def ids_of(seed, length):
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


def spell(ids):
    return "".join(f"<{i}>" for i in ids)


class Hook:
    """A `decode` that runs `act` once, in the engine's thread, when `after` tokens were made."""

    def __init__(self, act, after=1):
        self.act, self.after, self.done = act, after, False

    def __call__(self, ids):
        if len(ids) >= self.after and not self.done:
            self.done = True
            self.act()
        return spell(ids)


@pytest.fixture
def engine_with():
    engines = []

    def make(**options):
        options = {"slots": 8, "max_length": LENGTH, "decode": spell, **options}
        engines.append(JaxEngine(ARCH, params_of(0), **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def generate(engine, prompt, seed=0, session="s", **how):
    return engine.submit(Request(prompt, Sampling(**how), seed, session)).result(timeout=300)


@jax.jit
def next_logits(params, ids, length):
    positions = jnp.arange(LENGTH)
    segments = jnp.where(positions < length, 1, 0)
    return nnx.merge(GRAPHDEF, params)(ids[None], segments[None], positions[None])[0, length - 1]


def greedy(params, prompt, count):
    ids = list(prompt)
    for _ in range(count):
        padded = np.zeros(LENGTH, np.int32)
        padded[: len(ids)] = ids
        ids.append(int(np.argmax(next_logits(params, padded, len(ids)))))
    return tuple(ids[len(prompt) :])


@functools.partial(jax.jit, static_argnames="temperature")
def learner_log_probs(params, ids, length, temperature):
    positions = jnp.arange(LENGTH)
    live = positions < length
    batch = {
        "input_ids": ids[None],
        "segment_ids": live[None].astype(jnp.int32),
        "positions": positions[None],
        "loss_mask": live[None],
    }
    return log_probs_of(GRAPHDEF, params, batch, temperature)[0][0]


def expected_log_probs(params, stream, spans, temperature=1.0):
    """The learner's log-probs of the tokens of `stream` in `spans`."""
    padded = np.zeros(LENGTH, np.int32)
    padded[: len(stream)] = stream
    all_of_them = np.asarray(
        learner_log_probs(params, padded, len(stream), temperature=temperature)
    )
    return np.concatenate([all_of_them[start:stop] for start, stop in spans])


def play(engine, session, observations, seed, **how):
    """A multi-turn stream, the spans that were sampled, and their log-probs and versions."""
    stream, spans, log_probs, versions = (), [], [], []
    for observation in observations:
        stream += observation
        made = generate(engine, stream, seed, session, **how)
        spans.append((len(stream), len(stream) + len(made.token_ids)))
        stream += made.token_ids
        log_probs += made.log_probs
        versions += made.versions
    return stream, spans, log_probs, versions


@pytest.mark.slow
def test_greedy_tokens_are_those_of_a_loop_that_recomputes_everything(engine_with):
    engine = engine_with()
    prompts = [ids_of(n, n) for n in (1, 2, 17, 64, 65, 127, 128, 200)]
    how = Sampling(temperature=0.0, max_tokens=24)
    futures = [engine.submit(Request(p, how, 0, str(i))) for i, p in enumerate(prompts)]
    for prompt, future in zip(prompts, futures, strict=True):
        made = future.result(timeout=300)
        assert made.token_ids == greedy(params_of(0), prompt, 24)
        assert made.finish_reason == "length" and made.versions == (0,) * 24
        spans = [(len(prompt), len(prompt) + 24)]
        expected = expected_log_probs(params_of(0), prompt + made.token_ids, spans)
        np.testing.assert_allclose(made.log_probs, expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.bug("B16")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_whole_episodes_are_the_learners(engine_with, temperature):
    engine = engine_with()
    observations = [ids_of(9, 70), ids_of(10, 1), ids_of(11, 40), ids_of(12, 9)]
    before = engine.metrics()
    stream, spans, log_probs, _ = play(
        engine, "a", observations, seed=3, temperature=temperature, max_tokens=21
    )
    after = engine.metrics()
    expected = expected_log_probs(params_of(0), stream, spans, temperature)
    np.testing.assert_allclose(log_probs, expected, atol=1e-4)
    # A turn computes what is new: the last sampled token, and the observation but for its last
    # token, which decoding takes in.
    assert after["prefill_tokens"] - before["prefill_tokens"] == 69 + 1 + 40 + 9
    assert after["reused_tokens"] - before["reused_tokens"] == 90 + 112 + 173


def test_a_diverging_prompt_keeps_the_common_prefix(engine_with):
    engine = engine_with()
    prompt = ids_of(1, 100)
    generate(engine, prompt, max_tokens=8)
    before = engine.metrics()
    forked = (*prompt[:60], (prompt[60] + 1) % VOCAB, *ids_of(2, 19))
    made = generate(engine, forked, temperature=0.0, max_tokens=8)
    after = engine.metrics()
    assert made.token_ids == greedy(params_of(0), forked, 8)
    assert after["reused_tokens"] - before["reused_tokens"] == 60
    assert after["prefill_tokens"] - before["prefill_tokens"] == 19


@pytest.mark.bug("B27")
def test_a_request_gives_the_same_bits_alone_and_among_others(engine_with):
    how = dict(temperature=0.9, max_tokens=30)
    observations = [ids_of(1, 33), ids_of(2, 12)]
    alone = play(engine_with(slots=8), "x", observations, seed=5, **how)
    engine = engine_with(slots=16, max_steps=8)
    others = [
        engine.submit(Request(ids_of(100 + n, 1 + 13 * n), Sampling(max_tokens=60), n, f"o{n}"))
        for n in range(20)
    ]
    among = play(engine, "x", observations, seed=5, **how)
    assert among == alone
    assert all(len(f.result(timeout=300).token_ids) == 60 for f in others)


@pytest.mark.slow
def test_many_slots_decode_in_few_lanes_with_the_same_bits(engine_with):
    engine = engine_with(slots=256, max_length=128)
    how = Sampling(max_tokens=12)
    alone = engine.submit(Request(ids_of(1, 20), how, 5, "x")).result(timeout=300)
    futures = [engine.submit(Request(ids_of(n, 20), how, n + 4, str(n))) for n in range(1, 100)]
    among = [f.result(timeout=300) for f in futures]
    assert among[0] == alone


def test_a_seed_gives_other_tokens_at_other_places_and_the_same_again(engine_with):
    engine = engine_with()
    how = dict(temperature=1.0, max_tokens=16)
    first = generate(engine, ids_of(1, 20), seed=7, session="a", **how)
    assert generate(engine, ids_of(1, 20), seed=7, session="b", **how) == first
    assert generate(engine, ids_of(1, 20), seed=8, session="b", **how) != first
    assert generate(engine, ids_of(1, 20), seed=7 + 2**40, session="b", **how) != first
    assert generate(engine, ids_of(1, 20), seed=-7, session="b", **how) != first


def test_new_weights_recompute_streams_in_flight(engine_with):
    engine = engine_with(decode=Hook(lambda: engine.update_weights(params_of(1), 5), 16))
    engine.update_weights(params_of(0), 4)
    prompt = ids_of(1, 50)
    made = generate(engine, prompt, seed=1, max_tokens=40, stop_strings=NEVER)
    old = made.versions.count(4)
    assert made.versions == (4,) * old + (5,) * (40 - old) and 16 <= old <= 24
    stream = prompt + made.token_ids
    for params, start, stop in ((params_of(0), 50, 50 + old), (params_of(1), 50 + old, 90)):
        expected = expected_log_probs(params, stream, [(start, stop)])
        np.testing.assert_allclose(made.log_probs[start - 50 : stop - 50], expected, atol=1e-4)


def test_new_weights_recompute_the_streams_of_idle_sessions(engine_with):
    engine = engine_with()
    stream = ids_of(1, 30)
    stream += generate(engine, stream, max_tokens=8).token_ids + ids_of(2, 5)
    engine.update_weights(params_of(1), 1)
    assert engine.version == 1
    before = engine.metrics()
    made = generate(engine, stream, temperature=0.0, max_tokens=8)
    after = engine.metrics()
    assert made.token_ids == greedy(params_of(1), stream, 8) and made.versions == (1,) * 8
    assert after["prefill_tokens"] - before["prefill_tokens"] == len(stream) - 1


def test_weights_are_copied_and_may_be_deleted(engine_with):
    engine = engine_with()
    params = jax.tree.map(jnp.copy, params_of(1))
    engine.update_weights(params, 1)
    for leaf in jax.tree.leaves(params):
        leaf.delete()
    prompt = ids_of(1, 10)
    made = generate(engine, prompt, temperature=0.0, max_tokens=8)
    assert made.token_ids == greedy(params_of(1), prompt, 8)


def test_a_stop_id_ends_the_generation_and_is_part_of_it(engine_with):
    engine = engine_with()
    prompt = ids_of(4, 20)
    full = generate(engine, prompt, seed=2, max_tokens=40)
    stop = full.token_ids[19]
    end = full.token_ids.index(stop) + 1
    made = generate(
        engine, prompt, seed=2, session="t", max_tokens=40, stop_ids=(VOCAB - 1 - stop, stop)
    )
    end = min(end, (*full.token_ids, VOCAB - 1 - stop).index(VOCAB - 1 - stop) + 1)
    assert made.token_ids == full.token_ids[:end] and made.finish_reason == "stop"
    assert made.log_probs == full.log_probs[:end]


def test_a_stop_string_over_two_tokens_ends_with_the_second_and_the_stream_continues(engine_with):
    engine = engine_with()
    prompt = ids_of(4, 20)
    full = generate(engine, prompt, seed=2, max_tokens=40)
    text = f"{full.token_ids[9]}><{full.token_ids[10]}>"
    end = next(n for n in range(41) if text in spell(full.token_ids[:n]))
    made = generate(
        engine, prompt, seed=2, session="t", max_tokens=40, stop_strings=("no such", text)
    )
    assert made.token_ids == full.token_ids[:end] and made.finish_reason == "stop"
    assert len(made.log_probs) == len(made.versions) == end
    stream = prompt + made.token_ids + ids_of(5, 6)
    more = generate(engine, stream, seed=2, session="t", max_tokens=10)
    spans = [(len(stream), len(stream) + 10)]
    expected = expected_log_probs(params_of(0), stream + more.token_ids, spans)
    np.testing.assert_allclose(more.log_probs, expected, atol=1e-4)


def test_stop_strings_are_found_across_pieces_of_any_size():
    pieces = ["a", "", "b\n", "Obs", "erv", "", "ation", ":", " x"]
    decode = lambda ids: "".join(pieces[i] for i in ids)
    ids = list(range(len(pieces)))
    for seen in range(7):
        assert stop_string_end(decode, ids, seen, ["\nObservation:", "zzz"]) == 8
    assert stop_string_end(decode, ids[:7], 3, ["\nObservation:"]) is None
    characters = "é".encode()
    assert stop_string_end(lambda ids: bytes(ids).decode(errors="replace"), characters, 1, "é") == 2


def test_a_generation_is_capped_by_the_engines_length(engine_with):
    engine = engine_with()
    made = generate(engine, ids_of(1, LENGTH - 5), max_tokens=50)
    assert len(made.token_ids) == 5 and made.finish_reason == "length"
    made = generate(engine, ids_of(1, LENGTH - 1), max_tokens=50)
    assert len(made.token_ids) == 1 and made.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "how", "message"),
    [
        ((), {}, "the prompt is empty"),
        ((1,) * LENGTH, {}, f"{LENGTH} tokens; max_length = {LENGTH} leaves no room"),
        ((VOCAB,), {}, "prompt ids must be in 0..95, got 96..96"),
        ((1,), {"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ((1,), {"temperature": -1.0}, "temperature and top_k must be >= 0, got -1.0 and 0"),
        ((1,), {"min_p": 2}, r"min_p in \[0, 1\], got 1.0 and 2"),
        ((1,), {"top_p": 0.0}, "top_p must be in .0, 1. and min_p"),
        ((1,), {"stop_ids": tuple(range(9))}, "9 stop ids; the engine supports at most 8"),
        ((1,), {"stop_strings": ("x",)}, "stop strings need an engine with `decode`"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(engine_with, prompt, how, message):
    engine = engine_with(decode=None)
    with pytest.raises(EngineError, match=message):
        engine.submit(Request(prompt, Sampling(**how), 0, "s"))


def test_a_length_beyond_the_models_positions_is_refused():
    with pytest.raises(EngineError, match="max_length 40000 exceeds the model's 32768 positions"):
        JaxEngine(ARCH, params_of(0), max_length=40_000)


def test_a_cache_that_exceeds_the_memory_is_refused_before_it_is_allocated():
    # 2 layers x keys and values x 2 heads x 8 dims x 4 bytes = 256 bytes per token.
    with pytest.raises(EngineError, match=r"2097152 slots x 4096 tokens takes 2,048\.0 GiB, and"):
        JaxEngine(ARCH, params_of(0), slots=2**21, max_length=4096)


def held(engine_with, **options):
    """An engine whose thread waits inside `decode` until `go` is set, and the job that holds it."""
    here, go = threading.Event(), threading.Event()

    def hold():
        here.set()
        assert go.wait(300)

    engine = engine_with(decode=Hook(hold), **options)
    how = Sampling(max_tokens=16, stop_strings=NEVER)
    job = engine.submit(Request(ids_of(1, 5), how, 0, "holder"))
    assert here.wait(300)
    return engine, go, job


def test_a_full_queue_is_an_error_and_waiting_requests_are_served(engine_with):
    engine, go, holder = held(engine_with, slots=1, queue_size=3)
    how = Sampling(temperature=0.0, max_tokens=4)
    futures = [engine.submit(Request(ids_of(n, 9), how, 0, str(n))) for n in range(3)]
    with pytest.raises(EngineError, match="the queue is full with 3 requests"):
        engine.submit(Request(ids_of(3, 9), how, 0, "3"))
    assert engine.metrics()["queue_length"] == 3
    go.set()
    for n, future in enumerate(futures):
        assert future.result(timeout=300).token_ids == greedy(params_of(0), ids_of(n, 9), 4)
    assert len(holder.result(timeout=300).token_ids) == 16


def test_requests_that_only_wait_for_the_end_of_a_dispatch_are_not_queued(engine_with):
    engine, go, _ = held(engine_with, slots=4)
    how = Sampling(max_tokens=4)
    futures = [engine.submit(Request(ids_of(n, 9), how, 0, str(n))) for n in range(3)]
    assert engine.metrics()["queue_length"] == 0  # each has a slot
    futures += [engine.submit(Request(ids_of(n, 9), how, 0, str(n))) for n in (3, 4)]
    assert engine.metrics()["queue_length"] == 2
    go.set()
    assert all(len(f.result(timeout=300).token_ids) == 4 for f in futures)


def test_cancelling_frees_the_slot_and_the_place_in_the_queue(engine_with):
    engine, go, holder = held(engine_with, slots=1, queue_size=2)
    how = Sampling(max_tokens=4)
    waiting, next_one = (engine.submit(Request(ids_of(n, 9), how, 0, str(n))) for n in range(2))
    assert holder.cancel() and waiting.cancel()
    go.set()
    assert len(next_one.result(timeout=300).token_ids) == 4
    assert engine.metrics()["active_slots"] == 0
    for future in (holder, waiting):
        with pytest.raises(CancelledError):
            future.result(timeout=300)


def test_the_session_idle_for_longest_is_evicted(engine_with):
    engine = engine_with(slots=2)
    streams = {}

    def turn(session):
        stream = streams.get(session, ()) + ids_of(ord(session) + len(streams), 40)
        before = engine.metrics()
        made = generate(engine, stream, session=session, temperature=0.0, max_tokens=8)
        assert made.token_ids == greedy(params_of(0), stream, 8)
        streams[session] = stream + made.token_ids
        return engine.metrics()["reused_tokens"] - before["reused_tokens"]

    assert [turn(s) for s in "ab"] == [0, 0]
    assert turn("a") == 47
    assert turn("c") == 0  # takes b's place
    assert turn("a") == 95
    assert turn("b") == 0  # takes c's place
    assert engine.metrics()["evictions"] == 2
    engine.release("a")
    assert turn("d") == 0
    assert engine.metrics()["evictions"] == 2


def test_a_prompt_shared_by_a_group_is_computed_once(engine_with):
    engine, go, _ = held(engine_with)
    prompt = ids_of(1, 120)
    how = Sampling(max_tokens=12)
    futures = [engine.submit(Request(prompt, how, n, f"member{n}")) for n in range(6)]
    before = engine.metrics()
    go.set()
    group = [f.result(timeout=300) for f in futures]
    after = engine.metrics()
    assert after["prefill_tokens"] - before["prefill_tokens"] == 119
    assert after["reused_tokens"] - before["reused_tokens"] == 5 * 119
    alone = engine_with()
    assert group == [generate(alone, prompt, n, str(n), max_tokens=12) for n in range(6)]


def test_closing_fails_running_and_waiting_requests_and_refuses_new_ones(engine_with):
    waiting = []

    def close():
        waiting.append(engine.submit(Request(ids_of(2, 5), Sampling(), 0, "w")))
        engine.close()

    engine = engine_with(decode=Hook(close), slots=1)
    how = Sampling(max_tokens=200, stop_strings=NEVER)
    running = engine.submit(Request(ids_of(2, 5), how, 0, "r"))
    with pytest.raises(EngineError, match="the engine is closed"):
        running.result(timeout=300)
    with pytest.raises(EngineError, match="the engine is closed"):
        waiting[0].result(timeout=300)
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.submit(Request(ids_of(2, 5), Sampling(), 0, "w"))
    with pytest.raises(EngineError, match="the engine is closed"):
        engine.update_weights(params_of(1), 1)
    engine.release("w")


def test_the_reason_of_an_engine_failure_reaches_its_requests(engine_with):
    def fail():
        raise MemoryError("out of pages")

    engine = engine_with(decode=Hook(fail))
    with pytest.raises(EngineError, match="the engine failed: MemoryError: out of pages"):
        generate(engine, ids_of(1, 5), stop_strings=NEVER)
    with pytest.raises(EngineError, match="the engine failed: MemoryError: out of pages"):
        generate(engine, ids_of(1, 5))


def test_programs_are_compiled_once(engine_with):
    programs = (CachedDecoder.fill, CachedDecoder.decode, CachedDecoder.copy)
    engine = engine_with()
    for session in "ab":  # the second copies the prefix of the first
        generate(engine, ids_of(0, 70), session=session, max_tokens=1)
    compiled = [p._cache_size() for p in programs]
    how = [dict(top_p=0.9), dict(top_k=5, min_p=0.1), dict(temperature=0.0), dict()]
    for n in range(24):
        generate(
            engine, ids_of(n % 5, 1 + 11 * n), session=str(n % 5), max_tokens=1 + n, **how[n % 4]
        )
    engine.update_weights(params_of(1), 1)
    generate(engine, ids_of(1, 200), max_tokens=20)
    assert [p._cache_size() for p in programs] == compiled


@pytest.mark.slow
def test_an_engine_in_bfloat16_is_close(engine_with):
    engine = engine_with(dtype="bfloat16", max_length=128)
    prompt = ids_of(1, 30)
    made = generate(engine, prompt, seed=3, max_tokens=20)
    expected = expected_log_probs(params_of(0), prompt + made.token_ids, [(30, 50)])
    np.testing.assert_allclose(made.log_probs, expected, atol=0.25)
