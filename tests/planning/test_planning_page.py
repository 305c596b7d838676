"""docs/planning.md agrees with the code: chips, flags, and the commands of its results."""

import re
from pathlib import Path

import pytest
from mesh_devices import HARDWARE

from manus_jax import plan
from manus_jax.planning.architectures import find_architecture
from manus_jax.planning.chips import GIB, GPUS, TPUS
from manus_jax.planning.estimates import COMPILED_TO_ESTIMATED, Workload, estimate_temporaries

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "planning.md").read_text()


def test_the_table_of_chips_is_the_one_in_use():
    chips = {**TPUS, **GPUS}
    rows = dict(re.findall(r"^\| (\w+) \| ((?:[\d.]+ \| ){4}[\d.]+) \|$", PAGE, flags=re.MULTILINE))
    assert set(rows) == set(chips)
    for name, chip in chips.items():
        flops, memory, bandwidth, link, network = (float(x) for x in rows[name].split("|"))
        assert (flops * 1e12, bandwidth * 1e9) == (chip.flops, chip.bandwidth), name
        assert (link * 1e9, network * 1e9) == (chip.link, chip.network), name
        assert memory == round(chip.memory / GIB, 2), name


def test_every_flag_is_on_the_page(capsys):
    with pytest.raises(SystemExit):
        plan.main(["--help"])
    flags = set(re.findall(r"--\w+", capsys.readouterr().out)) - {
        "--help",
        "--gin_file",
        "--gin_param",
    }
    assert flags == set(re.findall(r"^\| `(--\w+)`", PAGE, flags=re.MULTILINE))


def test_the_commands_behind_the_results_are_commands():
    lines = re.findall(r"^plan (\S+) (\S+) (\d+)(.*)$", PAGE, flags=re.MULTILINE)
    of_files = re.findall(r"^plan_file (\S+) (\S+) (\S+)$", PAGE, flags=re.MULTILINE)
    assert len(lines) + len(of_files) >= 8
    shared = re.findall(r"--gin_param='([^']+)'", PAGE.split("plan() {")[1].split("}")[0])
    files = ["configs/envs/textcraft.gin", "configs/recipes/grpo.gin"]
    for architecture, topology, rows, more in lines:
        assert find_architecture(architecture).num_params > 4e8
        assert topology.split(":")[0] in (*TPUS, "cuda")
        params = [*shared, f"data.rows = {rows}", *re.findall(r"--gin_param='([^']+)'", more)]
        config = plan.read_train_config(files, params)
        assert config.data.rows == int(rows)
    for hardware, topology, architecture in of_files:
        assert HARDWARE[hardware][1] == topology
        assert find_architecture(architecture).num_params > 4e8
        plan.read_train_config([*files, f"configs/hardware/{hardware}.gin"], [])


def test_the_range_that_estimates_state_holds_for_the_compiled_plans_of_the_page():
    row = (
        r"^\| (Qwen[\w.-]+) \| [^|]*`(\w+):\S+` ?\S* \| ([\w, ]+) "
        r"\| (\d+) × (\d+) × ([\d,]+) \| \S+ \| \S+ \| \S+ \| ([\d.]+) \|"
    )
    found = re.findall(row, PAGE, flags=re.MULTILINE)
    assert len(found) == PAGE.count("\n| Qwen") >= 11
    ratios = []
    for model, chip, mesh, micro_batches, rows, length, compiled in found:
        sizes = {axis: int(size) for axis, size in (part.split() for part in mesh.split(", "))}
        shards = {axis: sizes.get(axis, 1) for axis in ("data", "fsdp", "sequence", "tensor")}
        tokens = int(length.replace(",", ""))
        arch = find_architecture(model)
        w = Workload(arch, True, int(micro_batches), int(rows), tokens, 0.3, "full", 2, shards)
        platform = "cuda" if chip == "cuda" else "tpu"
        ratios.append(float(compiled) * GIB / estimate_temporaries(w, platform).total)
    low, high = COMPILED_TO_ESTIMATED
    assert low <= round(min(ratios), 2) <= round(max(ratios), 2) <= high
    stated = re.search(r"compilers took ([\d.]+) to ([\d.]+) times the estimated", PAGE)
    assert stated is not None
    assert [float(x) for x in stated.groups()] == [round(min(ratios), 2), round(max(ratios), 2)]


def test_the_range_holds_for_rows_that_are_split_over_small_chips():
    header = " ".join((ROOT / "configs/hardware/tpu_v5e_64.gin").read_text().split("\n#"))
    own = re.search(r"Qwen2.5-7B with GRPO +needs ([\d.]+) of 15.75", header)
    other = re.search(r"fsdp = 8, mesh.sequence = 8 and +data.rows = 8: ([\d.]+) GiB", header)
    assert own is not None and other is not None
    ratios = []
    for model, rows, split, peak in (("Qwen2.5-7B", 16, 4, own[1]), ("Qwen3-8B", 8, 8, other[1])):
        arch = find_architecture(model)
        shards = {"data": 1, "fsdp": rows, "sequence": split, "tensor": 1}
        w = Workload(arch, True, 64 // rows, rows, 17_408, 0.3, "full", 2, shards)
        # Weights, gradients, two moments and the reference policy in float32; the program itself
        # takes less than 0.1 GiB.
        compiled = float(peak) * GIB - 5 * 4 * arch.num_params / 64
        ratios.append(compiled / estimate_temporaries(w, "tpu").total)
    assert max(ratios) <= COMPILED_TO_ESTIMATED[1]
    stated = re.search(r"took ([\d.]+) times as much .*? and ([\d.]+) times for Qwen3-8B", PAGE)
    assert stated is not None
    assert [float(x) for x in stated.groups()] == pytest.approx(ratios, abs=0.01)
