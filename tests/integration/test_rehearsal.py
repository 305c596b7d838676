"""scripts/rehearse.sh: a pod of two processes, a real vLLM pool and an environment server."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("MANUS_JAX_VLLM_PYTHON")


def rehearse(*arguments, **environment):
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "VLLM_API_KEY")}
    return subprocess.run(
        [ROOT / "scripts" / "rehearse.sh", *map(str, arguments)],
        env={**kept, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.vllm
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not PYTHON, reason="MANUS_JAX_VLLM_PYTHON does not name an interpreter that has vLLM"
)
def test_the_rehearsal_ends_with_a_trained_published_and_served_model(tmp_path):
    directory = tmp_path / "rehearsal"
    done = rehearse("--dir", directory)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "both processes saved and ended with 143" in done.stdout
    assert re.search(r"^\d+ tensors were trained; version 6 is equal to", done.stdout, re.M)
    assert re.search(r"^http://127\.0\.0\.1:\d+ serves version 6 and answers", done.stdout, re.M)
    key = (directory / "key").read_text().strip()
    logs = "".join(file.read_text() for file in (directory / "logs").iterdir())
    assert key not in done.stdout + done.stderr + logs
    assert not (directory / "shared" / "pool" / "addresses").read_text().strip()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--servers", "0"], "--servers must be a number from 1 to 8, not '0'"),
        (["--dir", str(ROOT)], f"--dir {ROOT} exists"),
        (["--hosts", "2"], "unknown argument '--hosts'"),
    ],
)
def test_bad_arguments_are_one_line(arguments, message):
    done = rehearse(*arguments, MANUS_JAX_VLLM_PYTHON="python")
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_without_vllm_the_error_names_the_variable_to_set():
    done = rehearse(MANUS_JAX_VLLM_PYTHON="")
    assert done.returncode == 2 and "set MANUS_JAX_VLLM_PYTHON" in done.stderr
