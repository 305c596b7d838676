"""Checkpoints on disk, and the parameters of a policy in them.

A step directory contains items written by Orbax (`params`, `optimizer`, `host`, …) and is complete
when its checksums exist. Loading a model, converting and publishing read only `params` and the
model card; `training/checkpoints.py` writes the complete state.
"""

import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from manus_jax.errors import UserError
from manus_jax.files import (
    CHECKSUMS,
    DamagedError,
    begin_directory,
    end_directory,
    is_unfinished,
    remove_unfinished,
    verify_checksums,
    write_checksums,
)


class CheckpointError(UserError, ValueError):
    """A checkpoint is missing, damaged or incompatible; the message has its path."""


def list_steps(root: Path) -> list[int]:
    """The steps in a checkpoint directory, ascending; damaged ones too, but no unfinished ones."""
    names = (path.name for path in root.glob("*"))
    steps = [int(name) for name in names if name.isdecimal() and name == str(int(name))]
    return sorted(step for step in steps if not is_unfinished(root / str(step), CHECKSUMS))


def finish_step(step_dir: Path) -> None:
    """Makes a step visible."""
    write_checksums(step_dir)
    end_directory(step_dir)


def remove_leftovers(root: Path) -> None:
    """Removes what a kill left; no other process may be writing checkpoints here."""
    remove_unfinished(root, CHECKSUMS)
    for path in root.glob("*.orbax-checkpoint-tmp*"):
        shutil.rmtree(path, ignore_errors=True)


def find_checkpoint(path: Path) -> tuple[Path, Path]:
    """`(step directory, model card directory)` for a step directory or a run's newest step."""
    path = Path(path).expanduser().absolute()
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = list_steps(root) if root.name == "checkpoints" else []
    if steps:
        step_dir = root / str(steps[-1])
    elif path.is_dir() and (path.parent.name == "checkpoints" or (path / "params").is_dir()):
        step_dir = path
    else:
        raise CheckpointError(
            f"{path} contains no checkpoint: expected a run directory, or a step directory in its "
            "checkpoints/"
        )
    card = step_dir.parent.parent / "model"
    if not (card / "config.json").is_file():
        raise CheckpointError(f"{card} is missing: it describes the model of {step_dir}")
    return step_dir, card


def load_params(step_dir: Path, abstract_params: Any) -> Any:
    """Verifies a step and restores its parameters with the shapes and shardings given."""
    step_dir = Path(step_dir).absolute()
    if jax.process_index() == 0:
        try:
            verify_checksums(step_dir)
        except DamagedError as error:
            raise CheckpointError(f"checkpoint {step_dir} is damaged: {error}") from None
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            check_shapes(step_dir / "params", abstract_params)
            return checkpointer.restore(step_dir / "params", abstract_params)
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise CheckpointError(
                f"checkpoint {step_dir} does not fit the model in {step_dir.parent.parent}/model: "
                + " ".join(str(error).split())[:300]
            ) from None


def check_shapes(params_dir: Path, abstract_params: Any) -> None:
    """Raises ValueError if the parameters have other shapes than those on disk.

    Orbax would raise as well, but its unfinished reads print tracebacks of their own.
    """
    stored = _shapes(dict(ocp.StandardCheckpointHandler().metadata(params_dir)))
    expected = _shapes(abstract_params)
    for name in sorted(stored.keys() | expected.keys()):
        if stored.get(name) != expected.get(name):
            raise ValueError(
                f"{name} has shape {stored.get(name)} on disk, expected {expected.get(name)}"
            )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): tuple(leaf.shape) for path, leaf in leaves}


def save_params(run_dir: Path, params: Any, host: dict[str, Any]) -> Path:
    """Writes a checkpoint that contains only parameters, as step 0 of `run_dir`."""
    root = Path(run_dir).absolute() / "checkpoints"
    root.mkdir(parents=True, exist_ok=True)
    remove_leftovers(root)
    begin_directory(root / "0")
    items = ocp.args.Composite(params=ocp.args.StandardSave(params), host=ocp.args.JsonSave(host))
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(root / "0", args=items)
    finish_step(root / "0")
    return root / "0"
