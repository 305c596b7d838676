"""The servers of a machine share one copy of the weights, whoever is killed."""

import subprocess
import sys

import pytest
from published_models import CARD, changed, copies, model, tensors_of

from manus_jax.weights import shared_mirror
from manus_jax.weights.manifest import DELTA, FULL, WeightsError, version_directory
from manus_jax.weights.mirror import Changes, Mirror
from manus_jax.weights.publisher import Publisher
from manus_jax.weights.shared_mirror import SharedMirror


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "weights"
    publisher = Publisher(root, CARD, snapshot_every=100)
    for number in range(3):
        publisher.publish(changed(model(), 0.05 * number, number), number)
    publisher.close()
    return root


@pytest.fixture
def scratch(tmp_path):
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def contents(root, tmp_path, number):
    mirror = Mirror(tmp_path)
    mirror.advance(root, number)
    return copies(mirror)


def data_files(scratch):
    return list(scratch.glob("*/weights-*"))


def test_one_server_fetches_and_the_others_find_the_version(root, scratch, tmp_path):
    first, second = SharedMirror(root, scratch), SharedMirror(root, scratch)
    for number in (1, 2):
        expected = contents(root, tmp_path, number)
        assert first.advance(root, number)
        moved = {}
        for directory in (version_directory(root, n) for n in range(3)):
            for path in (directory / DELTA, directory / FULL):
                if path.exists():
                    moved[path] = path.rename(path.with_suffix(".away"))
        assert second.advance(root, number) == frozenset()  # it could not read any
        for path, away in moved.items():
            away.rename(path)
        with first.reading(second.held), second.reading(first.held):
            assert copies(first) == copies(second) == expected
        assert len(data_files(scratch)) == 1
    first.close()
    with second.reading(second.held):
        assert copies(second) == expected
    second.close()
    assert list(scratch.iterdir()) == []


def test_a_snapshot_replaces_the_copy_for_those_that_have_it_open(root, scratch):
    first, second = SharedMirror(root, scratch), SharedMirror(root, scratch)
    first.advance(root, 2)
    second.advance(root, 2)
    publisher = Publisher(root.with_name("other"), CARD)
    publisher.publish(model(7), 2)
    publisher.close()
    first.advance(publisher.root, 2)  # the same number of another run
    with (
        pytest.raises(WeightsError, match="another server has loaded it"),
        second.reading(second.held),
    ):
        pass
    with second.reading(first.held):
        assert copies(second) == tensors_of(version_directory(publisher.root, 2) / FULL)
    assert len(data_files(scratch)) == 1


def test_a_server_killed_while_it_changes_the_copy_leaves_it_to_the_others(
    root, scratch, tmp_path, monkeypatch
):
    class Killed(BaseException):
        pass

    def apply(self, store):
        store.raw(next(iter(self.sparse)))[:] = 1
        raise Killed

    first, second = SharedMirror(root, scratch), SharedMirror(root, scratch)
    first.advance(root, 0)
    second.advance(root, 0)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Changes, "apply", apply)
        first.advance(root, 1)
    assert second.advance(root, 1) == frozenset(second.store.specs)  # from the snapshot
    assert copies(second) == contents(root, tmp_path, 1)
    assert len(data_files(scratch)) == 1


def test_the_copy_of_another_boot_is_not_trusted(root, scratch, monkeypatch):
    SharedMirror(root, scratch).advance(root, 1)
    again = SharedMirror(root, scratch)
    assert again.advance(root, 1) == frozenset()
    monkeypatch.setattr(shared_mirror, "_boot_id", lambda: "later")
    assert again.advance(root, 1) == frozenset(again.store.specs)


def test_a_file_removed_by_a_cleaner_is_made_again(root, scratch, tmp_path):
    SharedMirror(root, scratch).advance(root, 1)
    (found,) = data_files(scratch)
    found.unlink()
    mirror = SharedMirror(root, scratch)
    assert mirror.advance(root, 1)
    assert copies(mirror) == contents(root, tmp_path, 1)


@pytest.mark.slow
def test_leftovers_of_a_killed_server_are_removed_by_the_next_one(root, scratch, tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
from manus_jax.weights.shared_mirror import SharedMirror
root, scratch = map(Path, sys.argv[1:])
mirror = SharedMirror(root, scratch)
mirror.advance(root, 1)
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code, root, scratch], check=False)
    assert len(data_files(scratch)) == 1
    SharedMirror(tmp_path / "elsewhere", scratch).close()
    assert list(scratch.iterdir()) == []
