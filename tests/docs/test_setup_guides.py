"""Every command of docs/setups/ is run as far as that is possible without accelerators.

Launchers run with --dry_run, and the trainer's command that they print is checked like one that a
guide shows: its settings are read, and its mesh, rows and model are laid out over the devices of
its hardware file. Other commands are checked against their own help.
"""

import dataclasses
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from mesh_devices import HARDWARE
from test_docs_examples import blocks, options_of

from manus_jax.config.commands import TrainConfig, read_train_config
from manus_jax.learner.mesh import check_batch, check_model, make_mesh
from manus_jax.models.attention import pick_implementation
from manus_jax.planning.architectures import find_architecture
from manus_jax.rollout.build_rollout import with_engine_settings
from manus_jax.training.learner_specs import make_recipe
from manus_jax.training.run_checks import check_sizes
from manus_jax.vllm.access import read_api_key

ROOT = Path(__file__).parents[2]
COMMANDS = [
    (guide.name, line)
    for guide in sorted((ROOT / "docs" / "setups").glob("*.md"))
    for block in blocks(guide)
    if block.language == "sh"
    for line in block.text.splitlines()
]


def parts(line):
    """(variables, program, arguments); a program is a script or the name of a module."""
    words = shlex.split(line)
    variables = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    if words[:2] == ["python", "-m"]:
        return variables, words[2], words[3:]
    return variables, words[0], words[1:]


def of(program):
    return [(guide, line) for guide, line in COMMANDS if parts(line)[1].startswith(program)]


def run(line, tmp_path, *more, **environment):
    """Runs the script of a command in a directory that looks like the project's root."""
    for name in ("configs", "scripts", "manus_jax"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "key").write_text("s3cret")
    variables, program, arguments = parts(line)
    done = subprocess.run(
        [program, *more, *arguments],
        cwd=tmp_path,
        env={**os.environ, **variables, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "s3cret" not in done.stdout
    return done.stdout


def check_training(arguments) -> TrainConfig:
    """Raises if the trainer, with these arguments, would refuse its settings or its devices."""
    files = [a.partition("=")[2] for a in arguments if a.startswith("--gin_file=")]
    params = [a.partition("=")[2] for a in arguments if a.startswith("--gin_param=")]
    assert len(files) + len(params) == len(arguments)
    config = with_engine_settings(read_train_config([str(ROOT / file) for file in files], params))
    check_sizes(config, make_recipe(config.algorithm))
    assert config.model.path is not None
    devices, _ = HARDWARE[Path(files[-1]).stem]
    mesh = make_mesh(**dataclasses.asdict(config.mesh), devices=devices())
    kernel = pick_implementation(mesh.devices.flat[0].platform)
    check_model(find_architecture(Path(config.model.path).name), mesh, kernel)
    check_batch(config.data.rows, config.data.max_length, mesh, kernel)
    return config


def trainer_in(words):
    """The arguments of the trainer in the words of a command."""
    start = words.index("manus_jax.train")
    assert words[start - 1] == "-m"
    return words[start + 1 :]


def test_all_kinds_of_commands_are_found():
    assert len(of("scripts/launch_")) >= 4 and len(of("manus_jax.plan")) >= 5
    assert len(of("manus_jax.train")) >= 4 and len(of("scripts/serve_vllm.sh")) >= 3


@pytest.mark.parametrize("guide, line", of("scripts/launch_tpu_pod.sh"))
def test_a_tpu_slice_is_launched_with_settings_that_divide_over_it(guide, line, tmp_path):
    lines = run(line, tmp_path, "--dry_run").splitlines()
    (command,) = (w for w in shlex.split(lines[-2]) if w.startswith("--command="))
    check_training(trainer_in(shlex.split(command.partition("=")[2])))


@pytest.mark.parametrize("guide, line", of("scripts/launch_slurm.sh"))
def test_a_slurm_job_is_submitted_with_settings_that_divide_over_its_nodes(guide, line, tmp_path):
    words = shlex.split(run(line, tmp_path, "--dry_run"))
    config = check_training(trainer_in(words))
    (exported,) = (w for w in words if w.startswith("--export="))
    length = dict(pair.split("=", 1) for pair in exported.split(",")[1:])["MAX_LENGTH"]
    assert int(length) >= config.data.max_length


@pytest.mark.parametrize("guide, line", of("scripts/launch_gke.sh"))
def test_a_jobset_runs_settings_that_divide_over_its_slice(guide, line, tmp_path):
    manifests = [m for m in yaml.safe_load_all(run(line, tmp_path, "--dry_run")) if m]
    (jobset,) = (m for m in manifests if m["kind"] == "JobSet")
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    check_training(trainer_in(pod["spec"]["containers"][0]["command"]))


@pytest.mark.parametrize("guide, line", of("manus_jax.train"))
def test_the_trainer_takes_settings_that_divide_over_the_devices(guide, line):
    check_training(parts(line)[2])


@pytest.mark.parametrize("guide, line", of("manus_jax.plan"))
def test_a_plan_is_for_the_devices_of_its_hardware_file(guide, line):
    *arguments, topology = parts(line)[2]
    check_training(arguments)
    hardware = [a for a in arguments if "/hardware/" in a][-1]
    assert topology == f"--topology={HARDWARE[Path(hardware).stem][1]}"


@pytest.mark.parametrize("guide, line", of("scripts/serve_vllm.sh"))
def test_servers_are_started_with_options_that_exist(guide, line, tmp_path):
    words = run(line, tmp_path, PYTHON="echo", CUDA_VISIBLE_DEVICES="0").split()
    assert words[:2] == ["-m", "manus_jax.serve"]
    given = {word for word in words if word.startswith("--") and word != "--"}
    assert "--gpus" in given and given <= options_of("manus_jax.serve")


def test_servers_accept_the_key_and_other_users_cannot_read_it(tmp_path):
    ((_, line),) = of("(umask")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", line], cwd=tmp_path, env={**os.environ, "PATH": path}, check=True)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert len(read_api_key(tmp_path / "key")) >= 32


@pytest.mark.parametrize("program", ["manus_jax.report", "envs.serve", "scripts/rehearse.sh"])
def test_other_commands_have_options_that_exist(program):
    assert of(program)
    for _, line in of(program):
        given = {a.partition("=")[0] for a in parts(line)[2] if a.startswith("--")}
        assert given <= options_of(program)


def test_every_command_is_checked_by_one_of_these_tests():
    checked = (
        "(umask",
        "scripts/",
        "manus_jax.train",
        "manus_jax.plan",
        "manus_jax.report",
        "envs.serve",
    )
    assert all(parts(line)[1].startswith(checked) for _, line in COMMANDS)
