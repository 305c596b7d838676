"""DataProto: the batch that rollouts produce and updates consume, as one JAX pytree.

It holds `batch` (arrays with one leading row dimension), `non_tensor_batch` (one Python value per
row, on the host) and `meta_info` (a plain dict). Every operation returns a new object in which
arrays and per-row values stay aligned; unchanged arrays are shared, not copied.

The leaves of the pytree are the arrays. Host values are not traced: they never cause `jit` to
retrace, and neither code inside a transformation nor its result has them. Outside of tracing
(`jax.tree.map`, `jax.device_put`) they are kept.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from manus_jax import data_proto_file
from manus_jax.files import write_atomically

Array = np.ndarray | jax.Array


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
            _check_array(key, value)
        others = {key: _object_column(key, v) for key, v in self.non_tensor_batch.items()}
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

    def __getitem__(self, index: Any) -> Any:
        """A row (`int` → `DataProtoItem`), or rows (slice, indexes or bool mask → `DataProto`)."""
        if isinstance(index, slice | jax.core.Tracer):
            return self._rows(index)
        # JAX clamps out-of-bounds indexes, which would silently repeat rows; NumPy refuses them.
        rows = np.arange(len(self))[index]
        if rows.ndim > 1:
            raise ValueError(f"indexes must be one-dimensional, got shape {rows.shape}")
        if rows.ndim:
            return self._rows(rows)
        return DataProtoItem(
            {key: value[rows] for key, value in self.batch.items()},
            {key: value[rows] for key, value in self.non_tensor_batch.items()},
            dict(self.meta_info),
        )

    def _rows(self, index: Any) -> "DataProto":
        return self._unchecked(
            {key: value[index] for key, value in self.batch.items()},
            {key: value[index] for key, value in self.non_tensor_batch.items()},
            self.meta_info,
        )

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> "DataProto":
        """Keeps the named keys; `None` keeps all of that part."""
        return self._unchecked(
            _pick(self.batch, batch_keys, "batch"),
            _pick(self.non_tensor_batch, non_tensor_batch_keys, "non_tensor_batch"),
            _pick(self.meta_info, meta_info_keys, "meta_info"),
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

    def union(self, other: "DataProto") -> "DataProto":
        """The keys of both; a key in both must have bitwise identical content."""
        return DataProto(
            _merge(self.batch, other.batch, "batch"),
            _merge(self.non_tensor_batch, other.non_tensor_batch, "non_tensor_batch"),
            _merge(self.meta_info, other.meta_info, "meta_info"),
        )

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
            meta = _merge(meta, proto.meta_info, "meta_info")
        batch = {key: _concat_arrays(key, [p.batch[key] for p in protos]) for key in first.batch}
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
            column = _pick(self.non_tensor_batch, [by], "non_tensor_batch")[by]
            units = np.array([numbers.setdefault(v, len(numbers)) for v in column], np.int64)
        count = int(units.max(initial=-1)) + 1
        size = count if mini_batch_size is None else mini_batch_size
        if size < 1 and count:
            raise ValueError(f"mini_batch_size must be at least 1, got {size}")
        if by is None and count and count % size:
            raise ValueError(f"{count} rows do not divide into mini-batches of {size}")

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

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one file atomically, without pickle."""
        write_atomically(Path(path), self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "DataProto":
        """Reads a file of `save`; arrays are NumPy arrays with their original dtypes."""
        return cls.from_bytes(Path(path).read_bytes(), str(path))

    def to_bytes(self) -> bytes:
        """The contents of a file of `save`, for sending to another process."""
        return data_proto_file.encode(self.batch, self.non_tensor_batch, self.meta_info)

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "the message") -> "DataProto":
        """The inverse of `to_bytes`; errors refer to the data as `name`."""
        return cls.from_dict(*data_proto_file.decode(data, name))


def _is_numeric_array(value: Any) -> bool:
    return isinstance(value, jax.Array) or (
        isinstance(value, np.ndarray)
        and (value.dtype == bool or jax.dtypes.issubdtype(value.dtype, np.number))
    )


def _check_array(key: str, value: Any) -> None:
    if not _is_numeric_array(value):
        kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(
            f"batch[{key!r}] must be a NumPy or JAX array of numbers or bools, got {kind}; "
            "per-row Python values belong in non_tensor_batch"
        )
    if value.ndim == 0:
        raise ValueError(f"batch[{key!r}] is a scalar; it needs a leading row dimension")


def _object_column(key: str, values: Any) -> np.ndarray:
    if isinstance(values, np.ndarray) and values.dtype == object and values.ndim == 1:
        return values
    if isinstance(values, np.ndarray) and values.ndim > 0:
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise ValueError(
            f"non_tensor_batch[{key!r}] must be a list, tuple or array with one value per row, "
            f"got {type(values).__name__}"
        )
    column = np.empty(len(values), object)
    for row, value in enumerate(values):  # row by row: NumPy would unpack nested lists
        column[row] = value
    return column


def _pick(part: dict[str, Any], keys: Iterable[str] | None, name: str) -> dict[str, Any]:
    if keys is None:
        return dict(part)
    if isinstance(keys, str):
        raise ValueError(f"{name} keys must be a list of names, got the string {keys!r}")
    keys = list(keys)
    for key in keys:
        if key not in part:
            raise KeyError(f"no key {key!r} in {name}; there are {list(part)}")
    return {key: part[key] for key in keys}


def _merge(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> dict[str, Any]:
    for key in ours:
        if key in theirs and not _same(ours[key], theirs[key]):
            raise ValueError(
                f"{name}[{key!r}] differs between the two: "
                f"{_describe(ours[key])} and {_describe(theirs[key])}"
            )
    return ours | theirs


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray | jax.Array):
        return f"{value.dtype}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _same(a: Any, b: Any) -> bool:
    """Equal in type and content; NaN equals itself, and 1, 1.0 and True differ."""
    if a is b:
        return True
    if isinstance(a, np.ndarray | jax.Array) and isinstance(b, np.ndarray | jax.Array):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.dtype == object:
            return all(map(_same, a.ravel(), b.ravel()))
        return np.asarray(a).tobytes() == np.asarray(b).tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) or bool(a != a and b != b)


def _concat_arrays(key: str, arrays: Sequence[Array]) -> Array:
    kinds = {(str(array.dtype), array.shape[1:]) for array in arrays}
    if len(kinds) > 1:
        listed = ", ".join(f"{dtype}[rows, *{shape}]" for dtype, shape in sorted(kinds))
        raise ValueError(f"concat: batch[{key!r}] is not the same in all: {listed}")
    if any(isinstance(array, jax.Array) for array in arrays):
        return jnp.concatenate(arrays)
    return np.concatenate(arrays)


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
