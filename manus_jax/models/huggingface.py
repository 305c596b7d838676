"""Hugging Face directories, read directly into sharded arrays and written back bit for bit.

Each parameter is either one Hugging Face tensor or the stack of one tensor per layer, in the same
layout. Loading therefore reads only each device's slice, and saving slices the layers; both handle
one tensor at a time. Everything in a directory except the weights (config, tokenizer, generation
settings, the type and file of each tensor) is kept in a `ModelCard`.
"""

import contextlib
import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from manus_jax.files import (
    CHECKSUMS,
    DamagedError,
    begin_directory,
    end_directory,
    is_plain_name,
    is_unfinished,
    verify_checksums,
    write_atomically,
    write_checksums,
)
from manus_jax.models.architecture import (
    Architecture,
    ModelError,
    check_format,
    from_hf_config,
    read_hf_config,
    read_json_object,
    to_hf_config,
)
from manus_jax.models.disk_params import DiskArray, Index, aligned_empty, host_tensor
from manus_jax.models.families import FAMILIES
from manus_jax.models.transformer import Params

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_CARD_FILE = "weights.json"
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_FILE_ORDER = ("F32", "BF16", "F16")
_TYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class ModelCard:
    """Everything about a model except its weights.

    `config` is the content of `config.json`, and `side_files` is the directory with the other files
    (tokenizer, generation settings). `tensor_types` ("F32", "BF16", …) and `tensor_files` give the
    type and the file of each tensor by its Hugging Face name.
    """

    config: dict[str, Any]
    side_files: Path | None = None
    tensor_types: dict[str, str] = dataclasses.field(default_factory=dict)
    tensor_files: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def architecture(self) -> Architecture:
        return from_hf_config(self.config)

    def save(self, directory: Path) -> None:
        """Writes the card as a model directory without weights, which `load` reads."""
        directory.mkdir(parents=True, exist_ok=True)
        self.copy_side_files(directory)
        weights = {"types": self.tensor_types, "files": self.tensor_files}
        _write_json(directory / _CARD_FILE, weights)
        write_checksums(directory)

    @classmethod
    def load(cls, directory: Path) -> "ModelCard":
        path = directory / _CARD_FILE
        if not path.is_file():
            raise ModelError(f"{directory} contains no model card ({_CARD_FILE} is missing)")
        verify_model(directory)
        config, weights = read_hf_config(directory), read_json_object(path)
        types, files = weights.get("types"), weights.get("files")
        if not isinstance(types, dict) or not isinstance(files, dict):
            raise ModelError(f"{path} has no types or no files of tensors")
        arch = from_hf_config(config, str(directory / "config.json"))
        known = types.keys() & files.keys()
        if arch.num_layers > len(known) or any(n not in known for n, *_ in tensor_map(arch)):
            raise ModelError(f"{path} does not describe the tensors of the model in config.json")
        if any(kind not in list(_DTYPES) for kind in types.values()):
            raise ModelError(f"{path} has a tensor whose type is not one of {', '.join(_DTYPES)}")
        _check_weight_files(files.values(), path)
        return cls(config, directory, types, files)

    def copy_side_files(self, directory: Path) -> None:
        """Copies all files except weights; writes `config.json` if there is none to copy."""
        if self.side_files is not None and self.side_files.resolve() != directory.resolve():
            for path in sorted(self.side_files.iterdir()):
                if path.is_file() and not _is_weight_file(path.name):
                    _check_link(path)
                    write_atomically(directory / path.name, path.read_bytes())
        if not (directory / "config.json").exists():
            _write_json(directory / "config.json", self.config)


def _is_weight_file(name: str) -> bool:
    weights = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth")
    return name.endswith((*weights, ".gguf", ".h5", ".msgpack", ".onnx")) or name in (
        _CARD_FILE,
        CHECKSUMS,
    )


def _check_link(path: Path) -> None:
    """Raises ModelError if a file is a link to another place than a Hugging Face cache's blobs."""
    target = path.resolve()
    directory = path.parent.resolve()
    if target.parent not in (directory, directory.parent.parent / "blobs"):
        raise ModelError(
            f"{path} is a link to {target}, outside its directory: replace it with the file"
        )


def _check_weight_files(names: Iterable[Any], source: Path) -> None:
    """Raises ModelError if `source` names a file that is not in its own directory."""
    for name in names:
        if not is_plain_name(name) or not name.endswith(".safetensors"):
            raise ModelError(
                f"{source} names {name!r}, which is not the name of a safetensors file beside it"
            )


def verify_model(directory: Path) -> None:
    """Raises ModelError if a directory written here has changed or is unfinished; others have no
    checksums."""
    if is_unfinished(directory, CHECKSUMS):
        raise ModelError(
            f"{directory} is unfinished: it is being written, or its writer was killed"
        )
    if (directory / CHECKSUMS).exists():
        try:
            verify_checksums(directory)
        except DamagedError as error:
            raise ModelError(
                f"{error}; if the change is intended, remove {directory / CHECKSUMS}"
            ) from None


def is_complete(directory: Path) -> bool:
    """Whether a model was written to the directory; ModelError if it has changed since."""
    if is_unfinished(directory, CHECKSUMS) or not directory.exists():
        return False
    if not any(directory.iterdir()):
        return False
    verify_model(directory)
    return True


def new_card(arch: Architecture, side_files: Path | None, dtype: str = "float32") -> ModelCard:
    """The card of a model that is initialised here."""
    code = {v: k for k, v in _TYPE_NAMES.items()}[dtype]
    types = {name: code for name, *_ in tensor_map(arch)}
    return ModelCard(
        to_hf_config(arch, dtype), side_files, types, dict.fromkeys(types, SINGLE_FILE)
    )


def tensor_map(arch: Architecture) -> Iterator[tuple[str, tuple[str, ...], Index, tuple]]:
    """Yields (Hugging Face name, parameter path, part of the parameter, shape)."""
    d, names = arch.hidden_size, FAMILIES[arch.family].layer_names
    yield "model.embed_tokens.weight", ("backbone", "embed"), (), (arch.vocab_size, d)
    for name, shape in arch.layer_shapes.items():
        path = ("backbone", "layers", name)
        for layer in range(arch.num_layers):
            whole = f"model.layers.{layer}.{names[name]}"
            if "{}" not in names[name]:
                yield whole, path, (layer,), shape
                continue
            for expert in range(arch.num_experts):
                yield whole.format(expert), path, (layer, expert), shape[1:]
    yield "model.norm.weight", ("backbone", "norm"), (), (d,)
    if not arch.tie_embeddings:
        yield _HEAD, ("lm_head",), (), (arch.vocab_size, d)


class _Reader:
    """The tensors of a model directory, read in slices.

    The library maps files into memory. A file is mapped anew for every tensor, because the pages of
    all tensors read so far would otherwise stay in memory.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.files: dict[str, str] = {}
        self.types: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in self._weight_files():
            try:
                with safe_open(directory / file, framework="numpy") as handle:
                    for name in handle.keys():  # noqa: SIM118 (a safetensors handle is not a dict)
                        view = handle.get_slice(name)
                        self.files[name] = file
                        self.types[name], self._shapes[name] = view.get_dtype(), view.get_shape()
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{directory / file} cannot be read as safetensors ({error}); "
                    "it may be truncated: copy or download it again"
                ) from None

    def _weight_files(self) -> list[str]:
        index = self.directory / INDEX_FILE
        if index.is_file():
            weight_map = read_json_object(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ModelError(f"{index} has no weight_map")
            _check_weight_files(weight_map.values(), index)
            files = sorted(set(weight_map.values()))
            missing = [f for f in files if not (self.directory / f).is_file()]
            if missing:
                raise ModelError(f"{index} lists {missing[0]}, which is not in {self.directory}")
            return files
        if (self.directory / SINGLE_FILE).is_file():
            return [SINGLE_FILE]
        raise ModelError(
            f"{self.directory} contains no weights: neither {SINGLE_FILE} nor {INDEX_FILE} exists"
        )

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._shapes[name])

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        with safe_open(self.directory / self.files[name], framework="numpy") as handle:
            tensor = handle.get_slice(name)[index] if index else handle.get_tensor(name)
        return _finite(tensor, name)


def read_card(directory: Path) -> ModelCard:
    """Reads a directory's card and checks the names, types and shapes of its tensors."""
    return _read_card(directory)[0]


def _read_card(directory: Path) -> tuple[ModelCard, _Reader]:
    directory = Path(directory)
    check_format(directory)
    config = read_hf_config(directory)
    arch = from_hf_config(config, str(directory / "config.json"))
    reader = _Reader(directory)
    if arch.num_layers > len(reader.files):
        raise ModelError(
            f"{directory}: config.json says {arch.num_layers} layers, but there are only "
            f"{len(reader.files)} tensors"
        )
    expected = {name: shape for name, _, _, shape in tensor_map(arch)}
    missing = [name for name in expected if name not in reader.files]
    if missing:
        raise ModelError(f"{directory}: {len(missing)} tensors are missing, first {missing[0]}")
    ignored = {_HEAD} if arch.tie_embeddings else set()
    unknown = [n for n in reader.files if n not in expected and n not in ignored]
    if unknown:
        raise ModelError(f"{directory}: {arch.family} has no tensor {unknown[0]}")
    for name, shape in expected.items():
        if reader.shape(name) != shape:
            raise ModelError(
                f"{directory}: tensor {name} has shape {reader.shape(name)}, "
                f"config.json says {shape}"
            )
        if reader.types[name] not in _DTYPES:
            raise ModelError(
                f"{directory}: tensor {name} has type {reader.types[name]}, which is not supported"
            )
    return ModelCard(config, directory, reader.types, reader.files), reader


def load_params(
    directory: Path, shardings: Any = None, dtype: str = "float32"
) -> tuple[Params, ModelCard]:
    """Loads parameters in `dtype`; each device's slices are read separately.

    `shardings` is a tree like the parameters; None places everything on the default device.
    """
    card, reader = _read_card(Path(directory))
    params: Params = {}
    for path, (names, shape) in _stacks(card.architecture).items():
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        if shardings is not None:
            sharding = _get(shardings, path)
        read = functools.partial(_read_slice, reader, names, shape, dtype=dtype)
        array = jax.make_array_from_callback(shape, sharding, read)
        # Wait before reading the next: pending transfers would keep several host copies alive.
        _set(params, path, jax.block_until_ready(array))
    return params, card


def open_params(directory: Path) -> tuple[Params, ModelCard]:
    """The parameters as `DiskArray`s, in the types of the files."""
    card, reader = _read_card(Path(directory))
    params: Params = {}
    for path, (names, shape) in _stacks(card.architecture).items():
        _set(params, path, DiskArray(shape, functools.partial(_read_part, reader, names, shape)))
    return params, card


def check_finite(directory: Path) -> None:
    """Reads all tensors; raises ModelError if a value is not a finite number."""
    card, reader = _read_card(Path(directory))
    for name, *_ in tensor_map(card.architecture):
        reader.read(name)


def _stacks(arch: Architecture) -> dict[tuple[str, ...], tuple[np.ndarray, tuple[int, ...]]]:
    """For each parameter, the names of the tensors in it, by layer and expert, and its shape."""
    members: dict[tuple[str, ...], list[tuple[str, Index, tuple]]] = {}
    for name, path, index, shape in tensor_map(arch):
        members.setdefault(path, []).append((name, index, shape))
    stacks = {}
    for path, found in members.items():
        leading = tuple(i + 1 for i in found[-1][1])
        names = np.array([name for name, *_ in found], dtype=object).reshape(leading)
        stacks[path] = names, (*leading, *found[-1][2])
    return stacks


def _read_part(
    reader: _Reader, names: np.ndarray, shape: tuple[int, ...], index: Index
) -> np.ndarray:
    """A part of a parameter; a single tensor has the type of the file."""
    if len(index) == names.ndim:
        return reader.read(names[index])
    inside = (slice(None),) * (len(shape) - len(index))
    return _read_slice(reader, names[index], shape[len(index) :], inside)


def _read_slice(
    reader: _Reader,
    names: np.ndarray,
    shape: tuple[int, ...],
    index: tuple[slice, ...],
    dtype: str = "float32",
) -> np.ndarray:
    """A slice of a parameter in `dtype`."""
    sizes = tuple(len(range(*i.indices(size))) for i, size in zip(index, shape, strict=True))
    out = aligned_empty(sizes, jax.numpy.dtype(dtype))
    chosen = np.asarray(names[index[: names.ndim]], dtype=object)
    for where in np.ndindex(chosen.shape):
        out[where] = reader.read(str(chosen[where]), index[names.ndim :])
    return out


def _finite(tensor: np.ndarray, name: str) -> np.ndarray:
    # A sum is not finite if a term is not, and needs no copy; it may also overflow.
    if not np.isfinite(tensor.sum(dtype=np.float32)) and not np.isfinite(tensor).all():
        raise ModelError(f"tensor {name} contains values that are not finite numbers")
    return tensor


def save_hf(params: Params, card: ModelCard, directory: Path) -> None:
    """Writes a Hugging Face directory, which is complete when its checksums exist."""
    directory = Path(directory)
    check_new(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    if is_unfinished(directory, CHECKSUMS):
        shutil.rmtree(directory, ignore_errors=True)
    begin_directory(directory)
    directory.mkdir(exist_ok=True)
    card.copy_side_files(directory)
    _write_weights(params, card, directory)
    write_checksums(directory)
    end_directory(directory)


def check_new(directory: Path) -> None:
    """Raises ModelError unless `directory` does not exist, is empty or is unfinished."""
    if is_unfinished(directory, CHECKSUMS):
        return
    if directory.exists() and not directory.is_dir():
        raise ModelError(f"{directory} exists and is not a directory; choose another one")
    if directory.exists() and any(directory.iterdir()):
        raise ModelError(f"{directory} exists and is not empty; choose another directory")


def _write_weights(params: Params, card: ModelCard, directory: Path) -> None:
    """Writes every tensor to its place in its file, so that host memory holds one tensor."""
    sources = {name: (path, index) for name, path, index, _ in tensor_map(card.architecture)}
    shapes = {name: tuple(shape) for name, _, _, shape in tensor_map(card.architecture)}
    if card.architecture.tie_embeddings and _HEAD in card.tensor_files:
        sources[_HEAD], shapes[_HEAD] = (("backbone", "embed"), ()), next(iter(shapes.values()))
    members: dict[str, list[str]] = {}
    for name in sources:
        members.setdefault(card.tensor_files[name], []).append(name)
    total = 0
    with contextlib.ExitStack() as stack:
        files = {file: stack.enter_context((directory / file).open("wb")) for file in members}
        places: dict[str, int] = {}
        for file, names in members.items():
            header, offsets = _header(names, card.tensor_types, shapes)
            files[file].write(header)
            places |= {name: len(header) + offset for name, offset in offsets.items()}
        for name, (path, index) in sources.items():
            dtype = _DTYPES[card.tensor_types[name]]
            tensor = _finite(host_tensor(_get(params, path), index, dtype), name)
            target = files[card.tensor_files[name]]
            target.seek(places[name])
            target.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
            total += tensor.nbytes
    if list(members) != [SINGLE_FILE]:
        listed = {"metadata": {"total_size": total}, "weight_map": card.tensor_files}
        _write_json(directory / INDEX_FILE, listed)


def _header(
    names: list[str], types: dict[str, str], shapes: dict[str, tuple[int, ...]]
) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file, and where each tensor begins after it.

    The order is that of the safetensors library: wider types first, then by name.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name in sorted(names, key=lambda name: (_FILE_ORDER.index(types[name]), name)):
        offsets[name] = end
        end += math.prod(shapes[name]) * np.dtype(_DTYPES[types[name]]).itemsize
        entries[name] = {
            "dtype": types[name],
            "shape": list(shapes[name]),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text, offsets


def _get(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _set(tree: Params, path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _write_json(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
