"""A plan as a page of text, and as JSON."""

import io
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from manus_jax.planning.chips import GIB
from manus_jax.planning.plans import Plan, UpdatePlan


def render(plan: Plan, width: int = 100) -> str:
    """The plan as it is printed: a heading, and a table for each update."""
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    console.print(_heading(plan))
    for update in plan.updates:
        console.print()
        console.print(_table(update))
        console.print()
        console.print(_verdict(update))
        if note := whole_sums(update, plan.mesh["fsdp"] * plan.mesh["sequence"]):
            console.print(note)
    console.print(_assumptions(plan))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _heading(plan: Plan) -> str:
    chip, a = plan.topology.chip, plan.arch
    sizes = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    count = f"{plan.topology.count} x {chip.name}"
    slices = f", {plan.topology.slices} slices" if plan.topology.slices > 1 else ""
    w = plan.updates[0].workload
    return (
        f"{plan.topology.name}{slices}: {count} ({chip.usable / GIB:.2f} GiB, "
        f"{chip.flops / 1e12:.0f} TFLOP/s, {chip.bandwidth / 1e9:.0f} GB/s each), mesh {sizes}\n"
        f"{a.family}, {a.num_params:,} parameters; an update: {w.micro_batches} "
        f"micro-batches of {w.rows} rows x {w.length} tokens = {w.tokens:,} tokens, "
        f"{w.trained:.0%} of them trained; remat {w.remat}; {plan.updates_per_step} updates a step"
    )


def _table(update: UpdatePlan) -> Table:
    source = "compiled" if update.compiled else "estimated, not compiled"
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(f"{update.name}'s update, per chip ({source})")
    table.add_column("", justify="right")
    table.add_column("")
    for name, value in _memory_rows(update):
        table.add_row(name, gib(value))
    table.add_row("peak", gib(update.needed), f"of {gib(update.usable)}")
    table.add_section()
    table.add_row("FLOPs, the model's own", flops(update.model_flops / update.workload.chips))
    if update.flops is not None and update.bytes is not None:
        ratio = update.flops * update.workload.chips / update.model_flops
        table.add_row("FLOPs, done", flops(update.flops), f"{ratio:.2f} x the model's")
        table.add_row("memory traffic", gigabytes(update.bytes))
    for t in update.traffic:
        if t.sent >= 1e6 or t is update.traffic[0]:
            note = f"{t.times:,} over {t.chips} chips, {duration(t.seconds)}"
            table.add_row(t.kind, gigabytes(t.sent), note)
    if update.seconds:
        table.add_section()
        for name, seconds in update.seconds.items():
            table.add_row(f"{name} alone", duration(seconds))
        for name, total in (("all at once", update.overlapped), ("in turn", update.in_turn)):
            table.add_row(f"update, {name}", duration(total), f"MFU {update.mfu(total):.1%}")
    return table


def _memory_rows(update: UpdatePlan) -> list[tuple[str, float]]:
    rows = [
        ("parameters (float32)", float(update.state.parameters)),
        ("optimizer (two moments)", float(update.state.optimizer)),
    ]
    if update.temporaries is None:
        known = update.state.parameters + update.state.optimizer
        rows.append(("gradients, activations, temporaries", update.peak - known))
    else:
        rows += [
            ("gradients (float32)", update.gradients),
            ("activations and temporaries", update.temporaries),
            ("batch", float(update.state.batch)),
        ]
        if update.code:
            rows.append(("program", update.code))
    return [*rows, *update.resident.items()]


def _verdict(update: UpdatePlan) -> str:
    free = update.usable - update.needed
    if update.fits:
        return f"fits, with {gib(free)} to spare; attention: {_attention(update)}"
    return f"does not fit: {gib(-free)} too much; attention: {_attention(update)}"


def _attention(update: UpdatePlan) -> str:
    if not update.kernels:
        return "plain" if update.flops is not None else "not told by the compiler"
    kinds = sorted({name.split("_mha")[0].split("_mqa")[0] for name in update.kernels})
    return ", ".join(kinds)


def whole_sums(update: UpdatePlan, shards: int) -> str | None:
    """What to say where the compiler sums matrices whole that are split over `shards` chips."""
    everything = sum(t.sent for t in update.traffic)
    sent = sum(t.sent for t in update.traffic if t.kind == "all-reduce" and t.chips == shards)
    if not update.compiled or sent < 0.25 * everything:
        return None
    return (
        f"All-reduces over {shards} chips send {gigabytes(sent)}: the compiler sums matrices whole "
        "there and keeps a part, where a reduce-scatter would send half. The same chips split "
        "otherwise (mesh.data, mesh.tensor) may do better: plan it too."
    )


def _assumptions(plan: Plan) -> str:
    e = plan.efficiency
    source = (
        "Memory, FLOPs and collectives are the compiled program's, each loop's body times its "
        "length."
        if plan.topology.compiles
        else "No compiler: the step was lowered for these chips, the figures are estimates."
    )
    return (
        f"{source} Seconds at {e.flops:.0%} of peak FLOP/s, {e.memory:.0%} of memory bandwidth, "
        f"{e.links:.0%} of link bandwidth. All rows full."
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
    """The same numbers, in bytes, FLOPs and seconds."""
    return {
        "topology": plan.topology.name,
        "chips": plan.topology.count,
        "mesh": plan.mesh,
        "parameters": plan.arch.num_params,
        "fits": plan.fits,
        "updates_per_step": plan.updates_per_step,
        "efficiency": vars(plan.efficiency),
        "updates": [_update_json(u) for u in plan.updates],
    }


def _update_json(u: UpdatePlan) -> dict[str, Any]:
    w = u.workload
    return {
        "name": u.name,
        "source": "compiled" if u.compiled else "estimated",
        "micro_batches": w.micro_batches,
        "rows": w.rows,
        "length": w.length,
        "remat": w.remat,
        "tokens": w.tokens,
        "memory": {
            "parameters": u.state.parameters,
            "optimizer": u.state.optimizer,
            "gradients": u.gradients,
            "temporaries": u.temporaries,
            "batch": u.state.batch,
            "resident": u.resident,
            "peak": u.needed,
            "usable": u.usable,
        },
        "fits": u.fits,
        "model_flops": u.model_flops,
        "flops_per_chip": u.flops,
        "bytes_per_chip": u.bytes,
        "collectives": [vars(t) for t in u.traffic],
        "seconds": {**u.seconds, "overlapped": u.overlapped, "in_turn": u.in_turn}
        if u.seconds
        else {},
        "mfu": [u.mfu(u.in_turn), u.mfu(u.overlapped)] if u.seconds else [],
        "kernels": list(u.kernels),
    }
