"""One mesh ("data", "fsdp", "tensor") and the ordered rules that place arrays on it.

Rows of a batch are split over "data" and "fsdp"; parameters over "fsdp" (gathered layer by layer
when used) and "tensor" (heads, MLP columns, vocabulary). A parameter that no rule matches is an
error, and so is a dimension that does not divide: both are found before anything is allocated.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from manus_jax.models.attention import BATCH_AXES

AXES = ("data", "fsdp", "tensor")

# First match wins. Stacked layer parameters have a leading layer axis, which is never split.
PARAM_RULES: tuple[tuple[str, P], ...] = (
    (r"(^|/)(embed|lm_head)$", P("tensor", "fsdp")),
    (r"layers/(q|k|v|gate|up)_proj$", P(None, "tensor", "fsdp")),
    (r"layers/(o|down)_proj$", P(None, "fsdp", "tensor")),
    (r"layers/(q|k|v)_bias$", P(None, "tensor")),
    (r"(^|/)(\w*norm|value_head)$", P()),
)


class MeshError(ValueError):
    """A mesh or batch that does not fit, with the arithmetic."""


def make_mesh(
    data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh of the given sizes over all devices; one size may be -1 and takes what is left."""
    devices = list(jax.devices() if devices is None else devices)
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    text = ", ".join(f"{k}={v}" for k, v in sizes.items())
    if any(v != -1 and v < 1 for v in sizes.values()):
        raise MeshError(f"mesh sizes must be positive, or -1 for the rest: {text}")
    free = [k for k, v in sizes.items() if v == -1]
    if len(free) > 1:
        raise MeshError(f"only one mesh size may be -1: {text}")
    fixed = math.prod(v for v in sizes.values() if v != -1)
    if free:
        if len(devices) % fixed:
            raise MeshError(f"mesh {text}: {len(devices)} devices are not divisible by {fixed}")
        sizes[free[0]] = len(devices) // fixed
    elif fixed != len(devices):
        raise MeshError(
            f"mesh {text} needs {fixed} devices and there are {len(devices)}; "
            "set one of the sizes to -1 to take what is there"
        )
    shape = tuple(sizes[a] for a in AXES)
    return Mesh(np.array(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_shards(mesh: Mesh) -> int:
    """Into how many parts the rows of a micro-batch are split."""
    return math.prod(mesh.shape[a] for a in BATCH_AXES)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Where arrays [micro_batches, rows, …] of a packed batch live."""
    return NamedSharding(mesh, P(None, BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def path_name(path: tuple[Any, ...]) -> str:
    """A pytree path as `backbone/layers/q_proj`."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def param_spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The placement of one parameter by the first rule that matches its name."""
    for pattern, spec in PARAM_RULES:
        if re.search(pattern, name):
            _check_divides(name, shape, spec, mesh)
            return spec
    raise MeshError(
        f"no sharding rule matches parameter {name!r} {shape}; add one to learner/mesh.py"
    )


def _check_divides(name: str, shape: tuple[int, ...], spec: P, mesh: Mesh) -> None:
    for dim, axis in enumerate(spec):
        if axis is not None and shape[dim] % mesh.shape[axis]:
            raise MeshError(
                f"parameter {name} {shape}: dimension {dim} of size {shape[dim]} "
                f"is not divisible by {axis}={mesh.shape[axis]}"
            )


def param_shardings(params: Any, mesh: Mesh) -> Any:
    """A tree of `NamedSharding` like `params` (arrays or shapes)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: NamedSharding(mesh, param_spec(path_name(path), x.shape, mesh)), params
    )


def optimizer_shardings(opt_state: Any, params: Any, mesh: Mesh) -> Any:
    """Moments lie where their parameters lie (same path and shape); all else is replicated."""
    specs = {
        path_name(path): (x.shape, param_spec(path_name(path), x.shape, mesh))
        for path, x in jax.tree_util.tree_leaves_with_path(params)
    }

    def place(path: tuple[Any, ...], x: Any) -> NamedSharding:
        name = path_name(path)
        for start in (i for i, c in enumerate("/" + name) if c == "/"):
            shape, spec = specs.get(name[start:], (None, P()))
            if shape == x.shape:
                return NamedSharding(mesh, spec)
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, opt_state)
