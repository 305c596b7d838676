"""A local copy of the published weights, updated from version to version with deltas.

vLLM workers and restarted publishers keep a mirror: all tensors in one memory-mapped local file.
An update first reads and verifies everything, on several threads, and only then modifies the copy,
so a damaged file, a missing base or a version pruned while it is read leaves the mirror unchanged.
"""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from manus_jax.weights import delta
from manus_jax.weights.manifest import (
    DELTA,
    FULL,
    Identity,
    Manifest,
    TensorSpec,
    WeightsError,
    published_versions,
    read_manifest,
    version_directory,
)
from manus_jax.weights.tensor_file import TensorFileReader

THREADS = min(8, os.cpu_count() or 1)


class TensorStore:
    """Tensors by name in one memory-mapped file: `path`, or one in `directory` without a name. The
    latter disappears with the process, even if that is killed."""

    def __init__(
        self, specs: Mapping[str, TensorSpec], directory: Path, path: Path | None = None
    ) -> None:
        self.specs = dict(specs)
        self._offsets: dict[str, int] = {}
        total = 0
        for name, spec in self.specs.items():
            self._offsets[name] = total
            total += -(-spec.nbytes // 8) * 8
        total = max(1, total)
        try:
            with (
                tempfile.TemporaryFile(prefix="weights-", dir=directory)
                if path is None
                else os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
            ) as file:
                # Reserving blocks now avoids a crash on a full disk when a mapped page is written.
                os.posix_fallocate(file.fileno(), 0, total)
                self._raw = np.memmap(file, np.uint8, "r+", shape=(total,))
        except OSError as error:
            raise WeightsError(
                f"no room for {total} bytes of weights in {directory} ({error.strerror})"
            ) from None

    def raw(self, name: str) -> np.ndarray:
        """A view of a tensor's bytes, `[bytes]`."""
        start = self._offsets[name]
        return self._raw[start : start + self.specs[name].nbytes]

    def elements(self, name: str) -> np.ndarray:
        """A view of a tensor as unsigned integers, `[elements]`."""
        return delta.elements(self.raw(name), self.specs[name])


@dataclasses.dataclass(frozen=True)
class Changes:
    """A verified delta in memory: complete tensors, and positions with values."""

    whole: Mapping[str, np.ndarray]
    sparse: Mapping[str, tuple[np.ndarray, np.ndarray]]

    def apply(self, store: TensorStore) -> frozenset[str]:
        for name, raw in self.whole.items():
            store.raw(name)[:] = raw
        for name, (positions, values) in self.sparse.items():
            store.elements(name)[positions] = values
        return frozenset((*self.whole, *self.sparse))


class Mirror:
    """A copy of one version in the directory `scratch` (default: the system's temporary directory).
    Not thread-safe."""

    def __init__(self, scratch: Path | None = None) -> None:
        if scratch is not None:
            scratch.mkdir(parents=True, exist_ok=True)
        self.directory = scratch or Path(tempfile.gettempdir())
        self.held: Identity | None = None
        self.store: TensorStore | None = None

    def advance(self, root: Path, number: int) -> frozenset[str]:
        """Updates to a version in `root` and returns the names of the changed tensors.

        If the version cannot be read completely, raises WeightsError and changes nothing.
        """
        snapshot, deltas = plan(root, self.held, number)
        if snapshot is None and not deltas:
            return frozenset()
        store = self.store if snapshot is None else self._load(root, snapshot)
        assert store is not None
        changes = [_read_delta(root, manifest, store) for manifest in deltas]
        changed = self._apply(changes, store)
        self.store = store
        self.held = (deltas[-1] if deltas else snapshot).identity  # type: ignore[union-attr]
        return changed if snapshot is None else frozenset(store.specs)

    def close(self) -> None:
        self.held = self.store = None

    def _load(self, root: Path, manifest: Manifest) -> TensorStore:
        store = self._new_store(manifest.tensors)
        path = version_directory(root, manifest.identity.number) / FULL
        with TensorFileReader(path, manifest.files[FULL]) as file:
            _for_each(lambda name: file.read_into(name, store.raw(name)), manifest.tensors)
        return store

    def _new_store(self, specs: Mapping[str, TensorSpec]) -> TensorStore:
        return TensorStore(specs, self.directory)

    def _apply(self, changes: Sequence[Changes], store: TensorStore) -> frozenset[str]:
        return frozenset[str]().union(*(change.apply(store) for change in changes))


def plan(
    root: Path, held: Identity | None, number: int
) -> tuple[Manifest | None, tuple[Manifest, ...]]:
    """The snapshot to start from (None: the version held) and the deltas that lead to a version.

    Of the possible paths, the one that reads the fewest bytes.
    """
    deltas: list[Manifest] = []
    ways: list[tuple[int, Manifest | None, tuple[Manifest, ...]]] = []
    moved, missing = 0, None
    target = read_manifest(root, number)
    manifest = target
    while True:
        if held == manifest.identity:
            ways.append((moved, None, tuple(reversed(deltas))))
            break
        if manifest.has_snapshot:
            total = moved + manifest.files[FULL].nbytes
            ways.append((total, manifest, tuple(reversed(deltas))))
            if held is None:
                break
        if manifest.base is None:
            break
        deltas.append(manifest)
        moved += manifest.files[DELTA].nbytes
        base = manifest.base
        try:
            manifest = read_manifest(root, base.number)
        except WeightsError as error:
            if held == base:  # pruned, but held here
                ways.append((moved, None, tuple(reversed(deltas))))
            missing = error
            break
        if manifest.identity != base:
            missing = WeightsError(
                f"version {base.number} in {root} is not the base of version "
                f"{deltas[-1].identity.number}: another run has published there"
            )
            break
    if not ways:
        raise missing or WeightsError(f"{root} has no snapshot at or before version {number}")
    _, snapshot, chain = min(ways, key=lambda way: way[0])
    return snapshot, chain


def _for_each(work: Callable[[str], None], names: Iterable[str]) -> None:
    """Calls `work` with all names, each thread with its share of them."""
    listed = list(names)

    def share(first: int) -> None:
        for name in listed[first::THREADS]:
            work(name)

    with ThreadPoolExecutor(THREADS, "weights") as threads:
        list(threads.map(share, range(THREADS)))


def _read_delta(root: Path, manifest: Manifest, store: TensorStore) -> Changes:
    if manifest.tensors != store.specs:
        raise WeightsError(
            f"version {manifest.identity.number} in {root} has different tensors than its base"
        )
    path = version_directory(root, manifest.identity.number) / DELTA
    whole: dict[str, np.ndarray] = {}
    sparse: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    with TensorFileReader(path, manifest.files[DELTA]) as file:

        def read(name: str) -> None:
            spec = manifest.tensors[name]
            if name in file:
                whole[name] = file.read(name)
            elif name + delta.GAPS in file:
                kind = file.dtype(name + delta.GAPS)
                gaps = delta.read_gaps(file.read(name + delta.GAPS), kind)
                values = delta.elements(file.read(name + delta.VALUES), spec)
                positions = delta.positions_of(delta.Sparse(gaps, values), spec, name)
                sparse[name] = (positions, values)

        _for_each(read, manifest.tensors)
    return Changes(whole, sparse)


def newest(root: Path) -> Identity | None:
    """The newest readable version in `root`."""
    for number in reversed(published_versions(root)):
        with contextlib.suppress(WeightsError):
            return read_manifest(root, number).identity
    return None
