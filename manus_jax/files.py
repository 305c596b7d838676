"""Atomic file writes."""

import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces a file; readers see the old content or the new, never a part, also after a crash."""
    work = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with work.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    work.replace(path)
