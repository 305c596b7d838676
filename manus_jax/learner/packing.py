"""Ragged sequences into rows of one fixed shape.

First-fit-decreasing packing puts several sequences in a row and tells them apart by segment id.
The buffer always has room for one sequence per row, so any batch of that many sequences fits and
the shape never changes; the update loop runs only over the micro-batches that hold something.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from manus_jax.algorithms.aggregation import sequence_weights
from manus_jax.config.settings import Overlong
from manus_jax.errors import UserError


class PackingError(UserError, ValueError):
    """A sequence or a batch that does not fit, with the sizes."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One training sequence.

    `input_ids` int32 [T] are the exact tokens, `loss_mask` bool [T] marks the agent's own.
    `fields` are per-token float32 [T] (advantages, old_log_probs, …), kept in step with the tokens.
    `turn_ends` are the positions just after each agent turn, where a cut leaves no half turn.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    fields: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    turn_ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.input_ids) == 0 or self.loss_mask[0]:
            raise PackingError("a sequence needs a first token that is given, not trained")
        for name, x in {"loss_mask": self.loss_mask, **self.fields}.items():
            if x.shape != self.input_ids.shape:
                raise PackingError(
                    f"field {name!r} has shape {x.shape}, the tokens {self.input_ids.shape}"
                )

    def __len__(self) -> int:
        return len(self.input_ids)

    def cut(self, length: int) -> "Sample":
        """The first `length` tokens."""
        return dataclasses.replace(
            self,
            input_ids=self.input_ids[:length],
            loss_mask=self.loss_mask[:length],
            fields={k: v[:length] for k, v in self.fields.items()},
            turn_ends=tuple(e for e in self.turn_ends if e <= length),
        )


@dataclasses.dataclass(frozen=True)
class Layout:
    """The fixed shape of a packed batch: [micro_batches, rows, length]."""

    micro_batches: int
    rows: int
    length: int

    @classmethod
    def for_batch(cls, sequences: int, rows: int, length: int) -> "Layout":
        """Room for `sequences` sequences in micro-batches of `rows` rows."""
        return cls(-(-sequences // rows), rows, length)


@dataclasses.dataclass(frozen=True)
class Packed:
    """`arrays` [micro_batches, rows, length]: input_ids, segment_ids, positions, loss_mask, fields.

    `places[i]` is where sample i lies: (micro_batch, row, start, length). `used` micro-batches hold
    something; the rest of the buffer is padding.
    """

    arrays: dict[str, np.ndarray]
    places: tuple[tuple[int, int, int, int], ...]
    used: int

    def unpack(self, array: np.ndarray) -> list[np.ndarray]:
        """Per-sample pieces of an array [micro_batches, rows, length]."""
        return [array[m, r, start : start + n] for m, r, start, n in self.places]

    def metrics(self) -> dict[str, float]:
        """How full the computed rows are."""
        tokens = sum(n for *_, n in self.places)
        _, rows, length = self.arrays["input_ids"].shape
        return {
            "packing/tokens": float(tokens),
            "packing/rows": float(self.used * rows),
            "packing/efficiency": tokens / max(1, self.used * rows * length),
        }


def fit(
    samples: Sequence[Sample], length: int, policy: Overlong
) -> tuple[list[Sample], dict[str, float]]:
    """Applies the policy on sequences longer than a row; returns what stays, and the counts.

    "error" refuses them, "drop" leaves them out, "cut" keeps the whole turns that fit (and drops
    a sequence whose first agent turn does not).
    """
    kept, dropped, cut = [], 0, 0
    for index, sample in enumerate(samples):
        if len(sample) <= length:
            kept.append(sample)
            continue
        if policy == "error":
            raise PackingError(
                f"sequence {index} has {len(sample)} tokens and a row holds {length}; "
                "raise the length, or choose overlong = 'drop' or 'cut'"
            )
        end = max((e for e in sample.turn_ends if e <= length), default=0)
        if policy == "cut" and end and sample.loss_mask[:end].any():
            kept.append(sample.cut(end))
            cut += 1
        else:
            dropped += 1
    return kept, {"packing/overlong_dropped": float(dropped), "packing/overlong_cut": float(cut)}


def with_loss_weights(
    samples: Sequence[Sample], mode: str, norm_constant: float | None = None
) -> list[Sample]:
    """The samples with a field `loss_weights`: the whole batch's denominators, per token."""
    lengths = np.array([s.loss_mask.sum() for s in samples], np.int64)
    weights = sequence_weights(lengths, mode, norm_constant)
    return [
        dataclasses.replace(s, fields={**s.fields, "loss_weights": w * s.loss_mask})
        for s, w in zip(samples, weights, strict=True)
    ]


def pack(samples: Sequence[Sample], layout: Layout, pad_id: int = 0) -> Packed:
    """First-fit-decreasing into `layout`; deterministic for the same samples in the same order."""
    rows_of = _first_fit_decreasing([len(s) for s in samples], layout.length)
    capacity = layout.micro_batches * layout.rows
    if len(rows_of) > capacity:
        raise PackingError(
            f"{len(samples)} sequences need {len(rows_of)} rows of {layout.length} tokens and the "
            f"batch has {layout.micro_batches} x {layout.rows} = {capacity}"
        )
    shape = (capacity, layout.length)
    arrays: dict[str, np.ndarray] = {
        "input_ids": np.full(shape, pad_id, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
        "positions": np.zeros(shape, np.int32),
        "loss_mask": np.zeros(shape, np.bool_),
    }
    names = sorted({name for s in samples for name in s.fields})
    arrays |= {name: np.zeros(shape, np.float32) for name in names}
    places: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)] * len(samples)
    for row, members in enumerate(rows_of):
        start = 0
        for segment, index in enumerate(members, start=1):
            sample = samples[index]
            span = slice(start, start + len(sample))
            arrays["input_ids"][row, span] = sample.input_ids
            arrays["segment_ids"][row, span] = segment
            arrays["positions"][row, span] = np.arange(len(sample))
            arrays["loss_mask"][row, span] = sample.loss_mask
            for name in names:
                arrays[name][row, span] = sample.fields[name]
            places[index] = (*divmod(row, layout.rows), start, len(sample))
            start += len(sample)
    shaped = {
        k: v.reshape(layout.micro_batches, layout.rows, layout.length) for k, v in arrays.items()
    }
    return Packed(shaped, tuple(places), used=-(-len(rows_of) // layout.rows))


def _first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Members of each row. Sequences are placed longest first, each in the first row with room."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows: list[list[int]] = []
    room = np.empty(len(lengths), np.int64)
    for index in order:
        if lengths[index] > capacity:
            raise PackingError(f"a sequence of {lengths[index]} tokens in rows of {capacity}")
        fits = np.flatnonzero(room[: len(rows)] >= lengths[index])
        if fits.size:
            row = int(fits[0])
            rows[row].append(index)
        else:
            row = len(rows)
            rows.append([index])
            room[row] = capacity
        room[row] -= lengths[index]
    return rows
