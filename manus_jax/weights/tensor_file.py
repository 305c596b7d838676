"""Safetensors files, written and read one tensor at a time, with checksums for every byte.

The safetensors library writes all tensors of a file at once, but a learner's host should never hold
a complete model. The writer therefore reserves space for the header, appends tensors as they
arrive, and writes the header last, padded with the spaces that the format allows.
"""

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from manus_jax.weights.manifest import FileRecord, WeightsError, checksum

_LENGTH_BYTES = 8
_ENTRY_ROOM = 160  # bytes of JSON for a type, a shape of five numbers and two offsets
_METADATA = {"format": "pt"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor for a file: a contiguous array and the checksum of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray
    checksum: str

    @classmethod
    def of(cls, name: str, dtype: str, shape: tuple[int, ...], data: np.ndarray) -> "Entry":
        return cls(name, dtype, shape, data, checksum(data.reshape(-1).view(np.uint8)))


class TensorFileWriter:
    """Writes a safetensors file; `names` are the entries that may be added."""

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        room = sum(len(json.dumps(name)) + _ENTRY_ROOM for name in names) + _ENTRY_ROOM
        self._header_bytes = -(-room // 8) * 8
        self._entries: dict[str, Any] = {"__metadata__": _METADATA}
        self._checksums: dict[str, str] = {}
        self._offset = 0
        self._file = path.open("wb")
        self._file.seek(_LENGTH_BYTES + self._header_bytes)

    def add(self, entry: Entry) -> None:
        raw = entry.data.reshape(-1).view(np.uint8)
        self._file.write(raw.data)
        self._entries[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [self._offset, self._offset + raw.nbytes],
        }
        self._checksums[entry.name] = entry.checksum
        self._offset += raw.nbytes

    def finish(self) -> FileRecord:
        """Writes the header and syncs the file to disk."""
        text = json.dumps(self._entries, separators=(",", ":")).encode()
        header = self._header_bytes.to_bytes(_LENGTH_BYTES, "little")
        header += text.ljust(self._header_bytes)
        self._file.seek(0)
        self._file.write(header)
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileRecord(len(header) + self._offset, checksum(header), self._checksums)

    def __enter__(self) -> "TensorFileWriter":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._file.close()
        except OSError:
            if error is None:  # otherwise `error` already reports the failed write
                raise


class TensorFileReader:
    """Reads a safetensors file and verifies it against its record."""

    def __init__(self, path: Path, record: FileRecord) -> None:
        self._path = path
        self._record = record
        try:
            self._file = path.open("rb")
        except FileNotFoundError:
            raise WeightsError(f"{path} is missing; it may have been pruned") from None
        try:
            self._entries, self._start = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> tuple[dict[str, Any], int]:
        size = os.fstat(self._file.fileno()).st_size
        if size != self._record.nbytes:
            raise WeightsError(
                f"{self._path} has {size} bytes, but its manifest says {self._record.nbytes}: "
                "it was truncated or replaced; publish the version again"
            )
        length = self._file.read(_LENGTH_BYTES)
        text = self._file.read(min(int.from_bytes(length, "little"), size))
        if checksum(length + text) != self._record.header:
            raise self._damaged("header")
        return json.loads(text), len(length) + len(text)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def dtype(self, name: str) -> str:
        return self._entries[name]["dtype"]

    def read(self, name: str) -> np.ndarray:
        """The bytes of an entry, `[bytes]`, with its checksum verified."""
        begin, end = self._span(name)
        raw = np.empty(end - begin, np.uint8)
        self.read_into(name, raw)
        return raw

    def read_into(self, name: str, raw: np.ndarray) -> None:
        """Like `read`, into an array. Threads may read at the same time."""
        begin, end = self._span(name)
        got = 0
        while got < raw.nbytes:  # one call reads at most 2 GiB
            count = os.preadv(self._file.fileno(), [raw.data[got:]], self._start + begin + got)
            if count == 0:
                break
            got += count
        if got != end - begin or checksum(raw) != self._record.entries.get(name):
            raise self._damaged(name)

    def _span(self, name: str) -> tuple[int, int]:
        if name not in self._entries:
            raise WeightsError(f"{self._path} has no {name}")
        begin, end = self._entries[name]["data_offsets"]
        return begin, end

    def _damaged(self, what: str) -> WeightsError:
        return WeightsError(
            f"{self._path} is damaged: its {what} does not match its checksum; "
            "publish the version again"
        )

    def __enter__(self) -> "TensorFileReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
