"""What a published version is: a directory, and a manifest that says what must be in it.

A version directory is written beside its final name and renamed when all of it is on disk, so one
that is seen is whole. Its manifest gives every tensor's type and shape, the checksum of every byte
of every file, and the version that its delta goes on from, by number and by id: two runs may both
have a version 7, and a delta on the wrong one would make weights that nobody trained. The manifest
ends with a checksum of itself. Nothing here needs JAX: vLLM's workers read it too.
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
    """Weights that cannot be published, or must not be used; names the file."""


@dataclasses.dataclass(frozen=True)
class Identity:
    """Which weights: `number` is the learner's, `id` is unlike that of any other publication."""

    number: int
    id: str


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Type ("F32", "BF16", "F16") and shape of one tensor, as Hugging Face has it."""

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
    """A file's size, and the checksums of its header and of each entry."""

    nbytes: int
    header: str
    entries: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """`base` is what the delta goes on from; None where there is only a snapshot."""

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
    """Of bytes or of a contiguous array's bytes."""
    return hashlib.sha256(data).hexdigest()


def version_directory(root: Path, number: int) -> Path:
    return root / f"{number:08d}"


def published_versions(root: Path) -> list[int]:
    """Numbers of the versions below `root`, in order."""
    if not root.is_dir():
        return []
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdigit())


def read_manifest(root: Path, number: int) -> Manifest:
    """A version's manifest, checked against its own checksum."""
    path = version_directory(root, number) / MANIFEST
    try:
        record = json.loads(path.read_text())
        expected = record.pop("checksum")
        damaged = expected != checksum(_canonical(record))
    except FileNotFoundError:
        there = ", ".join(map(str, published_versions(root))) or "none"
        raise WeightsError(f"version {number} is not in {root}; there are: {there}") from None
    except (ValueError, KeyError, AttributeError):
        damaged = True
    if damaged:
        raise WeightsError(f"{path} is damaged: it does not match its checksum; publish it again")
    if record["format"] != _FORMAT:
        raise WeightsError(f"{path} has format {record['format']}; this program reads {_FORMAT}")
    if record["identity"]["number"] != number:
        raise WeightsError(f"{path} is of version {record['identity']['number']}")
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
