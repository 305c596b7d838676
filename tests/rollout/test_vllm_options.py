"""Settings and commands of vLLM servers: mistakes are found before anything is started."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from manus_jax import serve
from manus_jax.config import ConfigError
from manus_jax.rollout.engine import EngineError
from manus_jax.rollout.vllm_options import parse_options
from manus_jax.rollout.vllm_processes import ManagedServers, ServerRecipe
from manus_jax.runtime.playing import check_engine
from manus_jax.settings import EngineSettings
from manus_jax.weights.manifest import WeightsError

SCRIPT = Path(__file__).parents[2] / "scripts" / "serve_vllm.sh"


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "either urls"),
        ({"urls": ["http://a"], "servers": 1}, "either urls"),
        ({"urls": ["http://a"]}, "no weights_dir"),
        ({"servers": 1, "push": False}, "need push"),
        ({"servers": 1, "atempts": 2}, "did you mean attempts"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(EngineError, match=message):
        parse_options(options)
    with pytest.raises(ConfigError, match=message):
        check_engine(EngineSettings(name="vllm", options=options))


def test_servers_elsewhere_may_keep_their_weights():
    assert parse_options({"urls": ["http://a"], "push": False}).urls == ("http://a",)


def snapshot(root, number):
    directory = root / f"{number:08d}" / "full"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


def test_a_server_begins_with_a_model_or_the_newest_snapshot(tmp_path):
    with pytest.raises(WeightsError, match="neither a Hugging Face directory"):
        serve.model_directory(tmp_path)
    snapshot(tmp_path, 3)
    newest = snapshot(tmp_path, 12)
    (tmp_path / "00000013").mkdir()  # a version without one
    assert serve.model_directory(tmp_path) == newest
    assert serve.model_directory(newest) == newest


def recorder(tmp_path, then="pass"):
    """An interpreter that writes down how it was called instead of being vLLM's."""
    script = tmp_path / "vllm_python"
    script.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"record = [sys.argv[1:], dict(os.environ)]\n"
        f"open({str(tmp_path / 'called')!r}, 'w').write(json.dumps(record))\n{then}\n"
    )
    script.chmod(0o755)
    return script


def test_a_cpu_build_is_told_apart_and_takes_whole_prompts(tmp_path):
    says_cpu = recorder(tmp_path, "print('cpu')")
    assert serve.is_cpu_build(str(says_cpu))
    assert not serve.is_cpu_build(sys.executable)  # which has no vLLM
    assert serve.cpu_arguments(4096)[-2:] == ["--max-num-batched-tokens", "4096"]
    assert "--no-enable-chunked-prefill" in serve.cpu_arguments(None)


def test_the_command_becomes_vllms_server_with_what_learning_needs(tmp_path):
    model = snapshot(tmp_path, 1)
    command = [sys.executable, "-m", "manus_jax.serve", "--model", str(tmp_path), "--port", "81"]
    command += ["--python", str(recorder(tmp_path)), "--max-length", "99", "--", "--seed", "4"]
    subprocess.run(command, check=True)
    called, environment = json.loads((tmp_path / "called").read_text())
    assert called[:4] == ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    given = dict(zip(called[4::2], called[5::2], strict=False))
    assert given["--port"] == "81" and given["--max-model-len"] == "99"
    assert called[called.index("--logprobs-mode") + 1] == "processed_logprobs"
    transfer = called[called.index("--weight-transfer-config") + 1]
    assert json.loads(transfer) == {"backend": "manus_jax"}
    assert "--enable-scale-out" in called
    assert called[-2:] == ["--seed", "4"]
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"


def test_the_script_starts_servers_one_port_after_the_other(tmp_path):
    snapshot(tmp_path, 1)
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "MANUS_JAX_VLLM_PYTHON": str(recorder(tmp_path, "import time; time.sleep(0.5)")),
    }
    script = [str(SCRIPT), str(tmp_path), "2", "8100", "--", "--max-length", "99"]
    ended = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["http://127.0.0.1:8100", "http://127.0.0.1:8101"]
    called, _ = json.loads((tmp_path / "called").read_text())
    assert called[called.index("--port") + 1] in ("8100", "8101")
    assert called[called.index("--max-model-len") + 1] == "99"
    assert subprocess.run([str(SCRIPT)], capture_output=True).returncode == 2


def test_mistakes_of_the_command_are_one_line(tmp_path):
    for more in ([], ["--python", "no-such-python"]):
        command = [sys.executable, "-m", "manus_jax.serve", "--model", str(tmp_path), *more]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == 2
        assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1


def recipe(tmp_path, python):
    snapshot(tmp_path, 1)
    return ServerRecipe(str(python), tmp_path, 64, 4, "float32")


def test_a_server_that_does_not_start_is_an_error_with_its_last_words(tmp_path):
    python = recorder(tmp_path, "sys.exit('no vllm here')")
    with pytest.raises(EngineError, match=r"ended with status 1: no vllm here \(all of it in"):
        ManagedServers(recipe(tmp_path, python), 1, tmp_path / "logs")


_HEALTHY = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_servers_are_started_again_when_they_die_and_end_with_the_program(tmp_path):
    servers = ManagedServers(recipe(tmp_path, recorder(tmp_path, _HEALTHY)), 2, tmp_path / "logs")
    before = servers.pids
    assert len(set(servers.urls)) == 2
    subprocess.run(["kill", "-9", str(before[0])], check=True)
    for _ in range(1000):
        if len(servers.pids) == 2 and servers.pids[0] != before[0]:
            break
        time.sleep(0.01)
    after = servers.pids
    assert after[0] != before[0] and after[1] == before[1]
    servers.close()
    for pid in {*before, *after}:
        assert subprocess.run(["kill", "-0", str(pid)], capture_output=True).returncode != 0
