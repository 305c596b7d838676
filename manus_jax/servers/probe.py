"""Whether a server answers over HTTP, and ports on which one can be started."""

import contextlib
import http.client
import socket
import urllib.error
import urllib.request


def answers(url: str, timeout: float = 5.0) -> bool:
    """Whether GET `url` returns status 200 in time. Proxies are not used."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=timeout) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return False


def free_ports(count: int) -> list[int]:
    """Distinct ports of the loopback interface that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [bound.getsockname()[1] for bound in sockets]
