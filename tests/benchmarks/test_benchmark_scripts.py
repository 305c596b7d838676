"""Every benchmark starts as a script, and finds the packages of this project."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))
# Some benchmarks import the packages only after they have read their options.
START = """
import runpy, sys
sys.path[0] = sys.argv[1]  # as for a script
sys.argv[:] = [sys.argv[2], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as leaving:
    assert not leaving.code
import manus_jax, envs.registry
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_starts_and_its_folder_hides_no_package(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START, str(script.parent), str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("usage: ")
