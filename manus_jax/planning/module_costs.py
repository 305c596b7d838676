"""What a compiled module does on one device: matrix products, memory traffic, collectives.

XLA's own cost analysis counts the body of a loop once. Here each computation counts as often as it
runs: loops whose length the compiler knows by that length, loops whose length is data (the
micro-batches in use, the chunks of trained tokens) by the lengths that the caller gives.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence

from manus_jax.planning.convolutions import product_flops
from manus_jax.planning.hlo_text import Computation, Instruction, Module, parse
from manus_jax.planning.memory_traffic import traffic
from manus_jax.planning.replica_groups import first_group

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# What leaves a TPU slice is handed to the hosts, which sum it over the data-centre network.
BETWEEN_SLICES = "between slices"
_MEGASCALE = "xla_megascale"
# The TPU back end spreads a collective over fusions that compute meanwhile; its steps have this.
_CHAIN = re.compile(r'chain_id="(\d+)"')
# The TPU back end writes a reduce-scatter as a fusion of this name around an all-reduce.
_FUSED_REDUCE_SCATTER = "all-reduce-scatter"


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the module. `operand_bytes` are what one device puts in, once.

    `group` are positions in the mesh of the devices that take part, `loops` the lengths of the
    loops around it, outermost first.
    """

    kind: str
    operand_bytes: float
    group: tuple[int, ...]
    loops: tuple[int, ...]

    @property
    def times(self) -> int:
        return math.prod(self.loops)

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends in all its runs, by the ring algorithm."""
        n = len(self.group)
        once = {
            "all-gather": n - 1.0,
            "all-reduce": 2 * (n - 1) / n,
            "reduce-scatter": (n - 1) / n,
            "all-to-all": (n - 1) / n,
            "collective-permute": 1.0,
            BETWEEN_SLICES: 1.0,
        }[self.kind]
        return self.operand_bytes * once * self.times


@dataclasses.dataclass(frozen=True)
class ModuleCosts:
    """Per device and run. `product_flops` are those of matrix products that XLA runs itself,
    `kernel_flops` those of attention kernels, `bytes` goes to and from main memory."""

    product_flops: float
    kernel_flops: float
    bytes: float
    collectives: tuple[Collective, ...]
    kernels: tuple[str, ...]

    @property
    def flops(self) -> float:
        return self.product_flops + self.kernel_flops

    @property
    def wire_bytes(self) -> float:
        return sum(c.wire_bytes for c in self.collectives)


def module_costs(text: str, data_loops: Sequence[int], devices: int) -> ModuleCosts:
    """Costs of `compiled.as_text()`.

    Args:
      text: the module.
      data_loops: lengths of loops that depend on data, by how many such loops are around them.
      devices: how many devices the program runs on.
    """
    module = parse(text)
    products = kernels = moved = 0.0
    found: list[Collective] = []
    chains: set[str] = set()
    names: list[str] = []
    for run in _runs(module, data_loops):
        i, times = run.instruction, math.prod(run.loops)
        if i.opcode in ("dot", "convolution"):
            products += times * product_flops(i, run.computation)
        elif kind := _collective_kind(i, run.computation):
            step = _CHAIN.search(i.attributes)
            sent = sum(s.bytes for s in run.computation.operand_shapes(i))
            group = first_group(i, devices) if kind != BETWEEN_SLICES else (0, devices - 1)
            if len(group) > 1 and (step is None or step[1] not in chains):
                found.append(Collective(kind, sent, group, run.loops))
                moved += times * (sent + i.bytes)
            chains |= {step[1]} if step else set()
        elif i.attribute("custom_call_target") == '"tpu_custom_call"':
            names.append(i.name)
            kernels += times * splash_flops(i, run.computation)
        if not run.fused and not _collective_kind(i):
            moved += times * traffic(i, run.computation, module)
    return ModuleCosts(products, kernels, moved, tuple(found), tuple(names))


@dataclasses.dataclass(frozen=True)
class _Run:
    """An instruction, and the loops around it; inside a fusion it causes no traffic of its own."""

    instruction: Instruction
    computation: Computation
    loops: tuple[int, ...]
    fused: bool


def _runs(module: Module, data_loops: Sequence[int]) -> Iterator[_Run]:
    def visit(name: str, loops: tuple[int, ...], around: int, fused: bool) -> Iterator[_Run]:
        computation = module.computations[name]
        for i in computation.instructions.values():
            yield _Run(i, computation, loops, fused)
            if i.opcode == "while":
                trips = _known_trips(i, computation, module)
                inside = around + (trips is None)
                if trips is None:
                    trips = data_loops[min(around, len(data_loops) - 1)]
                for body in i.called("body"):
                    yield from visit(body, (*loops, trips), inside, False)
            elif i.opcode in ("fusion", "call", "call-start", "async-start", "conditional"):
                names = ("calls", "to_apply", "called_computations", "branch_computations")
                inner = fused or i.opcode == "fusion"
                for called in i.called(*names, "true_computation", "false_computation"):
                    yield from visit(called, loops, around, inner)

    yield from visit(module.entry, (), 0, False)


def _known_trips(loop: Instruction, around: Computation, module: Module) -> int | None:
    """How often a loop runs: XLA's note, or by its counter's start, step and constant bound."""
    if note := _TRIPS.search(loop.attributes):
        return int(note[1])
    condition = module.computations[loop.called("condition")[0]]
    compare = condition.instructions[condition.root]
    if compare.opcode != "compare" or compare.attribute("direction") != "LT":
        return None
    counter, bound = (condition.operand(compare, n) for n in (0, 1))
    if bound.opcode != "constant" or counter.opcode != "get-tuple-element":
        return None
    place = int(counter.attribute("index") or 0)
    body = module.computations[loop.called("body")[0]]
    added = body.instructions.get(_element(body.instructions[body.root], place))
    # A loop that passes parts round a ring may take two of them at a time.
    steps = [_constant(body, name) for name in added.operands] if added is not None else []
    step = next((n for n in steps if n), 1)
    start = _constant(around, _element(around.operand(loop, 0), place)) or 0
    return -(-(int(bound.operands[0]) - start) // step)


def _element(value: Instruction, place: int) -> str:
    return value.operands[place] if value.opcode == "tuple" else value.name


def _constant(computation: Computation, name: str) -> int | None:
    """The number behind a name, through copies; None where it is not written there."""
    value = computation.instructions.get(name)
    while value is not None and value.opcode in ("copy", "bitcast"):
        value = computation.instructions.get(value.operands[0])
    return int(value.operands[0]) if value is not None and value.opcode == "constant" else None


def _collective_kind(i: Instruction, computation: Computation | None = None) -> str | None:
    if i.opcode == "send" and _MEGASCALE in i.attributes:
        return BETWEEN_SLICES
    kind = i.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return None
    scattered = computation is not None and computation.name.startswith(_FUSED_REDUCE_SCATTER)
    return "reduce-scatter" if kind == "all-reduce" and scattered else kind


# Matrix products of a block of scores in each of splash attention's kernels.
_SPLASH_PRODUCTS = {"splash_mha_fwd": 2, "splash_mqa_fwd": 2, "dkv": 4, "dq": 3}


def splash_flops(i: Instruction, computation: Computation) -> float:
    """FLOPs of one splash kernel: products over the blocks that its causal mask leaves."""
    products = next((n for name, n in _SPLASH_PRODUCTS.items() if name in i.name), 0)
    # [rows, heads, length, dim], or [heads, length, dim] of a single row; queries come first.
    arrays = [s for s in computation.operand_shapes(i) if s.dtype in ("bf16", "f32")]
    if not products or len(arrays) < 2 or len(arrays[0].dims) < 3:
        return 0.0
    keys = arrays[1].dims[-2]
    found = re.search(r'block_q\\?": (\d+)', i.attributes)
    block = int(found[1]) if found else math.gcd(keys, 512)
    share = (1 + block / keys) / 2
    return products * 2.0 * arrays[0].elements * keys * share


def by_kind(collectives: Iterable[Collective]) -> dict[str, tuple[int, float]]:
    """How often each kind runs, and the bytes that a device sends in it."""
    out: dict[str, tuple[int, float]] = {}
    for c in collectives:
        times, sent = out.get(c.kind, (0, 0.0))
        out[c.kind] = times + c.times, sent + c.wire_bytes
    return dict(sorted(out.items(), key=lambda item: -item[1][1]))
