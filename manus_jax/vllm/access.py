"""Access control of vLLM servers: an API key, and private interfaces only.

vLLM's routes for reinforcement learning call methods of its workers, and vLLM's own key does not
protect them. A server that is reachable from other machines therefore runs `KeyedRoutes`, which
requires the key on every route except /health. The key comes from a file or the environment, which
other users of the machine cannot read, never from a command line or a config. This module also runs
in vLLM's environment, without JAX.
"""

import errno
import hashlib
import hmac
import ipaddress
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from manus_jax.engines.protocol import EngineError
from manus_jax.files import read_text

KEY_VARIABLE = "VLLM_API_KEY"  # the name that vLLM uses
MIDDLEWARE = "manus_jax.vllm.access.KeyedRoutes"
_OPEN_ROUTE = "/health"
_HOW_TO_GIVE_A_KEY = f"{KEY_VARIABLE} in the environment, or a file that contains it"

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class AccessError(EngineError):
    """A server that would be publicly reachable, or an invalid key."""


def read_api_key(file: str | Path | None) -> str | None:
    """The key in the file, if given, else the key in the environment, else None."""
    if file is None:
        key, where = os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE
        if not key:
            return None
    else:
        where = str(file)
        try:
            key = read_text(Path(file)).strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise AccessError(f"the API key file {file} cannot be read: {reason}") from None
        if not key:
            raise AccessError(f"the API key file {file} is empty")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise AccessError(
            f"{where} holds no valid API key: use printable ASCII characters without spaces"
        )
    return key


def check_port(host: str, port: int) -> None:
    """Raises AccessError if a server cannot listen there."""
    for family, address in {(entry[0], entry[4]) for entry in _resolve(host, port)}:
        try:
            socket.create_server(address, family=family).close()
        except OSError as error:
            reason = {
                errno.EADDRINUSE: "another program uses it; give another --port",
                errno.EACCES: "ports below 1024 need privileges; give another --port",
                errno.EADDRNOTAVAIL: "this machine does not have the address; give another --host",
            }.get(error.errno or 0, str(error))
            raise AccessError(f"port {port} of {host} is not available: {reason}") from None


def check_host(host: str, api_key: str | None) -> None:
    """Refuses public interfaces, and private ones without a key."""
    addresses = _addresses_of(host)
    if all(address.is_loopback for address in addresses):
        return
    for address in addresses:
        if address.is_unspecified:
            raise AccessError(
                f"--host {host} listens on every interface: give the address of a private one, "
                "such as 10.0.0.7"
            )
        if address.is_global or address.is_multicast:
            raise AccessError(
                f"--host {host} is {address}, which the internet can reach: the routes that load "
                "weights belong on a private interface, such as 10.0.0.7 or 127.0.0.1"
            )
    if api_key is None:
        raise AccessError(f"--host {host} can be reached from outside: set {_HOW_TO_GIVE_A_KEY}")


def _addresses_of(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    found = _resolve(host, None)
    return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]


def _resolve(host: str, port: int | None) -> list[Any]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise AccessError(f"--host {host[:100]} cannot be resolved: {error}") from None


class KeyedRoutes:
    """ASGI middleware for vLLM's --middleware option; reads the key from the environment."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        key = os.environ.get(KEY_VARIABLE)
        if not key:
            raise AccessError(f"{KEY_VARIABLE} is not set, and every route requires it")
        self._app = app
        self._expected = _digest(key)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        open_to_all = scope["type"] == "lifespan" or scope["path"] == _OPEN_ROUTE
        if open_to_all or self._holds_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = b'{"error": "this server needs its API key"}'
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
            ]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})

    def _holds_key(self, scope: Message) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        scheme, _, key = given.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(_digest(key), self._expected)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
