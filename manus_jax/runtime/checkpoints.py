"""Orbax checkpoints of a run: asynchronous, whole or not there, restored onto any mesh.

A step's directory holds `params` and `optimizer` (arrays, sharded as they lie) and `host` (JSON:
dataset cursor, counters, whatever the loop needs to go on). Orbax writes beside the final name
and renames when all is there, so a checkpoint cut short by a kill is never listed.
"""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from manus_jax.learner.update import TrainState


class CheckpointError(ValueError):
    """A checkpoint that is missing or does not fit, with the path."""


class Checkpoints:
    """The checkpoints below one directory, by step."""

    def __init__(self, directory: Path, keep: int | None = None):
        self.directory = Path(directory).absolute()
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_names=("params", "optimizer", "host"),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=True, cleanup_tmp_directories=True
            ),
        )

    def latest(self) -> int | None:
        """The newest whole checkpoint's step."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, host: dict[str, Any]) -> None:
        """Starts writing and returns; the arrays may be donated at once."""
        counters = {"step": state.step, "skipped": state.skipped}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                optimizer=ocp.args.StandardSave({"state": state.opt_state, **counters}),
                host=ocp.args.JsonSave(host),
            ),
        )

    def restore(self, step: int, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The state of a step, put where `abstract` (shapes with shardings) says."""
        counters = {"step": abstract.step, "skipped": abstract.skipped}
        optimizer = {"state": abstract.opt_state, **counters}
        try:
            loaded = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardRestore(abstract.params),
                    optimizer=ocp.args.StandardRestore(optimizer),
                    host=ocp.args.JsonRestore(),
                ),
            )
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise CheckpointError(
                f"checkpoint {self.directory / str(step)} does not fit this configuration: "
                + " ".join(str(error).split())[:300]
            ) from None
        opt = loaded["optimizer"]
        state = TrainState(loaded["params"], opt["state"], opt["step"], opt["skipped"])
        return state, loaded["host"]

    def wait(self) -> None:
        """Blocks until everything begun is on disk; raises what the writing raised."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self.wait()
        self._manager.close()


def abstract_state(state: TrainState, shardings: TrainState) -> TrainState:
    """Shapes and types of `state` (arrays or shapes) with the given shardings."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
    )


def find_checkpoint(path: Path) -> tuple[Path, Path]:
    """`(step directory, model card directory)` of a step directory, or a run's newest step."""
    path = Path(path).absolute()
    if (path / "params").is_dir():
        step_dir = path
    else:
        root = path if path.name == "checkpoints" else path / "checkpoints"
        steps = [p for p in root.glob("*") if p.name.isdigit() and (p / "params").is_dir()]
        if not steps:
            raise CheckpointError(
                f"{path} holds no checkpoint: expected a run directory, or a step below its "
                "checkpoints/"
            )
        step_dir = max(steps, key=lambda p: int(p.name))
    card = step_dir.parent.parent / "model"
    if not (card / "config.json").is_file():
        raise CheckpointError(f"{card} is missing: it says what model {step_dir} holds")
    return step_dir, card


def load_params(step_dir: Path, abstract_params: Any) -> Any:
    """Only the parameters of a step directory, put where `abstract_params` says."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(Path(step_dir).absolute() / "params", abstract_params)


def save_params(run_dir: Path, params: Any, host: dict[str, Any]) -> Path:
    """A checkpoint of parameters alone as step 0 of `run_dir`."""
    directory = Path(run_dir).absolute() / "checkpoints"
    with ocp.CheckpointManager(directory, item_names=("params", "host")) as manager:
        manager.save(
            0,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params), host=ocp.args.JsonSave(host)
            ),
        )
        manager.wait_until_finished()
    return directory / "0"
