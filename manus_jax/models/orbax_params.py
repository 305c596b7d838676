"""Parameters of a policy in an Orbax checkpoint, without the rest of the training state.

Loading a model, converting and publishing need only a checkpoint's `params` item and the model card
beside it. `training/checkpoints.py` writes the complete state with the same layout.
"""

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from manus_jax.errors import UserError


class CheckpointError(UserError, ValueError):
    """A checkpoint is missing or incompatible; the message has its path."""


def find_checkpoint(path: Path) -> tuple[Path, Path]:
    """`(step directory, model card directory)` for a step directory or a run's newest step."""
    path = Path(path).absolute()
    if (path / "params").is_dir():
        step_dir = path
    else:
        root = path if path.name == "checkpoints" else path / "checkpoints"
        steps = [p for p in root.glob("*") if p.name.isdigit() and (p / "params").is_dir()]
        if not steps:
            raise CheckpointError(
                f"{path} contains no checkpoint: expected a run directory, or a step directory in "
                "its checkpoints/"
            )
        step_dir = max(steps, key=lambda p: int(p.name))
    card = step_dir.parent.parent / "model"
    if not (card / "config.json").is_file():
        raise CheckpointError(f"{card} is missing: it describes the model of {step_dir}")
    return step_dir, card


def load_params(step_dir: Path, abstract_params: Any) -> Any:
    """Restores the parameters of a step directory with the shapes and shardings given."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(Path(step_dir).absolute() / "params", abstract_params)


def save_params(run_dir: Path, params: Any, host: dict[str, Any]) -> Path:
    """Writes a checkpoint that contains only parameters, as step 0 of `run_dir`."""
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
