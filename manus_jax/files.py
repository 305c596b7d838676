"""Files that survive a kill and reveal damage: atomic writes, complete directories, checksums.

`SHA256SUMS` lists the checksum of every other file of a directory, in the format of `sha256sum`
after a first line with the checksum of the list itself.

A directory is complete when its last file, the seal (for instance `SHA256SUMS`), exists. This also
holds on mounted buckets, which can replace a file but neither rename a directory, append to a file
nor link one. While a directory is written or removed, a mark beside it tells the leftovers of a
kill from damage.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from manus_jax.errors import UserError

CHECKSUMS = "SHA256SUMS"
_UNFINISHED = ".unfinished-"
_THREADS = 8


class DamagedError(UserError):
    """A directory differs from its checksums; the message names the first such file."""


class DirectoryInUse(UserError):
    """Another process writes to a directory."""


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces a file, on disk when this returns; readers see the old content or the new."""
    work = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with work.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        work.replace(path)
    except BaseException:
        work.unlink(missing_ok=True)  # a disk that is full, for instance
        raise
    sync_directory(path.parent)


def open_file(path: Path) -> BufferedReader:
    """Opens a file for reading; OSError for pipes and devices, whose end may never come."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        reason = "Is a directory" if path.is_dir() else "it is not a file"
        raise OSError(errno.EINVAL, reason, str(path))
    return os.fdopen(handle, "rb")


def read_text(path: Path) -> str:
    """The text of a file, as from `open_file`."""
    with open_file(path) as file:
        return file.read().decode()


def sync_directory(path: Path) -> None:
    """Makes the creation and renaming of files in a directory survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # mounted buckets have no directories
            raise
    finally:
        os.close(handle)


def remove_leftovers(directory: Path, name: str = "*") -> None:
    """Removes temporary files that killed writers of `name` left; nobody may be writing it now."""
    for path in directory.glob(f".{name}.tmp-*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def lock_directory(path: Path) -> BinaryIO:
    """An open file whose exclusive lock is released when the file or the process ends."""
    file = os.fdopen(os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.close()
            raise DirectoryInUse(
                f"another process is using {path}: wait until it ends, or choose another directory"
            ) from None
        # The file system does not support locks, so other processes cannot be detected.
    return file


def begin_directory(directory: Path) -> None:
    """Marks a directory that is about to be written."""
    _mark(directory).touch()


def end_directory(directory: Path) -> None:
    """Removes the mark of a directory whose seal exists, or which has been removed."""
    _mark(directory).unlink()


def remove_directory(directory: Path, seal: str) -> None:
    """Removes a directory so that an interrupted removal is completed by `remove_unfinished`."""
    begin_directory(directory)
    (directory / seal).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
    end_directory(directory)


def is_unfinished(directory: Path, seal: str) -> bool:
    return _mark(directory).exists() and not (directory / seal).exists()


def remove_unfinished(root: Path, seal: str) -> None:
    """Removes unfinished directories in `root`; nobody else may be writing there."""
    for mark in root.glob(f"{_UNFINISHED}*"):
        name = mark.name.removeprefix(_UNFINISHED)
        if is_plain_name(name) and is_unfinished(root / name, seal):
            shutil.rmtree(root / name, ignore_errors=True)
        mark.unlink()


def _mark(directory: Path) -> Path:
    return directory.with_name(f"{_UNFINISHED}{directory.name}")


def is_plain_name(name: object) -> bool:
    """Whether a name read from a file can only refer to a file of the same directory."""
    if not isinstance(name, str) or name in ("", ".."):
        return False
    return name == PurePosixPath(name).name and name.isprintable()


def write_checksums(directory: Path) -> None:
    """Completes a directory: its files reach the disk, and then SHA256SUMS is written."""
    names, directories = [], [directory]
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            directories.append(path)
        elif path.name != CHECKSUMS:
            names.append(path.relative_to(directory).as_posix())
    text = _checksums(directory, names, sync=True)
    for path in directories:
        sync_directory(path)
    write_atomically(directory / CHECKSUMS, text)


def verify_checksums(directory: Path) -> None:
    """Raises DamagedError unless SHA256SUMS exists and every file that it lists is unchanged."""
    path = directory / CHECKSUMS
    lines = checked_lines(path)
    names = [line[66:] for line in lines]
    if any(_leaves(name) for name in names):
        raise DamagedError(f"{path} is damaged")
    try:
        found = _checksums(directory, names, sync=False).split("\n")[1:-1]
    except FileNotFoundError as error:
        raise DamagedError(f"{error.filename} is missing") from None
    except OSError as error:
        raise DamagedError(f"{error.filename} cannot be read: {error.strerror}") from None
    for name, line, expected in zip(names, found, lines, strict=True):
        if line != expected:
            raise DamagedError(f"{directory / name} does not match {CHECKSUMS}")


def _leaves(name: str) -> bool:
    """Whether a path in a list of checksums points outside its directory."""
    return PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts


def _checksums(directory: Path, names: Sequence[str], sync: bool) -> str:
    def digest(name: str) -> str:
        with open_file(directory / name) as file:
            if sync:
                os.fsync(file.fileno())
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(_THREADS, "checksums") as threads:
        digests = list(threads.map(digest, names))
    return with_own_checksum([f"{d}  {n}" for d, n in zip(digests, names, strict=True)])


def checked_lines(path: Path) -> list[str]:
    """The lines of a file that was written `with_own_checksum`; DamagedError if it has changed."""
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        problem = "is missing" if isinstance(error, FileNotFoundError) else f"is damaged: {error}"
        raise DamagedError(f"{path} {problem}") from None
    lines = text.split("\n")[1:-1]
    if text != with_own_checksum(lines):
        raise DamagedError(f"{path} is damaged")
    return lines


def with_own_checksum(lines: Sequence[str]) -> str:
    """A text of lines after a first one with their checksum."""
    body = "".join(f"{line}\n" for line in lines)
    return f"# {hashlib.sha256(body.encode()).hexdigest()}\n{body}"
