"""Checksums of a directory: every change of a listed file is found, and other files are ignored."""

import hashlib
import os
import random
import subprocess
from pathlib import Path

import pytest

from manus_jax.files import (
    CHECKSUMS,
    DamagedError,
    is_plain_name,
    open_file,
    remove_leftovers,
    verify_checksums,
    write_atomically,
    write_checksums,
)


@pytest.fixture
def directory(tmp_path):
    rng = random.Random(0)
    for name in ("a", "b/data", "b/c/empty", "b/c/data", "same-1", "same-2"):
        path = tmp_path / "step" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        size = 0 if path.name == "empty" else 200
        path.write_bytes(b"x" * 50 if name.startswith("same") else rng.randbytes(size))
    write_checksums(tmp_path / "step")
    return tmp_path / "step"


def flip(path, bit):
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def test_an_unchanged_directory_is_accepted_and_readable_by_sha256sum(directory):
    verify_checksums(directory)
    subprocess.run(["sha256sum", "--check", "--quiet", CHECKSUMS], cwd=directory, check=True)


def test_every_flipped_bit_of_every_file_is_found(directory):
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        for bit in range(0, 8 * path.stat().st_size, 1 if path.name == CHECKSUMS else 61):
            flip(path, bit)
            with pytest.raises(DamagedError):
                verify_checksums(directory)
            flip(path, bit)
    verify_checksums(directory)


@pytest.mark.parametrize("name", ["a", "b/c/empty", CHECKSUMS])
def test_a_missing_file_is_named(directory, name):
    (directory / name).unlink()
    with pytest.raises(DamagedError, match=f"{name} is missing"):
        verify_checksums(directory)


def test_truncated_longer_and_replaced_files_are_found(directory):
    for change in (
        lambda p: p.write_bytes(p.read_bytes()[:-1]),
        lambda p: p.write_bytes(p.read_bytes() + b"\0"),
        lambda p: p.write_bytes(b""),
        lambda p: (p.unlink(), p.mkdir()),
    ):
        for name in ("b/data", CHECKSUMS):
            whole = (directory / name).read_bytes()
            change(directory / name)
            with pytest.raises(DamagedError, match=name):
                verify_checksums(directory)
            if (directory / name).is_dir():
                (directory / name).rmdir()
            (directory / name).write_bytes(whole)


def test_files_that_are_not_listed_are_ignored(directory):
    (directory / "b" / ".DS_Store").write_text("")
    verify_checksums(directory)


def test_a_list_that_points_outside_its_directory_is_refused(directory, tmp_path):
    (tmp_path / "outside").write_text("secret")
    (directory / "a").unlink()
    (directory / "a").symlink_to(tmp_path / "outside")
    write_checksums(directory)
    body = (directory / CHECKSUMS).read_text().partition("\n")[2].replace("  a\n", "  ../outside\n")
    header = hashlib.sha256(body.encode()).hexdigest()
    (directory / CHECKSUMS).write_text(f"# {header}\n{body}")
    with pytest.raises(DamagedError, match=f"{CHECKSUMS} is damaged"):
        verify_checksums(directory)


@pytest.mark.parametrize("name", ["", ".", "..", "/etc/passwd", "a/b", "../a", "a\n", 3, None])
def test_only_names_of_files_in_the_same_directory_are_plain(name):
    assert not is_plain_name(name)
    assert is_plain_name("model-00001-of-00002.safetensors")


def test_leftovers_of_killed_writers_are_removed_and_nothing_else(tmp_path):
    (tmp_path / ".4.tmp-123").mkdir()
    (tmp_path / ".4.tmp-123" / "file").write_text("")
    (tmp_path / ".config.gin.tmp-9").write_text("")
    (tmp_path / ".lock").write_text("")
    write_atomically(tmp_path / "config.gin", "text")
    remove_leftovers(tmp_path)
    remove_leftovers(tmp_path / "nowhere")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "config.gin"]


def test_pipes_and_devices_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="it is not a file"):
            open_file(path)


def test_a_pipe_in_place_of_a_listed_file_is_damage(directory):
    (directory / "a").unlink()
    os.mkfifo(directory / "a")
    with pytest.raises(DamagedError, match="a cannot be read: it is not a file"):
        verify_checksums(directory)


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_no_part(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    write_atomically(tmp_path / "report.html", "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "report.html", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "old"
