"""Plans a configuration for a topology: does a step fit, what does it cost, how long is it.

The programs are specified, sharded and lowered by the functions that training calls. Memory and
collectives come from the compiled program where a compiler for the chips is installed, and from
`estimates` elsewhere. FLOPs are always counted from the architecture and the batch.
"""

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from manus_jax.config.binding import ConfigError
from manus_jax.config.commands import TrainConfig
from manus_jax.engines.layout import split_devices
from manus_jax.learner.learner import LearnerSpec
from manus_jax.learner.mesh import make_mesh
from manus_jax.models.architecture import Architecture
from manus_jax.models.attention import pick_implementation
from manus_jax.models.lora import make_lora
from manus_jax.planning import estimates
from manus_jax.planning.collectives import BETWEEN_SLICES, find_collectives
from manus_jax.planning.compiling import (
    DoesNotFit,
    StateBytes,
    compile_program,
    lower_update,
    new_outputs,
    peak_bytes,
    state_bytes,
)
from manus_jax.planning.estimates import Workload
from manus_jax.planning.programs import (
    ENGINE,
    FROZEN,
    ProgramPlan,
    host_memory,
    plan_engine,
    plan_programs,
)
from manus_jax.planning.topologies import Topology
from manus_jax.rollout.build_rollout import ENGINES, embedded_decoder
from manus_jax.rollout.strategies import episodes_per_spec
from manus_jax.training.learner_specs import (
    critic_spec,
    make_recipe,
    policy_spec,
    tasks_per_update,
    updates_per_step,
)

# Assumed shares of peak FLOP/s and of link bandwidth.
FLOPS_UTILISATION, LINK_UTILISATION = 0.7, 0.8
REFERENCE = "reference policy"


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over groups of `chips`; bytes and seconds are per chip and update."""

    kind: str
    chips: int
    count: int
    sent: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class UpdatePlan:
    """The update of one model. Figures are per chip, except `model_flops` (the whole update).

    `resident` is other memory in use during the update, by name. `temporaries` is None if the
    compiler refused the program without a breakdown; `estimated` is what they were estimated to be.
    `host_state_ignored` if the optimizer's state is on the chip here, and on the host in training.
    """

    name: str
    compiled: bool
    workload: Workload
    state: StateBytes
    temporaries: float | None
    estimated: float
    code: float
    peak: float
    resident: dict[str, float]
    usable: float
    peak_flops: float
    traffic: tuple[Traffic, ...]
    kernels: tuple[str, ...]
    host_state_ignored: bool = False

    @property
    def fixed(self) -> int:
        """Bytes of parameters, optimizer and gradients, which are stored like the parameters."""
        return self.state.frozen + 2 * self.state.parameters + self.state.optimizer

    @property
    def needed(self) -> float:
        """Bytes on the chip that holds most."""
        return self.peak + sum(self.resident.values())

    @property
    def fits(self) -> bool:
        return self.needed <= self.usable

    @property
    def model_flops(self) -> float:
        return estimates.model_flops(self.workload)

    @property
    def flops(self) -> float:
        return estimates.executed_flops(self.workload)

    @property
    def seconds(self) -> dict[str, float]:
        """Arithmetic and communication alone; fully overlapped; one after the other."""
        arithmetic = self.flops / (self.peak_flops * FLOPS_UTILISATION)
        links = sum(t.seconds for t in self.traffic)
        return {
            "arithmetic": arithmetic,
            "links": links,
            "overlapped": max(arithmetic, links),
            "sequential": arithmetic + links,
        }

    def mfu(self, seconds: float) -> float:
        """Model FLOPs as a share of the chips' peak in that time."""
        return self.model_flops / (self.workload.chips * self.peak_flops * seconds)


@dataclasses.dataclass(frozen=True)
class Plan:
    topology: Topology
    arch: Architecture
    mesh: dict[str, int]
    updates: tuple[UpdatePlan, ...]
    updates_per_step: int
    programs: tuple[ProgramPlan, ...]
    host: dict[str, float]

    @property
    def largest(self) -> ProgramPlan:
        """The program, or update, during which a chip holds most."""
        return max(self.programs, key=lambda p: p.needed)

    @property
    def fits(self) -> bool:
        return self.largest.needed <= self.topology.usable


def plan_mesh(config: TrainConfig, topology: Topology) -> Mesh:
    """The mesh that training makes of the topology's devices, without those of the engine."""
    if not topology.devices:
        raise ConfigError(
            f"{topology.name} has {topology.count} devices, more than JAX was started with; "
            "plan it in a new process"
        )
    sizes = dataclasses.asdict(config.mesh)
    if not topology.compiles:
        sizes.pop("slices", None)  # CPU devices have no machine; they are in machine order
    devices, _ = split_devices(config.engine.devices, topology.devices)
    return make_mesh(**sizes, devices=devices)


def workload_of(
    config: TrainConfig, arch: Architecture, mesh: Mesh, has_lm_head: bool, trained: float
) -> Workload:
    """One update with a full row for each sequence of a mini-batch.

    With a prompt for each turn or bounded memory, an episode of all turns has a sequence for each
    turn, or for each that forgets an earlier one, and rows hold as many of them as fit.
    """
    lora = make_lora(config.lora, arch)
    rollout = config.rollout
    rows = tasks_per_update(config) * config.train.group_size * episodes_per_spec(rollout)
    per_turn = rollout.prompt_source == "per_turn"
    if per_turn or rollout.memory_turns is not None:
        together = 0 if per_turn else rollout.memory_turns or 0
        sequences = rows * max(1, rollout.max_turns - together)
        rows = -(-sequences // (config.data.max_length // rollout.max_total_tokens))
    return Workload(
        arch=arch,
        has_lm_head=has_lm_head,
        micro_batches=-(-rows // config.data.rows),
        rows=config.data.rows,
        length=config.data.max_length,
        trained=trained,
        remat=config.compute.remat,
        itemsize=2 if config.compute.dtype == "bfloat16" else 4,
        shards=dict(mesh.shape),
        adafactor=config.optimizer.name == "adafactor",
        adapters=0 if lora is None else sum(map(math.prod, lora.layer_shapes(arch).values())),
    )


def make_plan(
    config: TrainConfig, arch: Architecture, topology: Topology, trained: float = 0.3
) -> Plan:
    """Plans the updates and, if they fit, the other programs of a step."""
    recipe, engine = make_recipe(config.algorithm), ENGINES[config.engine.name].engine
    config = for_platform(config, topology)
    mesh = plan_mesh(config, topology)
    models: dict[str, LearnerSpec] = {"policy": policy_spec(config, recipe, arch, mesh)}
    if recipe.needs_critic:
        models["critic"] = critic_spec(config, arch, mesh)
    states = {name: state_bytes(spec, mesh) for name, spec in models.items()}
    residents: dict[str, float] = {}
    on_host: dict[str, float] = {}
    for name, state in states.items():
        residents[f"{name} parameters"] = state.parameters
        residents[f"{name} optimizer"] = state.optimizer
        on_host[f"{name} optimizer"] = state.optimizer_on_host
    if states["policy"].frozen:  # the reference is the base, and the critic has the same
        residents[FROZEN] = states["policy"].frozen
    elif recipe.needs_reference:
        half = 2 if config.algorithm.reference_dtype == "bfloat16" else 1
        keeper = on_host if config.algorithm.reference == "host" else residents
        keeper[REFERENCE] = states["policy"].parameters / half
    decoder = None
    if engine.on_learner_device:
        length = config.rollout.max_total_tokens
        _, chips = split_devices(config.engine.devices, topology.devices)
        decoder = embedded_decoder(config.engine, arch, length, mesh, chips, topology.platform)
        if not chips:
            residents[ENGINE] = float(decoder.layout.device_bytes)
    updates, planned = [], {}
    for name, spec in models.items():
        own = (f"{name} ", FROZEN)
        others = {n: size for n, size in residents.items() if not n.startswith(own)}
        w = workload_of(config, arch, mesh, name == "policy", trained)
        platform = None if topology.compiles else topology.platform
        lowered = lower_update(spec, mesh, platform)
        made = _plan_update(name, w, states[name], others, lowered, mesh, topology)
        # The compiler for absent GPUs has no host memory.
        ignored = spec.optimizer_on_host and not states[name].optimizer_on_host
        updates.append(dataclasses.replace(made, host_state_ignored=ignored))
        planned[name] = (spec, w, states[name])
    itemsize = jnp.dtype(config.engine.dtype).itemsize
    programs = tuple(ProgramPlan(f"{u.name} update", u.peak, u.resident) for u in updates)
    if all(u.fits for u in updates):
        reference = config.algorithm.reference_dtype if recipe.needs_reference else None
        programs += plan_programs(planned, residents, reference, itemsize, mesh, topology)
        if decoder is not None:
            beside = {} if config.engine.devices else residents
            programs += plan_engine(decoder, beside, topology)
    host = host_memory(float(itemsize) * arch.num_params, on_host, topology)
    count = updates_per_step(config)
    return Plan(topology, arch, dict(mesh.shape), tuple(updates), count, programs, host)


def for_platform(config: TrainConfig, topology: Topology) -> TrainConfig:
    """The settings with attention "auto" resolved for the chips instead of the stand-ins."""
    if topology.compiles or config.compute.attention != "auto":
        return config
    name = pick_implementation(topology.platform)
    return dataclasses.replace(config, compute=dataclasses.replace(config.compute, attention=name))


def _plan_update(
    name: str,
    w: Workload,
    state: StateBytes,
    resident: dict[str, float],
    lowered: Any,
    mesh: Mesh,
    topology: Topology,
) -> UpdatePlan:
    guess = estimates.estimate_temporaries(w, topology.platform).total
    temporaries: float | None = guess
    # A state on the host comes to the chip when the activations are gone.
    largest = max(guess, state.optimizer_on_host)
    fixed = state.frozen + 2 * state.parameters + state.optimizer
    peak, code = fixed + state.batch + largest, 0
    traffic = _estimated_traffic(w, mesh, topology)
    if topology.compiles:
        try:
            stats, text = compile_program(lowered)
            peak, code = float(peak_bytes(stats)), stats.generated_code_size_in_bytes
            kept = stats.temp_size_in_bytes + new_outputs(stats)
            temporaries = max(0.0, kept - state.parameters)  # the others are gradients
            traffic = _compiled_traffic(text, w, mesh, topology)
        except DoesNotFit as refused:
            peak, temporaries = refused.peak, None
    return UpdatePlan(
        name=name,
        compiled=topology.compiles,
        workload=w,
        state=state,
        temporaries=temporaries,
        estimated=guess,
        code=float(code),
        peak=peak,
        resident=resident,
        usable=topology.usable,
        peak_flops=topology.chip.flops,
        traffic=traffic,
        kernels=_kernels(lowered.as_text()),
    )


def _kernels(lowered: str) -> tuple[str, ...]:
    """The attention kernels that a lowered program calls; those of CUDA have no names."""
    if "__gpu$xla.gpu.triton" in lowered:
        return ("triton",)
    return tuple(sorted(set(re.findall(r'kernel_name = "(\w+)"', lowered))))


def _compiled_traffic(
    text: str, w: Workload, mesh: Mesh, topology: Topology
) -> tuple[Traffic, ...]:
    devices = mesh.devices.flatten()
    rows = []
    for c in find_collectives(text, (w.micro_batches, w.chunks), w.chips):
        if c.kind == BETWEEN_SLICES:
            chips, speed = topology.slices, topology.chip.network
        else:
            chips = len(c.group)
            speed = topology.bandwidth([devices[i] for i in c.group])
        if c.kind == "collective-permute":
            speed *= 2  # XLA passes half of the parts around a ring in each direction
        sent = c.sent * c.count
        rows.append(Traffic(c.kind, chips, c.count, sent, sent / (speed * LINK_UTILISATION)))
    return _totals(rows)


def _estimated_traffic(w: Workload, mesh: Mesh, topology: Topology) -> tuple[Traffic, ...]:
    rows = []
    for e in estimates.estimate_exchanges(w):
        index = tuple(slice(None) if axis in e.axes else 0 for axis in mesh.axis_names)
        group = list(mesh.devices[index].flatten())
        seconds = e.sent / (topology.bandwidth(group) * LINK_UTILISATION)
        rows.append(Traffic(e.kind, len(group), e.count, e.sent, seconds))
    return _totals(rows)


def _totals(rows: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Sums by kind and size of the group, the largest first."""
    totals: dict[tuple[str, int], Traffic] = {}
    for t in rows:
        old = totals.get((t.kind, t.chips), Traffic(t.kind, t.chips, 0, 0.0, 0.0))
        totals[t.kind, t.chips] = Traffic(
            t.kind, t.chips, old.count + t.count, old.sent + t.sent, old.seconds + t.seconds
        )
    return tuple(sorted(totals.values(), key=lambda t: -t.sent))
