"""`python -m manus_jax.publish`: a run's checkpoints become versions, followed as they come."""

import shutil
import subprocess
import sys

import pytest
from published_models import CARD, changed, copies, exported, model
from vllm_loopback import LoopbackServer

from manus_jax.engines.protocol import EngineError
from manus_jax.files import DirectoryInUse
from manus_jax.models import orbax_params
from manus_jax.models.orbax_params import CheckpointError
from manus_jax.publish import main
from manus_jax.vllm.publishing import publish_run
from manus_jax.weights.manifest import WeightsError, published_versions
from manus_jax.weights.mirror import Mirror

pytestmark = pytest.mark.slow


def save_step(run, step, params):
    CARD.save(run / "model")
    made = orbax_params.save_params(run.with_name(f"made-{step}"), params, {})
    (run / "checkpoints").mkdir(exist_ok=True)
    made.rename(run / "checkpoints" / str(step))


def test_a_run_is_followed_from_checkpoint_to_checkpoint(tmp_path):
    run, to = tmp_path / "run", tmp_path / "weights"
    params = model()
    save_step(run, 4, params)
    following = publish_run(run, to, poll=0.01)
    assert next(following).identity.number == 4
    params = changed(params, 0.02, 1)
    save_step(run, 9, params)
    second = next(following)
    assert (second.identity.number, second.snapshot_bytes) == (9, None)
    following.close()
    mirror = Mirror(tmp_path)
    mirror.advance(to, 9)
    assert copies(mirror) == exported(params, tmp_path / "hf")
    mirror.close()


def test_the_command_prints_each_version_and_publishes_it_once(tmp_path, capsys):
    run, to = tmp_path / "run", tmp_path / "weights"
    save_step(run, 2, model())
    main([str(run), "--to", str(to)])
    assert capsys.readouterr().out.startswith("version 2, ")
    main([str(run), "--to", str(to)])
    assert capsys.readouterr().out == f"version 2 is already in {to}\n"
    assert published_versions(to) == [2]


def test_directories_that_hold_something_else_are_refused_and_left_alone(tmp_path):
    run, to = tmp_path / "run", tmp_path / "weights"
    save_step(run, 2, model())
    before = sorted(path.relative_to(run) for path in run.rglob("*"))
    for place, name in ((run, "checkpoints|model"), (run / "checkpoints", "2")):
        with pytest.raises(WeightsError, match=f"contains ({name}), which is not a published"):
            main([str(run), "--to", str(place)])
    assert sorted(path.relative_to(run) for path in run.rglob("*")) == before
    save_step(tmp_path / "longer", 7, model(1))
    main([str(tmp_path / "longer"), "--to", str(to)])
    with pytest.raises(WeightsError, match=r"has version 7, and the newest step of the run is 2"):
        main([str(run), "--to", str(to)])
    assert published_versions(to) == [7]


def test_a_version_of_another_run_is_not_taken_for_this_one(tmp_path):
    to = tmp_path / "weights"
    for name, seed in (("one", 0), ("other", 1)):
        save_step(tmp_path / name, 2, model(seed))
        shutil.rmtree(tmp_path / "made-2")
    main([str(tmp_path / "one"), "--to", str(to)])
    with pytest.raises(WeightsError, match=r"version 2 in .* has other weights than .*another run"):
        main([str(tmp_path / "other"), "--to", str(to)])
    assert published_versions(to) == [2]


def test_two_publishers_do_not_write_to_one_directory(tmp_path):
    run, to = tmp_path / "run", tmp_path / "weights"
    save_step(run, 2, model())
    to.mkdir()
    hold = "import sys; from pathlib import Path; from manus_jax.files import lock_directory; "
    hold += "lock = lock_directory(Path(sys.argv[1])); print(flush=True); input()"
    command = [sys.executable, "-c", hold, str(to)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"\n"
        with pytest.raises(DirectoryInUse, match="another process is using"):
            main([str(run), "--to", str(to)])
        other.communicate(b"\n")
    main([str(run), "--to", str(to)])
    assert published_versions(to) == [2]


def test_a_server_that_cannot_be_used_is_named_before_anything_is_published(tmp_path):
    run, to = tmp_path / "run", tmp_path / "weights"
    save_step(run, 2, model())
    server = LoopbackServer(tmp_path)
    server.config = CARD.config
    for path, answer in (("/v1/models", "{}"), ("/collective_rpc", '{"results": []}')):
        server.instead = {path: answer}
        with pytest.raises(EngineError, match="it is not a vLLM server"):
            main([str(run), "--to", str(to), "--server", server.url])
    server.instead, server.key = {}, "k"
    with pytest.raises(EngineError, match="answered 401"):
        main([str(run), "--to", str(to), "--server", server.url])
    assert not to.exists()
    server.close()


def test_a_run_without_checkpoints_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        main([str(tmp_path), "--to", str(tmp_path / "weights")])


def test_a_mistake_is_one_line(tmp_path):
    run, to = tmp_path / "run", tmp_path / "weights"
    save_step(run, 0, model())
    to.write_text("a file")
    command = [sys.executable, "-m", "manus_jax.publish", str(run), "--to", str(to)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert str(to) in ended.stderr


def test_servers_load_published_versions(tmp_path):
    run, to = tmp_path / "run", tmp_path / "weights"
    servers = [LoopbackServer(tmp_path) for _ in range(2)]
    for server in servers:
        server.config = CARD.config
    named = [part for server in servers for part in ("--server", server.url)]
    for step in (2, 3):
        save_step(run, step, model(step))
        main([str(run), "--to", str(to), *named])
        assert [server.label.split("-")[0] for server in servers] == [str(step)] * 2
    for server in servers:
        server.restart()
    main([str(run), "--to", str(to), *named])  # nothing new, but they hold something else
    assert [server.label.split("-")[0] for server in servers] == ["3", "3"]
    for server in servers:
        server.close()


def test_a_server_that_cannot_be_reached_is_named(tmp_path):
    run, to = tmp_path / "run", tmp_path / "weights"
    save_step(run, 2, model())
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9 does not answer"):
        main([str(run), "--to", str(to), "--server", "http://127.0.0.1:9"])
