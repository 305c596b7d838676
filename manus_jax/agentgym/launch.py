"""`python -m manus_jax.agentgym.launch PARENT MODULE …`: run a module that dies with its parent.

A server that watches its parent's pid needs a running event loop to do so. The one idea: where the
kernel can (Linux), it is asked to kill this process at the parent's death, so that not even a
server that hangs outlives a trainer that was killed.
"""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """The kernel ends this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process is gone")


def main() -> None:
    parent, module = int(sys.argv[1]), sys.argv[2]
    die_with_parent(parent)
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
