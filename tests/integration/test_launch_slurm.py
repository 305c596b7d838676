"""scripts/launch_slurm.sh and its job, with a SLURM that runs every step on this machine."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from free_ports import free_pair, in_use
from recording_python import HEALTHY, recorder, snapshot

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "scripts" / "launch_slurm.sh")
CONFIG = str(ROOT / "configs" / "envs" / "textcraft.gin")

# sbatch: the variables of --export, then the job itself, here and now.
SBATCH = r"""#!/usr/bin/env bash
printf '%s\n' "$@" >ROOT/sbatch
while [[ $1 == --* ]]; do
  if [[ $1 == --export=ALL,* ]]; then
    IFS=, read -ra pairs <<<"${1#--export=ALL,}"
    export "${pairs[@]}"
  fi
  shift
done
export SLURM_JOB_ID=77
exec "$@"
"""
# srun: what it was asked, and the command once; a signal to it goes to the command.
SRUN = r"""#!/usr/bin/env bash
options=()
while [[ $1 == --* ]]; do options+=("$1"); shift; done
echo "${options[@]}" "JAX_LOCAL_DEVICE_IDS=${JAX_LOCAL_DEVICE_IDS-}" >>ROOT/steps
setsid "$@" &
child=$!
trap 'kill -TERM -- "-$child" 2>/dev/null' TERM
while kill -0 "$child" 2>/dev/null; do wait "$child"; done
wait "$child"
"""
FAKES = {
    "sbatch": SBATCH,
    "srun": SRUN,
    "scontrol": '#!/bin/sh\necho "$@" >>ROOT/scontrol\n',
    "hostname": "#!/bin/sh\necho 127.0.0.1 172.17.0.1\n",
}


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, text in FAKES.items():
        (tmp_path / "bin" / name).write_text(text.replace("ROOT", str(tmp_path)))
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "key").write_text("s3cret")
    recorder(tmp_path / "bin", HEALTHY)
    snapshot(tmp_path / "versions").rename(tmp_path / "model")
    return tmp_path


def trainer(cluster, text):
    """An interpreter that is ours but for the trainer, which is shell code."""
    path = cluster / "bin" / "python"
    path.write_text(
        "#!/usr/bin/env bash\nif [[ $2 == manus_jax.train ]]; then\n"
        f'printf "%s\\n" "$@" >{cluster}/trained\n{text}\nfi\nexec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    return path


def command(cluster, *more, **options):
    given = {
        "name": "craft",
        "gin_file": CONFIG,
        "run_dir": str(cluster / "run"),
        "log_dir": str(cluster / "logs"),
        "python": str(cluster / "bin" / "python"),
        **options,
    }
    return [SCRIPT, *(w for k, v in given.items() for w in (f"--{k}", str(v))), *more]


def environment(cluster):
    kept = {k: v for k, v in os.environ.items() if k != "VLLM_API_KEY"}
    path = f"{cluster / 'bin'}:{os.environ['PATH']}"
    return {**kept, "PATH": path, "CUDA_VISIBLE_DEVICES": ""}


def run(cluster, *more, **options):
    return subprocess.run(
        command(cluster, *more, **options),
        env=environment(cluster),
        capture_output=True,
        text=True,
        timeout=90,
    )


def pool(cluster, **more):
    return {
        "vllm_nodes": 1,
        "model": str(cluster / "model"),
        "max_length": 512,
        "api_key_file": str(cluster / "key"),
        "vllm_python": str(cluster / "bin" / "vllm_python"),
        **more,
    }


def steps(cluster):
    return [line.split() for line in (cluster / "steps").read_text().splitlines()]


def test_learner_nodes_get_one_process_each_with_all_of_their_gpus(cluster):
    trainer(cluster, "exit 0")
    done = run(cluster, "--", "--gin_param=train.seed = 3", learner_nodes=2, gpus_per_node=4)
    assert done.returncode == 0, done.stderr
    (step,) = steps(cluster)
    assert {"--nodes=2", "--ntasks=2", "--relative=0", "--gpus-per-node=4"} <= set(step)
    assert step[-1] == "JAX_LOCAL_DEVICE_IDS=0,1,2,3"
    given = (cluster / "trained").read_text().splitlines()
    assert given[:3] == ["-m", "manus_jax.train", f"--gin_file={CONFIG}"]
    assert given[-1] == "--gin_param=train.seed = 3"
    assert not (cluster / "scontrol").exists()


def test_servers_beside_it_are_found_through_the_file_and_end_with_the_job(cluster):
    addresses = cluster / "run" / "pool" / "addresses"
    addresses.parent.mkdir(parents=True)
    addresses.write_text("http://10.0.0.9:8000\n")  # of an earlier job
    port = free_pair()
    both = f"[[ $(wc -l <{addresses} 2>/dev/null) == 2 ]]"
    text = f"until {both}; do sleep 0.05; done; sort {addresses}; echo $VLLM_API_KEY"
    trainer(cluster, f"({text}) >{cluster}/seen; exit 0")
    done = run(cluster, learner_nodes=3, gpus_per_node=2, **pool(cluster, port=port))
    assert done.returncode == 0, done.stderr
    urls = [f"http://127.0.0.1:{number}" for number in (port, port + 1)]
    assert (cluster / "seen").read_text().splitlines() == [*urls, "s3cret"]
    relative = {
        next(w for w in step if w.startswith("--relative=")): step for step in steps(cluster)
    }
    assert "--nodes=3" in relative["--relative=0"] and "--nodes=1" in relative["--relative=3"]
    assert addresses.read_text() == "" and not in_use(port) and not in_use(port + 1)
    given = (cluster / "trained").read_text()
    assert f"--gin_param=vllm.address_file = '{addresses}'" in given
    assert f"--gin_param=vllm.weights_dir = '{addresses.parent / 'weights'}'" in given
    submitted = (cluster / "sbatch").read_text()
    assert "--nodes=4\n" in submitted and "s3cret" not in submitted + done.stdout + done.stderr


@pytest.mark.parametrize("code, requeued", [(143, True), (2, False), (1, False), (0, False)])
def test_only_a_preempted_trainer_is_queued_again(cluster, code, requeued):
    trainer(cluster, f"exit {code}")
    assert run(cluster).returncode == code
    assert (cluster / "scontrol").exists() == requeued
    if requeued:
        assert (cluster / "scontrol").read_text() == "requeue 77\n"


def test_the_signal_before_the_time_limit_reaches_the_learner_and_the_job_is_requeued(cluster):
    trainer(cluster, f"trap 'exit 143' TERM; touch {cluster}/ready; while :; do sleep 0.05; done")
    process = subprocess.Popen(command(cluster), env=environment(cluster))
    deadline = time.monotonic() + 60
    while not (cluster / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGTERM)  # the batch shell, which sbatch has become
    assert process.wait(60) == 143
    assert (cluster / "scontrol").read_text() == "requeue 77\n"


def test_the_job_asks_slurm_to_requeue_append_and_warn():
    asked = re.findall(r"^#SBATCH (.+)$", (ROOT / "scripts/slurm_gpu.sbatch").read_text(), re.M)
    assert {"--requeue", "--open-mode=append", "--signal=B:TERM@300"} <= set(asked)


def test_a_dry_run_prints_the_submission_and_submits_nothing(cluster):
    done = run(
        cluster, "--dry_run", "--sbatch_option=--partition=gpu", "--", "--gin_param=a.b = 'c d'",
        **pool(cluster, vllm_nodes=2, tensor_parallel=2),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    words = shlex.split(line)
    assert words[0] == "sbatch" and {"--nodes=3", "--gpus-per-node=8"} <= set(words)
    assert "--partition=gpu" in words and words[-1] == "--gin_param=a.b = 'c d'"
    exported = dict(
        p.split("=", 1) for p in next(w for w in words if "--export" in w).split(",")[1:]
    )
    assert exported["TENSOR_PARALLEL"] == "2" and exported["VLLM_NODES"] == "2"
    assert not (cluster / "sbatch").exists() and not (cluster / "logs").exists()
    assert "s3cret" not in done.stdout


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tensor_parallel": 3}, "8 GPUs per node are not divisible by --tensor_parallel 3"),
        ({"max_length": ""}, "--max_length is missing"),
        ({"api_key_file": "/no/such"}, "/no/such is missing or empty"),
        ({"vllm_nodes": 0}, "--max_length requires --vllm_nodes > 0"),
        ({"learner_nodes": 0}, "--learner_nodes must be a number of at least 1, not '0'"),
        ({"gin_file": "none.gin"}, "--gin_file none.gin does not exist"),
        ({"run_dir": "run"}, "must be an absolute path"),
        ({"run_dir": "/a,b"}, "must not contain a comma"),
    ],
)
def test_bad_arguments_are_one_line(cluster, change, message):
    done = run(cluster, **{**pool(cluster), **change})
    assert done.returncode == 2 and not (cluster / "sbatch").exists()
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_a_missing_config_is_named():
    done = subprocess.run([SCRIPT, "--name", "x"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "launch_slurm.sh: --gin_file is missing; --help lists the arguments\n"


def test_all_scripts_are_clean():
    scripts = [p for p in (ROOT / "scripts").iterdir() if p.suffix in (".sh", ".sbatch")]
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run(
        [shellcheck, "-x", *map(str, scripts)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
