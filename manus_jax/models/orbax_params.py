"""Checkpoints on disk, and the parameters of a policy in them.

A step directory contains items written by Orbax (`params`, `optimizer`, `host`, …) and is complete
when its checksums exist. Loading a model, converting and publishing read only `params` and the
model card; `training/checkpoints.py` writes the complete state.
"""

import contextlib
import functools
import logging
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

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
from manus_jax.models.disk_params import DiskArray, Index

# Orbax's default writes to another directory and renames it, which mounted buckets cannot do.
ATOMICITY = ocp.options.AtomicityOptions(
    ocp.options.AtomicityMode.COMMIT_FILE, allow_legacy_atomic_rename=True
)
# Orbax logs the traceback of every background thread that fails, and then raises the error. asyncio
# logs the errors of the other tasks of such a save when they are collected as garbage.
logging.getLogger("absl").addFilter(lambda r: not (r.exc_info and "orbax" in r.pathname))
logging.getLogger("asyncio").addFilter(lambda r: not (r.exc_info and "orbax" in r.getMessage()))


def _report_uncaught(hook: Any, kind: type[BaseException], error: Any, trace: Any) -> None:
    """Python's report of an error, without those of TensorStore's threads after such a save."""
    if kind is not RuntimeError or str(error) != "Event loop is closed":
        hook(kind, error, trace)


sys.excepthook = functools.partial(_report_uncaught, sys.excepthook)


class CheckpointError(UserError, ValueError):
    """A checkpoint is missing, damaged or incompatible; the message has its path."""


def list_steps(root: Path) -> list[int]:
    """The steps in a checkpoint directory, ascending; damaged ones too, but no unfinished ones."""
    names = (path.name for path in root.glob("*"))
    steps = [int(name) for name in names if name.isdecimal() and name == str(int(name))]
    return sorted(step for step in steps if not is_unfinished(root / str(step), CHECKSUMS))


def composite_handler(**handlers: Any) -> ocp.CompositeCheckpointHandler:
    """A handler for the items of a step; items without one of their own get Orbax's."""
    options = ocp.CompositeOptions(atomicity_options=ATOMICITY)
    return ocp.CompositeCheckpointHandler(composite_options=options, **handlers)


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
    with _verified(step_dir, abstract_params), ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(step_dir / "params", abstract_params)


def open_params(step_dir: Path, abstract_params: Any) -> Any:
    """Verifies a step and returns its parameters as `DiskArray`s.

    A layer of a stack is a chunk of its own on disk (`save_args`). In older checkpoints a chunk is
    a whole stack; the last one is then kept in memory.
    """
    step_dir = Path(step_dir).absolute()
    sizes = [4 * math.prod(x.shape) for x in jax.tree.leaves(abstract_params)]
    with _verified(step_dir, abstract_params):
        open_all = lambda context: jax.tree_util.tree_map_with_path(
            lambda path, _: _open_store(step_dir / "params", path, context), abstract_params
        )
        stores = open_all(tensorstore.Context())
        if not all(_by_layer(store) for store in jax.tree.leaves(stores)):
            limit = {"cache_pool": {"total_bytes_limit": max(sizes)}}
            stores = open_all(tensorstore.Context(limit))

    def read(store: tensorstore.TensorStore, index: Index) -> np.ndarray:
        return store[index].read().result()

    return jax.tree.map(
        lambda store: DiskArray(store.shape, functools.partial(read, store)), stores
    )


def _open_store(
    params_dir: Path, path: tuple[Any, ...], context: tensorstore.Context
) -> tensorstore.TensorStore:
    """One parameter as Orbax stores it: a zarr array in an OCDBT database."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    base = {"driver": "file", "path": f"{params_dir}/"}
    place = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    spec = {"driver": "zarr", "kvstore": place, "recheck_cached_data": False}
    return tensorstore.open(spec, read=True, context=context).result()


def _by_layer(store: tensorstore.TensorStore) -> bool:
    chunk = store.chunk_layout.read_chunk.shape
    return store.rank < 3 or (chunk is not None and chunk[0] == 1)


def verify_step(step_dir: Path) -> None:
    """Raises CheckpointError on process 0 if a step is damaged."""
    if jax.process_index() == 0:
        try:
            verify_checksums(step_dir)
        except DamagedError as error:
            raise CheckpointError(f"checkpoint {step_dir} is damaged: {error}") from None


@contextlib.contextmanager
def _verified(step_dir: Path, abstract_params: Any) -> Iterator[None]:
    """Raises CheckpointError if the step is damaged or its parameters have other shapes."""
    verify_step(step_dir)
    try:
        check_shapes(step_dir / "params", abstract_params)
        yield
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


def save_args(params: Any) -> Any:
    """How Orbax stores parameters: every matrix of a stack is a chunk, so it can be read alone."""
    return jax.tree.map(
        lambda x: ocp.SaveArgs(shard_axes=tuple(range(max(0, len(x.shape) - 2)))), params
    )


class _DiskArrayHandler(ocp.type_handlers.ArrayHandler):
    """Saves `DiskArray`s like JAX arrays, one after the other."""

    async def serialize(
        self,
        values: Sequence[Any],
        infos: Sequence[Any],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> Sequence[Any]:
        assert args is not None
        for value, info, arg in zip(values, infos, args, strict=True):
            array = value
            if isinstance(value, DiskArray):
                array = jax.device_put(value.read(())).astype(jnp.float32)
            for written in await super().serialize([array], [info], [arg]):
                written.result()
            del array  # before the next one is read
        return []


def save_params(run_dir: Path, params: Any, host: dict[str, Any]) -> Path:
    """Writes a checkpoint that contains only parameters, as step 0 of `run_dir`.

    `params` are arrays or `DiskArray`s; of the latter, one at a time is in memory.
    """
    root = Path(run_dir).absolute() / "checkpoints"
    root.mkdir(parents=True, exist_ok=True)
    remove_leftovers(root)
    begin_directory(root / "0")
    # Under jax.Array, Orbax looks for a store of metadata, which this handler does not have.
    by_type = ocp.type_handlers.create_type_handler_registry(
        *((kind, _DiskArrayHandler()) for kind in (DiskArray, jax.Array))
    )
    handler = composite_handler(
        params=ocp.PyTreeCheckpointHandler(type_handler_registry=by_type),
        host=ocp.JsonCheckpointHandler(),
    )
    items = ocp.args.Composite(
        params=ocp.args.PyTreeSave(params, save_args=save_args(params)),
        host=ocp.args.JsonSave(host),
    )
    with ocp.Checkpointer(handler, atomicity_options=ATOMICITY) as checkpointer:
        checkpointer.save(root / "0", args=items)
    finish_step(root / "0")
    return root / "0"
