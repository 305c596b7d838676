import hashlib
import json
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manus_jax.data.chat import Message
from manus_jax.data.mixture import Mixture
from manus_jax.data.tasks import DatasetError, Task


def tasks_of(name, count):
    return [Task(env=name, item=i, item_id=f"{name}_{i}") for i in range(count)]


def epochs(mixture):
    return {source["name"]: source["epoch"] for source in mixture.state()["sources"]}


def ids(tasks):
    return [task.item_id for task in tasks]


sources = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0])), min_size=1, max_size=3
).map(lambda found: [(f"s{i}", tasks_of(f"s{i}", n), w) for i, (n, w) in enumerate(found)])


@pytest.mark.bug("B4")
@settings(deadline=None, max_examples=60)
@given(mix=sources, seed=st.integers(0, 2**40), batches=st.lists(st.integers(1, 12), max_size=8))
def test_every_row_of_a_source_comes_once_an_epoch(mix, seed, batches):
    mixture = Mixture(mix, seed)
    dealt = [i for size in batches for i in ids(mixture.next_batch(size))]
    assert len(dealt) == sum(batches)
    for name, tasks, _ in mix:
        of_source = [i for i in dealt if i.startswith(f"{name}_")]
        rows = len(tasks)
        assert epochs(mixture)[name] == len(of_source) // rows
        for start in range(0, len(of_source), rows):
            epoch = of_source[start : start + rows]
            assert len(set(epoch)) == len(epoch)
            assert len(epoch) < rows or sorted(epoch) == sorted(ids(tasks))


@settings(deadline=None, max_examples=60)
@given(mix=sources, seed=st.integers(0, 99), before=st.integers(0, 40), after=st.integers(1, 40))
def test_resuming_anywhere_equals_never_having_stopped(mix, seed, before, after):
    whole = Mixture(mix, seed)
    dealt = ids(whole.next_batch(before + after))
    stopped = Mixture(mix, seed)
    if before:
        stopped.next_batch(before)
    saved = json.loads(json.dumps(stopped.state(), sort_keys=True))
    resumed = Mixture(mix, seed)
    resumed.next_batch(3)
    resumed.restore(saved)
    assert resumed.state() == stopped.state()
    assert ids(resumed.next_batch(after)) == dealt[before:]
    assert epochs(resumed) == epochs(whole)


@settings(deadline=None, max_examples=40)
@given(weights=st.lists(st.integers(1, 6), min_size=2, max_size=4))
def test_weights_are_exact_and_never_run_ahead(weights):
    mixture = Mixture([(f"s{i}", tasks_of(f"s{i}", 5), w) for i, w in enumerate(weights)])
    counts, total = Counter(), sum(weights)
    for draws in range(1, 4 * total + 1):
        counts[mixture.next_batch(1)[0].env] += 1
        for i, weight in enumerate(weights):
            assert counts[f"s{i}"] < weight * draws / total + 1
            if draws % total == 0:
                assert counts[f"s{i}"] == weight * draws // total


def test_stages_play_each_source_alone_before_they_are_mixed():
    mix = [(name, tasks_of(name, 3), 1.0) for name in "abc"]
    mixture = Mixture(mix, seed=1, stage_tasks=4)
    dealt = [task.env for task in mixture.next_batch(18)]
    assert dealt[:12] == [*"aaaabbbbcccc"]
    assert Counter(dealt[12:]) == {"a": 2, "b": 2, "c": 2}
    weighted = Mixture([(n, tasks_of(n, 3), w) for n, w in (("a", 1), ("b", 3))], stage_tasks=5)
    assert Counter(task.env for task in weighted.next_batch(18)) == {"a": 5 + 2, "b": 5 + 6}


@pytest.mark.parametrize("before", [3, 4, 9, 13])
def test_a_stage_is_resumed_where_it_stopped(before):
    mix = [(name, tasks_of(name, 3), 1.0) for name in "abc"]
    stopped, whole = (Mixture(mix, seed=1, stage_tasks=4) for _ in range(2))
    stopped.next_batch(before)
    resumed = Mixture(mix, seed=1, stage_tasks=4)
    resumed.restore(json.loads(json.dumps(stopped.state())))
    assert ids(resumed.next_batch(9)) == ids(whole.next_batch(before + 9))[before:]


@pytest.mark.bug("B32")
def test_a_batch_larger_than_the_dataset_runs_on_into_the_next_epochs():
    mixture = Mixture([("a", tasks_of("a", 3), 1.0)], seed=1)
    batch = mixture.next_batch(8)
    assert Counter(ids(batch[:6])) == {"a_0": 2, "a_1": 2, "a_2": 2}
    assert epochs(mixture) == {"a": 2}


def test_epochs_sources_and_seeds_have_orders_of_their_own():
    def order(name, seed, epochs=1):
        dealt = Mixture([(name, tasks_of("x", 50), 1.0)], seed).next_batch(50 * epochs)
        return ids(dealt)[-50:]

    orders = [order("a", 0), order("a", 0, epochs=2), order("b", 0), order("a", 1)]
    assert len({tuple(o) for o in orders}) == 4
    assert order("a", 0) == orders[0]


@pytest.mark.slow
def test_the_order_is_the_same_in_another_process():
    script = (
        "from manus_jax.data.mixture import Mixture; from manus_jax.data.tasks import Task;"
        "tasks = lambda n: [Task(n, i, f'{n}_{i}') for i in range(7)];"
        "m = Mixture([('a', tasks('a'), 2.0), ('b', tasks('b'), 1.0)], seed=5);"
        "print([t.item_id for t in m.next_batch(30)])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "123", "PATH": "/usr/bin"},
    )
    mixture = Mixture([("a", tasks_of("a", 7), 2.0), ("b", tasks_of("b", 7), 1.0)], seed=5)
    assert run.stdout.strip() == str(ids(mixture.next_batch(30)))


def philox_words(key, count):
    """Philox 4x64-10 from its paper, in plain integers; the first block has counter 1."""
    words, mask = [], 2**64 - 1
    for block in range(1, 1 + -(-count // 4)):
        x, (k0, k1) = [block, 0, 0, 0], key
        for _ in range(10):
            low, high = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
            x = [high >> 64 ^ x[1] ^ k0, high & mask, low >> 64 ^ x[3] ^ k1, low & mask]
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
        words += x
    return words[:count]


def test_the_order_is_the_ranks_of_philox_words_and_stays_so():
    digest = hashlib.sha256(b"5/0/a").digest()  # seed, epoch, name: saved runs depend on it
    key = [int.from_bytes(digest[i : i + 8], "little") for i in (0, 8)]
    words = philox_words(key, 10)
    want = [f"a_{i}" for i in sorted(range(10), key=lambda i: words[i])]
    assert ids(Mixture([("a", tasks_of("a", 10), 1.0)], seed=5).next_batch(10)) == want


def test_a_cursor_of_something_else_is_refused():
    def mixture(rows=4, weight=1.0, seed=0, name="a", content="x"):
        tasks = [Task("e", i, f"e_{i}", prompt=(Message("user", content),)) for i in range(rows)]
        return Mixture([(name, tasks, weight)], seed)

    state = mixture().state()
    mixture().restore(state)
    for other, what in [
        (
            mixture(rows=5),
            "source 'a' differs from the saved cursor: rows was 4 and is now 5",
        ),
        (mixture(content="y"), "fingerprint was"),
        (mixture(weight=2.0), "weight was 1.0 and is now 2.0"),
        (mixture(seed=1), "saved with seed 0, this run uses 1"),
        (mixture(name="b"), r"saved for sources \['a'\], not \['b'\]"),
    ]:
        with pytest.raises(DatasetError, match=what):
            other.restore(state)
    for broken in ({}, {"seed": 0}, {"seed": 0, "sources": [{}]}, {"seed": 0, "sources": 3}):
        with pytest.raises(DatasetError, match="not a saved mixture cursor"):
            mixture().restore(broken)
    state["sources"][0]["position"] = 4
    with pytest.raises(DatasetError, match="is out of range"):
        mixture().restore(state)


@pytest.mark.parametrize(
    ("mix", "what"),
    [
        ([], "at least one source"),
        ([("a", [], 1.0)], "source 'a' has no tasks"),
        ([("a", tasks_of("a", 1), 0.0)], "source 'a' has weight 0.0; it must be positive"),
        ([("a", tasks_of("a", 1), float("nan"))], "weight nan"),
        ([("a", tasks_of("a", 1), 1.0)] * 2, "source names must differ"),
    ],
)
def test_wrong_mixtures_are_refused(mix, what):
    with pytest.raises(DatasetError, match=what):
        Mixture(mix)


def test_a_batch_has_at_least_one_task():
    with pytest.raises(DatasetError, match="batch size must be at least 1, got 0"):
        Mixture([("a", tasks_of("a", 1), 1.0)]).next_batch(0)
