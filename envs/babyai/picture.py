"""A level as a picture, for `POST /render`.

A PNG file is a few length-prefixed chunks around zlib data, so no imaging library is needed.
"""

import base64
import struct
import zlib
from typing import Any

import numpy as np

TILE_PIXELS = 16


def data_uri(level: Any) -> str:
    """The level seen from above, as a `data:` URI of a PNG file."""
    image = np.ascontiguousarray(level.get_frame(highlight=True, tile_size=TILE_PIXELS), np.uint8)
    return "data:image/png;base64," + base64.b64encode(_png(image)).decode()


def _png(image: np.ndarray) -> bytes:
    """An RGB image of bytes `[height, width, 3]` as a PNG file."""
    height, width, _ = image.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    lines = b"".join(b"\0" + image[row].tobytes() for row in range(height))
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)
