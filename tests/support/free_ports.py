"""Ports for servers whose second port is the next number."""

import os
import socket


def free_pair() -> int:
    """The first of two successive ports that nobody uses.

    They are below the range from which the system gives out ports by itself.
    """
    candidates = range(20_000 + os.getpid() * 2 % 10_000, 32_000, 2)
    return next(p for p in candidates if not in_use(p) and not in_use(p + 1))


def in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False
