"""`python -m manus_jax.servers.launch PARENT SIGNAL MODULE …`: a module that dies with its parent.

On Linux the kernel sends SIGNAL to this process when the parent dies, so even a server that hangs
does not outlive a trainer that was killed.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Asks the kernel to signal this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        sys.exit("the parent process is gone")


def main() -> None:
    parent, number, module = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    die_with_parent(parent, number)
    sys.argv = [module, *sys.argv[4:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
