"""Orbax checkpoints of a run: asynchronous, whole or not there, restored onto any mesh.

A step's directory holds `params` and `optimizer` (arrays, sharded as they lie) and `host` (JSON:
dataset cursor, counters, whatever the loop needs to go on). Orbax writes beside the final name
and renames when all is there, so a checkpoint cut short by a kill is never listed.

Of several processes all call the same methods in step; each writes its own shards below a directory
that all see, and what is not an array is process 0's.
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
    """The checkpoints below one directory, by step.

    `parts` are the learners whose states are saved: the policy, and perhaps a critic. The newest
    `keep` steps stay, and with `best` also the one whose saved score was highest.
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
                # Named, the processes meet at barriers with a time limit.
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    active_processes=everyone if len(everyone) > 1 else None
                ),
            ),
        )

    def latest(self) -> int | None:
        """The newest whole checkpoint's step."""
        return self._manager.latest_step()

    def save(
        self,
        step: int,
        states: Mapping[str, TrainState],
        host: dict[str, Any],
        score: float | None = None,
    ) -> None:
        """Starts writing and returns; the arrays may be donated at once."""
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
        """The states of a step, put where `abstract` (shapes with shardings) says."""
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

    def preempted(self, step: int) -> bool:
        """Whether a host is to be given back; if so, all processes hear it at the same step.

        Knows only what JAX takes note of (`distributed.Preemption`).
        """
        return self._manager.reached_preemption(step)

    def wait(self) -> None:
        """Blocks until everything begun is on disk; raises what the writing raised."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self.wait()
        self._manager.close()


def _items(part: str) -> tuple[str, str]:
    """Names of a part's two items: the policy's parameters are plain `params`."""
    prefix = "" if part == "policy" else f"{part}_"
    return f"{prefix}params", f"{prefix}optimizer"


def _rest(state: TrainState) -> dict[str, Any]:
    return {"state": state.opt_state, "step": state.step, "skipped": state.skipped}


def abstract_state(state: TrainState, shardings: TrainState) -> TrainState:
    """Shapes and types of `state` (arrays or shapes) with the given shardings."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
    )
