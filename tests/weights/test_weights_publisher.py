"""Publishing: the bytes that `convert` would write, from any mesh, version after version."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_models import ARCH, CARD, changed, copies, exported, model, tensors_of

from manus_jax.files import verify_checksums
from manus_jax.learner.mesh import make_mesh, param_shardings
from manus_jax.models import huggingface
from manus_jax.models.transformer import Compute, Transformer, abstract_model
from manus_jax.weights.manifest import (
    DELTA,
    FULL,
    SNAPSHOT,
    WeightsError,
    published_versions,
    read_manifest,
    version_directory,
)
from manus_jax.weights.mirror import Mirror, plan
from manus_jax.weights.publisher import Publisher

ROOT = Path(__file__).parents[2]
PATHS = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))


@pytest.fixture
def mirror(tmp_path):
    mirror = Mirror(tmp_path / "mirror")
    yield mirror
    mirror.close()


@pytest.fixture
def publisher(tmp_path):
    publisher = Publisher(tmp_path / "weights", CARD, snapshot_every=3)
    yield publisher
    publisher.close()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 8, 1)])
def test_a_snapshot_equals_the_output_of_convert_on_any_mesh(publisher, tmp_path, sizes):
    params = model()
    _, shapes = abstract_model(Transformer, ARCH, Compute())
    placed = jax.device_put(params, param_shardings(shapes, make_mesh(*sizes)))
    publisher.publish(placed, 0)
    snapshot = version_directory(publisher.root, 0) / "full"
    assert tensors_of(snapshot / "model.safetensors") == exported(params, tmp_path / "hf")
    reread, _ = huggingface.load_params(snapshot)
    assert jax.tree.structure(reread) == jax.tree.structure(params)


@settings(max_examples=6, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.001, 0.3, 1.0]), min_size=1, max_size=5), st.data())
def test_every_reader_gets_every_version_to_the_bit(tmp_path_factory, shares, data):
    root = tmp_path_factory.mktemp("weights")
    publisher, mirror = Publisher(root / "to", CARD, snapshot_every=3), Mirror(root)
    params = model()
    for number, share in enumerate([0.0, *shares]):
        params = changed(params, share, number)
        publisher.publish(params, number)
        if data.draw(st.booleans(), label=f"reads version {number}"):
            mirror.advance(publisher.root, number)
            assert copies(mirror) == exported(params, root / f"hf-{number}")
    publisher.close()
    mirror.close()


def test_one_per_cent_of_the_weights_moves_at_most_three_of_the_bytes(tmp_path):
    publisher = Publisher(tmp_path / "weights", CARD)
    params = model()
    first = publisher.publish(params, 0)
    second = publisher.publish(changed(params, 0.01, 1), 1)
    file = version_directory(publisher.root, 1) / "delta.safetensors"
    header = int.from_bytes(file.read_bytes()[:8], "little")
    assert 0.005 < second.changed / second.elements < 0.015
    assert second.snapshot_bytes is None
    assert second.delta_bytes == file.stat().st_size
    # The header's size is that of the tensors' names, which in a real model are next to nothing.
    payload = second.delta_bytes - 8 - header
    assert payload <= 0.03 * 2 * first.elements
    publisher.close()


def test_only_changed_tensors_are_named(publisher, mirror):
    params = model()
    publisher.publish(params, 0)
    assert mirror.advance(publisher.root, 0) == set(read_manifest(publisher.root, 0).tensors)
    params["backbone"]["norm"] = params["backbone"]["norm"] + 1
    publisher.publish(params, 1)
    assert mirror.advance(publisher.root, 1) == {"model.norm.weight"}
    assert mirror.advance(publisher.root, 1) == frozenset()


def test_old_versions_are_removed_except_those_that_a_new_server_needs(publisher, mirror, tmp_path):
    params = model()
    for number in range(8):  # snapshots are 0, 3 and 6
        params = changed(params, 0.01, number)
        publisher.publish(params, number)
    assert published_versions(publisher.root) == [3, 4, 5, 6, 7]
    assert [n for n in (3, 4, 5, 6, 7) if read_manifest(publisher.root, n).has_snapshot] == [3, 6]
    snapshot, deltas = plan(publisher.root, None, 7)
    assert (snapshot.identity.number, [d.identity.number for d in deltas]) == (6, [7])
    mirror.advance(publisher.root, 7)
    assert copies(mirror) == exported(params, tmp_path / "hf")


def test_a_restarted_publisher_continues_with_deltas(publisher, mirror, tmp_path):
    params = model()
    publisher.publish(params, 0)
    again = Publisher(publisher.root, CARD)
    params = changed(params, 0.01, 1)
    assert again.publish(params, 1).snapshot_bytes is None
    mirror.advance(publisher.root, 1)
    assert copies(mirror) == exported(params, tmp_path / "hf")
    again.close()


def test_a_run_that_resumes_earlier_replaces_its_published_versions(publisher, mirror, tmp_path):
    params = model()
    for number in range(3):
        publisher.publish(changed(params, 0.1, number), number)
    mirror.advance(publisher.root, 2)
    again = Publisher(publisher.root, CARD)
    other = changed(params, 0.1, 99)
    again.publish(other, 1)
    assert published_versions(publisher.root) == [0, 1]
    mirror.advance(publisher.root, 1)
    assert copies(mirror) == exported(other, tmp_path / "hf")
    again.close()


def test_directories_that_are_not_versions_are_left_alone(tmp_path):
    (tmp_path / "20260101").mkdir()
    (tmp_path / "20260101" / "notes").write_text("")
    publisher = Publisher(tmp_path, CARD)
    publisher.publish(model(), 3)
    publisher.close()
    assert published_versions(tmp_path) == [3]
    assert (tmp_path / "20260101" / "notes").exists()


def test_a_version_must_be_newer_than_the_last(publisher):
    publisher.publish(model(), 3)
    with pytest.raises(WeightsError, match="version 3 is not newer than 3"):
        publisher.publish(model(), 3)


_ON_A_FULL_DISK = """
import errno, resource, sys
from pathlib import Path
from published_models import CARD, changed, copies, exported, model
from manus_jax.weights.manifest import WeightsError
from manus_jax.weights.mirror import Mirror
from manus_jax.weights.publisher import Publisher
root, scratch, mounted = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "mounted"
publisher = Publisher(root / "to", CARD, snapshot_every=9, scratch=scratch)
publisher.publish(model(), 0)
if mounted:
    with (root / "ballast").open("wb", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
else:
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, unlimited[1]))
try:
    publisher.publish(changed(model(), 0.5, 1), 1)
except WeightsError as error:
    print(error)
print(*sorted(path.name for path in (root / "to").iterdir()))
if mounted:
    (root / "ballast").unlink()
else:
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
params = changed(model(), 0.5, 2)
assert publisher.publish(params, 2).snapshot_bytes is not None
print(*sorted(path.name for path in (root / "to").iterdir()))
mirror = Mirror(scratch)
mirror.advance(root / "to", 2)
assert copies(mirror) == exported(params, scratch / "hf")
"""


@pytest.mark.slow
def test_a_disk_that_fills_up_is_one_line_leaves_no_half_and_is_gone_on_from(tmp_path):
    """A real one where a file system of 256 KB may be mounted, else files may not grow so far."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=256k none {disk}"
    try_it = ["unshare", "-rm", "sh", "-c", mount]
    mountable = shutil.which("unshare") and subprocess.run(try_it, capture_output=True)
    command = [sys.executable, "-c", _ON_A_FULL_DISK, str(disk), str(tmp_path / "scratch")]
    if mountable and mountable.returncode == 0:
        command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", *command, "mounted"]
        problem = rf"{disk}/to is full \(\d+ bytes left\), so nothing was published: free some"
    else:
        command.append("limited")
        problem = rf"cannot publish to {disk}/to: .*File too large"
    environment = {**os.environ, "PYTHONPATH": PATHS, "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    told, after_the_failure, at_the_end = ended.stdout.splitlines()
    assert re.match(problem, told)
    assert after_the_failure == ".lock 00000000"
    assert at_the_end == ".lock 00000000 00000002"


_FOREVER = """
import sys
from pathlib import Path
from published_models import CARD, changed, model
from manus_jax.weights.publisher import Publisher
publisher, params = Publisher(Path(sys.argv[1]), CARD, snapshot_every=2), model()
for number in range(10**6):
    params = changed(params, 0.2, number)
    publisher.publish(params, number)
    print(number, flush=True)
"""


@pytest.mark.slow
def test_a_publisher_killed_while_writing_leaves_only_whole_versions(tmp_path, mirror):
    root = tmp_path / "weights"
    environment = {**os.environ, "PYTHONPATH": PATHS, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", _FOREVER, str(root)]
    process = subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    for _ in range(3):
        process.stdout.readline()
    deadline = time.monotonic() + 60
    while not list(root.glob(".unfinished-*")) and time.monotonic() < deadline:
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    last = published_versions(root)[-1]
    mirror.advance(root, last)
    assert mirror.held.number == last
    publisher = Publisher(root, CARD)
    assert [path.name for path in root.glob(".*")] == [".lock"]
    assert [int(path.name) for path in sorted(root.glob("[!.]*"))] == published_versions(root)
    publisher.publish(model(), last + 1)
    publisher.close()


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightsError, match=r"cannot publish to .*file"):
        Publisher(tmp_path / "file" / "weights", CARD)


def test_a_snapshot_can_be_served_from_after_the_learner_is_gone(publisher):
    publisher.publish(model(), 0)
    kept = publisher.root.parent / "copy"
    shutil.copytree(version_directory(publisher.root, 0) / "full", kept)
    assert huggingface.read_card(kept).architecture == ARCH
    assert (version_directory(publisher.root, 0) / FULL).exists()


class Paused(Publisher):
    """Its snapshots of versions that have a delta wait for `go`, and fail with `problem`."""

    def __init__(self, root):
        super().__init__(root, CARD, snapshot_every=2, background=True)
        self.go, self.problem = threading.Event(), None

    def _write_snapshot(self, manifest, directory):
        if manifest.base is not None:
            assert self.go.wait(60)
            if self.problem is not None:
                raise self.problem
        return super()._write_snapshot(manifest, directory)


def test_a_snapshot_in_the_background_delays_no_publication_and_has_its_version(tmp_path, mirror):
    publisher = Paused(tmp_path / "weights")
    versions = [changed(model(), 0.1 * number, number) for number in range(4)]
    for number, params in enumerate(versions[:3]):
        publisher.publish(params, number)
    directory = version_directory(publisher.root, 2)
    assert not read_manifest(publisher.root, 2).has_snapshot
    mirror.advance(publisher.root, 2)
    expected = copies(mirror)
    publisher.go.set()
    publisher.publish(versions[3], 3)
    assert read_manifest(publisher.root, 2).has_snapshot
    assert tensors_of(directory / FULL) == expected
    verify_checksums(directory / SNAPSHOT)
    publisher.close()
    (directory / DELTA).unlink()
    again = Mirror(tmp_path)
    again.advance(publisher.root, 3)
    assert copies(again) == exported(versions[3], tmp_path / "hf")


def test_a_snapshot_that_cannot_be_written_ends_the_next_publication(tmp_path):
    publisher = Paused(tmp_path / "weights")
    publisher.problem = OSError(errno.ENOSPC, "No space left on device")
    publisher.go.set()
    for number in range(3):
        publisher.publish(model(number), number)
    with pytest.raises(WeightsError, match="is full"):
        publisher.publish(model(3), 3)
    publisher.close()
    assert published_versions(publisher.root) == [0, 1, 2]
