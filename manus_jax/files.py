"""Atomic file writes."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file; readers see the old content or the new, never a part."""
    work = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    work.write_text(text)
    work.replace(path)
