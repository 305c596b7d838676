"""The tasks of an evaluation: fixed, nested, of the right environments."""

import json
from pathlib import Path

import pytest

from envs.game import GameError
from envs.registry import ENVIRONMENTS, load
from manus_jax.config.binding import ConfigError
from manus_jax.config.settings import DataSettings, EnvSettings
from manus_jax.evaluation.eval_sets import (
    EvalSet,
    make_eval_set,
    playable_tasks,
    served_tasks,
    split_tasks,
)
from manus_jax.training.task_sources import read_task_sources


def test_an_evaluation_set_is_always_the_same_and_a_larger_one_contains_it() -> None:
    small, large = split_tasks("babyai", "test", 20), split_tasks("babyai", "test", 60)
    assert small == split_tasks("babyai", "test", 20) == large[:20]
    assert {task.item for task in large} <= set(load("babyai").items("test"))
    # sha256 of "maze_956" is the smallest among maze_800 to maze_999.
    assert split_tasks("maze", "test", 1)[0].item_id == "maze_956"


def test_an_evaluation_set_is_spread_over_the_sort_order_of_items() -> None:
    levels = {task.item % 40 for task in split_tasks("babyai", "test", 100)}
    assert len(levels) > 25
    items = [task.item for task in split_tasks("textcraft", "test", 50)]
    assert min(items) < 300 and max(items) > 1000


def test_an_evaluation_set_has_no_more_tasks_than_the_split() -> None:
    assert len(split_tasks("wordle", "test", 1000)) == 150
    assert not {t.item for t in split_tasks("wordle", "train", 1000)} & {
        t.item for t in split_tasks("wordle", "test", 1000)
    }


def test_tasks_of_agentgyms_servers_cover_their_item_range() -> None:
    assert sorted(task.item for task in served_tasks("academia", "test", 50)) == list(range(20))
    with pytest.raises(ConfigError, match="webshop servers"):
        served_tasks("webshop", "test", 50)
    # An item of babyai is the same task everywhere.
    assert served_tasks("babyai", "test", 20) == split_tasks("babyai", "test", 20)


def test_servers_that_are_known_to_have_our_items_are_validated_on_the_test_split() -> None:
    env = EnvSettings(names=("maze",), urls={"maze": ["http://10.0.0.7:36001"]})
    own = make_eval_set(env, 5, own_items=True)
    assert list(own.tasks) == split_tasks("maze", "test", 5)
    assert {task.item for task in make_eval_set(env, 5).tasks} <= set(range(25))


def test_tasks_from_a_file_keep_its_order(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps(["maze_9", "wordle_3", "maze_2", "maze_5"]))
    tasks = make_eval_set(EnvSettings(names=("maze", "wordle")), 2, [str(path)]).tasks
    assert [task.item_id for task in tasks] == ["maze_9", "maze_2", "wordle_3"]
    with pytest.raises(ConfigError, match=r"json row 1: .*wordle_3.*not in env\.names \(maze\)"):
        make_eval_set(EnvSettings(names=("maze",)), 2, [str(path)])
    with pytest.raises(ConfigError, match="no task of textcraft"):
        make_eval_set(EnvSettings(names=("maze", "wordle", "textcraft")), 2, [str(path)])


def test_every_environment_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    files = [str(tmp_path / f"{name}.json") for name in ("maze", "wordle")]
    for file in files:
        Path(file).write_text(json.dumps([f"{Path(file).stem}_1"]))
    env = EnvSettings(names=("maze", "wordle"))
    sources, _ = read_task_sources(DataSettings(train_files=tuple(files)), env, 1)
    assert [[task.item_id for task in tasks] for _, tasks, _ in sources] == [
        ["maze_1"],
        ["wordle_1"],
    ]


def test_validation_tasks_from_a_file_are_not_trained_on(tmp_path: Path) -> None:
    item = split_tasks("maze", "train", 1)[0].item_id
    held_out = tmp_path / "held_out.json"
    held_out.write_text(json.dumps([item]))
    data = DataSettings(val_files=(str(held_out),))
    [(_, tasks, _)], eval_set = read_task_sources(data, EnvSettings(names=("maze",)), 1)
    assert [task.item_id for task in eval_set.tasks] == [item]
    assert item not in [task.item_id for task in tasks]


def test_items_that_an_embedded_environment_does_not_have_are_named_with_their_row(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('"maze_999"\n\n"maze_0"\n"maze_1000"\n')
    embedded = EnvSettings(names=("maze",))
    with pytest.raises(
        ConfigError, match=r"tasks\.jsonl row 2: maze has no item 1000; .* 0 to 999"
    ):
        make_eval_set(embedded, 1, [str(path)])
    # Other servers may have other items.
    elsewhere = EnvSettings(names=("maze",), urls={"maze": ["http://10.0.0.7:36001"]})
    assert [task.item for task in playable_tasks([str(path)], elsewhere)[0]] == [999, 0, 1000]


OWN = [name for name, location in ENVIRONMENTS.items() if location.startswith("envs.")]


@pytest.mark.parametrize("name", sorted({*OWN} - {"sciworld"}))  # which needs Java
def test_every_embedded_environment_knows_how_many_items_it_has(name: str) -> None:
    spec = load(name)
    assert spec.item_count is not None
    count = spec.item_count()
    assert max(*spec.items("train"), *spec.items("test")) < count
    game = spec.new_game()
    game.reset(count - 1)
    with pytest.raises(GameError):
        game.reset(count)
    game.close()


def test_every_task_is_played_as_often_as_asked() -> None:
    eval_set = EvalSet(tuple(split_tasks("maze", "test", 2)), samples=3)
    specs = eval_set.specs()
    assert [spec.task.item for spec in specs] == [956] * 3 + [specs[-1].task.item] * 3
    assert len({spec.group_id for spec in specs}) == 2 and len({s.uid for s in specs}) == 6
    assert eval_set.environments == ("maze",)
