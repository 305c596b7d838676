"""Tagged blocks in an agent's text, such as `<think>…</think>`, found in one pass.

A block must be closed by its own tag, and a tag inside another block belongs to the content of that
block. The time is linear in the length of the text.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple


class Block(NamedTuple):
    tag: str
    content: str


def tagged_blocks(text: str, tags: Iterable[str]) -> list[Block]:
    """The closed blocks with these tags, in order; nested blocks are part of the outer content."""
    pattern = re.compile(rf"<(/?)({'|'.join(map(re.escape, sorted(set(tags))))})>")
    found: list[Block] = []
    opened: re.Match[str] | None = None
    for mark in pattern.finditer(text):
        if not mark[1] and opened is None:
            opened = mark
        elif mark[1] and opened is not None and mark[2] == opened[2]:
            found.append(Block(mark[2], text[opened.end() : mark.start()].strip()))
            opened = None
    return found
