"""Which elements of a tensor changed, in as few bytes as a gap and a value each.

A step of reinforcement learning moves few of a bfloat16 model's weights by enough to change their
bits. Changed elements are told by the distance from one to the next, in one or two bytes: the
largest value means "go on that far, there is nothing here". One per cent of bfloat16 elements,
spread evenly, takes 1.7 % of the bytes. Elements are compared bit by bit, so a NaN or a negative
zero travels like any other. A tensor of which so much changed that its delta would be no smaller
travels whole.
"""

import dataclasses

import numpy as np

from manus_jax.weights.manifest import ITEM_SIZES, TensorSpec, WeightsError

GAPS, VALUES = "#gaps", "#values"
_GAP_TYPES: dict[str, type[np.unsignedinteger]] = {"U8": np.uint8, "U16": np.uint16}


@dataclasses.dataclass(frozen=True)
class Sparse:
    """`gaps` `[changed + skips]` in one or two bytes, and `values` `[changed]`."""

    gaps: np.ndarray
    values: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.gaps.nbytes + self.values.nbytes

    @property
    def gap_type(self) -> str:
        return {np.dtype(t): name for name, t in _GAP_TYPES.items()}[self.gaps.dtype]


def elements(raw: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """Bytes `[bytes]` as one unsigned integer per element, `[elements]`; a view."""
    return raw.view(f"u{ITEM_SIZES[spec.dtype]}")


def least_bytes(changed: int, new: np.ndarray) -> int:
    """That so many changes take, if each is near the one before. Cheaper than finding them."""
    return changed * (1 + new.itemsize)


def difference(old: np.ndarray, new: np.ndarray) -> Sparse:
    """What turns `old` into `new`, both `[elements]` of unsigned integers."""
    positions = np.flatnonzero(old != new)
    distances = np.diff(positions, prepend=0)
    sizes = {
        kind: (len(positions) + int((distances // np.iinfo(kind).max).sum())) * kind().itemsize
        for kind in _GAP_TYPES.values()
    }
    kind = min(sizes, key=lambda k: sizes[k])
    return Sparse(_gaps(distances, kind), new[positions])


def _gaps(distances: np.ndarray, kind: type[np.unsignedinteger]) -> np.ndarray:
    skip = int(np.iinfo(kind).max)
    skips = distances // skip
    gaps = np.full(len(distances) + int(skips.sum()), skip, kind)
    gaps[np.cumsum(skips + 1) - 1] = distances % skip
    return gaps


def read_gaps(raw: np.ndarray, gap_type: str) -> np.ndarray:
    if gap_type not in _GAP_TYPES:
        raise WeightsError(f"a delta has gaps of type {gap_type}; there are U8 and U16")
    return raw.view(_GAP_TYPES[gap_type])


def positions_of(sparse: Sparse, spec: TensorSpec, name: str) -> np.ndarray:
    """Where the values go, `[changed]`, checked against the tensor's size."""
    stops = sparse.gaps != np.iinfo(sparse.gaps.dtype).max
    positions = np.cumsum(sparse.gaps, dtype=np.int64)[stops]
    if len(positions) != len(sparse.values):
        raise WeightsError(
            f"the delta of {name} has {len(positions)} places and {len(sparse.values)} values"
        )
    if len(positions) and positions[-1] >= spec.elements:
        raise WeightsError(
            f"the delta of {name} reaches element {positions[-1]} of {spec.elements}"
        )
    return positions
