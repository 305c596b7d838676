"""Publishes the learner's parameters as version directories of deltas and snapshots.

A publisher keeps the last published version in a memory-mapped file, compares each tensor with it
as it arrives from the devices, and writes the changed elements, several tensors at a time. At
regular intervals, and if there is no version to compare with, it also writes a snapshot: a Hugging
Face directory from which a server can start. A lock prevents a second publisher from writing to the
same directory.
"""

import contextlib
import dataclasses
import errno
import logging
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from manus_jax.files import (
    CHECKSUMS,
    begin_directory,
    end_directory,
    lock_directory,
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
from manus_jax.weights.mirror import THREADS, Mirror, TensorStore, newest
from manus_jax.weights.tensor_file import Entry, TensorFileWriter

_log = logging.getLogger(__name__)
T = TypeVar("T")
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
      background: add snapshots to versions that have a delta after `publish` has returned.
    """

    def __init__(
        self,
        root: Path,
        card: ModelCard,
        *,
        snapshot_every: int = 20,
        scratch: Path | None = None,
        background: bool = False,
    ) -> None:
        if snapshot_every < 1:
            raise WeightsError(f"snapshot_every must be at least 1, got {snapshot_every}")
        self.root = Path(root)
        self._card = card
        self._sources = tensor_sources(card)
        self._specs = {name: source.spec for name, source in self._sources.items()}
        self._snapshot_every, self._background = snapshot_every, background
        self._thread = ThreadPoolExecutor(1, "snapshot")
        self._adding: Future[None] | None = None
        self._since_snapshot = 0
        self._started = False
        with disk_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock = lock_directory(self.root)
            remove_unfinished(self.root, MANIFEST)
        self._last = Mirror(scratch)

    def publish(self, params: Any, version: int) -> Published:
        """Publishes the parameters as version `version`, visible when all of it is on disk.

        Raises the error of the last snapshot if that could not be added.
        """
        self._await_snapshot()
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
        with disk_errors(self.root), contextlib.ExitStack() as on_failure:
            begin_directory(directory)
            on_failure.callback(remove_directory, directory, MANIFEST)
            directory.mkdir()
            published = self._write(params, Identity(version, uuid.uuid4().hex), base, directory)
            end_directory(directory)
            on_failure.pop_all()
        self._last.held = published.identity
        self._since_snapshot += 1
        if published.snapshot_bytes or self._adding is not None:
            self._since_snapshot = 0
        if self._adding is None:
            prune(self.root)
        return published

    def holds(self, params: Any, version: int) -> bool:
        """Whether these parameters are the published version `version`."""
        self._resume_from_disk(version + 1)
        self._started = True
        store = self._last.store
        return store is not None and all(
            np.array_equal(store.raw(name), host_bytes(params, source))
            for name, source in self._sources.items()
        )

    def close(self) -> None:
        try:
            self._await_snapshot()
        except WeightsError as error:  # the version itself is complete
            _log.warning("version without snapshot: %s", error)
        self._thread.shutdown()
        self._last.close()
        self._lock.close()

    def _await_snapshot(self) -> None:
        adding, self._adding = self._adding, None
        if adding is not None:
            adding.result()

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
        if base is None:
            self._last.store = TensorStore(self._specs, self._last.directory)
        store = self._last.store
        assert store is not None
        files: dict[str, FileRecord] = {}
        changed = 0
        with contextlib.ExitStack() as stack:
            file = None
            if base is not None:
                names = [n + end for n in self._specs for end in (delta.GAPS, delta.VALUES)]
                file = stack.enter_context(TensorFileWriter(directory / DELTA, names))

            def replace(name: str) -> tuple[int, list[Entry]]:
                raw = host_bytes(params, self._sources[name])
                changes: tuple[int, list[Entry]] = self._specs[name].elements, []
                if file is not None:
                    changes = self._changes(store, name, raw)
                store.raw(name)[:] = raw
                return changes

            for count, entries in _in_order(replace, self._specs):
                changed += count
                for entry in entries:
                    assert file is not None
                    file.add(entry)
            if file is not None:
                files[DELTA] = file.finish()
        manifest = Manifest(identity, base, self._specs, files)
        due = self._since_snapshot + 1 >= self._snapshot_every
        if base is None or (due and not self._background):
            manifest = self._write_snapshot(manifest, directory)
            write_checksums(directory / SNAPSHOT)
            due = False
        manifest.write(directory)
        sync_directory(self.root)
        if due:
            self._adding = self._thread.submit(self._add_snapshot, manifest, directory)
        return Published(
            identity,
            changed,
            sum(spec.elements for spec in self._specs.values()),
            files[DELTA].nbytes if DELTA in files else None,
            manifest.files[FULL].nbytes if manifest.has_snapshot else None,
        )

    def _write_snapshot(self, manifest: Manifest, directory: Path) -> Manifest:
        """Writes the last version as a Hugging Face directory, except for its checksums."""
        store = self._last.store
        assert store is not None
        (directory / SNAPSHOT).mkdir()
        self._card.copy_side_files(directory / SNAPSHOT)

        def entry(name: str) -> Entry:
            spec = self._specs[name]
            return Entry.of(name, spec.dtype, spec.shape, store.raw(name))

        with TensorFileWriter(directory / FULL, self._specs) as file:
            for made in _in_order(entry, self._specs):
                file.add(made)
            return dataclasses.replace(manifest, files={**manifest.files, FULL: file.finish()})

    def _add_snapshot(self, manifest: Manifest, directory: Path) -> None:
        """Adds a snapshot to a published version, while servers load its delta."""
        with disk_errors(self.root):
            # The manifest is replaced before the checksums exist, by which `prune` and servers that
            # start find a snapshot: what they find can also be read as a version.
            self._write_snapshot(manifest, directory).write(directory)
            write_checksums(directory / SNAPSHOT)
            prune(self.root)

    def _changes(self, store: TensorStore, name: str, raw: np.ndarray) -> tuple[int, list[Entry]]:
        """How many elements differ from those in the store, and the entries of the delta."""
        spec = self._specs[name]
        old, new = store.elements(name), delta.elements(raw, spec)
        changed = int(np.count_nonzero(old != new))
        sparse = None
        if changed and delta.least_bytes(changed, new) < spec.nbytes:
            sparse = delta.difference(old, new)
        if sparse is not None and sparse.nbytes < spec.nbytes:
            gaps, values = sparse.gaps, sparse.values
            return changed, [
                Entry.of(name + delta.GAPS, sparse.gap_type, gaps.shape, gaps),
                Entry.of(name + delta.VALUES, spec.dtype, values.shape, values),
            ]
        return changed, [Entry.of(name, spec.dtype, spec.shape, raw)] if changed else []


def _in_order(work: Callable[[str], T], names: Iterable[str]) -> Iterator[T]:
    """The results of `work` for each name, computed on several threads. At most one more than there
    are threads wait, so the host holds few tensors at a time."""
    with ThreadPoolExecutor(THREADS, "publish") as threads:
        waiting: deque[Future[T]] = deque()
        for name in names:
            waiting.append(threads.submit(work, name))
            if len(waiting) > THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def prune(root: Path) -> None:
    """Removes versions older than the second-newest snapshot, which no reader needs."""
    numbers = published_versions(root)
    snapshots = [n for n in numbers if (version_directory(root, n) / SNAPSHOT / CHECKSUMS).exists()]
    if len(snapshots) < _KEPT_SNAPSHOTS:
        return
    oldest = snapshots[-_KEPT_SNAPSHOTS]
    for number in numbers:
        if number < oldest:
            remove_directory(version_directory(root, number), MANIFEST)


@contextlib.contextmanager
def disk_errors(root: Path) -> Iterator[None]:
    """Converts errors in writing to `root` to WeightsError."""
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
