"""Copies of the metrics for TensorBoard and wandb."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from manus_jax.config.binding import ConfigError
from manus_jax.config.settings import TrainSettings
from manus_jax.training.metric_sinks import check_sinks, open_sinks
from manus_jax.training.run_directory import RunDirectory

CONFIG = "train.total_steps = 3\noptimizer.lr = 0.1\n"


def train_settings(path: Path, **more: Any) -> TrainSettings:
    return TrainSettings(run_dir=str(path), **more)


def scalars(path: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard itself shows of a folder."""
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="tensorboard, which reads the files, is not installed",
    ).EventAccumulator(str(path))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(name)]


def test_without_settings_nothing_is_written(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, CONFIG)
    before = set(tmp_path.iterdir())
    check_sinks(train_settings(tmp_path))
    with open_sinks(train_settings(tmp_path), directory, 0) as log:
        log(1, {"a": 1.0})
    assert set(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_tensorboard_shows_every_step_once_after_a_resume(tmp_path: Path) -> None:
    settings = train_settings(tmp_path, tensorboard=True)
    directory = RunDirectory(tmp_path, CONFIG)
    check_sinks(settings)
    with open_sinks(settings, directory, 0) as log:
        for step in range(5):
            log(step, {"episode/reward": step / 4, "actor/loss": -1.0})
    # Killed after step 4, resumed from the checkpoint of step 2.
    with open_sinks(settings, directory, 2) as log:
        for step in (3, 4, 5):
            log(step, {"episode/reward": 10.0 + step})
    shown = scalars(tmp_path / "tensorboard", "episode/reward")
    assert shown == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 13.0), (4, 14.0), (5, 15.0)]
    assert scalars(tmp_path / "tensorboard", "actor/loss") == [(0, -1.0), (1, -1.0), (2, -1.0)]


def test_a_file_in_the_place_of_the_folder_is_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(ConfigError, match="tensorboard is a file"):
        check_sinks(train_settings(tmp_path, tensorboard=True))


def test_a_run_that_begins_again_shows_only_the_new_steps(tmp_path: Path) -> None:
    settings = train_settings(tmp_path, tensorboard=True)
    directory = RunDirectory(tmp_path, CONFIG)
    for value in (1.0, 2.0):
        with open_sinks(settings, directory, 0) as log:
            log(0, {"a": value})
    assert scalars(tmp_path / "tensorboard", "a") == [(0, 2.0)]


class StandInRun:
    """The part of wandb's Run that is used."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended: list[bool] = []

    def log(self, data: dict[str, float], step: int) -> None:
        self.logged.append((step, data))

    def __enter__(self) -> "StandInRun":
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        self.ended.append(kind is None)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("wandb")
    module.Error = type("Error", (Exception,), {})  # type: ignore[attr-defined]
    module.runs, module.calls = [], []  # type: ignore[attr-defined]

    def init(**arguments: Any) -> StandInRun:
        module.calls.append(arguments)
        module.runs.append(StandInRun())
        return module.runs[-1]

    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_steps_and_settings_and_resumes_its_run(
    tmp_path: Path, wandb: types.ModuleType
) -> None:
    settings = train_settings(tmp_path, wandb_project="agents")
    directory = RunDirectory(tmp_path / "first", CONFIG)
    check_sinks(settings)
    with open_sinks(settings, directory, 0) as log:
        log(1, {"a": 1.0})
    with pytest.raises(KeyError), open_sinks(settings, directory, 1) as log:
        log(2, {"a": 2.0})
        raise KeyError
    first, second = wandb.calls
    assert first == second
    assert (first["project"], first["resume"], first["name"]) == ("agents", "allow", "first")
    assert first["config"] == {"train.total_steps": "3", "optimizer.lr": "0.1"}
    assert first["dir"] == str(tmp_path / "first")
    assert [run.logged for run in wandb.runs] == [[(1, {"a": 1.0})], [(2, {"a": 2.0})]]
    assert [run.ended for run in wandb.runs] == [[True], [False]]
    with open_sinks(settings, RunDirectory(tmp_path / "other", CONFIG), 0):
        pass
    assert wandb.calls[2]["id"] != first["id"]


def test_wandb_that_cannot_start_is_one_clear_line(
    tmp_path: Path, wandb: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**arguments: Any) -> None:
        raise wandb.Error("no API key")

    monkeypatch.setattr(wandb, "init", refuse)
    settings = train_settings(tmp_path, wandb_project="agents")
    directory = RunDirectory(tmp_path, CONFIG)
    with (
        pytest.raises(ConfigError, match="'agents': wandb cannot start: no API key"),
        open_sinks(settings, directory, 0),
    ):
        pass


def test_wandb_that_is_not_installed_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb_project is set but wandb is not installed: pip"):
        check_sinks(train_settings(tmp_path, wandb_project="agents"))
