"""Every example of the guides runs: files are written, code and commands executed, in order.

A comment before a fenced block says how it is checked (`guide_examples`). Shell commands that are
not run (they would serve for ever, or need an accelerator) have their options checked against the
program's own help. No block of code goes without.
"""

import contextlib
import functools
import importlib
import importlib.util
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from guide_examples import GUIDES, ROOT, Block, blocks

CHECKED = [
    pytest.param(guide, test, id=f"{guide.name}-{Path(test).stem}")
    for guide in GUIDES
    for test in sorted({block.test for block in blocks(guide) if block.test})
]


def execute(command, cwd):
    flags = os.environ.get("XLA_FLAGS", "").replace("device_count=8", "device_count=1")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}  # one device, as most have
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def play(guide, cwd):
    """Runs a guide's examples; code that stands between two commands shares one namespace."""
    code = ""
    for number, block in enumerate([*blocks(guide), Block("sh", "", "run", None)]):
        if block.file:
            (cwd / block.file).write_text(block.text)
        elif block.mark == "run" and block.language == "python":
            code += block.text + "\n"
        elif block.mark == "run":
            if code:
                (cwd / f"examples_{number}.py").write_text(code)
                execute([sys.executable, f"examples_{number}.py"], cwd)
                code = ""
            for line in block.text.splitlines():
                program, *arguments = shlex.split(line)
                assert program == "python"
                execute([sys.executable, *arguments], cwd)


@pytest.mark.slow
@pytest.mark.bug("B6")
def test_the_extension_guide_runs_from_its_first_line_to_its_last(tmp_path):
    play(ROOT / "docs" / "extending.md", tmp_path)
    metrics = json.loads((tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()[-1])
    assert {"reward/brisk", "reward/narrowing", "actor/lateness"} <= set(metrics)
    assert (tmp_path / "diary.jsonl").stat().st_size > 0


@pytest.mark.parametrize("guide", GUIDES, ids=lambda p: p.name)
def test_no_code_stands_in_a_guide_without_being_run(guide):
    for block in blocks(guide):
        assert block.language in ("python", "gin", "sh", "text"), block
        if block.language in ("python", "gin"):
            assert block.mark, f"{guide.name}: this block is neither a file nor run:\n{block.text}"


@pytest.mark.parametrize(("guide", "test"), CHECKED)
def test_a_block_is_read_by_the_tests_that_it_names(guide, test, monkeypatch):
    monkeypatch.syspath_prepend(str((ROOT / test).parent))  # as pytest does for its tests
    spec = importlib.util.spec_from_file_location(f"reader_{Path(test).stem}", ROOT / test)
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    assert reader.EXAMPLES.guide == guide
    marked = [block.text for block in blocks(guide) if block.test == test]
    assert marked == list(reader.EXAMPLES)


@functools.cache
def options_of(program, *action):
    """What the help of a script, of a module's `main`, or of one of its actions lists."""
    if program.endswith(".sh"):
        text = subprocess.run([ROOT / program, "--help"], capture_output=True, text=True).stdout
    else:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as leaving:
            if program.endswith(".py"):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(sys, "argv", [program, "--help"])
                    runpy.run_path(str(ROOT / program), run_name="__main__")
            else:
                importlib.import_module(program).main([*action, "--help"])
        assert leaving.value.code == 0
        text = printed.getvalue()
    return set(re.findall(r"--[a-z](?:[a-z_-]*[a-z])?", text))


def test_commands_that_are_only_shown_have_options_that_exist():
    shown = {
        line
        for guide in GUIDES
        if guide.parent.name != "setups"  # see test_setup_guides.py
        for block in blocks(guide)
        if block.language == "sh" and block.mark != "run"
        for line in block.text.splitlines()
    }
    assert len(shown) > 4
    for line in shown:
        words = shlex.split(line)
        while "=" in words[0]:  # VARIABLE=value before the program
            words = words[1:]
        program, *rest = words[2:] if words[:2] == ["python", "-m"] else words
        cut = rest.index("--") if "--" in rest else len(rest)
        for used, options in ((program, rest[:cut]), ("manus_jax.train", rest[cut + 1 :])):
            given = {option.partition("=")[0] for option in options if option.startswith("--")}
            assert given <= options_of(used), line


@pytest.mark.parametrize("guide", GUIDES, ids=lambda p: p.name)
def test_links_and_paths_exist(guide):
    text = guide.read_text()
    for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", text):
        assert (guide.parent / target).exists(), target
    anchors = {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }
    for anchor in re.findall(r"\]\(#([\w-]+)\)", text):
        assert anchor in anchors, anchor
    own = {"envs/new_env/", "configs/envs/new_env.gin"}
    paths = set(
        re.findall(r"`((?:configs|scripts|benchmarks|manus_jax|envs|docs|tests)/[\w./]+)`", text)
    )
    missing = sorted(p for p in paths - own if not (ROOT / p).exists())
    assert not missing
