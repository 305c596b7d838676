"""The limits of values that users give, in settings and in command-line flags.

Each check returns what is wrong as the end of a sentence ("must be at least 1"), or None.
"""

import dataclasses
import math
import operator
import os
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

MAX_TEXT = 4096
"""Characters of a string; also the longest path that Linux accepts, in bytes."""
_MAX_NAME = 255  # bytes of a file name
_CHECKS: dict[str, Callable[[Any, Any], bool]] = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
}


@dataclasses.dataclass(frozen=True)
class Range:
    """The range of a number; no range contains an infinity or NaN."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def problem(self, value: float) -> str | None:
        if isinstance(value, float) and not math.isfinite(value):
            return "must be finite"
        for name, holds in _CHECKS.items():
            bound = getattr(self, name)
            if bound is not None and not holds(value, bound):
                return f"must be {name.replace('_', ' ')} {bound}"
        return None


def text_problem(text: str) -> str | None:
    if len(text) > MAX_TEXT:
        return f"has {len(text)} characters, more than {MAX_TEXT}"
    if "\0" in text:
        return "contains a NUL character"
    if not _is_unicode(text):
        return "is not valid Unicode"
    return None


def path_problem(path: str) -> str | None:
    if problem := text_problem(path):
        return problem
    if not path.strip():
        return "is not a path"
    if re.match(r"(gs|s3|r2|az|abfss?|hdfs)://", path):
        return "is not a path: mount the bucket, for instance with gcsfuse, and name its directory"
    if os.path.expanduser(path).startswith("~"):
        return f"starts with the home directory of an unknown user, {path.partition('/')[0]!r}"
    longest = max(len(part.encode()) for part in path.split("/"))
    if longest > _MAX_NAME:
        return f"contains a file name of {longest} bytes, more than {_MAX_NAME}"
    return None


def url_problem(url: str) -> str | None:
    """A URL with the scheme http or https, or HOST:PORT."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
        (parts.hostname or "").encode("idna")  # as for a connection: no empty or long label
    except ValueError:
        return "is not an address: write http://HOST:PORT"
    plain = url.isprintable() and not any(c.isspace() for c in url)
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not plain:
        return "is not an address: write http://HOST:PORT"
    return text_problem(url)


def shown(value: Any) -> str:
    """The value as it is shown in an error, at most 100 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python does not print numbers of thousands of digits
        return "a number with thousands of digits"
    return text if len(text) <= 100 else f"{text[:80]}… ({len(text)} characters)"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
