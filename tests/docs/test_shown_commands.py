"""Commands with a config, wherever a page shows them, have settings that the program accepts; with
a hardware file, they divide over its devices. All other programs of this project that a page shows
exist and have the options that they are given."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from mesh_devices import HARDWARE
from test_docs_examples import options_of
from test_setup_guides import check_training

from manus_jax.config.commands import read_evaluate_config, read_sft_config, read_train_config
from manus_jax.config.vllm_options import check_options
from manus_jax.rollout.build_rollout import with_engine_settings

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    {
        *(ROOT / "docs").rglob("*.md"),
        *(
            page
            for folder in (".", "configs", "envs", "benchmarks")
            for page in ROOT.glob(f"{folder}/*.md")
        ),
    }
)
READERS = {
    "train": read_train_config,
    "plan": read_train_config,
    "sft": read_sft_config,
    "evaluate": read_evaluate_config,
}
SHOWN = re.compile(
    rf"python -m manus_jax\.({'|'.join(READERS)}) ([^\n`#&]*--gin_file=configs[^\n`#&]*)"
)


def commands():
    for page in PAGES:
        text = re.sub(r"\s*\\\n\s*", " ", page.read_text())
        for match in SHOWN.finditer(text):
            shown = match[2].replace("$i", "0")  # the number of a process, in a loop
            if "$" not in shown:  # the body of a shell function: test_planning_page.py
                yield str(page.relative_to(ROOT)), match[1], shown


def test_commands_are_found_on_many_pages():
    assert len({page for page, _, _ in commands()}) >= 12
    assert {"train", "plan", "evaluate"} <= {command for _, command, _ in commands()}


@pytest.mark.parametrize("page, command, shown", sorted(set(commands())))
def test_a_command_has_settings_that_the_program_accepts(page, command, shown):
    words = [w for w in shlex.split(shown) if w.startswith(("--gin_file=", "--gin_param="))]
    files = [w.partition("=")[2] for w in words if w.startswith("--gin_file=")]
    params = [w.partition("=")[2] for w in words if w.startswith("--gin_param=")]
    if Path(files[-1]).stem in HARDWARE:
        check_training(words)
    else:
        with_engine_settings(READERS[command]([str(ROOT / file) for file in files], params))


# Programs of this project, wherever a page or the header of a config shows them: in a fence of any
# language, in an indented block or inline. Words that stand for a value are capitals, "..." or in
# brackets.
PROGRAMS = re.compile(
    r"(?:^|[\s`(])(?:python -m ((?:manus_jax|envs)\.\w+)|(scripts/\w+\.sh)"
    r"|(?:python )?((?:benchmarks|scripts)/\w+\.py))([^\n`#&|]*)"
)


def shown_programs():
    for page in (*PAGES, *sorted((ROOT / "configs").rglob("*.gin"))):
        text = re.sub(r"^# ", "", page.read_text(), flags=re.MULTILINE)  # the header of a config
        text = re.sub(r"\s*\\\n\s*", " ", text)
        for match in PROGRAMS.finditer(text):
            yield str(page.relative_to(ROOT)), match[1] or match[2] or match[3], match[4]


def test_every_program_that_a_page_shows_exists_and_has_the_options():
    found = sorted(set(shown_programs()))
    assert len(found) > 60
    for page, program, rest in found:
        if "/" in program:
            assert (ROOT / program).is_file(), (page, program)
        own, _, after = rest.partition(" -- ")
        if program == "manus_jax.serve":
            check_options(after.split(), page)  # they are vLLM's
            after = ""
        action = own.split()[:1] if program == "manus_jax.convert" else ()
        trains = program.startswith(("scripts/train_", "scripts/launch_"))
        passed_on = "manus_jax.train" if trains else "manus_jax.serve"
        for words, used in ((own, (program, *action)), (after, (passed_on,))):
            given = set(re.findall(r"(?:^|[\s\[])(--[a-z][a-z_-]*)", words))
            assert not given or given <= options_of(*used), (page, program, words)


def test_every_extra_that_a_page_installs_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    installed = {
        name
        for page in PAGES
        for names in re.findall(r"(?:manus-jax|\.)\[([\w,]+)\]", page.read_text())
        for name in names.split(",")
    }
    assert {"test", "plan", "cuda", "tpu"} <= installed <= set(extras)
