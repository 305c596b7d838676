"""The columns of a DataProto: validation, comparison and concatenation.

The message of every failed check names the key and the sizes.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = np.ndarray | jax.Array


def is_numeric_array(value: Any) -> bool:
    return isinstance(value, jax.Array) or (
        isinstance(value, np.ndarray)
        and (value.dtype == bool or jax.dtypes.issubdtype(value.dtype, np.number))
    )


def check_array(key: str, value: Any) -> None:
    if not is_numeric_array(value):
        kind = f"array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(
            f"batch[{key!r}] must be a NumPy or JAX array of numbers or bools, got {kind}; "
            "per-row Python values belong in non_tensor_batch"
        )
    if value.ndim == 0:
        raise ValueError(f"batch[{key!r}] is a scalar; it needs a leading row dimension")


def object_column(key: str, values: Any) -> np.ndarray:
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


def pick(part: dict[str, Any], keys: Iterable[str] | None, name: str) -> dict[str, Any]:
    if keys is None:
        return dict(part)
    if isinstance(keys, str):
        raise ValueError(f"{name} keys must be a list of names, got the string {keys!r}")
    keys = list(keys)
    for key in keys:
        if key not in part:
            raise KeyError(f"no key {key!r} in {name}; there are {list(part)}")
    return {key: part[key] for key in keys}


def merge(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> dict[str, Any]:
    for key in ours:
        if key in theirs and not same(ours[key], theirs[key]):
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


def same(a: Any, b: Any) -> bool:
    """Equal in type and content; NaN equals itself, and 1, 1.0 and True differ."""
    if a is b:
        return True
    if isinstance(a, np.ndarray | jax.Array) and isinstance(b, np.ndarray | jax.Array):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.dtype == object:
            return all(map(same, a.ravel(), b.ravel()))
        return np.asarray(a).tobytes() == np.asarray(b).tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or bool(a != a and b != b)


def concat_arrays(key: str, arrays: Sequence[Array]) -> Array:
    kinds = {(str(array.dtype), array.shape[1:]) for array in arrays}
    if len(kinds) > 1:
        listed = ", ".join(f"{dtype}[rows, *{shape}]" for dtype, shape in sorted(kinds))
        raise ValueError(f"concat: batch[{key!r}] is not the same in all: {listed}")
    if any(isinstance(array, jax.Array) for array in arrays):
        return jnp.concatenate(arrays)
    return np.concatenate(arrays)
