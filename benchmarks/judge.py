"""Measures how well a judge agrees with the environment's own reward, on recorded episodes.

    python benchmarks/judge.py runs/A/trajectories/*.jsonl --model MODEL@URL --rubric FILE [--n 200]

Takes `n` episodes of the files, evenly spaced, and scores them as `algorithm.reward = "judge"`
does. The files are those of a training run or of an evaluation. `auc` is the probability that the
judge gives more points to a success than to another episode, ties counting half: 1 is agreement,
0.5 is chance, and None means that the episodes are all successes or all failures. `unscored`
episodes would be dropped.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Python puts this folder first on the path, where envs.py would hide the package `envs`.
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path.pop(0)

import numpy as np

from manus_jax.rewards import RewardSettings
from manus_jax.rollout.scoring import score_episodes
from manus_jax.rollout.trajectory import Trajectory, trajectories
from manus_jax.rollout.trajectory_files import read_trajectories


def agreement(episodes: Sequence[Trajectory], judge: RewardSettings) -> dict[str, Any]:
    """Scores the episodes and compares the scores with their success."""
    scored = trajectories(score_episodes(episodes, judge, "drop"))
    points = np.array([episode.score.total for episode in scored if episode.score], float)
    success = np.array([episode.success for episode in scored], bool)
    won, lost = points[success], points[~success]
    higher, equal = (won[:, None] > lost).sum(), (won[:, None] == lost).sum()
    pairs = len(won) * len(lost)
    return {
        "episodes": len(scored),
        "unscored": len(episodes) - len(scored),
        "successes": len(won),
        "auc": float(higher + equal / 2) / pairs if pairs else None,
        "mean_score_of_successes": float(won.mean()) if len(won) else None,
        "mean_score_of_others": float(lost.mean()) if len(lost) else None,
        "distinct_scores": len(np.unique(points)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="+", help="trajectory files")
    parser.add_argument("--model", required=True, help="the judge, as MODEL@URL")
    parser.add_argument("--rubric", required=True, help="a file with the criteria")
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--max_tokens", type=int, default=512, help="of an answer")
    args = parser.parse_args()
    parameters = {"model": args.model, "rubric": args.rubric, "max_tokens": args.max_tokens}
    judge = RewardSettings("judge", parameters)
    outcomes = [outcome for file in args.files for outcome in read_trajectories(file)]
    episodes = trajectories(outcomes)
    if not episodes or args.n < 1:
        parser.error("the files have no episodes" if args.n > 0 else "--n: at least 1")
    judge.check_service()
    chosen = np.linspace(0, len(episodes) - 1, min(args.n, len(episodes))).round().astype(int)
    print(json.dumps(agreement([episodes[i] for i in chosen], judge)))


if __name__ == "__main__":
    main()
