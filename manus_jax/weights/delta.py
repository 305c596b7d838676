"""Sparse deltas of tensors: the changed elements, each as a gap and a value.

A reinforcement learning step changes the bits of only a few weights of a bfloat16 model. The
position of a changed element is stored as the distance from the previous one in one or two bytes;
the largest value is a skip without an element. If one per cent of the bfloat16 elements change,
evenly spread, the delta has 1.7 % of the bytes. Elements are compared bit by bit, so NaN and
negative zero need no special treatment. A tensor whose delta would not be smaller is stored
complete.
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
    """Views bytes `[bytes]` as unsigned integers `[elements]`."""
    return raw.view(f"u{ITEM_SIZES[spec.dtype]}")


def least_bytes(changed: int, new: np.ndarray) -> int:
    """A lower bound on the size of a delta with so many changes, without locating them."""
    return changed * (1 + new.itemsize)


def difference(old: np.ndarray, new: np.ndarray) -> Sparse:
    """The delta from `old` to `new`, both unsigned integers `[elements]`."""
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
        raise WeightsError(f"a delta has gaps of unknown type {gap_type} (known: U8, U16)")
    return raw.view(_GAP_TYPES[gap_type])


def positions_of(sparse: Sparse, spec: TensorSpec, name: str) -> np.ndarray:
    """Positions of the values, `[changed]`, checked against the size of the tensor."""
    stops = sparse.gaps != np.iinfo(sparse.gaps.dtype).max
    positions = np.cumsum(sparse.gaps, dtype=np.int64)[stops]
    if len(positions) != len(sparse.values):
        raise WeightsError(
            f"the delta of {name} has {len(positions)} positions but {len(sparse.values)} values"
        )
    if len(positions) and positions[-1] >= spec.elements:
        raise WeightsError(
            f"the delta of {name} has position {positions[-1]}, but only {spec.elements} elements"
        )
    return positions
