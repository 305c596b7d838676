"""Run directories written by the code that writes real ones, and an outline of report pages."""

import html.parser
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from manus_jax.data.chat import END_OF_TURN, Message, train_tokenizer
from manus_jax.data.tasks import Task
from manus_jax.rollout.trajectory import EpisodeSpec, Segment, Trajectory, Turn
from manus_jax.rollout.trajectory_files import write_trajectories
from manus_jax.training.run_directory import RunDirectory

CONFIG = "algorithm.recipe = 'grpo'\ntrain.total_steps = 40\n"
NASTY = "</script><script>document.title='owned'</script><img src=x onerror=owned()><!-- &amp; ]]>"


def new_run(path: Path, config: str = CONFIG) -> tuple[RunDirectory, Any]:
    """An empty run with a tokenizer."""
    directory = RunDirectory(path, config)
    return directory, train_tokenizer(
        ["go up, go down, \u00fc \U0001f642"] * 4, 400, directory.model
    )


def played(
    tokenizer: Any,
    uid: str,
    turns: Sequence[tuple[str, str, float]],
    env: str = "maze",
    first: str = "You stand in a maze.",
) -> Trajectory:
    """Turns are what was said, what was seen then, and the reward; log-probs are -0.5, -1, …"""
    ids: list[int] = tokenizer(first)["input_ids"]
    mask = [False] * len(ids)
    made = []
    for number, (said, seen, reward) in enumerate(turns):
        spoken = tokenizer(said + END_OF_TURN)["input_ids"]
        start = len(ids)
        ids = ids + spoken
        mask += [True] * len(spoken)
        turn = Turn(said, said, seen, reward, segment=0, start=start, stop=len(ids))
        made.append((number, turn))
    turn_ids = np.full(len(ids), -1, np.int32)
    for number, turn in made:
        turn_ids[turn.start : turn.stop] = number
    agent = np.array(mask)
    log_probs = np.where(agent, -0.5 * np.cumsum(agent), 0).astype(np.float32)
    segment = Segment(
        np.array(ids, np.int32), agent, log_probs, np.where(agent, 1, -1).astype(np.int32), turn_ids
    )
    total = sum(reward for _, _, reward in turns)
    item = uid.partition("#")[0]
    return Trajectory(
        spec=EpisodeSpec(Task(env, 3, item), uid, item),
        opening=(Message("user", first),),
        first_observation=first,
        turns=tuple(turn for _, turn in made),
        segments=(segment,),
        env_reward=total,
        success=total >= 1,
        end_reason="done",
    )


def advantages_of(trajectory: Trajectory, value: float) -> list[np.ndarray]:
    """The same advantage on every agent token."""
    return [np.where(s.loss_mask, value, 0).astype(np.float32) for s in trajectory.segments]


def small_run(path: Path, steps: Iterable[int] = range(1, 41)) -> RunDirectory:
    """Two environments; a validation at step 0 with baselines and every tenth step."""
    directory, tokenizer = new_run(path)
    validation = {"val/maze/success_rate": 0.25, "val/babyai/success_rate": 0.5}
    levels = {"val_oracle/success_rate": 1.0, "val_oracle/maze/success_rate": 1.0}
    directory.append_metrics({"step": 0, "val/success_rate": 0.375, **validation, **levels})
    for step in steps:
        metrics = {
            "step": step,
            "episode/success_rate": step / 40,
            "critic/score/mean": step / 80,
            "actor/pg_loss": -0.1,
            "response_length/mean": 20.0 + step,
            "timing_s/gen": 2.0,
            "timing_s/update_actor": 1.0,
            "timing_s/other": 0.25,
            "timing_s/step": 3.25,
            "rollout/episodes": 2.0,
        }
        if step % 10 == 0:
            rates = {name: value + step / 100 for name, value in validation.items()}
            metrics |= {"val/success_rate": 0.375 + step / 100, **rates}
        directory.append_metrics(metrics)
        won = played(tokenizer, f"maze_{step}#0", [("go up", "wall", 0.0), ("go down", "out", 1.0)])
        lost = played(tokenizer, f"babyai_{step}#1", [("go up", "wall", 0.0)], env="babyai")
        learned = {won.uid: advantages_of(won, 0.75), lost.uid: advantages_of(lost, -0.75)}
        write_trajectories(path / "trajectories", step, [won, lost], learned)
    directory.flush_metrics()
    write_trajectories(path / "trajectories", "val_0", [lost])
    return directory


class Outline(html.parser.HTMLParser):
    """The elements of a page, what each script element holds, and what is loaded from elsewhere."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[str] = []
        self.links: list[str] = []
        self._in_script = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data


def nasty_run(path: Path) -> None:
    """Markup wherever a run has text."""
    directory, tokenizer = new_run(path, f"train.total_steps = 3\nmodel.path = '{NASTY}'\n")
    directory.append_metrics({"step": 1, f"reward/{NASTY}": 1.0, "timing_s/step": 1.0})
    episode = played(tokenizer, f"{NASTY}#0", [(NASTY, NASTY, 1.0)], env=NASTY, first=NASTY)
    write_trajectories(path / "trajectories", 1, [episode])
