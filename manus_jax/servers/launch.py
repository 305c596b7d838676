"""`python -m manus_jax.servers.launch PARENT SIGNAL MODULE …`: a module that dies with its parent.

On Linux the kernel sends SIGNAL to this process when the parent dies, so even a server that hangs
does not outlive a trainer that was killed.
"""

import contextlib
import ctypes
import os
import runpy
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.05


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Asks the kernel to signal this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        sys.exit("the parent process is gone")


def adopt_orphans() -> None:
    """Makes processes whose parents end children of this one, instead of the machine's first."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_children(seconds: float) -> None:
    """Waits until this process has no children; kills those that are left when time is up."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(ChildProcessError):  # there are none
        while True:
            if os.waitpid(-1, os.WNOHANG) != (0, 0):
                continue
            if time.monotonic() > deadline:
                for task in Path("/proc/self/task").iterdir():
                    for child in (task / "children").read_text().split():
                        os.kill(int(child), signal.SIGKILL)
            time.sleep(_POLL_SECONDS)


def main() -> None:
    parent, number, module = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    die_with_parent(parent, number)
    sys.argv = [module, *sys.argv[4:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
