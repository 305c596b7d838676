"""scripts/train_*.sh: servers are started and stopped, and the trainer's exit code is returned."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envs.serve import process_lives

ROOT = Path(__file__).parents[2]
TINY = (
    "model.path = None",
    "compute.dtype = 'float32'",
    "engine.dtype = 'float32'",
    "engine.slots = 8",
    "data.rows = 8",
    "train.total_steps = 1",
    "train.batch_size = 2",
    "train.val_tasks = 2",
    "train.val_before_train = False",
    "train.export = False",
    "algorithm.mini_batch_size = None",
    "rollout.max_turns = 2",
    "rollout.max_tokens_per_turn = 8",
    "rollout.max_total_tokens = 640",
    "rollout.prompt_source = 'observation'",
    "data.max_length = 640",
    "warm_start.steps = 1",
    "warm_start.traces = 4",
    "warm_start.batch_size = 2",
    "scratch.vocab_size = 400",
    "scratch.hidden_size = 16",
    "scratch.intermediate_size = 32",
    "scratch.num_layers = 1",
    "scratch.num_heads = 2",
    "scratch.num_kv_heads = 2",
    "scratch.head_dim = 8",
)
TASKS = ("--data_dir", "tasks")
EMBEDDED = ("--hardware", "tpu_host")  # no vLLM


def params(*more):
    return [f"--gin_param={p}" for p in (*TINY, *more)]


def free_ports(count):
    """The first of `count` ports in a row that nobody listens on."""
    for first in range(42_000 + os.getpid() % 9000, 60_000, count):
        held = [socket.socket() for _ in range(count)]
        try:
            for i, one in enumerate(held):
                one.bind(("127.0.0.1", first + i))
            return first
        except OSError:
            continue
        finally:
            for one in held:
                one.close()
    raise AssertionError("no free ports")


def command(algorithm, *arguments):
    return [str(ROOT / "scripts" / f"train_{algorithm}.sh"), *map(str, arguments)]


def environment():
    return {**os.environ, "PYTHON": sys.executable}


def run(cwd, algorithm, *arguments):
    return subprocess.run(
        command(algorithm, *arguments),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def listening(port):
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.bug("B1", "B2", "B33")
def test_two_servers_are_started_trained_on_and_gone(tmp_path):
    port = free_ports(2)
    done = run(
        tmp_path, "grpo", "--env_name", "maze", "--num_servers", 2, "--base_port", port,
        "--exp_name_suffix", "-try", *EMBEDDED, "--", *params("train.group_size = 2"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/grpo_maze-try/metrics.jsonl").exists()
    written = (tmp_path / "runs/grpo_maze-try/config.gin").read_text()
    assert "'grpo'" in written and f"127.0.0.1:{port}" in written
    assert f"127.0.0.1:{port + 1}" in written and "grpo_maze-try/test.json" in written
    for number in (port, port + 1):
        assert f":{number}" in (tmp_path / f"logs/grpo_maze-try/server_{number}.log").read_text()
        assert not listening(number)


def test_a_failing_trainer_gives_its_exit_code_and_no_server_is_left(tmp_path):
    port = free_ports(1)
    bad = params("train.group_size = 2", "algorithm.recipe = 'grpoo'")
    write_tasks(tmp_path)
    given = ("--env_name", "maze", "--base_port", port, *TASKS, *EMBEDDED)
    done = run(tmp_path, "ppo", *given, "--", *bad)
    assert done.returncode == 2
    assert "unknown recipe 'grpoo'" in done.stderr.strip().splitlines()[-1]
    assert not listening(port)


def write_tasks(tmp_path):
    (tmp_path / "tasks").mkdir()
    for name in ("train.json", "test.json"):
        (tmp_path / "tasks" / name).write_text('["maze_1"]')


def fake_python(tmp_path, trainer):
    """An interpreter that runs `trainer`, shell code, in place of the trainer, and all else."""
    write_tasks(tmp_path)
    path = tmp_path / "python"
    path.write_text(
        f"#!/usr/bin/env bash\nif [[ $1 == -m && $2 == manus_jax.train ]]; then\n{trainer}\nfi\n"
        f'exec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    return {**os.environ, "PYTHON": str(path)}


@pytest.mark.bug("B33")
@pytest.mark.parametrize("code", [0, 7])
def test_the_exit_code_of_the_trainer_is_returned(tmp_path, code):
    done = subprocess.run(
        command(
            "grpo", "--env_name", "maze", "--base_port", free_ports(1), *TASKS, "--", "--flag=a b"
        ),
        cwd=tmp_path,
        env=fake_python(tmp_path, f'printf "%s\\n" "$@"; exit {code}'),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code
    given = done.stdout.splitlines()
    assert given[-1] == "--flag=a b"
    files = [word for word in given if word.startswith("--gin_file=")]
    assert files == [
        f"--gin_file={ROOT}/configs/{name}.gin"
        for name in ("envs/maze", "recipes/grpo", "hardware/gpus_one_host")
    ]


@pytest.mark.bug("B33")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_trainer_and_ends_the_servers(tmp_path, number):
    port = free_ports(1)
    trap = "trap 'echo caught; exit 9' INT TERM; echo training; while :; do sleep 0.05; done"
    process = subprocess.Popen(
        command("grpo", "--env_name", "maze", "--base_port", port, *TASKS),
        cwd=tmp_path,
        env=fake_python(tmp_path, trap),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "training\n"
    assert listening(port)
    process.send_signal(number)
    assert process.wait(60) == 9
    assert process.stdout.read() == "caught\n"
    assert not listening(port)


def test_servers_leave_when_the_script_is_killed(tmp_path):
    port = free_ports(1)
    waits = "echo $$; exec sleep 600"
    process = subprocess.Popen(
        command("grpo", "--env_name", "maze", "--base_port", port, *TASKS),
        cwd=tmp_path,
        env=fake_python(tmp_path, waits),
        stdout=subprocess.PIPE,
        text=True,
    )
    trainer = int(process.stdout.readline())
    process.kill()
    process.wait()
    os.kill(trainer, signal.SIGKILL)
    until = time.monotonic() + 30
    while listening(port) and time.monotonic() < until:
        time.sleep(0.05)
    assert not listening(port) and not process_lives(process.pid)


def test_an_environment_without_a_config_takes_the_base_and_its_own_tasks(tmp_path):
    copy = tmp_path / "project"
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    shutil.copytree(ROOT / "configs", copy / "configs")
    (copy / "configs" / "envs" / "wordle.gin").unlink()
    env = fake_python(tmp_path, 'printf "%s\\n" "$@"; exit 0')
    arguments = ("--env_name", "wordle", "--base_port", free_ports(1))
    script = str(copy / "scripts" / "train_ppo.sh")
    done = subprocess.run(
        [script, *map(str, arguments)], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"--gin_file={copy}/configs/base.gin" in done.stdout
    assert f"--gin_file={copy}/configs/recipes/ppo.gin" in done.stdout
    assert "--gin_param=env.names = ['wordle']" in done.stdout
    assert "--gin_param=train.run_dir = 'runs/ppo_wordle'" in done.stdout


def test_an_environment_from_outside_is_served_by_its_place(tmp_path):
    (tmp_path / "outside.py").write_text(
        "import dataclasses\nfrom envs.wordle import SPEC as WORDLE\n"
        "SPEC = dataclasses.replace(WORDLE, name='outside', prefix='')\n"
    )
    port = free_ports(1)
    place = ("--env_spec", "outside:SPEC")
    done = subprocess.run(
        command("ppo", "--env_name", "outside", *place, "--base_port", port, "--", "--last"),
        cwd=tmp_path,
        env=fake_python(
            tmp_path, f'printf "%s\\n" "$@"; exec 3<>/dev/tcp/127.0.0.1/{port}; exit $?'
        ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"--gin_file={ROOT}/configs/base.gin" in done.stdout
    assert '"outside_' in (tmp_path / "logs/ppo_outside/test.json").read_text()
    assert done.stdout.endswith("--last\n") and not listening(port)


def test_given_servers_are_used_and_none_is_started(tmp_path):
    data = tmp_path / "data" / "alfworld"
    data.mkdir(parents=True)
    for name in ("train.parquet", "val.json"):
        (data / name).write_text("")
    urls = "http://10.0.0.7:36001,http://10.0.0.8:36001"
    done = subprocess.run(
        command("grpo", "--env_name", "alfworld", "--env_urls", urls),
        cwd=tmp_path,
        env={**fake_python(tmp_path, 'printf "%s\\n" "$@"; exit 0'), "BASE_MODEL": "models/x y"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    listed = "['http://10.0.0.7:36001','http://10.0.0.8:36001',]"
    assert f"--gin_param=env.urls = {{'alfworld': {listed}}}" in done.stdout
    assert "--gin_param=data.train_files = ['data/alfworld/train.parquet']" in done.stdout
    assert "--gin_param=data.val_files = ['data/alfworld/val.json']" in done.stdout
    assert "--gin_param=model.path = 'models/x y'" in done.stdout
    assert not list((tmp_path / "logs" / "grpo_alfworld").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env_nam", "maze"], "unknown argument '--env_nam'"),
        (["--gin_param=x = 1"], "options of the trainer go after --"),
        (["--env_name"], "--env_name needs a value"),
        (["--env_name", "a/b"], "--env_name must be a name"),
        (["--env_name", "chess"], "unknown environment 'chess'"),
        (["--env_name", "webarena"], "--env_urls http://HOST:8000"),
        (["--env_name", "x", "--env_spec", "no_such_module:SPEC"], "no module 'no_such_module'"),
        (["--num_servers", "0"], "--num_servers must be a number from 1 to 1000"),
        (["--num_servers", "many"], "--num_servers must be a number"),
        (["--base_port", "70000"], "--base_port must be a number from 1 to 65535"),
        (["--base_port", "65535", "--num_servers", "2"], "leaves no room for 2 servers"),
        (["--env_name", "maze", "--data_dir", "nowhere"], "nowhere contains no train.parquet"),
        (["--env_name", "maze", "--env_urls", "http://a:1"], "no directory data/maze"),
        (["--exp_name_suffix", "it's"], "must not contain quotes"),
        (["--hardware", "dgx"], "--hardware must be one of gpus_many_hosts gpus_one_host"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(tmp_path, arguments, message):
    done = run(tmp_path, "grpo", *arguments)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_port_in_use_is_reported_with_exit_code_2(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = run(tmp_path, "grpo", "--env_name", "maze", "--base_port", port)
    assert done.returncode == 2
    assert f"the server on port {port} exited" in done.stderr and "cannot listen" in done.stderr


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_the_help_names_every_option(tmp_path, algorithm):
    done = run(tmp_path, algorithm, "--help")
    assert done.returncode == 0
    source = (ROOT / "scripts" / "train_common.sh").read_text()
    options = set(re.findall(r"--[a-z_]+", re.search(r"\n( +--env_name \|[^)]*)\)\n", source)[1]))
    assert len(options) == 9 and all(option in done.stdout for option in options)
    assert f"configs/recipes/{algorithm}.gin" in done.stdout


@pytest.mark.bug("B33")
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_the_scripts_are_clean():
    scripts = sorted(map(str, (ROOT / "scripts").glob("*.sh")))
    done = subprocess.run(["shellcheck", "-x", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
