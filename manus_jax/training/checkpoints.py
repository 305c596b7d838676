"""Checkpoints of a run: asynchronous, verified, restorable onto any mesh.

The directory of a step contains `params` and `optimizer` (sharded arrays) and `host` (JSON: dataset
cursor, counters and other state of the training loop), all written by Orbax in the background.
When they are on disk, process 0 writes the checksums of all files, which complete the checkpoint,
and only then removes older ones. Orbax has no checksums of its own: those of its storage formats
cover indices, not the arrays.

With several processes, all call the same methods in the same order. Each process writes its own
shards to a shared directory; process 0 writes everything that is not an array.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from manus_jax.data_proto import DataProto
from manus_jax.files import (
    CHECKSUMS,
    DamagedError,
    begin_directory,
    checked_lines,
    remove_directory,
    verify_checksums,
    with_own_checksum,
    write_atomically,
)
from manus_jax.learner.update import TrainState
from manus_jax.models import adapter_files, orbax_params
from manus_jax.models.adapter_files import Adaptation
from manus_jax.models.orbax_params import CheckpointError
from manus_jax.training.job import Job

_SCORE = "score"
_LATE_SCORES = "late_scores.json"  # of steps whose validation ended after they were saved


class Checkpoints:
    """The checkpoints in one directory, by step.

    `parts` are the learners whose states are saved: the policy and optionally a critic. The newest
    `keep` checkpoints are kept and, with `best`, also the one with the highest score. With
    `strict`, a damaged newest checkpoint is an error. With `adaptation`, the states are those of
    adapters, and checkpoints of another adaptation are not restored.
    """

    def __init__(
        self,
        directory: Path,
        keep: int | None = None,
        parts: Sequence[str] = ("policy",),
        best: bool = False,
        strict: bool = False,
        job: Job | None = None,
        adaptation: Adaptation | None = None,
    ):
        self._adaptation = adaptation
        self.directory = Path(directory).absolute()
        self._keep, self._parts, self._best, self._strict = keep, tuple(parts), best, strict
        self._job = job or Job()
        self._finishing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        # With explicit processes, Orbax uses barriers that have a timeout.
        everyone = set(range(self._job.count)) if self._job.count > 1 else None
        self._checkpointer = ocp.AsyncCheckpointer(
            orbax_params.composite_handler(),
            atomicity_options=orbax_params.ATOMICITY,
            multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes=everyone),
        )
        if self._job.primary:
            self.directory.mkdir(parents=True, exist_ok=True)
            orbax_params.remove_leftovers(self.directory)
        self._late_scores = self._read_late_scores() if self._job.primary else {}

    def _read_late_scores(self) -> dict[int, float]:
        path = self.directory / _LATE_SCORES
        if not path.exists():
            return {}
        try:
            [line] = checked_lines(path)
        except DamagedError as error:
            print(f"{error}; the scores of earlier checkpoints are lost", flush=True)
            return {}
        return {int(step): score for step, score in json.loads(line).items()}

    def latest(self) -> int | None:
        """The step of the newest intact checkpoint; None if there are no checkpoints.

        Damaged newer ones are reported and moved to `damaged-<step>`. If none is intact, nothing is
        moved, and CheckpointError is raised.
        """
        newest = self._job.from_primary(lambda: DataProto.empty({"step": self._newest_intact()}))
        return newest.meta_info["step"]

    def _newest_intact(self) -> int | None:
        damaged: dict[int, DamagedError] = {}
        for step in reversed(orbax_params.list_steps(self.directory)):
            try:
                verify_checksums(self.directory / str(step))
            except DamagedError as error:
                damaged[step] = error
                if self._strict:
                    break
                continue
            for other, problem in damaged.items():
                print(
                    f"checkpoint {other} is damaged and was moved to {self._set_aside(other)} "
                    f"({problem}); continuing from step {step}",
                    flush=True,
                )
            return step
        if damaged:
            step, problem = next(iter(damaged.items()))
            reason = (
                "and strict_resume is set: unset it to continue from an older one"
                if self._strict
                else f"and no other one in {self.directory} is intact: restore it from a copy, or "
                "remove the directory to start again"
            )
            raise CheckpointError(f"checkpoint {step} is damaged ({problem}), {reason}")
        return None

    def _set_aside(self, step: int) -> Path:
        target = self.directory / f"damaged-{step}"
        number = 2
        while target.exists():
            target = self.directory / f"damaged-{step}-{number}"
            number += 1
        try:
            shutil.move(self.directory / str(step), target)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {step} is damaged and cannot be moved to {target}: {error}"
            ) from None
        return target

    def save(
        self,
        step: int,
        states: Mapping[str, TrainState],
        host: dict[str, Any],
        score: float | None = None,
    ) -> None:
        """Starts an asynchronous save; the arrays may be donated as soon as this returns."""
        self.wait()
        items: dict[str, Any] = {"host": ocp.args.JsonSave(host)}
        if score is not None:
            items[_SCORE] = ocp.args.JsonSave({_SCORE: score})
        if self._adaptation is not None:
            items[adapter_files.ITEM] = ocp.args.JsonSave(self._adaptation.to_json())
        for part in self._parts:
            params, optimizer = _items(part)
            values = states[part].params
            items[params] = ocp.args.StandardSave(values, orbax_params.save_args(values))
            items[optimizer] = ocp.args.StandardSave(_rest(states[part]))
        if self._job.primary:
            begin_directory(self.directory / str(step))
        self._checkpointer.save(self.directory / str(step), args=ocp.args.Composite(**items))
        if self._job.primary:
            self._finishing = self._thread.submit(self._finish, step)

    def _finish(self, step: int) -> None:
        self._checkpointer.wait_until_finished()
        orbax_params.finish_step(self.directory / str(step))
        steps = orbax_params.list_steps(self.directory)
        kept = set(steps if self._keep is None else steps[-self._keep :])
        scores = {s: score for s in steps if (score := self._score(s)) is not None}
        if self._best and scores:
            kept.add(max(scores, key=lambda s: (scores[s], s)))
        for old in set(steps) - kept:
            remove_directory(self.directory / str(old), CHECKSUMS)

    def add_score(self, step: int, score: float) -> None:
        """The score of a checkpoint that was saved without, whose validation has ended by now."""
        if self._job.primary:
            self._thread.submit(self._write_late_score, step, score)

    def _write_late_score(self, step: int, score: float) -> None:
        if step in orbax_params.list_steps(self.directory):
            self._late_scores[step] = score
            kept = {str(s): x for s, x in self._late_scores.items()}
            content = with_own_checksum([json.dumps(kept)])
            write_atomically(self.directory / _LATE_SCORES, content)

    def _score(self, step: int) -> float | None:
        if step in self._late_scores:
            return self._late_scores[step]
        try:
            path = self.directory / str(step) / _SCORE / "metadata"
            return float(json.loads(path.read_text())[_SCORE])
        except (OSError, ValueError, KeyError, TypeError):  # no score, or a damaged checkpoint
            return None

    def restore(
        self, step: int, abstract: Mapping[str, TrainState]
    ) -> tuple[dict[str, TrainState], dict[str, Any]]:
        """Restores the states of a step with the shapes and shardings of `abstract`."""
        items: dict[str, Any] = {"host": ocp.args.JsonRestore()}
        for part in self._parts:
            params, optimizer = _items(part)
            items[params] = ocp.args.StandardRestore(abstract[part].params)
            items[optimizer] = ocp.args.StandardRestore(_rest(abstract[part]))
        path = self.directory / str(step)
        saved, now = adapter_files.checkpoint_adaptation(path), self._adaptation
        if saved is not None and now is not None and saved.fingerprint != now.fingerprint:
            raise CheckpointError(
                f"the adapters in checkpoint {path} were trained on {saved.base} with the weights "
                f"{saved.fingerprint}, and those of {now.base} are {now.fingerprint}: continue "
                "with the same base model"
            )
        try:
            for part in self._parts:
                orbax_params.check_shapes(path / _items(part)[0], abstract[part].params)
            loaded = self._checkpointer.restore(path, args=ocp.args.Composite(**items))
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise CheckpointError(
                f"checkpoint {path} does not fit this configuration: "
                + " ".join(str(error).split())[:300]
            ) from None
        states = {}
        for part in self._parts:
            params, optimizer = _items(part)
            rest = loaded[optimizer]
            states[part] = TrainState(loaded[params], rest["state"], rest["step"], rest["skipped"])
        return states, loaded["host"]

    def wait(self) -> None:
        """Waits until all saves are on disk; raises the error of a failed save."""
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            finishing.result()
        self._checkpointer.wait_until_finished()

    def close(self) -> None:
        self.wait()
        self._thread.shutdown()
        self._checkpointer.close()


def _items(part: str) -> tuple[str, str]:
    """The names of a part's two items; those of the policy have no prefix."""
    prefix = "" if part == "policy" else f"{part}_"
    return f"{prefix}params", f"{prefix}optimizer"


def _rest(state: TrainState) -> dict[str, Any]:
    return {"state": state.opt_state, "step": state.step, "skipped": state.skipped}
