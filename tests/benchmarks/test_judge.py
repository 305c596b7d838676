"""benchmarks/judge.py with a judge whose scores are known."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from chat_servers import chatting
from scripted_engine import spec_of

from manus_jax.rollout.trajectory import Trajectory, Turn
from manus_jax.rollout.trajectory_files import write_trajectories

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "judge.py"


def episode(number: int, points: str, success: bool) -> Trajectory:
    turn = Turn(f"I am worth {points}.", "look", "You see a door.", reward=float(success))
    return Trajectory(
        spec=spec_of(f"maze_{number}"),
        opening=(),
        first_observation="Find the door.",
        turns=(turn,),
        segments=(),
        env_reward=float(success),
        success=success,
        end_reason="done",
    )


def test_a_judge_agrees_where_successes_get_more_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("judge_benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    played = [("7", True), ("5", True), ("5", False), ("2", False), ("many", False)]
    episodes = [episode(n, *facts) for n, facts in enumerate(played)]
    files = [write_trajectories(tmp_path, 1, episodes[:2])]
    files += [write_trajectories(tmp_path, "val_0", episodes[2:])]
    (tmp_path / "rubric.txt").write_text("What is the agent worth?")

    def reply(messages: list[dict[str, str]]) -> str:
        worth = re.search(r"worth (\w+)\.", messages[0]["content"])
        assert worth is not None
        return f"Score: {worth[1]}"

    with chatting(reply) as url:
        flags = ["--model", f"m@{url}", "--rubric", str(tmp_path / "rubric.txt")]
        monkeypatch.setattr(sys, "argv", ["judge.py", *map(str, files), *flags])
        benchmark.main()
    printed = json.loads(capsys.readouterr().out)
    # Of the four pairs, three have a success ahead, and one is a tie.
    assert printed["auc"] == 3.5 / 4
    assert (printed["episodes"], printed["unscored"], printed["successes"]) == (4, 1, 2)
    assert printed["mean_score_of_successes"] == pytest.approx(0.6)
    assert printed["mean_score_of_others"] == pytest.approx(0.35)
    assert printed["distinct_scores"] == 3
