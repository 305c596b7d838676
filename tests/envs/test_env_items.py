"""`python -m envs.items`: task files of an environment's splits."""

import os

import pytest

from envs import items, registry
from manus_jax.config.settings import EnvSettings
from manus_jax.data.tasks import read_tasks
from manus_jax.evaluation.eval_sets import make_eval_set


def test_the_files_hold_the_splits_and_begin_with_the_evaluation_set(tmp_path):
    items.main(["maze", "--out", str(tmp_path)])
    train, test = (read_tasks(tmp_path / f"{split}.json") for split in ("train", "test"))
    spec = registry.load("maze")
    assert sorted(task.item for task in train) == sorted(spec.items("train"))
    assert sorted(task.item for task in test) == sorted(spec.items("test"))
    own = make_eval_set(EnvSettings(names=("maze",)), 10)
    listed = make_eval_set(EnvSettings(names=("maze",)), 10, [str(tmp_path / "test.json")])
    assert [t.item_id for t in listed.tasks] == [t.item_id for t in own.tasks]


@pytest.mark.parametrize(
    "name", ["chess", "no_such_module:SPEC", "raises:SPEC", "exits:SPEC", "cut:SPEC"]
)
def test_an_unknown_environment_is_one_line_and_exit_code_2(tmp_path, capsys, monkeypatch, name):
    (tmp_path / "raises.py").write_text("raise RuntimeError('no')")
    (tmp_path / "exits.py").write_text("raise SystemExit(5)")
    (tmp_path / "cut.py").write_text("def (")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SystemExit) as leaving:
        items.main([name, "--out", str(tmp_path / "x")])
    assert leaving.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_files_that_cannot_be_written_are_one_line_and_nothing_is_lost(tmp_path, capsys):
    items.main(["maze", "--out", str(tmp_path)])
    items.main(["maze", "--out", str(tmp_path)])  # the same content again
    (tmp_path / "file").write_text("")
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes" / "train.json")
    before = (tmp_path / "train.json").read_bytes()
    for arguments, reason in (
        (["wordle", "--out", str(tmp_path)], "train.json exists with other content"),
        (["maze", "--out", str(tmp_path / "file")], "File exists"),
        (["maze", "--out", "/proc/absent/x"], "/proc/absent"),
        (["maze", "--out", str(tmp_path / "pipes")], "train.json exists with other content"),
        (["maze"], "required: --out"),
    ):
        with pytest.raises(SystemExit) as leaving:
            items.main(arguments)
        errors = capsys.readouterr().err
        assert leaving.value.code == 2 and errors.count("\n") == 1 and reason in errors
    assert (tmp_path / "train.json").read_bytes() == before
