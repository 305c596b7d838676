"""A configuration on a topology: does each update fit, what does it do, how long does it take.

The updates are designed, sharded and lowered by the very functions that training calls. Where a
compiler for the chips is at hand, memory, FLOPs and collectives are the compiled program's;
elsewhere they are estimates, and the plan says so.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from manus_jax.config.binding import ConfigError
from manus_jax.config.commands import TrainConfig
from manus_jax.learner.learner import Design
from manus_jax.learner.mesh import make_mesh
from manus_jax.models.architecture import Architecture
from manus_jax.models.attention import pick_implementation
from manus_jax.planning import estimates
from manus_jax.planning.chips import group_bandwidth
from manus_jax.planning.compiling import (
    CRITIC_FIELDS,
    DoesNotFit,
    Memory,
    StateBytes,
    compile_update,
    lower_update,
    policy_fields,
    state_bytes,
)
from manus_jax.planning.estimates import Workload
from manus_jax.planning.module_costs import Collective, ModuleCosts, module_costs
from manus_jax.planning.topologies import Topology
from manus_jax.training.learner_specs import design_critic, design_policy, make_recipe


@dataclasses.dataclass(frozen=True)
class Efficiency:
    """The shares of their peaks that arithmetic, memory and links are taken to reach."""

    flops: float = 0.7
    memory: float = 0.8
    links: float = 0.8


@dataclasses.dataclass(frozen=True)
class Traffic:
    """A kind of collective over groups of so many chips: runs, bytes a chip sends, seconds."""

    kind: str
    chips: int
    times: int
    sent: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class UpdatePlan:
    """One model's update. Bytes and FLOPs are one chip's, `model_flops` the whole update's.

    `resident` is what lies in a chip's memory beside this update, by name. `temporaries` is None
    when the compiler gave up before it could tell them from the rest.
    """

    name: str
    compiled: bool
    workload: Workload
    state: StateBytes
    gradients: float
    temporaries: float | None
    code: float
    peak: float
    resident: dict[str, float]
    usable: float
    model_flops: float
    flops: float | None
    bytes: float | None
    traffic: tuple[Traffic, ...]
    seconds: dict[str, float]
    peak_flops: float
    kernels: tuple[str, ...]

    @property
    def needed(self) -> float:
        """Bytes of the fullest chip."""
        return self.peak + sum(self.resident.values())

    @property
    def fits(self) -> bool:
        return self.needed <= self.usable

    @property
    def overlapped(self) -> float:
        """Seconds if arithmetic, memory and links never wait for each other."""
        return max(self.seconds.values(), default=0.0)

    @property
    def in_turn(self) -> float:
        """Seconds if they never work at the same time."""
        return sum(self.seconds.values())

    def mfu(self, seconds: float) -> float:
        """The model's FLOPs as a share of what the chips could do in that time."""
        return self.model_flops / (self.workload.chips * self.peak_flops * seconds)


@dataclasses.dataclass(frozen=True)
class Plan:
    topology: Topology
    arch: Architecture
    mesh: dict[str, int]
    updates: tuple[UpdatePlan, ...]
    updates_per_step: int
    efficiency: Efficiency

    @property
    def fits(self) -> bool:
        return all(u.fits for u in self.updates)


def plan_mesh(config: TrainConfig, topology: Topology) -> Mesh:
    """The mesh that training would make of the topology's devices."""
    sizes = {f.name: getattr(config.mesh, f.name) for f in dataclasses.fields(config.mesh)}
    if not topology.devices:
        raise ConfigError(
            f"{topology.name} has {topology.count} devices, more than JAX was started with; "
            "plan it with a process of its own"
        )
    if not topology.compiles:
        # Stand-ins lie one machine after the other, as slices along the data axis do.
        sizes.pop("slices", None)
    return make_mesh(**sizes, devices=topology.devices)


def workload_of(
    config: TrainConfig, arch: Architecture, mesh: Mesh, has_lm_head: bool, trained: float
) -> Workload:
    """One update on rows that are all full: as many sequences as a mini-batch has."""
    train, algorithm = config.train, config.algorithm
    tasks = min(algorithm.mini_batch_size or train.batch_size, train.batch_size)
    return Workload(
        arch=arch,
        has_lm_head=has_lm_head,
        micro_batches=-(-tasks * train.group_size // config.data.rows),
        rows=config.data.rows,
        length=config.data.max_length,
        trained=trained,
        remat=config.compute.remat,
        itemsize=2 if config.compute.dtype == "bfloat16" else 4,
        shards=dict(mesh.shape),
    )


def make_plan(
    config: TrainConfig,
    arch: Architecture,
    topology: Topology,
    trained: float = 0.3,
    efficiency: Efficiency | None = None,
) -> Plan:
    """Plans the policy's update, and the critic's if the recipe has one."""
    efficiency = efficiency or Efficiency()
    config = for_platform(config, topology)
    mesh = plan_mesh(config, topology)
    recipe = make_recipe(config.algorithm)
    parts: list[tuple[str, Design, Sequence[str]]] = [
        ("policy", design_policy(config, recipe, arch, mesh), policy_fields(recipe))
    ]
    if recipe.needs_critic:
        parts.append(("critic", design_critic(config, arch, mesh), CRITIC_FIELDS))
    states = {name: state_bytes(design, mesh, fields) for name, design, fields in parts}
    shared: dict[str, float] = {}
    if recipe.needs_reference and config.algorithm.reference != "host":
        shared["reference policy"] = states["policy"].parameters
    if config.engine.name == "jax":
        shared["embedded engine (first chip)"] = engine_bytes(config, arch)
    updates = []
    for name, design, fields in parts:
        others = {
            f"{other} and its optimizer": float(s.parameters + s.optimizer)
            for other, s in states.items()
            if other != name
        }
        workload = workload_of(config, arch, mesh, name == "policy", trained)
        part = _Part(name, design, fields, workload, states[name], {**others, **shared})
        updates.append(_plan_update(part, mesh, topology, efficiency))
    tasks = config.algorithm.mini_batch_size or config.train.batch_size
    return Plan(
        topology,
        arch,
        {axis: size for axis, size in mesh.shape.items()},
        tuple(updates),
        config.algorithm.ppo_epochs * -(-config.train.batch_size // tasks),
        efficiency,
    )


def for_platform(config: TrainConfig, topology: Topology) -> TrainConfig:
    """The settings with attention "auto" resolved for chips that stand-ins are lowered for."""
    if topology.compiles or config.compute.attention != "auto":
        return config
    name = pick_implementation(topology.platform)
    return dataclasses.replace(config, compute=dataclasses.replace(config.compute, attention=name))


def engine_bytes(config: TrainConfig, arch: Architecture) -> float:
    """What the embedded engine keeps on one chip: its own weights, keys and values."""
    itemsize = 2 if config.engine.dtype == "bfloat16" else 4
    per_token = 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim
    cached = config.engine.slots * config.rollout.max_total_tokens * per_token
    return float(itemsize * (arch.num_params + cached))


@dataclasses.dataclass(frozen=True)
class _Part:
    name: str
    design: Design
    fields: Sequence[str]
    workload: Workload
    state: StateBytes
    resident: dict[str, float]


def _plan_update(part: _Part, mesh: Mesh, topology: Topology, efficiency: Efficiency) -> UpdatePlan:
    w, state, chip = part.workload, part.state, topology.chip
    platform = None if topology.compiles else topology.platform
    lowered = lower_update(part.design, mesh, part.fields, platform)
    guess = estimates.estimate_memory(w, state)
    memory: Memory | None = None
    costs: ModuleCosts | None = None
    peak = float(state.parameters + state.optimizer + state.batch + guess.gradients)
    peak += guess.temporaries
    if topology.compiles:
        try:
            memory, text = compile_update(lowered)
            costs = module_costs(text, (w.micro_batches, w.chunks), w.chips)
            peak = float(memory.peak)
        except DoesNotFit as verdict:
            peak = verdict.peak
    measured = memory is not None and costs is not None
    flops: float | None = None
    moved: float | None = None
    traffic: tuple[Traffic, ...] = ()
    if measured:
        assert costs is not None
        flops, moved = costs.flops, costs.bytes
        traffic = _measured_traffic(costs.collectives, mesh, topology, efficiency)
    elif not topology.compiles:
        flops, moved = estimates.executed_flops(w), estimates.estimate_bytes(w, state)
        traffic = _estimated_traffic(w, mesh, topology, efficiency)
    seconds = {}
    if flops is not None and moved is not None:
        seconds = {
            "arithmetic": flops / (chip.flops * efficiency.flops),
            "memory": moved / (chip.bandwidth * efficiency.memory),
            "links": sum(t.seconds for t in traffic),
        }
    return UpdatePlan(
        name=part.name,
        compiled=topology.compiles,
        workload=w,
        state=state,
        gradients=guess.gradients,
        temporaries=_temporaries(memory, guess, topology),
        code=float(memory.code) if memory else 0.0,
        peak=peak,
        resident=part.resident,
        usable=chip.usable,
        model_flops=estimates.model_flops(w),
        flops=flops,
        bytes=moved,
        traffic=traffic,
        seconds=seconds,
        peak_flops=chip.flops,
        kernels=costs.kernels if costs else _kernels(lowered.as_text()),
    )


def _temporaries(
    memory: Memory | None, guess: estimates.MemoryEstimate, topology: Topology
) -> float | None:
    if memory is not None:
        kept = memory.outputs - memory.reused
        return max(0.0, memory.temporaries + kept - guess.gradients)
    return None if topology.compiles else guess.temporaries


def _kernels(lowered: str) -> tuple[str, ...]:
    """Which attention kernels a lowered program calls."""
    marks = {"tpu_custom_call": "splash", "__gpu$xla.gpu.triton": "triton"}
    return tuple(name for mark, name in marks.items() if mark in lowered)


def _measured_traffic(
    collectives: Sequence[Collective], mesh: Mesh, topology: Topology, efficiency: Efficiency
) -> tuple[Traffic, ...]:
    devices = mesh.devices.flatten()
    node = topology.shape[-1]
    rows: dict[tuple[str, int], list[float]] = {}
    for c in collectives:
        members: list[Any] = [devices[position] for position in c.group]
        speed = group_bandwidth(topology.chip, members, topology.shape, node) * efficiency.links
        if c.kind == "collective-permute":
            # XLA passes parts round a ring both ways at once: half of these go each way.
            speed *= 2
        row = rows.setdefault((c.kind, len(c.group)), [0, 0.0, 0.0])
        for place, value in enumerate((c.times, c.wire_bytes, c.wire_bytes / speed)):
            row[place] += value
    return _sorted(rows)


def _estimated_traffic(
    w: Workload, mesh: Mesh, topology: Topology, efficiency: Efficiency
) -> tuple[Traffic, ...]:
    """Groups of stand-ins are told by their places alone: machine after machine."""
    positions = {device.id: place for place, device in enumerate(topology.devices)}
    rows: dict[tuple[str, int], list[float]] = {}
    for exchange in estimates.estimate_exchanges(w):
        index = tuple(slice(None) if a in exchange.axes else 0 for a in mesh.axis_names)
        group = [positions[d.id] for d in mesh.devices[index].flatten()]
        if topology.chip.kind == "gpu":
            speed = group_bandwidth(topology.chip, group, topology.shape, topology.shape[-1])
        else:
            speed = topology.chip.link * min(len(topology.shape), max(1, len(group) // 4))
        row = rows.setdefault((exchange.kind, len(group)), [0, 0.0, 0.0])
        seconds = exchange.sent / (speed * efficiency.links)
        for place, value in enumerate((exchange.times, exchange.sent, seconds)):
            row[place] += value
    return _sorted(rows)


def _sorted(rows: dict[tuple[str, int], list[float]]) -> tuple[Traffic, ...]:
    made = [Traffic(*key, int(row[0]), row[1], row[2]) for key, row in rows.items()]
    return tuple(sorted(made, key=lambda t: -t.sent))
