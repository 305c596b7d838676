"""A compiled module's text as computations and instructions, as much of it as costs need.

XLA prints what it will run, with the shapes of one device, and Python gets nothing richer of a
compiled program. Attributes stay text: whoever wants one looks it up by its name.
"""

import dataclasses
import functools
import math
import re

_BYTES = {"pred": 1.0, "token": 0.0, "opaque": 0.0}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](\{[^}]*\})?")
_HEADER = re.compile(r"(ENTRY )?%?([^\s(]+) .*\{$")
_ASSIGNMENT = re.compile(r"\s+(ROOT )?%?([^\s=]+) = ")
_CLOSING = re.compile(r"\}(, execution_thread=.*)?")
_SPACE = re.compile(r"S\((\d+)\)")


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array on one device. `space` 0 is its main memory, others are on the chip itself."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        return self.elements * _item_bytes(self.dtype)


@functools.cache
def _item_bytes(dtype: str) -> float:
    if dtype in _BYTES:
        return _BYTES[dtype]
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 0.0


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`shapes` are the leaves of its result, `attributes` all that follows the operands."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str

    @property
    def bytes(self) -> float:
        return sum(s.bytes for s in self.shapes)

    def attribute(self, name: str) -> str | None:
        """`name=value`, up to the next attribute; values in braces are whole."""
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^\s,]+)", self.attributes)
        return found[1] if found else None

    def called(self, *names: str) -> tuple[str, ...]:
        """Computations that the attributes `names` refer to."""
        values = (self.attribute(name) for name in names)
        return tuple(c for v in values if v for c in re.findall(r"%?([^\s,{}]+)", v))


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in their order; the last, or the one marked so, is the root."""

    name: str
    instructions: dict[str, Instruction]
    root: str

    def operand(self, instruction: Instruction, index: int) -> Instruction:
        return self.instructions[instruction.operands[index]]

    def operand_shapes(self, instruction: Instruction) -> list[Shape]:
        found = (self.instructions.get(name) for name in instruction.operands)
        return [shape for operand in found if operand for shape in operand.shapes]

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Who reads each instruction's result."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for name in instruction.operands:
                users.setdefault(name, []).append(instruction)
        return users

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameter instructions by their number."""
        found = (i for i in self.instructions.values() if i.opcode == "parameter")
        return {int(i.operands[0]): i for i in found}


@dataclasses.dataclass(frozen=True)
class Module:
    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """The module that `compiled.as_text()` prints."""
    computations: dict[str, Computation] = {}
    entry, name, root = "", "", ""
    instructions: dict[str, Instruction] | None = None
    for line in _whole_lines(text):
        if instructions is None:
            if header := _HEADER.match(line):
                name, instructions, root = header[2], {}, ""
                entry = name if header[1] else entry
        elif _CLOSING.fullmatch(line):
            last = root or next(reversed(instructions))
            computations[name] = Computation(name, instructions, last)
            instructions = None
        elif start := _ASSIGNMENT.match(line):
            instruction = _instruction(start[2], line[start.end() :])
            instructions[instruction.name] = instruction
            root = instruction.name if start[1] else root
    if not entry:
        raise ValueError("the text holds no HLO module: there is no ENTRY computation in it")
    return Module(computations, entry)


def _whole_lines(text: str) -> list[str]:
    """Lines, with those that go on over a line break (kernels' metadata) put together again."""
    lines: list[str] = []
    for line in text.splitlines():
        if lines and line[:1] in ('"', "}") and not _CLOSING.fullmatch(line):
            lines[-1] += line
        else:
            lines.append(line)
    return lines


def _instruction(name: str, rest: str) -> Instruction:
    rest = re.sub(r"/\*.*?\*/", "", rest)
    split = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shapes = tuple(_shape(*found) for found in _SHAPE.findall(rest[:split]))
    call = rest[split:].lstrip()
    opening = call.index("(")
    closing = _closing(call, opening)
    inside = call[opening + 1 : closing]
    operands = tuple(re.findall(r"%([^\s,()]+)", inside)) or tuple(
        part.strip() for part in inside.split(",") if part.strip()
    )
    return Instruction(name, call[:opening], shapes, operands, call[closing + 1 :])


def _shape(dtype: str, dims: str, layout: str) -> Shape:
    space = _SPACE.search(layout)
    sizes = tuple(int(d) for d in re.findall(r"\d+", dims))
    return Shape(dtype, sizes, int(space[1]) if space else 0)


def _closing(text: str, opening: int) -> int:
    """Where the parenthesis that opens at `opening` closes."""
    depth = 0
    for index in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"a parenthesis is never closed: {text[:80]!r}")
