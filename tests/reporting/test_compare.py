"""Runs compared by configuration: groups over seeds, curves with ranges, the table of results."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from report_runs import NASTY, Outline

from manus_jax import command, report
from manus_jax.command import config_comment, config_parser
from manus_jax.reporting.compare import COLUMNS, grouped, mean_and_range, table_of
from manus_jax.reporting.pictures import ticks
from manus_jax.reporting.run_data import read_run


def made_run(
    path: Path, seed: int, after: float, config: str = "maze.gin", score: float = 0, **bindings: str
) -> Path:
    """A run of two steps with a validation at 0 and 2, and costs.

    `score` is what the score after training is above the success rate.
    """
    values = {"algorithm.recipe": "'grpo'", "train.seed": str(seed), "train.run_dir": f"'{path}'"}
    values |= {name.replace("__", "."): value for name, value in bindings.items()}
    comment = f"# python -m manus_jax.train --gin_file={config} '--gin_param=train.seed = {seed}'\n"
    path.mkdir()
    text = comment + "".join(f"{name} = {value}\n" for name, value in values.items())
    (path / "config.gin").write_text(text)
    lines = [
        {"step": 0, "val/success_rate": 0.25, "val/maze/success_rate": 0.25},
        {"step": 1, "episode/success_rate": after / 2, "rollout/episodes": 600},
        {"step": 2, "episode/success_rate": after, "rollout/episodes": 600},
    ]
    lines[0] |= {"val_oracle/maze/success_rate": 1.0, "val_random/maze/success_rate": 0.125}
    lines[2] |= {"val/success_rate": after, "val/maze/success_rate": after}
    lines[1] |= {"perf/processor_minutes": 2.0}
    lines[2] |= {"perf/processor_minutes": 3.0, "perf/max_memory_gb": 1.5}
    lines[0] |= {"val/maze/score": 0.25}
    lines[0] |= {"val_random/maze/score": 0.125, "val_oracle/maze/score": 1.0}
    lines[2] |= {"val/maze/score": after + score, "episode/env_reward": after + score}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_runs_that_differ_in_seed_and_directory_are_one_group(tmp_path: Path) -> None:
    runs = [
        made_run(tmp_path / "b", 1, 0.75),
        made_run(tmp_path / "other", 0, 0.5, algorithm__recipe="'ppo'"),
        made_run(tmp_path / "a", 0, 0.5),
    ]
    first, second = grouped([read_run(run) for run in runs])
    assert [run.path.name for run in first.runs] == ["a", "b"]
    assert [first.label, second.label] == ["maze.gin, grpo (2 runs)", "maze.gin, ppo"]


def test_equal_commands_with_different_settings_are_named_by_their_first_run(tmp_path) -> None:
    runs = [
        made_run(tmp_path / "b", 1, 0.75),
        made_run(tmp_path / "edited", 0, 0.5, optimizer__lr="0.5"),
        made_run(tmp_path / "a", 0, 0.5),
    ]
    found = grouped([read_run(run) for run in runs])
    assert [group.config for group in found] == ["maze.gin (a)", "maze.gin (edited)"]


def test_a_setting_at_its_default_does_not_separate_runs(tmp_path: Path) -> None:
    old = made_run(tmp_path / "old", 0, 0.5)
    new = made_run(tmp_path / "new", 1, 0.5, algorithm__shuffle_rewards="False")
    control = made_run(tmp_path / "control", 1, 0.5, algorithm__shuffle_rewards="True")
    groups = grouped([read_run(run) for run in (old, new, control)])
    assert [[run.path.name for run in group.runs] for group in groups] == [
        ["old", "new"],
        ["control"],
    ]
    rows = table_of(groups)
    recipes = [row[COLUMNS.index("recipe")] for row in rows]
    assert recipes == ["grpo", "grpo, shuffled rewards"]
    assert [row[COLUMNS.index("config")] for row in rows] == ["maze.gin", "maze.gin"]


def test_a_score_that_differs_from_the_success_rate_has_a_row(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / "run", 0, 0.5, score=0.25)]
    rows = table_of(grouped([read_run(run) for run in runs]))
    cells = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    assert [(c["measure"], c["after"], c["gain"], c["random"]) for c in cells] == [
        ("success", "0.50", "+0.25, 33% of the gap", "0.12"),
        ("score", "0.75", "+0.50, 67% of the gap", "0.12"),
    ]


def test_a_run_without_a_validation_at_step_0_has_no_result_before(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", 0, 0.5)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[1:]))
    [row] = table_of(grouped([read_run(run)]))
    assert row[COLUMNS.index("before") : COLUMNS.index("oracle")] == ["–", "0.50", "–"]


def test_the_table_has_means_ranges_and_costs_of_each_group(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / str(seed), seed, 0.5 + seed / 4) for seed in (0, 1)]
    [row] = table_of(grouped([read_run(run) for run in runs]))
    assert dict(zip(COLUMNS, row, strict=True)) == {
        "config": "maze.gin",
        "environment": "maze",
        "recipe": "grpo",
        "seeds": "0, 1",
        "measure": "success",
        "before": "0.25",
        "after": "0.62 (0.50 to 0.75)",
        "gain": "+0.38, 50% of the gap",
        "oracle": "1.00",
        "random": "0.12",
        "episodes": "1,200",
        "processor minutes": "3.0",
        "peak memory": "1.5 GB",
    }


def test_mean_and_range_are_over_the_runs_that_reached_a_step() -> None:
    long, short = ([0, 1, 2], [1.0, 2.0, 4.0]), ([0, 2], [3.0, 0.0])
    assert mean_and_range([long, short]) == ([0, 1, 2], [2, 2, 2], [1, 2, 0], [3, 2, 4])


def test_the_command_writes_a_page_and_a_table(tmp_path: Path, capsys) -> None:
    runs = [made_run(tmp_path / str(seed), seed, 0.5, config=f"{NASTY}.gin") for seed in (0, 1)]
    page, table = tmp_path / "page.html", tmp_path / "table.md"
    report.main(["--compare", *map(str, runs), f"--out={page}", f"--markdown={table}"])
    assert capsys.readouterr().out == f"wrote {page}\nwrote {table}\n"
    data = json.loads(Outline(page.read_text(encoding="ascii")).scripts[0])
    [chart] = [chart for chart in data["charts"] if chart["title"] == "Success rate: training"]
    [line] = chart["lines"]
    assert line["range"] == {"low": [0.25, 0.5], "high": [0.25, 0.5]}
    axis, values = data["series"][line["metric"]]
    assert (data["axes"][axis], values) == ([1, 2], [0.25, 0.5])
    head, rule, row = table.read_text().splitlines()
    assert head.startswith("| config | environment | recipe | seeds | measure | before | after |")
    assert rule == "| " + " | ".join(["---"] * len(COLUMNS)) + " |"
    assert row.count(" | ") == len(COLUMNS) - 1


def test_the_markdown_shows_a_picture_of_every_environment(tmp_path: Path, capsys) -> None:
    runs = [made_run(tmp_path / str(s), s, 0.5 + s / 4, config="<b>&amp;.gin") for s in (0, 1)]
    table, images = tmp_path / "docs" / "table.md", tmp_path / "docs" / "images" / "new"
    arguments = [f"--out={tmp_path}/page.html", f"--markdown={table}", f"--images={images}"]
    report.main(["--compare", *map(str, runs), *arguments])
    assert f"wrote {images / 'maze.svg'}\n" in capsys.readouterr().out
    assert table.read_text().endswith("\n\n![maze: learning curves](images/new/maze.svg)\n")
    svg = ElementTree.parse(images / "maze.svg").getroot()
    name = lambda element: element.tag.partition("}")[2]
    assert {name(element) for element in svg.iter()} == {"svg", "g", "path", "text", "circle"}
    texts = [element.text for element in svg.iter() if name(element) == "text"]
    assert {"maze: success on held-out tasks", "success in training"} < set(texts)
    assert {"oracle 1.00", "random 0.12", "<b>&amp;.gin, grpo (2 runs)"} < set(texts)
    # Held-out success is 0.25 at 0 and 0.625 at 2; the axes are 0 to 2 over 44 to 294 pixels and
    # 0 to 1 over 210 to 30 pixels.
    curve = next(e for e in svg.iter() if e.get("stroke-width") == "2")
    assert curve.get("d") == "M44.0 165.0L294.0 97.5"
    band = next(e for e in svg.iter() if e.get("fill-opacity"))
    assert band.get("d") == "M44.0 165.0L294.0 75.0L294.0 120.0L44.0 165.0Z"


def test_ticks_are_round_numbers_within_the_range() -> None:
    assert ticks(0, 1, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert ticks(1, 40, 5) == [10, 20, 30, 40]
    assert ticks(-100, 100, 5) == [-100, -50, 0, 50, 100]


def test_the_config_of_a_run_starts_with_its_command() -> None:
    parser = config_parser("train", "")
    args = parser.parse_args(["--gin_file=a b.gin", "--gin_param=train.seed =\n 1"])
    assert config_comment(parser, args) == (
        "# python -m manus_jax.train '--gin_file=a b.gin' '--gin_param=train.seed = 1'\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["RUN", "RUN"], "several runs need --compare"),
        (["RUN", "--markdown=x.md"], "--markdown needs --compare"),
        (["--compare", "RUN", "--images=x"], "--images needs --markdown"),
        (["RUN", "--watch", "--out=x.html"], "--watch writes no file"),
        (["--compare", "RUN", "EMPTY"], "has no metrics to compare"),
        (["--compare", "RUN", "nowhere"], "nowhere does not exist"),
        (["--compare", "RUN", "run"], "run is given twice; a comparison"),
        (["RUN", "--out=run/metrics.jsonl"], "replace a file that is not HTML"),
        (["--compare", "RUN", "--out=run/metrics.jsonl"], "replace a file that is not HTML"),
        (["--compare", "RUN", "--markdown=run/config.gin"], "replace a file that is not Markdown"),
        (["--compare", "RUN", "--out=x.html", "--markdown=x.html"], "would replace a file"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path, monkeypatch, capsys, arguments, message) -> None:
    made_run(tmp_path / "run", 0, 0.5)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.gin").write_text("train.seed = 0\n")
    places = {"RUN": str(tmp_path / "run"), "EMPTY": str(tmp_path / "empty")}
    words = [places.get(word, word) for word in arguments]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["report", *words])
    with pytest.raises(SystemExit) as stopped:
        command.run(report.main)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
