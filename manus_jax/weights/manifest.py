"""The format of a published version: a directory with a manifest that describes its files.

A version directory is written under a temporary name and renamed when it is complete on disk. The
manifest gives the type and shape of every tensor, checksums that cover every byte of every file,
and the version that the delta is based on, by number and by id: two runs may both have a version 7,
and a delta applied to the wrong one would produce weights that were never trained. The manifest
contains its own checksum. This module does not import JAX, because vLLM workers read it too.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manus_jax.engines.protocol import EngineError

MANIFEST = "manifest.json"
DELTA = "delta.safetensors"
SNAPSHOT = "full"  # a Hugging Face directory
FULL = f"{SNAPSHOT}/model.safetensors"
ITEM_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
_FORMAT = 1


class WeightsError(EngineError):
    """Weights cannot be published or must not be used; the message names the file."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """A set of weights: the learner's version `number`, and an `id` unique to the publication."""

    number: int
    id: str


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Type ("F32", "BF16", "F16") and shape of a tensor in Hugging Face layout."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * ITEM_SIZES[self.dtype]


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """The size of a file and the checksums of its header and entries."""

    nbytes: int
    header: str
    entries: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """`base` is the version that the delta applies to; None if there is only a snapshot."""

    identity: Identity
    base: Identity | None
    tensors: Mapping[str, TensorSpec]
    files: Mapping[str, FileRecord]

    @property
    def has_snapshot(self) -> bool:
        return FULL in self.files

    def write(self, directory: Path) -> None:
        record = {"format": _FORMAT, **dataclasses.asdict(self)}
        text = json.dumps({**record, "checksum": checksum(_canonical(record))}, indent=1) + "\n"
        with (directory / MANIFEST).open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


def checksum(data: Any) -> str:
    """SHA-256 of bytes or of a contiguous array."""
    return hashlib.sha256(data).hexdigest()


def version_directory(root: Path, number: int) -> Path:
    return root / f"{number:08d}"


def published_versions(root: Path) -> list[int]:
    """Version numbers in `root`, ascending."""
    if not root.is_dir():
        return []
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdigit())


def read_manifest(root: Path, number: int) -> Manifest:
    """Reads a manifest and verifies its checksum."""
    path = version_directory(root, number) / MANIFEST
    try:
        record = json.loads(path.read_text())
        expected = record.pop("checksum")
        damaged = expected != checksum(_canonical(record))
    except FileNotFoundError:
        found = ", ".join(map(str, published_versions(root))) or "none"
        raise WeightsError(f"version {number} is not in {root}; it has: {found}") from None
    except (ValueError, KeyError, AttributeError):
        damaged = True
    if damaged:
        raise WeightsError(f"{path} is damaged: it does not match its checksum; publish it again")
    if record["format"] != _FORMAT:
        raise WeightsError(f"{path} has format {record['format']}, expected {_FORMAT}")
    if record["identity"]["number"] != number:
        raise WeightsError(f"{path} describes version {record['identity']['number']}")
    base = record["base"]
    return Manifest(
        identity=Identity(**record["identity"]),
        base=None if base is None else Identity(**base),
        tensors={
            name: TensorSpec(spec["dtype"], tuple(spec["shape"]))
            for name, spec in record["tensors"].items()
        },
        files={name: FileRecord(**fields) for name, fields in record["files"].items()},
    )


def _canonical(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()
