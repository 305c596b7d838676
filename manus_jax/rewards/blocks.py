"""Tagged blocks in what an agent said: `<think>…</think>` and the like, in one pass over the text.

The one idea: a block counts when it is closed by its own tag; a tag inside another block is text of
that block. Linear in the length of the text, whatever is in it.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple


class Block(NamedTuple):
    tag: str
    content: str


def tagged_blocks(text: str, tags: Iterable[str]) -> list[Block]:
    """The closed blocks of these tags, in order; nested ones are part of the outer content."""
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
