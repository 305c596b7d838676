"""The fenced blocks of the guides in docs/, and what a comment before each says about it.

`file: NAME` writes the block to a file, `run` executes it, and `checked: TEST` names the file of
the tests that take it from the page and have the program judge it.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs").rglob("*.md"))
FENCE = re.compile(
    r"(?:<!-- (?P<mark>run|checked: (?P<test>[\w./]+)|file: (?P<file>[\w./]+)) -->\n)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    language: str
    text: str
    mark: str | None
    file: str | None
    test: str | None = None


def blocks(guide: Path) -> list[Block]:
    found = FENCE.finditer(guide.read_text())
    return [Block(*m.group("language", "text", "mark", "file", "test")) for m in found]


class Examples(tuple[str, ...]):
    """The blocks of the page `guide` that a file of tests checks."""

    guide: Path


def examples_for(test: str, page: str) -> Examples:
    """The blocks of a page that are marked as checked by a file of tests, given its `__file__`."""
    own = str(Path(test).relative_to(ROOT))
    guide = ROOT / page
    found = Examples(block.text for block in blocks(guide) if block.test == own)
    found.guide = guide
    assert found, f"{page} has no block that {own} checks"
    return found
