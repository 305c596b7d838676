"""Bytes that an instruction moves to and from a device's main memory.

Operands are read and results written once. Arrays in the chip's own memory are free, and of an
array that is only sliced, or updated in place, only the slice counts, also when that happens
inside a fusion: scanned layers read their own slice of the stacked parameters.
"""

from manus_jax.planning.hlo_text import Computation, Instruction, Module, Shape

_NO_TRAFFIC = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"),
    *("call", "call-start", "async-start", "async-update", "after-all", "add-dependency"),
    *("partition-id", "replica-id", "iota", "optimization-barrier", "opt-barrier"),
}
_SLICES = {"dynamic-slice", "slice", "gather"}
# Steps of a collective that is under way: its own bytes are counted with the collective.
_UNDER_WAY = {"all-gather", "all-reduce", "custom-call"}


def traffic(i: Instruction, computation: Computation, module: Module) -> float:
    """Bytes in main memory that one run of the instruction reads and writes."""
    if i.opcode in _NO_TRAFFIC or i.opcode.endswith("-done"):
        return 0.0
    operands = computation.operand_shapes(i)
    if i.opcode == "slice-start":  # its result is (the whole, the slice, …)
        return i.shapes[1].bytes + _main(i.shapes[1:2])
    if i.opcode in _SLICES:
        return 2 * _main(i.shapes)
    if i.opcode in ("dynamic-update-slice", "scatter"):
        return 2 * _main(operands[2:] if i.opcode == "scatter" else operands[1:2])
    if i.opcode == "copy-start":
        return _main(operands) + _main(i.shapes[:1])
    if i.opcode != "fusion":
        return _main(operands) + _main(i.shapes)
    (name,) = i.called("calls")
    inner = module.computations[name]
    read = 0.0
    for index, operand in enumerate(i.operands):
        shapes = computation.instructions[operand].shapes
        if _main(shapes):
            read += min(_main(shapes), _read(inner.parameters[index], inner, module))
    return read + _written(inner.instructions[inner.root], i.shapes, inner, module)


def _main(shapes: tuple[Shape, ...] | list[Shape]) -> float:
    return sum(s.bytes for s in shapes if s.space == 0)


def _read(value: Instruction, inner: Computation, module: Module) -> float:
    """Bytes of `value` that the fused computation reads."""
    total = 0.0
    for user in inner.users[value.name]:
        if user.opcode in _SLICES and user.operands[0] == value.name:
            total += user.bytes
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            continue
        elif user.opcode in ("bitcast", "get-tuple-element"):
            total += _read(user, inner, module)
        elif user.opcode in _UNDER_WAY or user.opcode == "tuple":
            continue
        elif user.opcode == "fusion":
            (name,) = user.called("calls")
            nested = module.computations[name]
            places = (n for n, operand in enumerate(user.operands) if operand == value.name)
            total += sum(_read(nested.parameters[n], nested, module) for n in places)
        else:
            return value.bytes
    return min(total, value.bytes)


def _written(
    root: Instruction, shapes: tuple[Shape, ...], inner: Computation, module: Module
) -> float:
    """Bytes that the fused computation writes: of what is updated in place, the update."""
    if root.opcode == "tuple":
        parts = [inner.instructions[name] for name in root.operands]
        if len(parts) == len(shapes):
            pairs = zip(parts, shapes, strict=True)
            return sum(_written(part, (shape,), inner, module) for part, shape in pairs)
        return 0.0
    if not _main(shapes):
        return 0.0
    if root.opcode == "bitcast":
        return _written(inner.operand(root, 0), shapes, inner, module)
    if root.opcode == "dynamic-update-slice":
        return inner.operand(root, 1).bytes
    if root.opcode == "fusion":
        (name,) = root.called("calls")
        nested = module.computations[name]
        return _written(nested.instructions[nested.root], shapes, nested, module)
    if root.opcode in ("parameter", "get-tuple-element") or root.opcode in _UNDER_WAY:
        return 0.0
    return _main(shapes)
