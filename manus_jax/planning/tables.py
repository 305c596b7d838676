"""A plan as text and as JSON."""

import dataclasses
import io
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from manus_jax.planning.chips import GIB
from manus_jax.planning.estimates import COMPILED_TO_ESTIMATED
from manus_jax.planning.plans import FLOPS_UTILISATION, LINK_UTILISATION, Plan, UpdatePlan
from manus_jax.planning.programs import FROZEN
from manus_jax.planning.servers import ServerPlan

_HOST_STATE_IGNORED = (
    'The compiler for absent GPUs cannot place arrays in host memory: optimizer.state = "host" is '
    "planned with the state on the GPU, where training has it during the optimizer's step only."
)


def render(plan: Plan, width: int = 100) -> str:
    """The printed plan: a heading, and a table for each update."""
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    console.print(_heading(plan))
    for update in plan.updates:
        console.print()
        console.print(_table(update))
        console.print()
        console.print(_verdict(update))
        if note := all_reduce_note(update):
            console.print(note)
        if update.host_state_ignored:
            console.print(_HOST_STATE_IGNORED)
    console.print()
    console.print(_programs(plan))
    console.print()
    console.print(_overall(plan))
    console.print(_assumptions(plan))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _heading(plan: Plan) -> str:
    topology, a, w = plan.topology, plan.arch, plan.updates[0].workload
    chip = topology.chip
    sizes = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    slices = f", {topology.slices} slices" if topology.slices > 1 else ""
    return (
        f"{topology.name}{slices}: {topology.count} x {chip.name} "
        f"({topology.usable / GIB:.2f} GiB, {chip.flops / 1e12:.0f} TFLOP/s each), mesh {sizes}\n"
        f"{a.family}, {a.num_params:,} parameters; one update: {w.micro_batches} "
        f"micro-batches of {w.rows} rows x {w.length} tokens = {w.tokens:,} tokens, "
        f"{w.trained:.0%} trained; remat {w.remat}; {plan.updates_per_step} updates per step"
    )


def _table(update: UpdatePlan) -> Table:
    source = "compiled" if update.compiled else "estimated, not compiled"
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(f"{update.name} update, per chip ({source})")
    table.add_column("", justify="right")
    table.add_column("")
    for name, value in _memory_rows(update):
        table.add_row(name, gib(value))
    table.add_row("peak", gib(update.needed), f"of {gib(update.usable)}")
    table.add_section()
    own = update.model_flops / update.workload.chips
    table.add_row("model FLOPs", flops(own))
    table.add_row("executed FLOPs", flops(update.flops), f"{update.flops / own:.2f} x model FLOPs")
    for t in update.traffic:
        if t.sent >= 1e6 or t is update.traffic[0]:
            note = f"sent in {t.count:,} over {t.chips} chips, {duration(t.seconds)}"
            table.add_row(t.kind, gigabytes(t.sent), note)
    table.add_section()
    seconds = update.seconds
    table.add_row("arithmetic", duration(seconds["arithmetic"]))
    table.add_row("communication", duration(seconds["links"]))
    for name in ("overlapped", "sequential"):
        mfu = f"MFU {update.mfu(seconds[name]):.1%}"
        table.add_row(f"update, {name}", duration(seconds[name]), mfu)
    return table


def _programs(plan: Plan) -> Table:
    """What a chip holds during each program of a step."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("memory of a step, per chip")
    for name in ("program", "resident", "in all"):
        table.add_column(name, justify="right")
    for p in plan.programs:
        table.add_row(p.name, gib(p.own), gib(p.needed - p.own), gib(p.needed))
    return table


def _overall(plan: Plan) -> str:
    largest, usable = plan.largest, plan.topology.usable
    resident = ", ".join(f"{n} {gib(size)}" for n, size in largest.resident.items()) or "nothing"
    host = "; ".join(f"{name} {gib(size)}" for name, size in plan.host.items())
    return (
        f"Peak of the step: {gib(largest.needed)} of {gib(usable)}, during the {largest.name} "
        f"(resident: {resident})." + (f" Host memory of process 0: {host}." if host else "")
    )


def _memory_rows(update: UpdatePlan) -> list[tuple[str, float]]:
    rows = [
        ("parameters (float32)", float(update.state.parameters)),
        ("optimizer", float(update.state.optimizer)),
    ]
    if update.state.frozen:
        rows.insert(0, (FROZEN, float(update.state.frozen)))
    if update.temporaries is None:
        known = update.state.parameters + update.state.optimizer + update.state.frozen
        rows.append(("gradients, activations, temporaries", update.peak - known))
    else:
        rows += [
            ("gradients (float32)", float(update.state.parameters)),
            ("activations and temporaries", update.temporaries),
            ("batch", float(update.state.batch)),
        ]
        rows += [("program", update.code)] if update.code else []
    return [*rows, *update.resident.items()]


def _verdict(update: UpdatePlan) -> str:
    free = update.usable - update.needed
    attention = ", ".join(sorted({k.split("_")[0] for k in update.kernels})) or "plain"
    if not update.fits:
        refused = "; collectives are estimated" if update.temporaries is None else ""
        return f"does not fit: {gib(-free)} too much; attention: {attention}{refused}"
    may = "fits" if update.compiled else "may fit"
    return f"{may}, with {gib(free)} to spare; attention: {attention}"


def all_reduce_note(update: UpdatePlan) -> str | None:
    """A hint if the compiler all-reduces sharded gradients, which sends twice as much."""
    shards = update.workload.parameter_shards
    total = sum(t.sent for t in update.traffic)
    sent = sum(t.sent for t in update.traffic if t.kind == "all-reduce" and t.chips == shards)
    if not update.compiled or sent == 0 or sent < 0.25 * total:
        return None
    return (
        f"All-reduces over {shards} chips send {gigabytes(sent)}: the compiler uses them for "
        "gradients of sharded matrices, where a reduce-scatter would send half as much. Another "
        "mesh of the same chips (mesh.data, mesh.tensor) may be faster; plan it too."
    )


def _assumptions(plan: Plan) -> str:
    source = (
        "Memory and collectives are those of the compiled program; loop bodies are multiplied by "
        "the length of the loop."
        if plan.topology.compiles
        else "No compiler is installed for these chips: memory and collectives are estimates. "
        "Where plans were compiled too, the compiler took {:g} to {:g} times the estimated "
        "activations and temporaries.".format(*COMPILED_TO_ESTIMATED)
    )
    return (
        f"{source} FLOPs are counted from the architecture and the rows. Times assume "
        f"{FLOPS_UTILISATION:.0%} of peak FLOP/s, {LINK_UTILISATION:.0%} of link bandwidth, and "
        "full rows."
    )


def describe_servers(servers: ServerPlan) -> str:
    """What the share of vLLM servers on a GPU holds."""
    return (
        f"\nvLLM, per GPU: {gib(servers.share)} hold weights of {gib(servers.weights)} and, less "
        f"what vLLM needs for activations,\nthe keys and values of {servers.tokens:,} tokens or "
        f"{servers.episodes:,} episodes of {servers.length:,} tokens."
    )


def gib(value: float) -> str:
    return f"{value / GIB:.2f} GiB" if value >= GIB / 10 else f"{value / 2**20:.1f} MiB"


def gigabytes(value: float) -> str:
    return f"{value / 1e9:.2f} GB" if value >= 1e8 else f"{value / 1e6:.1f} MB"


def flops(value: float) -> str:
    return f"{value / 1e12:.2f} T" if value >= 1e11 else f"{value / 1e9:.2f} G"


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"


def as_json(plan: Plan) -> dict[str, Any]:
    """The same figures in bytes, FLOPs and seconds."""
    return {
        "topology": plan.topology.name,
        "chips": plan.topology.count,
        "mesh": plan.mesh,
        "parameters": plan.arch.num_params,
        "fits": plan.fits,
        "updates_per_step": plan.updates_per_step,
        "utilisation": {"flops": FLOPS_UTILISATION, "links": LINK_UTILISATION},
        "updates": [_update_json(u) for u in plan.updates],
        "programs": [{**dataclasses.asdict(p), "peak": p.needed} for p in plan.programs],
        "host_memory": plan.host,
    }


def _update_json(u: UpdatePlan) -> dict[str, Any]:
    w, seconds = u.workload, u.seconds
    return {
        "name": u.name,
        "source": "compiled" if u.compiled else "estimated",
        **{k: getattr(w, k) for k in ("micro_batches", "rows", "length", "remat", "tokens")},
        "memory": {
            **dataclasses.asdict(u.state),
            "gradients": u.state.parameters,
            "temporaries": u.temporaries,
            "estimated_temporaries": u.estimated,
            "resident": u.resident,
            "peak": u.needed,
            "usable": u.usable,
        },
        "fits": u.fits,
        "model_flops": u.model_flops,
        "flops_per_chip": u.flops,
        "collectives": [dataclasses.asdict(t) for t in u.traffic],
        "seconds": seconds,
        "mfu": [u.mfu(seconds["sequential"]), u.mfu(seconds["overlapped"])],
        "kernels": list(u.kernels),
    }
