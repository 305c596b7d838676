"""Adapters on disk: PEFT directories, and the item `lora` of a checkpoint.

Both name the base model and have a fingerprint of its weights, so that adapters are not combined
with another base; PEFT directories written elsewhere have none.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from manus_jax.files import (
    begin_directory,
    end_directory,
    open_file,
    write_atomically,
    write_checksums,
)
from manus_jax.limits import Range, path_problem, shown
from manus_jax.models.architecture import Architecture, ModelError, read_json_object
from manus_jax.models.disk_params import DiskArray, Index, host_tensor
from manus_jax.models.huggingface import check_new, tensor_map, verify_model
from manus_jax.models.lora import Lora, linear_layers, merged_weight

CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_BASE = "base_model.json"
ITEM = "lora"
_FACTOR = 2654435761
_RANKS, _ALPHAS = Range(at_least=1, at_most=2**20), Range(above=0, at_most=10**6)
_UNSUPPORTED = (
    *("use_dora", "use_rslora", "use_qalora", "modules_to_save", "rank_pattern", "alpha_pattern"),
    *("lora_bias", "layer_replication", "trainable_token_indices", "target_parameters"),
    "alora_invocation_tokens",
)
"""PEFT's options with which an adapter is more than products of the listed layers."""
_PREFIX, _SIDES = "base_model.model.", {"a": "lora_A.weight", "b": "lora_B.weight"}


@dataclasses.dataclass(frozen=True)
class Adaptation:
    """Adapters without their weights: `base` is the path of the model that they change.

    A relative path starts at the run directory. `fingerprint` is that of the base; None: unknown.
    """

    lora: Lora
    base: str
    fingerprint: str | None

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.lora), "base": self.base, "fingerprint": self.fingerprint}

    @classmethod
    def from_json(cls, values: dict[str, Any], source: Path) -> "Adaptation":
        try:
            lora = Lora(int(values["rank"]), float(values["alpha"]), tuple(values["targets"]))
            return cls(lora, str(values["base"]), str(values["fingerprint"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{source} does not describe adapters: {error!r}") from None

    def check_base(self, params: Any, what: str) -> None:
        """Raises ModelError if `params` are not those of the base."""
        if self.fingerprint is not None and fingerprint(params) != self.fingerprint:
            raise ModelError(
                f"{what} was trained on another model than {self.base}, whose weights have changed "
                "since: restore them"
            )


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["adapters"], meta_fields=["adaptation", "base"]
)
@dataclasses.dataclass(frozen=True)
class AdapterWeights:
    """The weights of a policy for an engine that has the base, which is the model at `base`."""

    adapters: Any
    adaptation: Adaptation
    base: Path


def has_adapters(step_dir: Path) -> bool:
    """Whether a checkpoint contains adapters; otherwise it contains all parameters."""
    return (step_dir / ITEM / "metadata").is_file()


def checkpoint_adaptation(step_dir: Path) -> Adaptation | None:
    """The adaptation of a checkpoint; None if it contains all parameters."""
    if not has_adapters(step_dir):
        return None
    path = step_dir / ITEM / "metadata"
    return Adaptation.from_json(read_json_object(path), path)


def base_path(adaptation: Adaptation, run_dir: Path, source: Path) -> Path:
    """The base model; ModelError if it is not there."""
    path = run_dir / Path(adaptation.base).expanduser()
    if not path.exists():
        raise ModelError(f"the base model of {source} is not at {path}: put it there")
    return path


def save_adapter(
    adapters: Any, adaptation: Adaptation, base: Path, arch: Architecture, directory: Path
) -> None:
    """Writes a directory that PEFT and vLLM load, complete when its checksums exist."""
    check_new(directory)
    directory.mkdir(parents=True, exist_ok=True)
    begin_directory(directory)
    lora = adaptation.lora
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    write_atomically(directory / CONFIG, json.dumps(config, indent=2) + "\n")
    tensors = {
        name: np.ascontiguousarray(host_tensor(_at(adapters, parameter), (layer,), np.float32))
        for name, parameter, layer, _ in _tensors(lora, arch)
    }
    save_file(tensors, directory / _WEIGHTS, {"format": "pt"})
    base_record = json.dumps({"fingerprint": adaptation.fingerprint}) + "\n"
    write_atomically(directory / _BASE, base_record)
    write_checksums(directory)
    end_directory(directory)


def _tensors(lora: Lora, arch: Architecture) -> list[tuple[str, str, int, tuple[int, int]]]:
    """(PEFT's name, parameter, layer, shape) of every matrix."""
    found, shapes = [], lora.layer_shapes(arch)
    for name, path, index, _ in tensor_map(arch):
        if path[-1] in lora.targets:
            for side, suffix in _SIDES.items():
                parameter = f"{path[-1]}_lora_{side}"
                full = f"{_PREFIX}{name.removesuffix('weight')}{suffix}"
                found.append((full, parameter, index[0], shapes[parameter]))
    return found


def _at(adapters: Any, parameter: str) -> Any:
    return adapters["backbone"]["layers"][parameter]


def read_adaptation(directory: Path) -> Adaptation:
    """The configuration of a PEFT directory; ModelError if this project cannot apply it."""
    verify_model(directory)
    path = directory / CONFIG
    config = read_json_object(path)
    base, targets = config.get("base_model_name_or_path"), config.get("target_modules")
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha", 0)
    if config.get("peft_type") != "LORA" or not isinstance(base, str):
        raise ModelError(f"{path} is not the configuration of a LoRA adapter with a base model")
    if problem := path_problem(base):
        raise ModelError(f"{path}: base_model_name_or_path = {shown(base)} {problem}")
    for name, value, kinds, allowed in (
        ("r", rank, (int,), _RANKS),
        ("lora_alpha", alpha, (int, float), _ALPHAS),
    ):
        if problem := allowed.problem(value) if type(value) in kinds else "must be a number":
            raise ModelError(f"{path}: {name} = {shown(value)} {problem}")
    for option in _UNSUPPORTED:
        if config.get(option):
            raise ModelError(f"{path}: {option} is set, but is not supported")
    if not isinstance(targets, list) or not targets:
        raise ModelError(f"{path}: target_modules must be a list of names")
    record = directory / _BASE
    known = read_json_object(record).get("fingerprint") if record.is_file() else None
    return Adaptation(Lora(rank, float(alpha), tuple(map(str, targets))), base, known)


def read_adapter(directory: Path, lora: Lora, arch: Architecture) -> Any:
    """The weights of a PEFT directory as parameters; ModelError if they are for another model."""
    problem = f"{directory} is an adapter for another model"
    if unknown := set(lora.targets) - set(linear_layers(arch)):
        raise ModelError(f"{problem}: the {arch.family} model has no layer {min(unknown)}")
    layers: dict[str, np.ndarray] = {}
    expected = _tensors(lora, arch)
    try:
        with open_file(directory / _WEIGHTS):  # not a pipe
            tensors = load_file(directory / _WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{directory / _WEIGHTS} cannot be read as safetensors: {error}") from None
    for name, parameter, layer, shape in expected:
        if name not in tensors:
            raise ModelError(f"{problem}: it has no tensor {name}")
        if tensors[name].shape != shape:
            raise ModelError(f"{problem}: {name} has shape {tensors[name].shape}, expected {shape}")
        if tensors[name].dtype.name not in ("float32", "float16", "bfloat16"):
            raise ModelError(f"{directory}: {name} has the type {tensors[name].dtype.name}")
        stack = layers.setdefault(parameter, np.empty((arch.num_layers, *shape), np.float32))
        stack[layer] = tensors[name]
        if not np.isfinite(stack[layer]).all():
            raise ModelError(f"{directory}: {name} has a value that is not finite")
    if more := tensors.keys() - {name for name, *_ in expected}:
        raise ModelError(f"{problem}: that one has no place for {min(more)}")
    return {"backbone": {"layers": layers}}


def merged_on_disk(base: Any, adapters: Any, lora: Lora) -> Any:
    """Parameters whose adapted weights are `DiskArray`s, merged with NumPy arrays when read."""
    layers = dict(base["backbone"]["layers"])
    for name in lora.targets:
        a, b = (_at(adapters, f"{name}_lora_{side}") for side in "ab")
        layers[name] = DiskArray(layers[name].shape, _merging(layers[name], a, b, lora.scale))
    return {**base, "backbone": {**base["backbone"], "layers": layers}}


def _merging(
    weight: Any, a: np.ndarray, b: np.ndarray, scale: float
) -> Callable[[Index], np.ndarray]:
    return lambda index: merged_weight(
        host_tensor(weight, index, np.float32), a[index], b[index], scale
    )


def fingerprint(params: dict[str, Any]) -> str:
    """A checksum of parameters by name, in bfloat16, so that it holds for every type and sharding.

    Leaves are JAX arrays or `DiskArray`s, of which one layer at a time is read.
    """
    found = {}
    for path, array in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if isinstance(array, DiskArray):
            places = [(i,) for i in range(array.shape[0])] if "/layers/" in name else [()]
            parts = [int(_checksum(jnp.asarray(array.read(place)))) for place in places]
        else:
            checksum = jax.vmap(_checksum) if "/layers/" in name else _checksum
            parts = np.atleast_1d(np.asarray(jax.jit(checksum)(array))).tolist()
        found[name] = array.shape, parts
    return _digest(found)


def fingerprint_of_tensors(checksums: Mapping[str, int], arch: Architecture) -> str:
    """The `fingerprint` of a model from the checksums of its tensors by Hugging Face name."""
    found: dict[str, tuple[tuple[int, ...], list[int]]] = {}
    for name, path, index, shape in tensor_map(arch):
        layer, *expert = index or (0,)
        if index:
            shape = (arch.num_layers, *arch.layer_shapes[path[-1]])
        parts = found.setdefault("/".join(path), (shape, [0] * (shape[0] if index else 1)))[1]
        factor = (2 * expert[0] + 1) * _FACTOR if expert else 1
        parts[layer] = (parts[layer] + checksums.get(name, 0) * factor) % 2**32
    return _digest(found)


def _digest(found: Mapping[str, tuple[tuple[int, ...], list[int]]]) -> str:
    """Of the shape of each parameter and the checksums of its layers."""
    digest = hashlib.sha256()
    for name, (shape, parts) in sorted(found.items()):
        digest.update(f"{name} {shape} {parts}\n".encode())
    return digest.hexdigest()[:32]


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    """A sum of the bits of all values, each times an odd number, modulo 2^32.

    vLLM's workers compute it with PyTorch (`vllm.transfer`).
    """
    bits = jax.lax.bitcast_convert_type(array.astype(jnp.bfloat16), jnp.uint16)
    total = bits.astype(jnp.uint32)
    for size in reversed(array.shape):
        odd = 2 * jnp.arange(size, dtype=jnp.uint32) + 1
        total = jnp.sum(total * odd * np.uint32(_FACTOR), axis=-1, dtype=jnp.uint32)
    return total
