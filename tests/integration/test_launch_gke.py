"""scripts/launch_gke.sh: valid manifests, sizes of slices, and no secrets."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "scripts" / "launch_gke.sh")
OPTIONS = {
    "name": "craft",
    "image": "registry.example/manus:1",
    "gin_file": "configs/envs/textcraft.gin",
    "accelerator": "v5e",
    "topology": "4x4",
    "vllm_image": "registry.example/vllm:1",
    "gpu_type": "nvidia-h100-80gb",
    "model": "/shared/models/qwen",
    "storage_class": "standard-rwx",
    "api_key_secret": "pool-key",
}


def launch(*more, environment=None, **options):
    given = {**OPTIONS, **options}
    command = [SCRIPT, *(w for k, v in given.items() for w in (f"--{k}", str(v))), *more]
    env = {**os.environ, "VLLM_API_KEY": "s3cret", **(environment or {})}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def manifests(*more, **options):
    done = launch("--dry_run", *more, **options)
    assert done.returncode == 0, done.stderr
    assert "s3cret" not in done.stdout
    found = list(yaml.safe_load_all(done.stdout))
    return {document["kind"]: document for document in found if document}


def learner(made):
    return made["JobSet"]["spec"]["replicatedJobs"][0]


def container(pod):
    (only,) = pod["spec"]["containers"]
    return only


@pytest.mark.parametrize(
    "accelerator, topology, label, hosts, chips",
    [
        ("v5e", "4x4", "tpu-v5-lite-podslice", 4, 4),
        ("v5e", "2x2", "tpu-v5-lite-podslice", 1, 4),
        ("v5e", "1x1", "tpu-v5-lite-podslice", 1, 1),
        ("v6e", "16x16", "tpu-v6e-slice", 64, 4),
        ("v5p", "2x2x4", "tpu-v5p-slice", 4, 4),
    ],
)
def test_hosts_and_chips_follow_from_the_topology(accelerator, topology, label, hosts, chips):
    job = learner(manifests(accelerator=accelerator, topology=topology))["template"]["spec"]
    assert job["parallelism"] == job["completions"] == hosts
    pod = job["template"]
    resources = container(pod)["resources"]
    assert resources["limits"] == resources["requests"] == {"google.com/tpu": chips}
    assert pod["spec"]["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": topology,
    }


def test_several_slices_are_several_jobs_of_as_many_hosts():
    job = learner(manifests(slices=2, topology="8x8"))
    assert job["replicas"] == 2 and job["template"]["spec"]["parallelism"] == 16


def test_a_preemption_restarts_all_and_counts_for_nothing():
    made = manifests()
    policy = made["JobSet"]["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 3
    assert policy["rules"] == [
        {
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
    ]
    job = learner(made)["template"]["spec"]
    assert job["backoffLimit"] == 0
    codes, evicted = job["podFailurePolicy"]["rules"]
    assert codes["onExitCodes"] == {
        "containerName": container(job["template"])["name"],
        "operator": "In",
        "values": [143],
    }
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] == 600


def test_learner_and_servers_share_a_volume_an_address_file_and_a_secret():
    made = manifests(vllm_replicas=3, vllm_gpus=2, vllm_max_length=4096)
    assert made["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    claim = made["PersistentVolumeClaim"]["metadata"]["name"]
    deployment = made["Deployment"]["spec"]
    assert deployment["replicas"] == 3
    pods = [learner(made)["template"]["spec"]["template"], deployment["template"]]
    for pod in pods:
        volumes = {v["name"]: v for v in pod["spec"]["volumes"]}
        assert volumes["shared"]["persistentVolumeClaim"] == {"claimName": claim}
        assert {"name": "shared", "mountPath": "/shared"} in container(pod)["volumeMounts"]
        env = {e["name"]: e for e in container(pod)["env"]}
        secret = {"secretKeyRef": {"name": "pool-key", "key": "api-key"}}
        assert env["VLLM_API_KEY"] == {"name": "VLLM_API_KEY", "valueFrom": secret}
        assert "/shared/craft/addresses" in " ".join(container(pod)["command"])
    served = container(deployment["template"])
    assert served["resources"]["limits"] == {"nvidia.com/gpu": 2}
    words = served["command"]
    assert words[words.index("--host") + 1] == "$(POD_IP)"  # a private interface
    assert words[words.index("--max-length") + 1] == "4096"
    assert words[-2:] == ["--tensor-parallel-size", "2"]


def test_only_the_learner_reaches_the_servers_and_nothing_balances_them():
    made = manifests()
    policy, service = made["NetworkPolicy"]["spec"], made["Service"]["spec"]
    labels = made["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"] == service["selector"] == labels
    ((source,),) = [rule["from"] for rule in policy["ingress"]]
    pod = learner(made)["template"]["spec"]["template"]
    assert source["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    assert service["clusterIP"] == "None"


def test_the_trainers_options_arrive_as_they_are():
    odd = """--gin_param=train.next_command = 'say "a\\\\b" $(HOME) ${name} & #'"""
    words = container(learner(manifests("--", odd))["template"]["spec"]["template"])["command"]
    assert words[:3] == ["python", "-m", "manus_jax.train"]
    assert words[-1] == odd.replace("$(", "$$(")  # which Kubernetes makes $( again
    assert "--gin_param=train.run_dir = '/shared/runs/craft'" in words


def test_spot_nodes_are_asked_for():
    made = manifests("--spot")
    for pod in (
        learner(made)["template"]["spec"]["template"],
        made["Deployment"]["spec"]["template"],
    ):
        assert pod["spec"]["nodeSelector"]["cloud.google.com/gke-spot"] == "true"


def test_no_name_is_left_to_be_filled_in():
    used = set()
    for path in (ROOT / "scripts/kubernetes").glob("*.yaml"):
        used |= set(re.findall(r"\$\{\w+\}", path.read_text()))
    assert len(used) > 15
    done = launch("--dry_run", "--spot")
    assert not re.findall(r"\$\{\w+\}", done.stdout)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"topology": "4x6"},
            "v5e has no topology 4x6 (4 x 6 = 24 chips); it has 1x1 = 1, 2x2 = 4",
        ),
        ({"accelerator": "v5p"}, "v5p has no topology 4x4 (4 x 4 = 16 chips); it has 2x2x1 = 4"),
        ({"topology": "big"}, "not 'big'"),
        ({"accelerator": "v3"}, "must be v5e, v5p or v6e"),
        ({"topology": "2x2", "slices": 2}, "4 chips are one host"),
        ({"vllm_gpus": 0}, "--vllm_gpus must be a number of at least 1, not '0'"),
        ({"model": "models/qwen"}, "--model must be on the shared volume"),
        ({"api_key_secret": ""}, "--api_key_secret is missing"),
        ({"image": "a'b"}, "--image must be plain letters"),
        ({"tpus": "4"}, "unknown argument '--tpus'"),
    ],
)
def test_impossible_requests_are_refused_in_one_line(options, message):
    done = launch("--dry_run", **options)
    assert done.returncode == 2 and not done.stdout
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_without_a_dry_run_the_same_manifests_are_applied(tmp_path):
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/arguments\ncat >{tmp_path}/applied\n')
    kubectl.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert launch(environment=path, namespace="agents").returncode == 0
    assert (tmp_path / "arguments").read_text() == "apply --namespace agents -f -\n"
    assert (tmp_path / "applied").read_text() == launch("--dry_run").stdout
