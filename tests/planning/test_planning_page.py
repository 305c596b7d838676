"""docs/planning.md agrees with the code: chips, flags, and the commands that made its results."""

import re
from pathlib import Path

import pytest

from manus_jax import plan
from manus_jax.planning.architectures import find_architecture
from manus_jax.planning.chips import GIB, GPUS, TPUS

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()


def test_the_table_of_chips_is_the_one_in_use():
    chips = {**TPUS, **GPUS}
    rows = dict(re.findall(r"^\| ([a-zA-Z]\w+) \| ([\d.| ]+) \|$", PAGE, flags=re.MULTILINE))
    assert set(rows) == set(chips)
    for name, chip in chips.items():
        flops, usable, bandwidth, link, network = (float(x) for x in rows[name].split("|"))
        assert (flops * 1e12, bandwidth * 1e9) == (chip.flops, chip.bandwidth), name
        assert (link * 1e9, network * 1e9) == (chip.link, chip.network), name
        assert usable == round(chip.usable / GIB, 2), name


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
    assert len(lines) >= 8
    shared = re.findall(r"--gin_param='([^']+)'", PAGE.split("plan() {")[1].split("}")[0])
    for architecture, topology, rows, more in lines:
        assert find_architecture(architecture).num_params > 1e9
        assert topology.split(":")[0] in TPUS
        params = [*shared, f"data.rows = {rows}", *re.findall(r"--gin_param='([^']+)'", more)]
        files = ["configs/envs/textcraft.gin", "configs/recipes/grpo.gin"]
        config = plan.read_train_config(files, params)
        assert config.data.rows == int(rows)
