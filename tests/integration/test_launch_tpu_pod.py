"""scripts/launch_tpu_pod.sh with an imitated gcloud: every outcome of a run."""

import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from imitated_gcloud import Cloud, run

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "scripts" / "launch_tpu_pod.sh")
TUESDAY = "--gin_param=algorithm.reward_parameters = {'day': 'Tuesday'}"


def arguments(tmp_path, *more):
    options = {
        "project": "p",
        "zone": "z",
        "name": "slice",
        "accelerator_type": "v5litepod-16",
        "runtime_version": "v2-alpha-tpuv5-lite",
        "gin_file": "configs/envs/textcraft.gin",
        "run_dir": "/mnt/runs/a b",
        "model": "none",
        "log_dir": str(tmp_path / "logs"),
        "poll_seconds": "0",
    }
    return [word for key, value in options.items() for word in (f"--{key}", value)] + [*more]


def launch(cloud, *more, **environment):
    command = [SCRIPT, *arguments(cloud.root, *more)]
    return run(command, env=cloud.environment(**environment))


def log(cloud, number=1):
    return (cloud.root / "logs" / f"slice-{number}.log").read_text()


def test_a_run_is_installed_on_all_hosts_trained_and_the_slice_deleted(tmp_path):
    states = "WAITING_FOR_RESOURCES PROVISIONING ACTIVE"
    cloud = Cloud(tmp_path, states, "[[ -d $HOME/manus_jax/manus_jax ]] && echo done")
    done = launch(cloud, "--mount", "gs://bucket=" + str(tmp_path / "mnt"), "--spot", "--", TUESDAY)
    assert done.returncode == 0, done.stderr
    assert cloud.verbs() == ["create", "scp", "ssh", "ssh", "ssh", "delete"]
    create = cloud.calls()[0]
    assert {"--project=p", "--zone=z", "--accelerator-type=v5litepod-16", "--spot"} <= set(create)
    for host in (0, 1):
        assert cloud.runs(host) == 1
        assert cloud.arguments(host)[:2] == ["-m", "manus_jax.train"]
        assert "--gin_param=train.run_dir = '/mnt/runs/a b'" in cloud.arguments(host)
        assert cloud.arguments(host)[-1] == TUESDAY
    assert log(cloud).count("] done\n") == 2
    assert (tmp_path / "mounted").read_text().count(f"bucket {tmp_path}/mnt") == 2
    assert not (tmp_path / "exists").exists()


@pytest.mark.parametrize("state", ["ACTIVE", "SUSPENDED", "FAILED"])
def test_a_preempted_trainer_resumes_in_a_new_slice_with_the_same_command(tmp_path, state):
    cloud = Cloud(tmp_path, f"ACTIVE {state} ACTIVE", "((RUN > 1)) || exit 143")
    done = launch(cloud)
    assert done.returncode == 0, done.stderr
    once = ["create", "scp", "ssh", "ssh", "ssh", "delete"]
    assert cloud.verbs() == once * 2
    ran = [next(w for w in c if w.startswith("--command=")) for c in cloud.calls() if "ssh" in c]
    assert ran[2].replace(" run 1 ", " run 2 ") == ran[5]
    assert cloud.runs(0) == cloud.runs(1) == 2
    assert "run 1" in log(cloud, 1) and "run 2" in log(cloud, 2)


def test_hosts_that_vanish_with_their_slice_are_replaced(tmp_path):
    cloud = Cloud(tmp_path, "ACTIVE SUSPENDING SUSPENDED ACTIVE", "((RUN > 1)) || exit 255")
    done = launch(cloud)
    assert done.returncode == 0, done.stderr
    assert cloud.verbs().count("create") == cloud.verbs().count("delete") == 2


def test_a_request_that_fails_is_made_again(tmp_path):
    cloud = Cloud(tmp_path, "ACCEPTED FAILED FAILED ACTIVE", "true")
    assert launch(cloud).returncode == 0
    assert cloud.verbs()[:3] == ["create", "delete", "create"]
    assert cloud.runs() == 1


def test_a_slice_is_asked_for_no_more_often_than_allowed(tmp_path):
    cloud = Cloud(tmp_path, "ACTIVE", "exit 143")
    done = launch(cloud, "--max_restarts", "1")
    assert done.returncode == 143
    assert cloud.verbs().count("create") == cloud.verbs().count("delete") == cloud.runs() == 2
    assert "was lost 2 times" in done.stderr


def test_a_mistake_ends_the_run_with_its_code_and_the_slice_is_deleted(tmp_path):
    cloud = Cloud(tmp_path, "ACTIVE", "echo 'error: no such thing'; exit 2")
    done = launch(cloud)
    assert done.returncode == 2
    assert "no such thing" in done.stdout and "ended with 2" in done.stderr
    assert cloud.runs() == 1 and cloud.verbs()[-1] == "delete"


def test_a_broken_connection_is_joined_again_and_nothing_is_started_twice(tmp_path):
    cloud = Cloud(tmp_path, "ACTIVE", "sleep 1; echo finished")
    (tmp_path / "break").touch()
    done = launch(cloud)
    assert done.returncode == 0, done.stderr
    assert cloud.runs(0) == cloud.runs(1) == 1
    assert cloud.verbs() == ["create", "scp", "ssh", "ssh", "ssh", "ssh", "delete"]
    assert log(cloud).count("] finished\n") == 2


def test_a_slice_of_somebody_else_with_that_name_is_left_alone(tmp_path):
    cloud = Cloud(tmp_path, "ACTIVE", "true")
    (tmp_path / "exists").touch()
    done = launch(cloud)
    assert done.returncode == 1 and "exists already" in done.stderr
    assert cloud.verbs() == ["create"]


def test_keep_leaves_the_slice(tmp_path):
    cloud = Cloud(tmp_path, "ACTIVE", "true")
    assert launch(cloud, "--keep").returncode == 0
    assert "delete" not in cloud.verbs()


def test_a_launcher_that_is_stopped_lets_the_trainer_save_and_deletes_the_slice(tmp_path):
    trainer = (
        "trap 'echo saved >>saves; exit 143' TERM; touch ready-$host; while :; do sleep 0.05; done"
    )
    cloud = Cloud(tmp_path, "ACTIVE", trainer)
    process = subprocess.Popen(
        [SCRIPT, *arguments(tmp_path)],
        env=cloud.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert (tmp_path / "saves").read_text() == "saved\nsaved\n"
    assert cloud.verbs()[-2:] == ["ssh", "delete"]


def write_model(directory):
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


@pytest.mark.parametrize("source", ["bucket", "copy"])
def test_a_model_is_brought_to_every_host(tmp_path, source):
    text = "cat $HOME/manus_jax/models/Qwen3-8B/config.json"
    cloud = Cloud(tmp_path, "ACTIVE", text)
    given = write_model(tmp_path / "bucket" / "models" / "Qwen3-8B")
    model = "gs://bucket/models/Qwen3-8B" if source == "bucket" else str(given)
    done = launch(cloud, "--model", f"{model}/")
    assert done.returncode == 0, done.stderr + log(cloud)
    for host in (0, 1):
        assert "--gin_param=model.path = 'models/Qwen3-8B'" in cloud.arguments(host)
    assert log(cloud).count("] {}") == 2


def test_a_model_on_a_mounted_file_system_stays_there(tmp_path):
    cloud = Cloud(tmp_path, "ACTIVE", "true")
    mount = ("--mount", f"gs://bucket={tmp_path}/mnt")
    done = launch(cloud, *mount, "--model", f"{tmp_path}/mnt/models/Qwen3-8B")
    assert done.returncode == 0, done.stderr
    assert f"--gin_param=model.path = '{tmp_path}/mnt/models/Qwen3-8B'" in cloud.arguments()
    assert cloud.verbs() == ["create", "scp", "ssh", "ssh", "ssh", "delete"]


SUDO = """#!/usr/bin/env bash
# records what it is given; what is installed exists afterwards
echo "$@" >>{root}/sudo
[[ $1 != tee ]] || cat >>{root}/written
[[ "$*" != *"install -q -y gcsfuse" ]] || cp {root}/bin/echo_mount {root}/bin/gcsfuse
"""


def test_packages_for_mounting_are_installed_on_hosts_that_lack_them(tmp_path):
    Cloud(tmp_path, "ACTIVE", "true")
    commands = tmp_path / "bin"
    (commands / "gcsfuse").rename(commands / "echo_mount")
    for name, text in (("sudo", SUDO), ("curl", "#!/bin/sh\necho KEY $@\n")):
        (commands / name).write_text(text.format(root=tmp_path))
        (commands / name).chmod(0o755)
    scripts = tmp_path / "project" / "scripts"
    scripts.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "tpu_worker.sh", scripts)
    for name in ("bash", "cat", "chmod", "cp", "dirname", "id", "mkdir"):
        (commands / name).symlink_to(shutil.which(name))
    environment = {"PATH": str(commands), "HOME": str(tmp_path)}
    script = str(scripts / "tpu_worker.sh")
    mounts = ("gs://bucket=/mnt/b", "10.0.0.2:/share=/mnt/s")
    done = run(["bash", script, "install", *mounts], env=environment)
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "sudo").read_text()
    assert "apt-get install -q -y gcsfuse\n" in asked
    assert asked.index("install -q -y nfs-common\n") < asked.index("mount -t nfs 10.0.0.2:/share")
    written = (tmp_path / "written").read_text()
    assert "KEY" in written and "https://packages.cloud.google.com/apt gcsfuse-" in written
    assert (tmp_path / "mounted").read_text().endswith("bucket /mnt/b\n")


POOL = ("--address_file", "/mnt/pool/addresses", "--weights_dir", "/mnt/pool/weights")


@pytest.mark.parametrize("by_file", [True, False])
def test_the_key_reaches_the_trainer_and_no_command_or_log(tmp_path, by_file):
    seen = "echo $VLLM_API_KEY $MANUS_JAX_ENV_KEY >key-$host; stat -c %a $HOME/.manus_jax"
    cloud = Cloud(tmp_path, "ACTIVE", seen)
    (tmp_path / "secret").write_text("s3cret")
    (tmp_path / "env_secret").write_text("3nv_s3cret")
    files = {"api_key": tmp_path / "secret", "env_key": tmp_path / "env_secret"}
    given = [w for name, file in files.items() for w in (f"--{name}_file", str(file))] * by_file
    environment = {} if by_file else {"VLLM_API_KEY": "s3cret", "MANUS_JAX_ENV_KEY": "3nv_s3cret"}
    done = launch(cloud, *POOL, *given, **environment)
    assert done.returncode == 0, done.stderr
    for host in (0, 1):
        assert (tmp_path / f"key-host-{host}").read_text() == "s3cret 3nv_s3cret\n"
        assert f"--gin_param=vllm.address_file = '{POOL[1]}'" in cloud.arguments(host)
        assert f"--gin_param=vllm.weights_dir = '{POOL[3]}'" in cloud.arguments(host)
    assert log(cloud).count("] 700\n") == 2
    assert "s3cret" not in done.stdout + done.stderr + log(cloud) + repr(cloud.calls())


def test_a_dry_run_prints_every_command_and_runs_none(tmp_path):
    cloud = Cloud(tmp_path, "ACTIVE", "true")
    done = launch(cloud, "--dry_run", *POOL, "--", TUESDAY, VLLM_API_KEY="s3cret")
    assert done.returncode == 0, done.stderr
    assert not cloud.calls() and "s3cret" not in done.stdout
    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    gcloud = [words[4] for words in lines if words[0] == "gcloud"]
    assert gcloud == ["create", "describe", "scp", "ssh", "scp", "ssh", "ssh", "delete"]
    command = next(word for word in lines[-2] if word.startswith("--command="))
    remote = shlex.split(command.partition("=")[2])
    assert remote[:5] == ["bash", "manus_jax/scripts/tpu_worker.sh", "run", "1", "--"]
    assert remote[-1] == TUESDAY
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    "more, message",
    [
        (["--zone", ""], "--zone is missing"),
        (["--model", ""], "--model is missing"),
        (["--model", "/mnt/qwen"], "--model /mnt/qwen is not below a --mount"),
        (["--name", "Big One"], "--name must be at most 40 lower-case letters"),
        (["--gin_file", "configs/none.gin"], "configs/none.gin is not in"),
        (["--run_dir", "runs/a"], "must be an absolute path"),
        (["--address_file", "/a"], "--address_file and --weights_dir must be given together"),
        (["--mount", "bucket"], "--mount must be SOURCE=DIR"),
        (["--max_restarts", "many"], "must be a number of at least 0, not 'many'"),
        (["--run_dir", "/a'b"], "must not contain quotes"),
        (["--api_key_file", "/no/such/file"], "is missing or empty"),
        (["--tpu"], "unknown argument '--tpu'"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, more, message):
    cloud = Cloud(tmp_path, "ACTIVE", "true")
    done = launch(cloud, *more)
    assert done.returncode == 2 and not cloud.calls()
    assert message in done.stderr and done.stderr.count("\n") == 1
