"""Token sequences of different lengths as batches, for tests of the learner."""

import numpy as np

from manus_jax.algorithms.aggregation import token_weights
from manus_jax.data_proto import DataProto
from manus_jax.learner.packing import PackedRows, RowShape, add_packing
from manus_jax.rollout.batch import padded

COLUMNS = ("advantages", "old_log_probs", "ref_log_probs", "sampler_log_probs", "values", "returns")


def ragged_sequences(seed=0, count=11, longest=60, vocabulary=64):
    """Unequal lengths and unequal shares of trained tokens: equal ones hide wrong denominators."""
    rng = np.random.default_rng(seed)
    sequences = []
    for n in rng.integers(5, longest, count):
        mask = rng.random(n) < rng.uniform(0.1, 0.9)
        mask[0], mask[-1] = False, True
        columns = {k: rng.normal(size=n).astype(np.float32) for k in COLUMNS}
        for k in ("old_log_probs", "ref_log_probs", "sampler_log_probs"):
            columns[k] = (-4 + 0.3 * columns[k]).astype(np.float32)
        ids = rng.integers(0, vocabulary, n).astype(np.int32)
        sequences.append({"input_ids": ids, "loss_mask": mask, **columns})
    return sequences


def batch_of(sequences, **host):
    """One row per sequence, a dict of arrays [T]; `host` columns go along."""
    width = max((len(s["input_ids"]) for s in sequences), default=0)
    names = list(sequences[0]) if sequences else ["input_ids", "loss_mask"]
    arrays = {
        name: padded([s[name] for s in sequences], sequences[0][name].dtype, width=width)
        for name in names
    }
    ones = [np.ones(len(s["input_ids"]), bool) for s in sequences]
    arrays["attention_mask"] = padded(ones, bool, width=width)
    return DataProto.from_dict(arrays, host)


def weighted(batch, aggregation="token-mean", norm_constant=None):
    weights = token_weights(np.asarray(batch.batch["loss_mask"]), aggregation, norm_constant)
    return batch.union(DataProto.from_dict({"loss_weights": weights}))


def packed_arrays(batch, rows, length, capacity=1):
    """(arrays [micro_batches, rows, length], used) of all the batch's token columns."""
    packed = PackedRows(add_packing(batch, length), RowShape(rows, length), capacity)
    given = ("input_ids", "loss_mask", "attention_mask")
    columns = [k for k, v in batch.batch.items() if v.ndim == 2 and k not in given]
    return packed.arrays(columns), packed.used
