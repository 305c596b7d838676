"""FLOPs of matrix products, which the TPU back end writes as convolutions."""

import itertools
import math
import re

import numpy as np

from manus_jax.planning.hlo_text import Computation, Instruction


def product_flops(i: Instruction, computation: Computation) -> float:
    """Two FLOPs per multiplication that counts; padding of a convolution does not."""
    left, right = (computation.operand(i, n).shapes[0].dims for n in (0, 1))
    if i.opcode == "dot":
        contracted = _ints(i.attribute("lhs_contracting_dims") or "")
        return 2.0 * i.shapes[0].elements * math.prod(left[d] for d in contracted)
    labels = i.attribute("dim_labels")
    assert labels is not None
    lhs, rhs, out = re.split(r"_|->", labels)
    groups = int(i.attribute("batch_group_count") or 1)
    features = right[rhs.index("i")] * right[rhs.index("o")]
    batch = left[lhs.index("b")] // groups
    spatial = [label for label in rhs if label.isdigit()]
    window = _window(i, len(spatial))
    positions = 1.0
    for label in spatial:
        sizes = (left[lhs.index(label)], right[rhs.index(label)])
        positions *= _valid_positions(
            *sizes, i.shapes[0].dims[out.index(label)], *window[int(label)]
        )
    return 2.0 * batch * features * positions


def _ints(text: str) -> list[int]:
    return [int(d) for d in re.findall(r"-?\d+", text)]


def _window(i: Instruction, dims: int) -> list[tuple[int, int, int, int]]:
    """Per spatial dimension: stride, padding before it, dilation of the input, of the kernel."""
    text = i.attribute("window") or "{}"
    read = lambda name: re.search(rf"\b{name}=([\dx_-]+)", text)
    numbers = lambda name, default: (
        [int(part.split("_")[0]) for part in found[1].split("x")]
        if (found := read(name))
        else [default] * dims
    )
    columns = (
        numbers("stride", 1),
        numbers("pad", 0),
        numbers("lhs_dilate", 1),
        numbers("rhs_dilate", 1),
    )
    return list(zip(*columns, strict=True))


def _valid_positions(
    size: int, kernel: int, out: int, stride: int, pad: int, dilate: int, kernel_dilate: int
) -> int:
    """Pairs of an output and a kernel position that meet a number of the input, not padding."""
    if kernel == 1 and stride == pad + 1 == dilate == 1:
        return min(out, size)
    total = 0
    span = (size - 1) * dilate + 1
    outputs = np.arange(out) * stride
    for offset in itertools.islice(itertools.count(0, kernel_dilate), kernel):
        places = outputs + offset - pad
        total += int(((places >= 0) & (places < span) & (places % dilate == 0)).sum())
    return total
