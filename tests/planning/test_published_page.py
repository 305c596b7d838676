"""docs/published.md: hours and prices follow from the configs and from four compiled updates."""

import dataclasses
import re
from pathlib import Path

import pytest
from mesh_devices import HARDWARE

from manus_jax.config.commands import read_train_config
from manus_jax.learner.mesh import make_mesh
from manus_jax.planning.architectures import find_architecture
from manus_jax.planning.plans import workload_of
from manus_jax.training.learner_specs import updates_per_step

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "published.md").read_text()
MACHINES = ("tpu_v5e_64", "gpus_one_host")
ROWS = re.findall(r"^\| `(\w+)` \| ([\d.]+B) \| (.*) \|$", PAGE, re.MULTILINE)


def seconds_of_64_rows():
    """By model and machine: both bounds."""
    rows = re.findall(r"^\| (Qwen\S+?B) \| (.*) \|$", PAGE, re.MULTILINE)
    return {
        (model.rpartition("-")[2], machine): [float(x) for x in cell.split(" to ")]
        for model, cells in rows
        for machine, cell in zip(MACHINES, cells.split(" | ")[:2], strict=True)
        if cell != "–"  # not planned
    }


SECONDS = seconds_of_64_rows()


def test_every_config_has_its_rows():
    named = {name for name, *_ in ROWS}
    assert named == {path.stem for path in ROOT.glob("configs/published/*.gin")}
    assert len(ROWS) == len(named) + 2  # GiGPO's two models


@pytest.mark.parametrize("name, model, cells", ROWS)
def test_hours_and_prices_are_those_of_the_rows(name, model, cells):
    steps, updates, *of_machines = cells.split(" | ")
    prices = [float(x) for x in re.findall(r"\$([\d.]+) an hour for (?:64 chips|eight GPUs)", PAGE)]
    arch = find_architecture(f"qwen2.5-{model.lower()}")
    for number, (machine, price) in enumerate(zip(MACHINES, prices, strict=True)):
        files = [f"configs/published/{name}.gin", f"configs/hardware/{machine}.gin"]
        config = read_train_config([str(ROOT / file) for file in files], [])
        mesh = make_mesh(**dataclasses.asdict(config.mesh), devices=HARDWARE[machine][0]())
        work = workload_of(config, arch, mesh, True, 0.3)
        rows = work.micro_batches * work.rows
        assert (int(steps), int(updates)) == (config.train.total_steps, updates_per_step(config))
        shown_rows, hours, dollars = of_machines[3 * number : 3 * number + 3]
        assert int(shown_rows) == rows
        if (model, machine) not in SECONDS:
            assert hours == dollars == "–"
            continue
        bounds = [
            seconds / 64 * rows * int(updates) * int(steps) / 3600
            for seconds in SECONDS[model, machine]
        ]
        assert hours == " to ".join(f"{x:.1f}" for x in bounds)
        assert dollars == " to ".join(f"{x * price:,.0f}" for x in bounds)
