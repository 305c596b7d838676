"""The collectives of a compiled program, read from its HLO text.

Only three things are read: the result shape of each collective, the devices that take part, and
the loops around it. A loop whose length depends on data takes its length from the caller.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# Traffic that leaves a TPU slice: the compiler hands it to the hosts as a send.
BETWEEN_SLICES = "between slices"
_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_COMPUTATION = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?\S+ = (\(.*?\)|\S+) ([a-z][\w-]*)\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|\w+_computations?)=\{?((?:%[^\s,{}]+(?:, )?)+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONSTANT = re.compile(r"%(\S+) = [su]32\[\]\S* constant\((\d+)\)")
_COMPARE = re.compile(r"ROOT .* compare\(%(\S+), %(\S+?)\), direction=LT")
# The TPU compiler splits a collective into steps with a common chain id, to overlap it with
# computation, and writes a reduce-scatter as an all-reduce inside a computation of this name.
_CHAIN = re.compile(r'chain_id="(\d+)"')
_REDUCE_SCATTER = "all-reduce-scatter"


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of the program.

    `sent` is the number of bytes that one device sends each time it runs, with the ring algorithm.
    `group` are mesh positions of the devices that take part, `loops` the lengths of the loops
    around it, outermost first.
    """

    kind: str
    sent: float
    group: tuple[int, ...]
    loops: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.loops)


def find_collectives(text: str, data_loops: Sequence[int], devices: int) -> list[Collective]:
    """The collectives of `compiled.as_text()` for a program on `devices` devices.

    `data_loops` are the lengths of loops that depend on data, by nesting depth.
    """
    found: list[Collective] = []
    chains: set[str] = set()
    for i in instructions(text, data_loops):
        kind = i.opcode.removesuffix("-start")
        if i.opcode == "send" and "xla_megascale" in i.line:
            found.append(Collective(BETWEEN_SLICES, max(_bytes(i.result)), (), i.loops))
        elif kind in _KINDS:
            group, chain = first_group(i.line, devices), _CHAIN.search(i.line)
            size = _result_bytes(i.result, i.opcode)
            if kind == "all-reduce" and i.computation.startswith(_REDUCE_SCATTER):
                kind, size = "reduce-scatter", size / len(group)
            if len(group) > 1 and not (chain and chain[1] in chains):
                found.append(Collective(kind, _sent(kind, size, len(group)), group, i.loops))
            chains.update(chain.groups() if chain else ())
    return found


class Instruction(NamedTuple):
    """An instruction, the computation it belongs to, and the lengths of the loops around it."""

    result: str
    opcode: str
    line: str
    computation: str
    loops: tuple[int, ...]


def instructions(text: str, data_loops: Sequence[int]) -> Iterator[Instruction]:
    """Every instruction that runs, once for each place that calls its computation."""
    computations, entry = _computations(text)

    def visit(name: str, loops: tuple[int, ...], depth: int) -> Iterator[Instruction]:
        for line in computations[name]:
            if not (match := _INSTRUCTION.match(line)):
                continue
            result, opcode = match[1], match[2]
            yield Instruction(result, opcode, line, name, loops)
            if opcode == "while":
                trips = _trip_count(line, computations)
                length = trips or data_loops[min(depth, len(data_loops) - 1)]
                yield from visit(
                    _callee(line, "body"), (*loops, length), depth + (0 if trips else 1)
                )
            elif opcode.removesuffix("-start") not in _KINDS:
                for called in _CALLED.findall(line):
                    for callee in re.findall(r"%([^\s,]+)", called):
                        yield from visit(callee, loops, depth)

    yield from visit(entry, (), 0)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and the name of the entry computation."""
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            name = header[2]
            computations[name] = []
            entry = name if header[1] else entry
        elif name:
            computations[name].append(line)
    if not entry:
        raise ValueError("no HLO module: the text has no ENTRY computation")
    return computations, entry


def _callee(line: str, attribute: str) -> str:
    return re.findall(rf"\b{attribute}=%?([^\s,]+)", line)[0]


def _trip_count(loop: str, computations: dict[str, list[str]]) -> int | None:
    """The length of a loop: XLA's annotation, or the constant bound of its counter.

    A loop that passes parts around a ring may handle two of them at a time, so the bound is
    divided by the step of the counter.
    """
    if note := _TRIPS.search(loop):
        return int(note[1])
    condition = "\n".join(computations[_callee(loop, "condition")])
    body = "\n".join(computations[_callee(loop, "body")])
    compare = _COMPARE.search(condition)
    bound = dict(_CONSTANT.findall(condition)).get(compare[2]) if compare else None
    if compare is None or bound is None:
        return None
    index = re.search(rf"%{re.escape(compare[1])} = .* index=(\d+)", condition)
    result = re.search(r"ROOT .* tuple\((.*?)\)", body)
    if index is None or result is None:
        return int(bound)
    counter = re.findall(r"%([^\s,]+)", result[1])[int(index[1])]
    added = re.search(rf"%{re.escape(counter)} = \S+ add\(%(\S+), %(\S+?)\)", body)
    constants = dict(_CONSTANT.findall(body))
    steps = [int(constants[n]) for n in (added.groups() if added else ()) if n in constants]
    return -(-int(bound) // max(steps, default=1))


def _bytes(result: str) -> list[float]:
    """The size of each array in a result."""
    return [
        math.prod(int(d) for d in dims.split(",") if d) * (int(bits) / 8 if bits else 1)
        for _, bits, dims in _ARRAY.findall(result)
    ]


def _result_bytes(result: str, opcode: str) -> float:
    sizes = _bytes(result)
    if opcode.endswith("-start") and opcode != "all-reduce-start":
        arrays = [size for size in sizes if size > 4]  # operands, results, then scalar contexts
        return sum(arrays[len(arrays) // 2 :])
    return sum(sizes)


def _sent(kind: str, result: float, n: int) -> float:
    """Bytes that a device sends, from the size of its result and the size `n` of the group."""
    share = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1.0, "collective-permute": 1.0}
    return result * share.get(kind, (n - 1) / n)


_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_DEVICE_IDS = re.compile(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)")
_AXIS = re.compile(r"'([^']+)'(?:=(\d+))?(?::\((\d+)\)(\d+))?")


def first_group(line: str, devices: int) -> tuple[int, ...]:
    """Mesh positions of a collective's first group of devices; all groups have the same form."""
    members = np.arange(devices)
    if found := _LISTED.search(line):
        members = np.array(_ints(found[1]))
    elif found := _IOTA.search(line):
        members = _transposed(found[3], found[4]).reshape(-1, int(found[2]))[0]
    elif found := _MESH.search(line):
        sizes = {name: int(size) for name, size, *_ in _AXIS.findall(found[1])}
        members = np.zeros(1, int)
        for name, _, before, part in _AXIS.findall(found[2]):
            inner = list(sizes.values())[list(sizes).index(name) + 1 :]
            count = int(part or sizes[name])  # 'a':(before)part is a part of axis 'a'
            stride = math.prod(inner) * sizes[name] // (int(before or 1) * count)
            members = (members[:, None] + stride * np.arange(count)).ravel()
        if order := _DEVICE_IDS.search(line):  # of the devices in this mesh
            members = _transposed(order[1], order[2]).ravel()[members]
    return tuple(int(m) for m in members)


def _transposed(sizes: str, axes: str | None) -> np.ndarray:
    """The numbers 0, 1, … as an array of these sizes, with its axes in another order."""
    numbers = np.arange(math.prod(_ints(sizes))).reshape(_ints(sizes))
    return numbers.transpose(_ints(axes)) if axes else numbers


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(d) for d in text.split(","))
