"""scripts/learn.sh: its table of runs, and a page from runs of an imitated trainer."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manus_jax.config.commands import read_train_config
from manus_jax.rollout.build_rollout import with_engine_settings

ROOT = Path(__file__).parents[2]
# An interpreter that imitates the trainer and passes everything else on to the real one. Seed 7
# fails; seed 8 runs until SIGTERM.
INTERPRETER = f"""#!{sys.executable}
import json, os, pathlib, shlex, signal, sys, time
if "manus_jax.train" not in sys.argv:
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
params = [a.removeprefix("--gin_param=") for a in sys.argv if a.startswith("--gin_param=")]
bound = dict(param.split(" = ", 1) for param in params)
run, seed = pathlib.Path(bound["train.run_dir"].strip("'")), int(bound["train.seed"])
run.mkdir(parents=True, exist_ok=True)
with open(run / "cores", "a") as file:
    print(*os.sched_getaffinity(0), file=file)
if seed == 7:
    sys.exit("no luck")
if seed == 8:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit((run / "stopped").write_text("")))
    time.sleep(60)
comment = "# python -m manus_jax.train " + shlex.join(sys.argv[3:]) + "\\n"
(run / "config.gin").write_text(comment + "\\n".join(params) + "\\n")
lines = [{{"step": i, "val/maze/success_rate": i / 2 + seed / 8}} for i in (0, 1)]
(run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
(run / "status.json").write_text(json.dumps({{"state": "finished"}}, indent=1))
"""


@pytest.fixture
def place(tmp_path):
    """A copy of the project with one config and without runs."""
    for name in ("scripts", "manus_jax"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "learn_maze.gin").write_text("")
    (tmp_path / "python").write_text(INTERPRETER)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def write_table(place, *rows):
    text = "# name\trecipe\n\n" + "".join("\t".join(row) + "\n" for row in rows)
    (place / "configs" / "learn_runs.tsv").write_text(text)


def start(place, *options):
    return subprocess.Popen(
        [place / "scripts" / "learn.sh", "--cores", str(min(os.sched_getaffinity(0))), *options],
        env={**os.environ, "PYTHON": str(place / "python")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def learn(place, *options):
    """(exit code, stdout, stderr)"""
    process = start(place, *options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_runs_are_done_once_and_a_page_shows_them(place):
    write_table(
        place,
        ("maze", "grpo", "0", "-"),
        ("maze", "grpo", "2", "-"),
        ("maze", "ppo", "0", "memory", "rollout.memory_turns = 2", "optimizer.lr = 1e-4"),
    )
    code, out, err = learn(place)
    assert (code, err) == (0, "")
    assert "maze_grpo_seed2: finished" in out and "wrote docs/learning.md with 3 of 3 runs" in out
    title, *_, grpo, ppo, _, picture = (place / "docs/learning.md").read_text().splitlines()
    assert title == "# Learning curves"
    name = "configs/learn_maze.gin"
    assert grpo.startswith(f"| `{name}` | maze | grpo | 0, 2 | success | 0.12 (0.00 to 0.25) |")
    assert ppo.startswith(f"| `{name}, rollout.memory_turns = 2, optimizer.lr = 1e-4` | maze | ppo")
    assert picture == "![maze: learning curves](images/learning/maze.svg)"
    assert (place / "docs/images/learning/maze.svg").exists()
    assert (place / "runs/learn/comparison.html").exists()
    assert not list((place / "docs").glob("*.part"))
    # Finished runs are not repeated; each had the one core.
    assert learn(place)[0] == 0
    cores = [path.read_text() for path in place.glob("runs/learn/*/cores")]
    assert cores == [f"{min(os.sched_getaffinity(0))}\n"] * 3


def test_a_run_that_fails_is_named_and_the_others_are_done(place):
    write_table(place, *(("maze", "grpo", seed, "-") for seed in "071"))
    code, out, err = learn(place)
    assert code == 1
    assert "maze_grpo_seed7: not finished; see runs/learn/maze_grpo_seed7.log: no luck" in err
    assert err.endswith("learn.sh: not finished: maze_grpo_seed7\n")
    assert "| 0, 1 |" in (place / "docs/learning.md").read_text()
    code, out, err = learn(place, "--report_only", "--page", "other/page.md", "--title", "Maze")
    assert (code, out.splitlines()[-1]) == (1, "wrote other/page.md with 2 of 3 runs")
    assert (place / "other/page.md").read_text().startswith("# Maze\n")
    assert (place / "runs/learn/maze_grpo_seed7/cores").read_text().count("\n") == 1
    assert learn(place, "--only", "*_seed[01]")[0] == 0


def test_an_interrupted_script_stops_its_runs(place):
    write_table(place, ("maze", "grpo", "8", "-"), ("maze", "grpo", "0", "-"))
    process = start(place)
    run = place / "runs/learn/maze_grpo_seed8"
    while not (run / "cores").exists():
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.2)  # until the trainer handles signals
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and "the same command continues" in err
    assert (run / "stopped").exists()
    assert not (place / "runs/learn/maze_grpo_seed0").exists()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("maze", "grpo", "0"), "needs name, recipe, seed and label"),
        (("mase", "grpo", "0", "-"), "there is no configs/learn_mase.gin"),
        (("maze", "grpo", "0", "a b"), "'maze_grpo_seed0_a b' is not a name"),
        (("maze", "ppo", "1", "-"), "two lines are the run maze_ppo_seed1"),
    ],
)
def test_mistakes_in_the_table_are_one_line(place, row, message):
    write_table(place, ("maze", "ppo", "1", "-"), row)
    code, out, err = learn(place)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_the_runs_of_the_project_are_those_of_its_configs_and_have_settings_it_accepts():
    command = [ROOT / "scripts" / "learn.sh", "--dry_run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = set()
    for line in done.stdout.splitlines():
        program, *words = shlex.split(line)[2:]
        assert program == "manus_jax.train"
        files = [w.removeprefix("--gin_file=") for w in words if w.startswith("--gin_file=")]
        params = [w.removeprefix("--gin_param=") for w in words if w.startswith("--gin_param=")]
        with_engine_settings(read_train_config([str(ROOT / file) for file in files], params))
        run |= {Path(file).name for file in files}
    texts = {path.name: path.read_text() for path in ROOT.glob("configs/learn_*.gin")}
    included = re.findall(r"""^include ["'](.*)["']$""", "\n".join(texts.values()), re.MULTILINE)
    assert run == set(texts) - set(included)
