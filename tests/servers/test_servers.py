"""Code shared by the server pools: health, probes, ports; it does not import JAX."""

import subprocess
import sys
from pathlib import Path

import pytest

from manus_jax.servers.health import HEALTHY, BackOff
from manus_jax.servers.processes import ServerCommand, ServerProcess, answers, free_ports

BACK_OFF = BackOff(first=1.0, limit=4.0)


def test_a_server_is_down_for_twice_as_long_after_each_failure() -> None:
    health, waits = HEALTHY, []
    for _ in range(4):
        health = health.mark_down("no answer", 10.0, BACK_OFF)
        waits.append(health.retry_at - 10.0)
    assert waits == [1.0, 2.0, 4.0, 4.0]
    assert health.down and health.problem == "no answer"
    assert not health.may_retry(13.9) and health.may_retry(14.0)
    assert not HEALTHY.down and HEALTHY.may_retry(0.0)


def test_jitter_shortens_a_wait() -> None:
    assert HEALTHY.mark_down("", 0.0, BACK_OFF, chance=1.0).retry_at == 0.5


def test_free_ports_differ_and_have_no_listener() -> None:
    ports = free_ports(3)
    assert len(set(ports)) == 3
    assert not answers(f"http://127.0.0.1:{ports[0]}/health", timeout=1.0)


def test_servers_their_settings_and_the_serve_command_need_no_jax() -> None:
    code = (
        "import sys; import manus_jax.serve, manus_jax.agentgym.environments, "
        "manus_jax.config.server_settings, manus_jax.vllm.client, manus_jax.vllm.access\n"
        "assert not {'jax', 'flax', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_output_is_read_when_it_cannot_be_logged_and_when_it_is_one_long_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "chatty.py").write_text(
        "print('x' * 10**7, flush=True)\nprint('serving http://a:1', flush=True)\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"}
    command = ServerCommand("vLLM", "chatty", (), environment, log=tmp_path / "gone" / "log")
    process = ServerProcess(command)
    process.wait(60)
    assert process.url == "http://a:1" and process.exit_status == 0
    assert caplog.text.count("output of vLLM is not logged any more") == 1


_WITH_ORPHANS = """
import subprocess, sys
from manus_jax.servers.launch import adopt_orphans, end_children
adopt_orphans()
shell = "(sleep 0.5; echo ended) & (trap '' TERM; sleep 60; echo survived) & exit 0"
subprocess.run(["bash", "-c", shell], check=True)
end_children(1.5)
print("done")
"""


def test_the_children_of_a_server_that_ended_are_waited_for_and_then_killed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITH_ORPHANS], capture_output=True, text=True, timeout=30
    )
    # Their output would follow, and the end of the pipe would be awaited, if they were alive.
    assert (done.stdout, done.stderr) == ("ended\ndone\n", "")
