"""The file in which vLLM servers list their addresses for the pool.

One URL per line; empty lines and # comments are ignored, so the file can also be edited by hand. It
is replaced, never written in place, and a server checks every few seconds that its line is still
there: on a file system whose locks do not work across machines, a line lost in a concurrent write
is restored. This module does not import JAX.
"""

import contextlib
import fcntl
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from manus_jax.engines.protocol import EngineError
from manus_jax.files import open_file, write_atomically

_log = logging.getLogger(__name__)
_FOLLOW_SECONDS = 2.0
_MAX_BYTES = 1 << 20  # more are not read: it is some other file


class AddressError(EngineError):
    """An address file that cannot be read or written, or is malformed."""


def read_addresses(path: Path) -> list[str]:
    """Each URL once, in order; none if the file does not exist yet."""
    try:
        with open_file(path) as file:
            text = file.read(_MAX_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise AddressError(f"the address file {path} cannot be read: {error.strerror}") from None
    urls: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        url = line.partition("#")[0].strip().rstrip("/")
        if not url:
            continue
        if not _is_address(url):
            raise AddressError(
                f"{path}, line {number}: {url[:100]!r} is not an address like http://HOST:PORT"
            )
        urls[url] = None
    return list(urls)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number, or misplaced brackets
        return False
    return known and not parts.path and url.isprintable() and " " not in url


def check_address_file(path: Path) -> None:
    """Raises AddressError if a server cannot be listed in the file."""
    if not path.parent.is_dir():
        raise AddressError(f"there is no directory {path.parent} for the address file {path.name}")
    read_addresses(path)
    with _locked(path):
        pass


def register(path: Path, url: str) -> None:
    """Adds the URL if it is missing."""
    if url in read_addresses(path):
        return
    with _locked(path):
        if url not in (urls := read_addresses(path)):
            write_atomically(path, "".join(f"{line}\n" for line in [*urls, url]))


def unregister(path: Path, url: str) -> None:
    """Removes the URL if it is listed."""
    if url not in read_addresses(path):
        return
    with _locked(path):
        kept = [other for other in read_addresses(path) if other != url]
        write_atomically(path, "".join(f"{line}\n" for line in kept))


class AddressFollower:
    """A thread that reports servers that are added to the file or removed from it.

    Args:
      path: the file.
      known: the servers that are already known.
      every: seconds between two reads; None: 2.
    """

    def __init__(self, path: Path, known: list[str], every: float | None = None) -> None:
        self._path, self._known = path, known
        self._every = _FOLLOW_SECONDS if every is None else every
        self._last_error = ""
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, joined: Callable[[str], None], left: Callable[[str], None]) -> None:
        """Starts calling `joined` and `left` with URLs."""
        self._thread = threading.Thread(
            target=self._follow, args=(joined, left), name="vllm-addresses", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join()

    def _follow(self, joined: Callable[[str], None], left: Callable[[str], None]) -> None:
        while not self._ending.wait(self._every):
            try:
                now = read_addresses(self._path)
            except AddressError as error:  # keep the servers until the file is valid again
                if str(error) != self._last_error:
                    _log.warning("%s", error)
                self._last_error = str(error)
                continue
            for url in now:
                if url not in self._known:
                    joined(url)
            for url in self._known:
                if url not in now:
                    left(url)
            self._known, self._last_error = now, ""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        with open(path.with_name(f".{path.name}.lock"), "w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: see above
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise AddressError(f"the address file {path} cannot be written: {error}") from None
