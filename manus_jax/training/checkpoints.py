"""Orbax checkpoints of a run: asynchronous, atomic, restorable onto any mesh.

The directory of a step contains `params` and `optimizer` (sharded arrays) and `host` (JSON: dataset
cursor, counters and other state of the training loop). Orbax writes to a temporary name and renames
the complete checkpoint, so an interrupted one is never listed.

With several processes, all call the same methods in the same order. Each process writes its own
shards to a shared directory; process 0 writes everything that is not an array.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from manus_jax.learner.update import TrainState
from manus_jax.models.orbax_params import CheckpointError


class Checkpoints:
    """The checkpoints in one directory, by step.

    `parts` are the learners whose states are saved: the policy and optionally a critic. The newest
    `keep` checkpoints are kept and, with `best`, also the one with the highest score.
    """

    def __init__(
        self,
        directory: Path,
        keep: int | None = None,
        parts: Sequence[str] = ("policy",),
        best: bool = False,
    ):
        self.directory = Path(directory).absolute()
        self._parts = tuple(parts)
        policies: list[managers.PreservationPolicy] = [managers.LatestN(keep)]
        if best:
            scored = managers.BestN(
                get_metric_fn=lambda metrics: metrics["score"],
                n=1,
                keep_checkpoints_without_metrics=False,
            )
            policies.append(scored)
        everyone = set(range(jax.process_count()))
        self.directory.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_names=(*(i for part in parts for i in _items(part)), "host"),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=managers.AnyPreservationPolicy(policies),
                create=False,
                cleanup_tmp_directories=True,
                # With explicit processes, Orbax uses barriers that have a timeout.
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    active_processes=everyone if len(everyone) > 1 else None
                ),
            ),
        )

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint; None if there is none."""
        return self._manager.latest_step()

    def save(
        self,
        step: int,
        states: Mapping[str, TrainState],
        host: dict[str, Any],
        score: float | None = None,
    ) -> None:
        """Starts an asynchronous save; the arrays may be donated as soon as this returns."""
        items: dict[str, Any] = {"host": ocp.args.JsonSave(host)}
        for part in self._parts:
            params, optimizer = _items(part)
            items[params] = ocp.args.StandardSave(states[part].params)
            items[optimizer] = ocp.args.StandardSave(_rest(states[part]))
        metrics = None if score is None else {"score": score}
        self._manager.save(step, args=ocp.args.Composite(**items), metrics=metrics)

    def restore(
        self, step: int, abstract: Mapping[str, TrainState]
    ) -> tuple[dict[str, TrainState], dict[str, Any]]:
        """Restores the states of a step with the shapes and shardings of `abstract`."""
        items: dict[str, Any] = {"host": ocp.args.JsonRestore()}
        for part in self._parts:
            params, optimizer = _items(part)
            items[params] = ocp.args.StandardRestore(abstract[part].params)
            items[optimizer] = ocp.args.StandardRestore(_rest(abstract[part]))
        try:
            loaded = self._manager.restore(step, args=ocp.args.Composite(**items))
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise CheckpointError(
                f"checkpoint {self.directory / str(step)} does not fit this configuration: "
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
        self._manager.wait_until_finished()

    def close(self) -> None:
        self.wait()
        self._manager.close()


def _items(part: str) -> tuple[str, str]:
    """The names of a part's two items; those of the policy have no prefix."""
    prefix = "" if part == "policy" else f"{part}_"
    return f"{prefix}params", f"{prefix}optimizer"


def _rest(state: TrainState) -> dict[str, Any]:
    return {"state": state.opt_state, "step": state.step, "skipped": state.skipped}
