"""Run and weights directories on a mounted bucket, which cannot rename directories, append or link.

`bucket_rules.c`, preloaded into the real program, gives a directory these rules.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_training import ROOT, arguments, metrics

from manus_jax.weights.mirror import Mirror

RULES = ROOT / "tests" / "support" / "bucket_rules.c"


class Bucket:
    """A directory with the rules of a bucket, for the commands that run in it."""

    def __init__(self, path: Path) -> None:
        self.root = path.resolve() / "bucket"
        self.root.mkdir()
        self._library = path / "bucket_rules.so"
        self._refusals = path / "refusals"
        compiler = ["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", self._library, RULES]
        subprocess.run([*compiler, "-ldl"], check=True)

    def run(self, code: str, *values: object) -> None:
        environment = {
            **os.environ,
            "LD_PRELOAD": str(self._library),
            "BUCKET_ROOT": str(self.root),
            "BUCKET_REFUSALS": str(self._refusals),
        }
        command = [sys.executable, "-c", code, *map(str, values)]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=600)

    def refusals(self) -> list[str]:
        return self._refusals.read_text().splitlines() if self._refusals.exists() else []


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path)


def test_the_rules_hold_in_the_bucket_and_nowhere_else(bucket, tmp_path):
    (bucket.root / "a").mkdir()
    (tmp_path / "a").mkdir()
    code = """
import os, sys
for root, allowed in zip(sys.argv[1:], (False, True)):
    os.chdir(root)
    open("file", "w").close()
    os.replace("file", "other")
    attempts = (
        lambda: os.rename("a", "b"),
        lambda: open(root + "/log", "a"),
        lambda: os.link("other", "link"),
    )
    for attempt in attempts:
        try:
            attempt()
            assert allowed
        except OSError:
            assert not allowed
"""
    bucket.run(code, bucket.root, tmp_path)
    assert bucket.refusals() == ["rename a", f"append {bucket.root}/log", "link link"]


def test_a_run_its_weights_and_conversions_live_in_a_bucket(bucket):
    run, weights = bucket.root / "run", bucket.root / "weights"
    code = """
import json, sys
from pathlib import Path
from manus_jax import convert, publish, train
from manus_jax.vllm.publishing import publish_run
run, weights = sys.argv[1:3]
train.main(json.loads(sys.argv[3]))
publish.main([run, "--to", weights])
following = publish_run(Path(run), Path(weights + "-followed"), poll=0.1)  # as --follow does
next(following)
following.close()
for arguments in json.loads(sys.argv[4]):
    convert.main(arguments)
"""
    params = arguments(run, "train.total_steps = 2", "train.tensorboard = True")
    bucket.run(code, run, weights, json.dumps(params), "[]")
    assert bucket.refusals() == []

    # The damaged checkpoint is copied, as it cannot be renamed, and the steps are repeated.
    damaged = max((run / "checkpoints" / "2").rglob("*"), key=lambda path: path.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    params = arguments(run, "train.total_steps = 3", "train.tensorboard = True")
    conversions = [
        ["to-hf", "--checkpoint", str(run), "--out", str(bucket.root / "hf")],
        ["from-hf", "--hf", str(run / "export" / "3"), "--out", str(bucket.root / "imported")],
    ]
    bucket.run(code, run, weights, json.dumps(params), json.dumps(conversions))
    assert bucket.refusals() == [f"rename {run / 'checkpoints' / '2'}"]
    assert (run / "checkpoints" / "damaged-2").is_dir()
    assert [line["step"] for line in metrics(run)] == [0, 1, 2, 3]
    assert (bucket.root / "weights-followed" / "00000003" / "manifest.json").exists()

    exported = load_file(run / "export" / "3" / "model.safetensors")
    copies = load_file(bucket.root / "hf" / "model.safetensors")
    mirror = Mirror()
    assert "delta.safetensors" in {path.name for path in (weights / "00000003").iterdir()}
    mirror.advance(weights, 3)
    assert mirror.store is not None
    for name, tensor in exported.items():
        np.testing.assert_array_equal(copies[name], tensor)
        np.testing.assert_array_equal(mirror.store.raw(name), tensor.reshape(-1).view(np.uint8))
    assert not [path for path in bucket.root.rglob(".unfinished-*")]
