"""The format of a published version: a directory with a manifest that describes its files.

The manifest is written last, when all other files are on disk: a version without one is ignored. It
gives the type and shape of every tensor, checksums that cover every byte of every file,
and the version that the delta is based on, by number and by id: two runs may both have a version 7,
and a delta applied to the wrong one would produce weights that were never trained. The manifest
contains its own checksum. This module does not import JAX, because vLLM workers read it too.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manus_jax.engines.protocol import EngineError
from manus_jax.files import read_text, write_atomically

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


def label_of(identity: Identity) -> str:
    """The name of a version on the servers."""
    return f"{identity.number}-{identity.id}"


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
        write_atomically(directory / MANIFEST, _with_checksum(record))


def checksum(data: Any) -> str:
    """SHA-256 of bytes or of a contiguous array."""
    return hashlib.sha256(data).hexdigest()


def version_directory(root: Path, number: int) -> Path:
    return root / f"{number:08d}"


def published_versions(root: Path) -> list[int]:
    """Numbers of the complete versions in `root`, ascending."""
    names = (path.parent.name for path in root.glob(f"*/{MANIFEST}"))
    return sorted(int(name) for name in names if name.isdecimal() and name == f"{int(name):08d}")


def read_manifest(root: Path, number: int) -> Manifest:
    """Reads a manifest and verifies its checksum."""
    path = version_directory(root, number) / MANIFEST
    try:
        text = read_text(path)
        record = json.loads(text)
        del record["checksum"]
        damaged = text != _with_checksum(record)
    except FileNotFoundError:
        found = ", ".join(map(str, published_versions(root))) or "none"
        raise WeightsError(f"version {number} is not in {root}; it has: {found}") from None
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
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


def _with_checksum(record: Mapping[str, Any]) -> str:
    """The text of a manifest; a reader writes it again and compares."""
    canonical = json.dumps(record, sort_keys=True)
    return json.dumps({**record, "checksum": checksum(canonical.encode())}, sort_keys=True) + "\n"
