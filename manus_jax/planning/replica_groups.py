"""Which devices take part in a collective, in each of the ways in which XLA writes it down."""

import math
import re

import numpy as np

from manus_jax.planning.hlo_text import Instruction

_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'(?:=(\d+))?(?::\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")


def first_group(instruction: Instruction, devices: int) -> tuple[int, ...]:
    """Positions of the first group's devices in the program's mesh; groups are all alike."""
    text = instruction.attributes
    if found := _PAIRS.search(text):
        return int(found[1]), int(found[2])
    if found := _LISTED.search(text):
        return tuple(int(d) for d in found[1].split(",") if d) or tuple(range(devices))
    if found := _IOTA.search(text):
        ids = np.arange(math.prod(_ints(found[3]))).reshape(_ints(found[3]))
        ids = ids.transpose(_ints(found[4])) if found[4] else ids
        return tuple(int(d) for d in ids.reshape(int(found[1]), int(found[2]))[0])
    if found := _MESH.search(text):
        return _mesh_group(found[1], found[2])
    return tuple(range(devices))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(d) for d in text.split(","))


def _mesh_group(mesh: str, axes: str) -> tuple[int, ...]:
    """The group of device 0 along `axes`; an axis `'a':(before)size` is a part of `'a'`."""
    sizes = {name: int(size) for name, size, *_ in _AXIS.findall(mesh)}
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    taken = []
    for name, _, before, size in _AXIS.findall(axes):
        whole = sizes[name]
        steps = np.arange(whole)
        if size:
            inner = whole // (int(before) * int(size))
            steps = np.arange(int(size)) * inner
        taken.append((list(sizes).index(name), steps))
    members = np.zeros(1, int)
    strides = np.array(ids.strides) // ids.itemsize
    for axis, steps in taken:
        members = (members[:, None] + steps[None, :] * strides[axis]).reshape(-1)
    return tuple(int(m) for m in members)
