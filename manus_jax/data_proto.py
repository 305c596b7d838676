"""DataProto: the batch that rollouts produce and updates consume, as one JAX pytree.

It holds `batch` (arrays with one leading row dimension), `non_tensor_batch` (one Python value per
row, on the host) and `meta_info` (a plain dict). Every operation returns a new object in which
arrays and per-row values stay aligned; unchanged arrays are shared, not copied.

The leaves of the pytree are the arrays. Host values are not traced: they never cause `jit` to
retrace, and neither code inside a transformation nor its result has them. Outside of tracing
(`jax.tree.map`, `jax.device_put`) they are kept.
"""

import dataclasses
import io
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from manus_jax import data_proto_columns as columns
from manus_jax import data_proto_file
from manus_jax.data_proto_columns import Array

ROW_WEIGHT = "row_weight"
"""float32 `[rows]`: 1 (or any positive weight) on real rows, 0 on padding rows."""


@dataclasses.dataclass(frozen=True, eq=False)
class DataProtoItem:
    """One row: arrays without their leading dimension, and the row's Python values."""

    batch: dict[str, Array]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class DataProto:
    """Arrays `[rows, ...]`, per-row Python values, and metadata of the batch."""

    batch: dict[str, Array] = dataclasses.field(default_factory=dict)
    non_tensor_batch: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    meta_info: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, value in self.batch.items():
            columns.check_array(key, value)
        others = {key: columns.object_column(key, v) for key, v in self.non_tensor_batch.items()}
        object.__setattr__(self, "batch", dict(self.batch))
        object.__setattr__(self, "non_tensor_batch", others)
        object.__setattr__(self, "meta_info", dict(self.meta_info))
        sizes = {key: len(value) for key, value in (self.batch | others).items()}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{key!r} has {size}" for key, size in sizes.items())
            raise ValueError(f"every key must have the same number of rows, but {listed}")
        if both := self.batch.keys() & others.keys():
            raise ValueError(f"keys {sorted(both)} are in both batch and non_tensor_batch")

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Array] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> "DataProto":
        return cls(dict(tensors or {}), dict(non_tensors or {}), dict(meta_info or {}))  # type: ignore[arg-type]

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: Mapping[str, Any] | None = None
    ) -> "DataProto":
        """Assigns columns by type: numeric and bool arrays are tensors, all else per-row values."""
        tensors = {key: value for key, value in data.items() if columns.is_numeric_array(value)}
        others = {key: value for key, value in data.items() if key not in tensors}
        return cls.from_dict(tensors, others, meta_info)

    @classmethod
    def empty(cls, meta_info: Mapping[str, Any] | None = None) -> "DataProto":
        return cls.from_dict(meta_info=meta_info)

    @classmethod
    def _unchecked(
        cls, batch: dict[str, Any], non_tensor_batch: dict[str, np.ndarray], meta: dict[str, Any]
    ) -> "DataProto":
        """Skips validation, because leaves may be arbitrary objects inside transformations."""
        proto = object.__new__(cls)
        object.__setattr__(proto, "batch", batch)
        object.__setattr__(proto, "non_tensor_batch", non_tensor_batch)
        object.__setattr__(proto, "meta_info", dict(meta))
        return proto

    def __len__(self) -> int:
        for column in itertools.chain(self.batch.values(), self.non_tensor_batch.values()):
            return column.shape[0]
        return 0

    def __repr__(self) -> str:
        arrays = ", ".join(
            f"{key}: {getattr(v, 'dtype', type(v).__name__)}{list(getattr(v, 'shape', ()))}"
            for key, v in self.batch.items()
        )
        return (
            f"DataProto(batch={{{arrays}}}, non_tensor_batch={list(self.non_tensor_batch)}, "
            f"meta_info={list(self.meta_info)})"
        )

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self._item(row) for row in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        """A row (`int` → `DataProtoItem`), or rows (slice, indexes or bool mask → `DataProto`)."""
        if isinstance(index, slice):
            return self._rows(index)
        if isinstance(index, jax.core.Tracer):
            return self._rows(index)
        array = np.asarray(index)
        if array.ndim == 0 and array.dtype.kind in "iu":
            return self._item(int(self._checked_indexes(array[None])[0]))
        return self._rows(self._checked_indexes(array))

    def _item(self, row: int) -> DataProtoItem:
        return DataProtoItem(
            {key: value[row] for key, value in self.batch.items()},
            {key: value[row] for key, value in self.non_tensor_batch.items()},
            dict(self.meta_info),
        )

    def _rows(self, index: Any) -> "DataProto":
        return self._unchecked(
            {key: value[index] for key, value in self.batch.items()},
            {key: value[index] for key, value in self.non_tensor_batch.items()},
            self.meta_info,
        )

    def _checked_indexes(self, indexes: np.ndarray) -> np.ndarray:
        # JAX clamps out-of-bounds indexes, which would silently repeat rows.
        rows = len(self)
        if indexes.ndim != 1:
            raise ValueError(f"indexes must be one-dimensional, got shape {indexes.shape}")
        if indexes.dtype == bool:
            if len(indexes) != rows:
                raise ValueError(f"a bool mask of {len(indexes)} does not fit {rows} rows")
            return np.flatnonzero(indexes)
        if indexes.size == 0:
            return np.zeros(0, np.int64)
        if indexes.dtype.kind not in "iu":
            raise ValueError(f"indexes must be integers or bools, got {indexes.dtype}")
        for bad in indexes[(indexes < -rows) | (indexes >= rows)][:1]:
            raise IndexError(f"index {bad} is out of range for {rows} rows")
        return indexes.astype(np.int64) % max(rows, 1)

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> "DataProto":
        """Keeps the named keys; `None` keeps all of that part."""
        return self._unchecked(
            columns.pick(self.batch, batch_keys, "batch"),
            columns.pick(self.non_tensor_batch, non_tensor_batch_keys, "non_tensor_batch"),
            columns.pick(self.meta_info, meta_info_keys, "meta_info"),
        )

    def pop(
        self,
        batch_keys: Iterable[str] = (),
        non_tensor_batch_keys: Iterable[str] = (),
        meta_info_keys: Iterable[str] = (),
    ) -> tuple["DataProto", "DataProto"]:
        """Returns `(popped, rest)`: the named keys, and everything else."""
        popped = self.select(batch_keys, non_tensor_batch_keys, meta_info_keys)
        rest = self._unchecked(
            {k: v for k, v in self.batch.items() if k not in popped.batch},
            {k: v for k, v in self.non_tensor_batch.items() if k not in popped.non_tensor_batch},
            {k: v for k, v in self.meta_info.items() if k not in popped.meta_info},
        )
        return popped, rest

    def rename(self, names: Mapping[str, str]) -> "DataProto":
        """Renames keys of `batch` and `non_tensor_batch`: `{old: new}`."""
        keys = [*self.batch, *self.non_tensor_batch]
        for old in names:
            if old not in keys:
                raise KeyError(f"cannot rename unknown key {old!r}; there are {keys}")
        renamed = [names.get(key, key) for key in keys]
        for new in renamed:
            if renamed.count(new) > 1:
                raise ValueError(f"renaming {dict(names)} gives two columns the name {new!r}")
        return self._unchecked(
            {names.get(key, key): value for key, value in self.batch.items()},
            {names.get(key, key): value for key, value in self.non_tensor_batch.items()},
            self.meta_info,
        )

    def union(self, other: "DataProto") -> "DataProto":
        """The keys of both; a key in both must have bitwise identical content."""
        if self._has_columns and other._has_columns and len(self) != len(other):
            raise ValueError(f"union of {len(self)} rows with {len(other)} rows")
        return DataProto(
            columns.merge(self.batch, other.batch, "batch"),
            columns.merge(self.non_tensor_batch, other.non_tensor_batch, "non_tensor_batch"),
            columns.merge(self.meta_info, other.meta_info, "meta_info"),
        )

    @property
    def _has_columns(self) -> bool:
        return bool(self.batch or self.non_tensor_batch)

    @staticmethod
    def concat(protos: Sequence["DataProto"]) -> "DataProto":
        """Concatenates rows in order; keys, dtypes and metadata must agree."""
        if not protos:
            raise ValueError("concat needs at least one DataProto")
        first, meta = protos[0], protos[0].meta_info
        for number, proto in enumerate(protos[1:], start=1):
            for part in ("batch", "non_tensor_batch"):
                here, there = getattr(first, part).keys(), getattr(proto, part).keys()
                if here != there:
                    raise ValueError(
                        f"concat: {part} of item {number} has keys {sorted(there)}, "
                        f"that of item 0 has {sorted(here)}"
                    )
            meta = columns.merge(meta, proto.meta_info, "meta_info")
        batch = {
            key: columns.concat_arrays(key, [p.batch[key] for p in protos]) for key in first.batch
        }
        others = {
            key: np.concatenate([p.non_tensor_batch[key] for p in protos])
            for key in first.non_tensor_batch
        }
        return DataProto(batch, others, meta)

    def chunk(self, chunks: int) -> list["DataProto"]:
        """`chunks` parts of equal size, in order."""
        if chunks < 1 or len(self) % chunks:
            raise ValueError(
                f"{len(self)} rows do not divide into {chunks} equal chunks"
                + (f" ({len(self)} % {chunks} = {len(self) % chunks})" if chunks > 0 else "")
            )
        size = len(self) // chunks
        return [self[i * size : (i + 1) * size] for i in range(chunks)]

    def split(self, size: int) -> list["DataProto"]:
        """Parts of `size` rows, in order; the last may be smaller."""
        if size < 1:
            raise ValueError(f"split size must be at least 1, got {size}")
        return [self[start : start + size] for start in range(0, len(self), size)]

    def repeat(self, times: int, interleave: bool = True) -> "DataProto":
        """Each row `times` times: a a b b (`interleave`), or a b a b."""
        if times < 1:
            raise ValueError(f"repeat times must be at least 1, got {times}")
        rows = np.arange(len(self))
        return self._rows(np.repeat(rows, times) if interleave else np.tile(rows, times))

    def reorder(self, indexes: Any) -> "DataProto":
        """Rows in the order of `indexes` `[rows]`, which must be a permutation."""
        order = np.asarray(indexes)
        missing = set(range(len(self))) - set(order.ravel().tolist())
        if order.shape != (len(self),) or missing:
            raise ValueError(
                f"reorder needs a permutation of {len(self)} rows, got shape {order.shape} "
                f"that misses {len(missing)} of them; use proto[indexes] to gather rows"
            )
        return self[order]

    def make_iterator(
        self,
        mini_batch_size: int | None = None,
        *,
        by: str | None = None,
        epochs: int = 1,
        seed: Sequence[int] | None = None,
    ) -> Iterator["DataProto"]:
        """Iterates over mini-batches for `epochs` passes; with a seed, each pass is reshuffled.

        Args:
          mini_batch_size: rows per mini-batch, which must divide the batch; with `by`, the number
            of distinct values per mini-batch, where the last one may have fewer. None: all.
          by: a host column; rows with the same value stay together, in their order.
          epochs: passes over the batch.
          seed: shuffles the rows; pass `e` uses the seed `(*seed, e)`.
        """
        units = np.arange(len(self))
        if by is not None:
            numbers: dict[Any, int] = {}
            column = columns.pick(self.non_tensor_batch, [by], "non_tensor_batch")[by]
            units = np.array([numbers.setdefault(v, len(numbers)) for v in column], np.int64)
        count = int(units.max(initial=-1)) + 1
        size = count if mini_batch_size is None else mini_batch_size
        if size < 1 and count:
            raise ValueError(f"mini_batch_size must be at least 1, got {size}")
        if by is None and count and count % size:
            raise ValueError(
                f"{count} rows do not divide into mini-batches of {size}; "
                f"pad_to_divisor({size}) first"
            )

        def mini_batches() -> Iterator["DataProto"]:
            for epoch in range(epochs):
                order = np.arange(count)
                if seed is not None:
                    order = np.random.default_rng((*seed, epoch)).permutation(count)
                for start in range(0, count, max(size, 1)):
                    chosen = order[start : start + size]
                    if by is None:
                        yield self._rows(chosen)
                    else:
                        yield self._rows(np.flatnonzero(np.isin(units, chosen)))

        return mini_batches()

    def pad_to_divisor(self, divisor: int) -> "DataProto":
        """Appends rows of zeros (and `None`) up to a multiple of `divisor`, with `row_weight` 0."""
        if divisor < 1:
            raise ValueError(f"divisor must be at least 1, got {divisor}")
        rows, extra = len(self), -len(self) % divisor
        batch = dict(self.batch)
        weight = batch.setdefault(ROW_WEIGHT, np.ones(rows, np.float32))
        if weight.dtype != np.float32 or weight.ndim != 1:
            raise ValueError(
                f"batch[{ROW_WEIGHT!r}] must be float32 [rows], got {weight.dtype}{weight.shape}"
            )
        padded: dict[str, Array] = {}
        for key, value in batch.items():
            zeros = np.zeros((extra, *value.shape[1:]), value.dtype)
            padded[key] = columns.concat_arrays(key, [value, zeros]) if extra else value
        nones = np.full(extra, None, object)
        others = {key: np.concatenate([v, nones]) for key, v in self.non_tensor_batch.items()}
        return DataProto(padded, others, self.meta_info)

    def unpad(self) -> "DataProto":
        """Drops all rows of weight zero, and `row_weight` itself if all other weights are 1."""
        if ROW_WEIGHT not in self.batch:
            raise KeyError(
                f"unpad needs batch[{ROW_WEIGHT!r}] from pad_to_divisor; there are {[*self.batch]}"
            )
        weight = np.asarray(self.batch[ROW_WEIGHT])
        real = self if weight.all() else self[weight != 0]
        if (weight[weight != 0] == 1).all():
            _, real = real.pop([ROW_WEIGHT])
        return real

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one file atomically, without pickle."""
        data_proto_file.write(path, self.batch, self.non_tensor_batch, self.meta_info)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "DataProto":
        """Reads a file of `save`; arrays are NumPy arrays with their original dtypes."""
        with open(path, "rb") as file:
            return cls.from_dict(*data_proto_file.read(file, str(path)))

    def to_bytes(self) -> bytes:
        """The contents of a file of `save`, for sending to another process."""
        buffer = io.BytesIO()
        data_proto_file.dump(buffer, self.batch, self.non_tensor_batch, self.meta_info)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "DataProto":
        return cls.from_dict(*data_proto_file.read(io.BytesIO(data), "the message"))


class _HostValues:
    """The static part of a flattened DataProto; all compare equal, to avoid retracing."""

    __slots__ = ("meta_info", "non_tensor_batch")

    def __init__(self, non_tensor_batch: dict[str, np.ndarray], meta_info: dict[str, Any]):
        self.non_tensor_batch = non_tensor_batch
        self.meta_info = meta_info

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _HostValues)

    def __repr__(self) -> str:
        return f"{list(self.non_tensor_batch)}, {list(self.meta_info)}"


def _flatten(proto: DataProto) -> tuple[tuple[dict[str, Array]], _HostValues]:
    return (proto.batch,), _HostValues(proto.non_tensor_batch, proto.meta_info)


def _flatten_with_keys(proto: DataProto) -> tuple[tuple[tuple[Any, Any]], _HostValues]:
    (batch,), host = _flatten(proto)
    return ((jax.tree_util.GetAttrKey("batch"), batch),), host


def _unflatten(host: _HostValues, children: Iterable[Any]) -> DataProto:
    (batch,) = children
    leaves = jax.tree.leaves(batch)
    # jit caches the static part of its first call, so results of tracing must not contain it.
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return DataProto._unchecked(batch, {}, {})
    return DataProto._unchecked(batch, dict(host.non_tensor_batch), host.meta_info)


jax.tree_util.register_pytree_with_keys(DataProto, _flatten_with_keys, _unflatten, _flatten)
