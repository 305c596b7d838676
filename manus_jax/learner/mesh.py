"""The mesh ("data", "fsdp", "sequence", "tensor") and the ordered rules that place arrays on it.

Rows of a batch are split over "data" and "fsdp", and their tokens over "sequence". Parameters are
split over "fsdp" and "sequence" together (and gathered layer by layer when used) and over "tensor"
(heads, MLP columns or experts, vocabulary). Slices connected only by a data-centre network form the
outer part of "data", so that gradients cross that network once per micro-batch. A parameter that no
rule matches is an error, and so is a size that is not divisible. Both are detected before anything
is allocated, and the message shows the arithmetic.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from manus_jax.errors import UserError
from manus_jax.models.architecture import Architecture
from manus_jax.models.attention import BATCH_AXES, KERNEL_BLOCK, Implementation, check_window

# Ordered by communication, least first; the devices of the last axis are closest to each other.
AXES = ("data", "fsdp", "sequence", "tensor")

HOST_MEMORY = "pinned_host"

# First match wins. Stacked layer parameters have a leading layer axis, which is never split.
PARAM_RULES: tuple[tuple[str, P], ...] = (
    (r"(^|/)(embed|lm_head)$", P("tensor", ("fsdp", "sequence"))),
    (r"layers/(q|k|v|gate|up)_proj$", P(None, "tensor", ("fsdp", "sequence"))),
    (r"layers/(o|down)_proj$", P(None, ("fsdp", "sequence"), "tensor")),
    (r"layers/(q|k|v|gate|up)_proj_lora_a$", P(None, None, ("fsdp", "sequence"))),
    (r"layers/(q|k|v|gate|up)_proj_lora_b$", P(None, "tensor", None)),
    (r"layers/(o|down)_proj_lora_a$", P(None, None, "tensor")),
    (r"layers/(o|down)_proj_lora_b$", P(None, ("fsdp", "sequence"), None)),
    (r"layers/(q|k|v)_bias$", P(None, "tensor")),
    (r"layers/expert_(gate|up)$", P(None, "tensor", None, ("fsdp", "sequence"))),
    (r"layers/expert_down$", P(None, "tensor", ("fsdp", "sequence"), None)),
    (r"(^|/)(\w*norm|router|value_head)$", P()),
)


class MeshError(UserError, ValueError):
    """A mesh, model or batch whose sizes do not fit; the message shows the arithmetic."""


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    sequence: int = 1,
    slices: int | None = None,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh of the given sizes over all devices; one size may be -1 to use the remaining ones.

    `slices` is the number of device groups that are connected only by a data-centre network; they
    follow one another along "data". None: the number that TPU devices report, or one on other
    platforms, where a slice is a machine (devices with the same `slice_index`) or a process.
    """
    try:
        devices = list(jax.devices() if devices is None else devices)
    except RuntimeError as error:
        raise MeshError(f"JAX cannot use the devices of this machine: {error}") from None
    sizes = _fill({"data": data, "fsdp": fsdp, "tensor": tensor, "sequence": sequence}, devices)
    shape = tuple(sizes[axis] for axis in AXES)
    count, by_process = _count_slices(slices, devices)
    if count > 1:
        if sizes["data"] % count:
            raise MeshError(
                f"data={sizes['data']} is not divisible by {count} slices, which lie along it; "
                f"set mesh.data to a multiple of {count}"
            )
        array = mesh_utils.create_hybrid_device_mesh(
            (sizes["data"] // count, *shape[1:]),
            (count, *(1,) * (len(AXES) - 1)),
            devices,
            process_is_granule=by_process,
            allow_split_physical_axes=True,
        )
    else:
        array = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _fill(sizes: dict[str, int], devices: Sequence[Any]) -> dict[str, int]:
    """The sizes with -1 replaced by the number of remaining devices."""
    text = ", ".join(f"{k}={v}" for k, v in sizes.items())
    if any(v != -1 and v < 1 for v in sizes.values()):
        raise MeshError(f"mesh sizes must be positive, or -1 for the rest: {text}")
    free = [k for k, v in sizes.items() if v == -1]
    if len(free) > 1:
        raise MeshError(f"only one mesh size may be -1: {text}")
    fixed = math.prod(v for v in sizes.values() if v != -1)
    if free:
        if len(devices) % fixed:
            raise MeshError(
                f"mesh {text}: {len(devices)} devices are not divisible by {fixed}; the sizes "
                f"other than mesh.{free[0]} must have a product of "
                f"{_largest_divisor(len(devices), fixed)} or another divisor of {len(devices)}"
            )
        return {**sizes, free[0]: len(devices) // fixed}
    if fixed != len(devices):
        raise MeshError(
            f"mesh {text} needs {fixed} devices and there are {len(devices)}; "
            "set one of the sizes to -1 to take what is there"
        )
    return sizes


def _count_slices(wanted: int | None, devices: Sequence[Any]) -> tuple[int, bool]:
    """How many slices there are, and whether a slice is a process."""
    members = {
        name: np.unique([getattr(d, name, None) or 0 for d in devices], return_counts=True)[1]
        for name in ("slice_index", "process_index")
    }
    slices, processes = members["slice_index"], members["process_index"]
    on_tpu = devices[0].platform == "tpu"
    if wanted is None:
        wanted = len(slices) if on_tpu else 1
    if wanted == 1 and not (on_tpu and len(slices) > 1):
        return 1, False
    by_process = wanted != len(slices)
    if by_process and (on_tpu or wanted != len(processes)):
        choices = f"machines ({len(slices)}) or processes ({len(processes)})"
        if on_tpu:
            choices = f"slices ({len(slices)})"
        raise MeshError(
            f"mesh.slices = {wanted} must be the number of {choices} that the {len(devices)} "
            "devices belong to"
        )
    counts = processes if by_process else slices
    if len(set(counts)) > 1:
        raise MeshError(f"slices of unequal sizes cannot make a mesh: {counts.tolist()} devices")
    return wanted, by_process


def check_model(arch: Architecture, mesh: Mesh, implementation: Implementation = "plain") -> None:
    """Raises unless the model's parameters and attention heads divide evenly over the mesh.

    If there are fewer key-value heads than devices along "tensor", heads are repeated; their number
    must then divide the number of devices.
    """
    check_window(arch, implementation)
    by_heads = ("tensor", "sequence") if implementation == "triton" else ("tensor",)
    kv_heads, parts = arch.num_kv_heads, _size(by_heads, mesh)
    _require_divides(f"{arch.num_heads} heads are", arch.num_heads, by_heads, mesh)
    if kv_heads % parts and parts % kv_heads:
        raise MeshError(
            f"{kv_heads} key-value heads are not divisible by {_product(by_heads, mesh)}, "
            f"nor does {kv_heads} divide it"
        )
    if arch.num_experts:
        _require_divides(f"{arch.num_experts} experts are", arch.num_experts, ("tensor",), mesh)
    for name, size, axes in (
        ("intermediate size", 0 if arch.num_experts else arch.intermediate_size, ("tensor",)),
        ("key-value width", kv_heads * arch.head_dim, ("tensor",)),
        ("hidden size", arch.hidden_size, ("fsdp", "sequence")),
        ("vocabulary", arch.vocab_size, ("tensor",)),
    ):
        _require_divides(f"{name} {size} is", size, axes, mesh)


def check_batch(
    rows: int, length: int, mesh: Mesh, implementation: Implementation = "plain"
) -> None:
    """Raises unless micro-batches of `rows` rows of `length` tokens divide over the mesh."""
    _require_divides(f"{rows} rows per micro-batch are", rows, BATCH_AXES, mesh, remedy="data.rows")
    block = {"plain": 1, "splash": KERNEL_BLOCK, "triton": KERNEL_BLOCK}[implementation]
    _require_divides(
        f"row length {length} is", length, ("sequence",), mesh, block, remedy="data.max_length"
    )


def _size(axes: Sequence[str], mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _product(axes: Sequence[str], mesh: Mesh, block: int = 1) -> str:
    """`fsdp=4`, or `fsdp=4 x sequence=2 = 8`; axes of size one are omitted if there are others."""
    axes = [a for a in axes if mesh.shape[a] > 1] or axes[:1]
    factors = [str(block)] * (block > 1) + [f"{a}={mesh.shape[a]}" for a in axes]
    total = f" = {block * _size(axes, mesh)}" if len(factors) > 1 else ""
    return " x ".join(factors) + total


def _require_divides(
    what: str, size: int, axes: Sequence[str], mesh: Mesh, block: int = 1, remedy: str = ""
) -> None:
    """Raises unless `size` is divisible; advises `remedy`, a setting, or else another mesh."""
    parts = block * _size(axes, mesh)
    if size % parts:
        if remedy:
            below, above = size // parts * parts, -(-size // parts) * parts
            nearest = f"{below} or {above}" if below else f"{above}"
            advice = f"set {remedy} = {nearest}"
        else:
            works = _largest_divisor(math.gcd(size, mesh.devices.size), parts)
            advice = f"{' x '.join(f'mesh.{axis}' for axis in axes)} = {works} works"
        raise MeshError(f"{what} not divisible by {_product(axes, mesh, block)}; {advice}")


def _largest_divisor(number: int, at_most: int) -> int:
    return max(n for n in range(1, min(number, at_most) + 1) if number % n == 0)


def batch_shards(mesh: Mesh) -> int:
    """The number of shards into which the rows of a micro-batch are split."""
    return _size(BATCH_AXES, mesh)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of the arrays [micro_batches, rows, length] of a packed batch."""
    return NamedSharding(mesh, P(None, BATCH_AXES, "sequence"))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def path_name(path: tuple[Any, ...]) -> str:
    """A pytree path as `backbone/layers/q_proj`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def param_spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The partition spec of one parameter, from the first rule that matches its name."""
    for pattern, spec in PARAM_RULES:
        if re.search(pattern, name):
            for dim, axes in enumerate(spec):
                if axes is not None:
                    what = f"parameter {name} {shape}: dimension {dim} of size {shape[dim]} is"
                    axes = (axes,) if isinstance(axes, str) else axes
                    _require_divides(what, shape[dim], axes, mesh)
            return spec
    raise MeshError(
        f"no sharding rule matches parameter {name!r} {shape}; add one to learner/mesh.py"
    )


def param_shardings(params: Any, mesh: Mesh) -> Any:
    """A tree of `NamedSharding` like `params` (arrays or shapes)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: NamedSharding(mesh, param_spec(path_name(path), x.shape, mesh)), params
    )


def optimizer_shardings(opt_state: Any, params: Any, mesh: Mesh) -> Any:
    """Moments are sharded like their parameters (same path and shape); all else is replicated."""
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
