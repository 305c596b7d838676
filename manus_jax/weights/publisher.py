"""Publishes the learner's parameters as version directories of deltas and snapshots.

A publisher keeps the last published version in a memory-mapped file, compares each tensor with it
as it arrives from the devices, and writes the changed elements. At regular intervals, and if there
is no version to compare with, it also writes a snapshot: a Hugging Face directory from which a
server can start. Only one publisher may write to a directory at a time.
"""

import contextlib
import dataclasses
import errno
import shutil
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from manus_jax.files import (
    begin_directory,
    end_directory,
    remove_directory,
    remove_unfinished,
    sync_directory,
    write_checksums,
)
from manus_jax.models.huggingface import ModelCard
from manus_jax.weights import delta
from manus_jax.weights.host_tensors import host_bytes, tensor_sources
from manus_jax.weights.manifest import (
    DELTA,
    FULL,
    MANIFEST,
    SNAPSHOT,
    FileRecord,
    Identity,
    Manifest,
    WeightsError,
    published_versions,
    read_manifest,
    version_directory,
)
from manus_jax.weights.mirror import Mirror, TensorStore, newest
from manus_jax.weights.tensor_file import TensorFileWriter

_KEPT_SNAPSHOTS = 2


@dataclasses.dataclass(frozen=True)
class Published:
    """A publication: `changed` of `elements` weights differ; sizes of its files in bytes."""

    identity: Identity
    changed: int
    elements: int
    delta_bytes: int | None
    snapshot_bytes: int | None


class Publisher:
    """Publishes versions of one model in `root`, a directory shared with the servers.

    Args:
      root: the directory; created if it does not exist.
      card: the names and types of the tensors, and the other files of a snapshot.
      snapshot_every: versions per snapshot. The newest two snapshots and all versions since the
        older one are kept; older versions are removed.
      scratch: a directory on a local disk with space for a copy of the model.
    """

    def __init__(
        self, root: Path, card: ModelCard, *, snapshot_every: int = 20, scratch: Path | None = None
    ) -> None:
        if snapshot_every < 1:
            raise WeightsError(f"snapshot_every must be at least 1, got {snapshot_every}")
        self.root = Path(root)
        self._card = card
        self._sources = tensor_sources(card)
        self._specs = {name: source.spec for name, source in self._sources.items()}
        self._snapshot_every = snapshot_every
        self._since_snapshot = 0
        self._started = False
        with _disk_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            remove_unfinished(self.root, MANIFEST)
        self._last = Mirror(scratch)

    def publish(self, params: Any, version: int) -> Published:
        """Publishes the parameters as version `version`, visible when all of it is on disk."""
        if not self._started:
            self._resume_from_disk(version)
            self._started = True
        base = self._last.held
        if base is not None and version <= base.number:
            raise WeightsError(
                f"version {version} is not newer than {base.number}, the last published version"
            )
        directory = version_directory(self.root, version)
        if directory.exists():
            raise WeightsError(f"{directory} exists and is not a published version")
        # The copy of the last version is overwritten here: after a failure, publish a snapshot.
        self._last.held = None
        with _disk_errors(self.root), contextlib.ExitStack() as on_failure:
            begin_directory(directory)
            on_failure.callback(remove_directory, directory, MANIFEST)
            directory.mkdir()
            published = self._write(params, Identity(version, uuid.uuid4().hex), base, directory)
            end_directory(directory)
            on_failure.pop_all()
        self._last.held = published.identity
        self._since_snapshot = 0 if published.snapshot_bytes else self._since_snapshot + 1
        prune(self.root)
        return published

    def close(self) -> None:
        self._last.close()

    def _resume_from_disk(self, version: int) -> None:
        """Removes versions from `version` on and continues with deltas if that is possible."""
        for number in published_versions(self.root):
            if number >= version:
                remove_directory(version_directory(self.root, number), MANIFEST)
        found = newest(self.root)
        if found is None:
            return
        with contextlib.suppress(WeightsError):  # otherwise start with a snapshot
            self._last.advance(self.root, found.number)
            if self._last.store is None or self._last.store.specs != self._specs:
                self._last.held = None
            numbers = published_versions(self.root)
            whole = [n for n in numbers if read_manifest(self.root, n).has_snapshot]
            self._since_snapshot = sum(n > whole[-1] for n in numbers)

    def _write(
        self, params: Any, identity: Identity, base: Identity | None, directory: Path
    ) -> Published:
        snapshot = base is None or self._since_snapshot + 1 >= self._snapshot_every
        if base is None:
            self._last.store = TensorStore(self._specs, self._last.directory)
        store = self._last.store
        assert store is not None
        files: dict[str, FileRecord] = {}
        with contextlib.ExitStack() as stack:
            whole = moved = None
            if snapshot:
                (directory / SNAPSHOT).mkdir()
                self._card.copy_side_files(directory / SNAPSHOT)
                whole = stack.enter_context(TensorFileWriter(directory / FULL, self._specs))
            if base is not None:
                names = [n + end for n in self._specs for end in (delta.GAPS, delta.VALUES)]
                moved = stack.enter_context(TensorFileWriter(directory / DELTA, names))

            def put(name: str, raw: np.ndarray) -> int:
                spec = self._specs[name]
                if whole is not None:
                    whole.add(name, spec.dtype, spec.shape, raw)
                changed = spec.elements
                if moved is not None:
                    changed = self._add_changes(moved, store, name, raw)
                store.raw(name)[:] = raw
                return changed

            changed = self._each_tensor(params, put)
            if whole is not None:
                files[FULL] = whole.finish()
            if moved is not None:
                files[DELTA] = moved.finish()
        if snapshot:
            write_checksums(directory / SNAPSHOT)  # for those who load it as a model directory
        Manifest(identity, base, self._specs, files).write(directory)
        sync_directory(self.root)
        return Published(
            identity,
            changed,
            sum(spec.elements for spec in self._specs.values()),
            files[DELTA].nbytes if DELTA in files else None,
            files[FULL].nbytes if FULL in files else None,
        )

    def _each_tensor(self, params: Any, put: Callable[[str, np.ndarray], int]) -> int:
        """Calls `put` with every tensor and returns the sum of its results. While one tensor is
        written, the next is fetched from the devices, so the host holds two."""
        total = 0
        with ThreadPoolExecutor(1, "publish") as writer:
            before: Future[int] | None = None
            for name, source in self._sources.items():
                raw = host_bytes(params, source)
                total += before.result() if before is not None else 0
                before = writer.submit(put, name, raw)
            return total + (before.result() if before is not None else 0)

    def _add_changes(
        self, file: TensorFileWriter, store: TensorStore, name: str, raw: np.ndarray
    ) -> int:
        spec = self._specs[name]
        old, new = store.elements(name), delta.elements(raw, spec)
        changed = int(np.count_nonzero(old != new))
        sparse = None
        if changed and delta.least_bytes(changed, new) < spec.nbytes:
            sparse = delta.difference(old, new)
        if sparse is not None and sparse.nbytes < spec.nbytes:
            file.add(name + delta.GAPS, sparse.gap_type, sparse.gaps.shape, sparse.gaps)
            file.add(name + delta.VALUES, spec.dtype, sparse.values.shape, sparse.values)
        elif changed:
            file.add(name, spec.dtype, spec.shape, raw)
        return changed


def prune(root: Path) -> None:
    """Removes versions older than the second-newest snapshot, which no reader needs."""
    numbers = published_versions(root)
    snapshots = [n for n in numbers if version_directory(root, n).joinpath(FULL).exists()]
    if len(snapshots) < _KEPT_SNAPSHOTS:
        return
    oldest = snapshots[-_KEPT_SNAPSHOTS]
    for number in numbers:
        if number < oldest:
            remove_directory(version_directory(root, number), MANIFEST)


@contextlib.contextmanager
def _disk_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(root).free
            raise WeightsError(
                f"{root} is full ({free} bytes left), so nothing was published: free some space, "
                "or publish to another directory"
            ) from None
        raise WeightsError(f"cannot publish to {root}: {error}") from None
