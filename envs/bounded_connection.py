"""HTTP connections that clients cannot keep open with incomplete requests."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

REQUEST_SECONDS = 20.0
"""A request must arrive within this time; clients send it at once."""
MAX_HEAD_BYTES = 64 * 1024


class BoundedConnection(HttpToolsProtocol):
    """Closes connections whose request does not arrive in time or has too large a head."""

    _deadline: asyncio.TimerHandle | None = None
    _arriving = True  # until the first request is complete, and during later ones
    _in_head = True
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if not self._in_head:
            self._head_bytes = 0
        elif self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")
        self._watch()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._arriving = self._in_head = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._arriving = False
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arriving = False
        self._watch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self._arriving and self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self.transport.close)
        elif not self._arriving and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
