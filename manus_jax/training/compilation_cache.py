"""JAX's persistent compilation cache: a command that is started again does not compile again.

Entries are identified by the program, the versions of JAX and the compiler, and the devices, so a
stale one is never used. JAX locks the directory while it reads or writes an entry, and compiles a
program whose entry is damaged.
"""

import hashlib
import logging
import os
import platform
import tempfile
from pathlib import Path

import jax

from manus_jax.config.settings import CompilationSettings

_log = logging.getLogger(__name__)
_MAX_BYTES = 8 << 30  # then JAX removes the entries that were not used for the longest time


def use_compilation_cache(settings: CompilationSettings) -> None:
    """Enables the cache, before anything is compiled; JAX_COMPILATION_CACHE_DIR takes precedence.

    If the directory cannot be written, a warning says so, and every program is compiled.
    """
    if settings.cache_dir is None or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    try:
        directory = Path(settings.cache_dir).expanduser() / _processor()
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        _log.warning("compiled programs are not kept (compilation.cache_dir): %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)


def _processor() -> str:
    """A name for the kind of processor: machine code for one may not run on another, and JAX does
    not distinguish them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kinds = ("model name", "flags", "Features", "CPU part")
    known = sorted({line for line in lines if line.startswith(kinds)})
    digest = hashlib.sha256("\n".join(known).encode()).hexdigest()
    return f"{platform.machine()}-{digest[:16]}"
