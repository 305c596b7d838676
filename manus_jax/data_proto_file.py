"""The file format of a DataProto: an .npz archive with the arrays, and JSON for everything else.

Without pickle, reading a file never runs code. The archive's checksums detect damaged files.
"""

import base64
import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

FORMAT = "manus_jax.DataProto/1"


def encode(
    batch: Mapping[str, np.ndarray | jax.Array],
    non_tensor_batch: Mapping[str, np.ndarray],
    meta_info: dict[str, Any],
) -> bytes:
    arrays = {f"array_{i}": _storable(key, v) for i, (key, v) in enumerate(batch.items())}
    header = {
        "format": FORMAT,
        "batch": [[key, _dtype_name(value.dtype)] for key, value in batch.items()],
        "non_tensor_batch": {
            key: [_to_json(v, f"non_tensor_batch[{key!r}][{row}]") for row, v in enumerate(column)]
            for key, column in non_tensor_batch.items()
        },
        "meta_info": _to_json(meta_info, "meta_info"),
    }
    arrays["header"] = np.frombuffer(json.dumps(header).encode("ascii"), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def decode(
    data: bytes, name: str
) -> tuple[dict[str, np.ndarray], dict[str, list[Any]], dict[str, Any]]:
    """Returns `(batch, non_tensor_batch, meta_info)`; errors refer to the data as `name`."""
    file = io.BytesIO(data)
    try:
        if not zipfile.is_zipfile(file):
            raise ValueError("it is truncated, or of another format")
        archive = np.load(file, allow_pickle=False)
        header = json.loads(archive["header"].tobytes())
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']!r}, not {FORMAT!r}")
        batch = {
            key: archive[f"array_{i}"].view(np.dtype(dtype))
            for i, (key, dtype) in enumerate(header["batch"])
        }
        columns = {
            key: [_from_json(value) for value in column]
            for key, column in header["non_tensor_batch"].items()
        }
        return batch, columns, _from_json(header["meta_info"])
    except (zipfile.BadZipFile, ValueError, LookupError, TypeError, EOFError) as error:
        raise ValueError(f"{name} is not a readable DataProto file: {error}") from error


def _is_extension(dtype: np.dtype) -> bool:
    """bfloat16, float8 and the like: registered with NumPy but not supported by its file format."""
    return dtype.isbuiltin == 2


def _dtype_name(dtype: np.dtype) -> str:
    return dtype.name if _is_extension(dtype) else dtype.str


def _storable(key: str, value: np.ndarray | jax.Array) -> np.ndarray:
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        raise ValueError(f"cannot save batch[{key!r}] of {value.dtype}; save its key_data instead")
    array = np.ascontiguousarray(value)
    return array.view(f"u{array.dtype.itemsize}") if _is_extension(array.dtype) else array


def _to_json(value: Any, where: str) -> Any:
    """JSON, with one-key objects `{"$tag": …}` for types that JSON does not have."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_to_json(v, where) for v in value]
    if type(value) is tuple:
        return {"$tuple": [_to_json(v, where) for v in value]}
    if type(value) is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _to_json(v, where) for key, v in value.items()}
        return {"$dict": [[_to_json(k, where), _to_json(v, where)] for k, v in value.items()]}
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode("ascii")
        tag = "$array" if isinstance(value, np.ndarray) else "$scalar"
        return {tag: [_dtype_name(value.dtype), list(value.shape), data]}
    raise ValueError(
        f"cannot save {where}: it holds a {type(value).__name__}; save None, bools, numbers, "
        "strings, NumPy arrays, and lists, tuples and dicts of these"
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(v) for v in value]
    if not isinstance(value, dict):
        return value
    match next(iter(value.items()), None):
        case ("$tuple", items):
            return tuple(_from_json(v) for v in items)
        case ("$dict", pairs):
            return {_from_json(key): _from_json(v) for key, v in pairs}
        case ("$array" | "$scalar" as tag, (dtype, shape, data)):
            flat = np.frombuffer(base64.b64decode(data), np.dtype(dtype))
            array = flat.reshape(shape).copy()
            return array if tag == "$array" else array[()]
    return {key: _from_json(v) for key, v in value.items()}
