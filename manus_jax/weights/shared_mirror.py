"""One mirror of the published weights for all vLLM workers of a machine.

The copy is a file in the temporary directory of the machine, mapped by every worker. One worker
brings it to a new version under an exclusive lock, and the others find it there; they read it under
a shared lock. `state.json` says which version the file contains. It is absent while the file is
modified, so if a worker is killed meanwhile, the next one starts from a snapshot. It also contains
the id of the machine's boot, since a crash of the machine may lose pages of the file.

Each worker holds a shared lock on `users`. The last one removes the copy; if it was killed, the
next worker that starts on the machine does.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import stat
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from manus_jax.files import write_atomically
from manus_jax.weights.manifest import Identity, TensorSpec, WeightsError
from manus_jax.weights.mirror import Changes, Mirror, TensorStore

_STATE, _LOCK, _USERS = "state.json", "lock", "users"
_DATA = "weights-"


class SharedMirror(Mirror):
    """The mirror of the versions in `root`, shared with the other processes of this user.

    `held` and `store` are valid in the block of `reading`, and after `advance` as long as no other
    process advances the mirror.
    """

    def __init__(self, root: Path, scratch: Path | None = None) -> None:
        base = scratch or _private_directory()
        super().__init__(mirror_directory(root, base))
        self.root = root
        self._users = _join(self.directory)
        self._file: str | None = None  # the name of the mapped file
        for other in base.iterdir():  # of servers that were killed
            if other != self.directory:
                _remove_unused(other)

    def advance(self, root: Path, number: int) -> frozenset[str]:
        with self._locked(fcntl.LOCK_EX):
            self._attach()
            changed = super().advance(root, number)
            if changed:
                self._record()
            return changed

    @contextlib.contextmanager
    def reading(self, wanted: Identity | None) -> Iterator[TensorStore]:
        """The weights, which do not change in the block; WeightsError if it is another version."""
        with self._locked(fcntl.LOCK_SH):
            self._attach()
            if self.store is None or self.held != wanted:
                raise WeightsError(
                    f"the mirror of this machine holds {self.held} instead of {wanted}: another "
                    "server has loaded it"
                )
            yield self.store

    def close(self) -> None:
        super().close()
        self._users.close()
        _remove_unused(self.directory)

    def _new_store(self, specs: Mapping[str, TensorSpec]) -> TensorStore:
        self._file = f"{_DATA}{uuid.uuid4().hex}"
        return TensorStore(specs, self.directory, self.directory / self._file)

    def _apply(self, changes: Sequence[Changes], store: TensorStore) -> frozenset[str]:
        (self.directory / _STATE).unlink(missing_ok=True)
        return super()._apply(changes, store)

    def _attach(self) -> None:
        """Takes over what other processes have written."""
        try:
            state = json.loads((self.directory / _STATE).read_text())
        except (OSError, ValueError):
            state = {}
        if state.get("boot") != _boot_id():
            self.held = self.store = self._file = None
        elif state["file"] != self._file:
            specs = {n: TensorSpec(t, tuple(shape)) for n, (t, shape) in state["tensors"].items()}
            path = self.directory / state["file"]
            # A cleaner of temporary files may have removed it.
            self.store = TensorStore(specs, self.directory, path) if path.exists() else None
            self._file = state["file"]
        self.held = Identity(**state["identity"]) if self.store is not None else None

    def _record(self) -> None:
        assert self.store is not None and self.held is not None
        state = {
            "boot": _boot_id(),
            "file": self._file,
            "identity": dataclasses.asdict(self.held),
            "tensors": {n: (spec.dtype, spec.shape) for n, spec in self.store.specs.items()},
        }
        write_atomically(self.directory / _STATE, json.dumps(state))
        for path in self.directory.glob(f"{_DATA}*"):
            if path.name != self._file:
                path.unlink()

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / _LOCK).open("wb") as file:
            fcntl.flock(file, kind)
            yield


def mirror_directory(root: Path, base: Path | None = None) -> Path:
    """Where the mirror of the versions in `root` is; `base` is the directory of all mirrors."""
    name = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    return (base or _private_directory()) / name


def _private_directory() -> Path:
    """A directory for mirrors that only this user can write."""
    path = Path(tempfile.gettempdir()) / f"manus-jax-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise WeightsError(
            f"{path} can be written by other users: remove it, or set TMPDIR to another directory"
        )
    return path


def _join(directory: Path) -> BinaryIO:
    """An open file with a shared lock, which tells that the directory is in use."""
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            users = (directory / _USERS).open("wb")
        except FileNotFoundError:  # removed since
            continue
        fcntl.flock(users, fcntl.LOCK_SH)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(users.fileno()), (directory / _USERS).stat()):
                return users
        users.close()


def remove_unused_mirrors() -> None:
    """Removes the mirrors of this user that no process uses."""
    with contextlib.suppress(OSError, WeightsError):
        for directory in _private_directory().iterdir():
            _remove_unused(directory)


def _remove_unused(directory: Path) -> None:
    """Removes a mirror that no process uses."""
    try:
        users = (directory / _USERS).open("rb")
    except OSError:  # removed, or not a mirror
        return
    with users, contextlib.suppress(OSError):
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # `users` last: until then, a process that joins waits for the lock.
        for path in sorted(directory.iterdir(), key=lambda path: path.name == _USERS):
            path.unlink()
        directory.rmdir()


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
