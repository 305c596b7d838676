"""Programs on several devices are started by one thread at a time.

On each device, a program with collectives waits for the others. If the learner and the embedded
engine started programs at the same moment, one device could run the learner's first and another the
engine's, and both would wait forever. The lock is held while a program is started, not while it
runs.
"""

import contextlib
import threading
from typing import Any

_LOCK = threading.RLock()


def starting(mesh: Any) -> contextlib.AbstractContextManager[Any]:
    """Held while a program on the mesh is started; nothing for a single device."""
    return _LOCK if mesh.size > 1 else contextlib.nullcontext()
