"""docs/operations.md agrees with the code: exit codes, keys of status.json, the systemd unit."""

import configparser
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from manus_jax.status import STATUS
from manus_jax.training.job import Job
from manus_jax.training.stopping import StopRequest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
UNIT = ROOT / "scripts" / "manus_jax.service"

ENDS = {
    0: "pass",
    1: "raise ValueError('a bug')",
    2: "raise UserError('no such\\nfile')",
    130: "raise KeyboardInterrupt",
    134: "os.abort()",
    137: "os.kill(os.getpid(), signal.SIGKILL)",
    143: "raise Stopped.after(3, 5, 143)",
}


def table(heading: str) -> dict[str, str]:
    section = PAGE.partition(heading)[2].partition("\n\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.*?) \|", section, re.MULTILINE)
    return {first: second for first, second in rows if first not in ("code", "key")}


def test_every_exit_code_is_documented_and_happens() -> None:
    assert {int(code) for code in table("## Exit codes")} == set(ENDS)
    for code, statement in ENDS.items():
        program = (
            "import os, signal\n"
            "from manus_jax import command\n"
            "from manus_jax.errors import Stopped, UserError\n"
            f"def main(arguments):\n    {statement}\n"
            "command.run(main)\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        shell = done.returncode if done.returncode >= 0 else 128 - done.returncode
        assert shell == code, statement
        if code in (2, 130, 143):
            assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_requested_stop_has_the_code_of_its_signal(number: signal.Signals) -> None:
    request = StopRequest(Job())
    request.signal_number = number
    assert str(request.exit_code) in table("## Exit codes")
    assert number.name in table("## Exit codes")[str(request.exit_code)]


def test_every_key_of_the_status_is_documented() -> None:
    documented = {k for keys in table("`status.json`:") for k in re.findall(r"`(\w+)`", keys)}
    assert documented == set(STATUS.snapshot())


def test_the_unit_restarts_crashes_and_not_user_errors() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert service["SuccessExitStatus"].split() == ["130", "143"]
    config = re.search(r"--gin_file=(\S+)", service["ExecStart"])
    assert config and (ROOT / config[1]).is_file()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text().replace("/srv/manus_jax/.venv/bin/python", sys.executable)
    text = text.replace("User=manus", "User=root").replace("/srv/manus_jax", str(ROOT))
    (tmp_path / UNIT.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / UNIT.name)],
        capture_output=True,
        text=True,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )
    ours = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, ours) == (0, []), done.stderr
