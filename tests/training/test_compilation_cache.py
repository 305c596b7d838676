"""Compiled programs are kept between commands; an unusable cache is one warning."""

import os
import subprocess
import sys

import jax
import pytest

from manus_jax.config.settings import CompilationSettings
from manus_jax.training.compilation_cache import use_compilation_cache


@pytest.fixture(autouse=True)
def fresh_config(monkeypatch):
    """Without the cache that tests share, and JAX's settings as before at the end."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    names = ("jax_compilation_cache_dir", "jax_compilation_cache_max_size")
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_directory_is_made_below_the_one_given(tmp_path):
    use_compilation_cache(CompilationSettings(str(tmp_path / "a" / "b")))
    (made,) = (tmp_path / "a" / "b").iterdir()
    assert jax.config.jax_compilation_cache_dir == str(made)


def test_it_is_off_if_none_and_the_variable_takes_precedence(tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    use_compilation_cache(CompilationSettings(None))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    use_compilation_cache(CompilationSettings(str(tmp_path / "a")))
    assert jax.config.jax_compilation_cache_dir == before
    assert not (tmp_path / "a").exists()


def test_a_directory_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    before = jax.config.jax_compilation_cache_dir
    use_compilation_cache(CompilationSettings(str(tmp_path / "file" / "cache")))
    assert jax.config.jax_compilation_cache_dir == before
    assert [record.message for record in caplog.records if "not kept" in record.message]


PROGRAM = """
import sys
import jax
from manus_jax.config.settings import CompilationSettings
from manus_jax.training.compilation_cache import use_compilation_cache
use_compilation_cache(CompilationSettings(sys.argv[1]))
numbers = jax.random.normal(jax.random.key(0), (64, 64))
for size in (8, 16, 32):
    part = jax.nn.softmax(numbers[:size] @ numbers) @ numbers
    print(part.sum().item().hex())
"""


@pytest.mark.slow
def test_processes_share_a_cache_and_survive_damaged_entries(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}

    def start():
        command = [sys.executable, "-c", PROGRAM, tmp_path]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)

    cold = [process.communicate() for process in (start(), start())]
    entries = list(tmp_path.rglob("*-cache"))
    assert len(entries) > 3
    warm = start().communicate()
    for path in entries:
        path.write_bytes(path.read_bytes()[:-10])
    damaged = start().communicate()
    assert {out for out, _ in (*cold, warm, damaged)} == {cold[0][0]} and cold[0][0].count("p") == 3
    assert "persistent compilation cache" not in cold[0][1] + cold[1][1] + warm[1]
    assert "Error reading persistent compilation cache entry" in damaged[1]
