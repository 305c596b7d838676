"""Reading: what is damaged, cut short or on another base is refused, and nothing changes."""

import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published_models import CARD, changed, copies, model

from manus_jax.weights.manifest import (
    DELTA,
    FULL,
    MANIFEST,
    Identity,
    WeightsError,
    checksum,
    read_manifest,
    version_directory,
)
from manus_jax.weights.mirror import Mirror, newest, plan
from manus_jax.weights.publisher import Publisher


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("published") / "weights"
    publisher = Publisher(root, CARD, snapshot_every=100)
    params = model()
    for number in range(3):
        publisher.publish(changed(params, 0.05 * number, number), number)
    publisher.close()
    return root


@pytest.fixture
def mirror(tmp_path):
    mirror = Mirror(tmp_path)
    yield mirror
    mirror.close()


class Damaged:
    """A file with other content as long as the block."""

    def __init__(self, path, change):
        self.path, self.change = path, change

    def __enter__(self):
        self.whole = self.path.read_bytes()
        self.path.write_bytes(self.change(self.whole))

    def __exit__(self, *_):
        self.path.write_bytes(self.whole)


@pytest.mark.slow
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from([DELTA, MANIFEST, FULL]), st.floats(0, 1), st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_refused_and_changes_nothing(root, mirror, file, where, bit):
    number = 0 if file == FULL else 1
    if number:
        mirror.advance(root, 0)
    before = (mirror.held, copies(mirror) if mirror.store else None)
    path = version_directory(root, number) / file

    def flip(data):
        place = min(int(where * len(data)), len(data) - 1)
        return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]

    with Damaged(path, flip):
        if number == 0:
            mirror.held = None
        with pytest.raises(WeightsError):
            mirror.advance(root, number)
    if number:
        assert (mirror.held, copies(mirror)) == before


@pytest.mark.parametrize("file", [DELTA, MANIFEST])
@pytest.mark.parametrize("kept", [0, 7, 0.5, -2])
def test_a_file_cut_short_is_refused(root, mirror, file, kept):
    mirror.advance(root, 0)
    before = copies(mirror)
    cut = lambda data: data[: int(kept * len(data)) if isinstance(kept, float) else kept]
    path = version_directory(root, 1) / file
    with (
        Damaged(path, cut),
        pytest.raises(WeightsError, match=r"truncated|does not match its checksum"),
    ):
        mirror.advance(root, 1)
    assert (mirror.held.number, copies(mirror)) == (0, before)


def test_one_who_holds_another_base_takes_the_snapshot_instead(root, mirror):
    snapshot, deltas = plan(root, Identity(1, "another run's"), 2)
    assert snapshot.identity.number == 0
    assert [d.identity.number for d in deltas] == [1, 2]
    mirror.advance(root, 2)
    wanted = copies(mirror)
    mirror.held = Identity(1, "another run's")
    mirror.advance(root, 2)
    assert copies(mirror) == wanted


def test_a_delta_whose_base_was_replaced_is_refused(root, mirror):
    manifest = version_directory(root, 1) / MANIFEST

    def other_id(data):
        record = json.loads(data)
        del record["checksum"]
        record["identity"]["id"] = "another"
        sealed = checksum(json.dumps(record, sort_keys=True).encode())
        return json.dumps({**record, "checksum": sealed}, sort_keys=True).encode() + b"\n"

    with (
        Damaged(manifest, other_id),
        pytest.raises(WeightsError, match="is not the base of version 2"),
    ):
        mirror.advance(root, 2)
    assert mirror.held is None


def test_a_version_that_is_not_there_is_named_with_those_that_are(root, mirror):
    with pytest.raises(WeightsError, match=r"version 9 is not in .*; it has: 0, 1, 2"):
        mirror.advance(root, 9)


def test_the_newest_whole_version_is_found(root, tmp_path):
    assert newest(root) == read_manifest(root, 2).identity
    assert newest(tmp_path / "nothing") is None
    with Damaged(version_directory(root, 2) / MANIFEST, lambda data: data[:50]):
        assert newest(root).number == 1


@pytest.mark.slow
def test_reading_needs_no_jax():
    code = (
        "import sys; import manus_jax.weights.mirror; "
        "assert not {'jax', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
