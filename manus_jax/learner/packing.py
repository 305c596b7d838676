"""Segments of different lengths packed into rows of one fixed length.

First-fit-decreasing packing puts several segments into a row; segment ids distinguish them. A batch
is packed once per step: `add_packing` stores the position of each segment as columns of the batch,
and every forward pass and update of the step reads its rows with `PackedRows`. Segments that may
belong to different mini-batches never share a row, so a mini-batch is a set of whole rows.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from manus_jax.data_proto import DataProto
from manus_jax.errors import UserError

PACKED_ROW, PACKED_START, PACKED_SEGMENT = "packed_row", "packed_start", "packed_segment"


class PackingError(UserError, ValueError):
    """A sequence is longer than a row; the message gives both sizes."""


def add_packing(batch: DataProto, length: int, by: str | None = None) -> DataProto:
    """Adds the position of each segment in packed rows of `length` tokens.

    The new columns are int32 [rows]: packed_row, packed_start, packed_segment (1, 2, … within a
    packed row). Only segments with the same value of the host column `by` share a row; None: any.
    Deterministic for the same segments in the same order.
    """
    mask = np.asarray(batch.batch["attention_mask"])
    lengths = mask.sum(1)
    if len(lengths) and int(lengths.min()) == 0:
        raise PackingError("a segment has no tokens")
    if np.asarray(batch.batch["loss_mask"])[:, :1].any():
        raise PackingError("the first token of a segment is trained; it has no context")
    units: list[np.ndarray] = [np.arange(len(lengths))]
    if by is not None:
        members: dict[object, list[int]] = {}
        for index, value in enumerate(batch.non_tensor_batch[by]):
            members.setdefault(value, []).append(index)
        units = [np.array(indexes) for indexes in members.values()]
    row, start, segment = np.zeros((3, len(lengths)), np.int32)
    rows = 0
    for unit in units:
        for packed in _first_fit_decreasing(lengths[unit].tolist(), length):
            members_of_row = unit[packed]
            ends = np.cumsum(lengths[members_of_row])
            row[members_of_row] = rows
            start[members_of_row] = ends - lengths[members_of_row]
            segment[members_of_row] = np.arange(1, len(packed) + 1)
            rows += 1
    columns = {PACKED_ROW: row, PACKED_START: start, PACKED_SEGMENT: segment}
    return batch.union(DataProto.from_dict(columns))


@dataclasses.dataclass(frozen=True)
class RowShape:
    """Packed rows as the compiled step takes them: micro-batches of `rows` rows of `length`."""

    rows: int
    length: int


class PackedRows:
    """The rows that the segments of a packed batch fill, split into micro-batches.

    `used` micro-batches hold tokens; buffers have room for `capacity` of them.
    """

    def __init__(self, batch: DataProto, shape: RowShape, capacity: int) -> None:
        self._batch, self._shape = batch, shape
        self._mask = np.asarray(batch.batch["attention_mask"])
        numbers, rows = np.unique(np.asarray(batch.batch[PACKED_ROW]), return_inverse=True)
        self.used = -(-len(numbers) // shape.rows)
        self._shape3 = (max(capacity, self.used), shape.rows, shape.length)
        tokens = np.arange(self._mask.shape[1], dtype=np.int64)
        start = rows.astype(np.int64) * shape.length + np.asarray(batch.batch[PACKED_START])
        self._where = (start[:, None] + tokens)[self._mask]
        self._positions = np.broadcast_to(tokens, self._mask.shape)[self._mask]

    def arrays(self, columns: Iterable[str]) -> dict[str, np.ndarray]:
        """[capacity, rows, length, …]: input_ids, segment_ids, positions, loss_mask, columns."""
        segment = np.asarray(self._batch.batch[PACKED_SEGMENT])
        segment = np.broadcast_to(segment[:, None], self._mask.shape)
        return {
            "segment_ids": self._place(segment[self._mask]),
            "positions": self._place(self._positions.astype(np.int32)),
            **{
                name: self._place(np.asarray(self._batch.batch[name])[self._mask])
                for name in ("input_ids", "loss_mask", *columns)
            },
        }

    def unpack(self, packed: np.ndarray) -> np.ndarray:
        """Values [capacity, rows, length] as a column [rows of the batch, width], 0 elsewhere."""
        column = np.zeros(self._mask.shape, packed.dtype)
        column[self._mask] = packed.reshape(-1)[self._where]
        return column

    def metrics(self) -> dict[str, float]:
        """The fill rate of the computed rows."""
        rows = self.used * self._shape.rows
        return {
            "packing/tokens": float(len(self._where)),
            "packing/rows": float(rows),
            "packing/efficiency": len(self._where) / max(1, rows * self._shape.length),
        }

    def _place(self, values: np.ndarray) -> np.ndarray:
        packed = np.zeros((int(np.prod(self._shape3)), *values.shape[1:]), values.dtype)
        packed[self._where] = values
        return packed.reshape(*self._shape3, *values.shape[1:])


def _first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Members of each row. Segments are placed longest first, each in the first row with room."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows: list[list[int]] = []
    room = np.empty(len(lengths), np.int64)
    for index in order:
        if lengths[index] > capacity:
            raise PackingError(
                f"a sequence of {lengths[index]} tokens does not fit into rows of {capacity}; "
                "raise data.max_length"
            )
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
