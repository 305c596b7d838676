# mypy: disable-error-code="import-not-found, import-untyped, misc"
"""Loads published versions into a running vLLM; runs in each of its workers.

The workers of a machine share a mirror of the weights under their Hugging Face names.
`fetch_weights` starts a thread that brings the mirror to a version, so that reading and checking do
not delay generation, and damaged files never reach the model. During vLLM's update (start, update,
finish) the mirror is loaded through the model's own loaders, which fuse, shard and lay out tensors.
All tensors are loaded, because vLLM would leave the rest of a fused tensor empty.

On CPU this is slow, since every matrix is repacked, so the thread also loads a staged copy of the
model, and the update only copies it over. The server then holds the weights twice, unless
`MANUS_JAX_STAGE_WEIGHTS=0` is set. Adapters are loaded by vLLM itself; here their files are checked
first. Runs in vLLM's environment, without JAX.
"""

import copy
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from manus_jax.files import DamagedError, verify_checksums
from manus_jax.vllm.plugin import register
from manus_jax.weights.manifest import Identity, TensorSpec, WeightsError
from manus_jax.weights.mirror import TensorStore
from manus_jax.weights.shared_mirror import SharedMirror

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

register()  # for a server that loads this module without the entry point


@dataclasses.dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Empty: the transfer needs no setup."""


@dataclasses.dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """The version to load; it must have been fetched."""

    number: int
    id: str


class FileWeightTransfer(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """vLLM's side of `manus_jax.weights`, one per worker."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        wanted = os.environ.get("MANUS_JAX_STAGE_WEIGHTS", "1") != "0"
        self._stages = wanted and self.device.type == "cpu"
        self._staged_model: torch.nn.Module | None = None
        self._is_staged = False  # the staged model holds the mirror's version
        self._mirror: SharedMirror | None = None
        self._held: Identity | None = None  # the version that was fetched
        self._thread: threading.Thread | None = None
        self._problem: str | None = None

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        pass

    def fetch(self, directory: str, number: int) -> None:
        """Starts bringing the mirror to a version."""
        self._start(self._fetch, Path(directory), number)

    def check_adapter(self, directory: str) -> None:
        """Starts checking the files of an adapter, whose content vLLM does not check."""
        self._start(self._check_adapter, Path(directory))

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        """In a thread, after what is still running; `fetched` tells the result."""
        if self._thread is not None:
            self._thread.join()
        self._problem = None
        self._thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._thread.start()

    def _check_adapter(self, directory: Path) -> None:
        try:
            verify_checksums(directory)
        except DamagedError as error:
            self._problem = str(error)

    def _fetch(self, directory: Path, number: int) -> None:
        self._is_staged = False
        try:
            if self._mirror is None or self._mirror.root != directory:
                self._close_mirror()
                self._mirror = SharedMirror(directory)
            self._mirror.advance(directory, number)
            self._held = self._mirror.held
            if self._stages:
                if self._staged_model is None:
                    self._staged_model = _copy_of(self.model)
                with self._mirror.reading(self._held) as store:
                    self._load_into(self._staged_model, store)
                self._is_staged = True
        except (WeightsError, OSError) as error:
            self._problem = str(error)
        except Exception as error:  # from vLLM's loaders; reported by `fetched`
            self._problem, self._staged_model = repr(error), None

    def fetched(self) -> dict[str, Any]:
        """Whether a fetch is `busy`, its `error`, the version `held`, and whether it is `staged`:
        then the pause only copies it."""
        held = self._held
        return {
            "busy": self._thread is not None and self._thread.is_alive(),
            "error": self._problem,
            "held": None if held is None else dataclasses.asdict(held),
            "staged": self._is_staged,
        }

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        wanted = Identity(update_info.number, update_info.id)
        state = self.fetched()
        if self._mirror is None or state["busy"] or self._held != wanted:
            raise ValueError(f"version {wanted.number} was not fetched before its update: {state}")
        if self._staged_model is not None and self._is_staged:
            _copy_into(self.model, self._staged_model)
        else:
            with self._mirror.reading(wanted) as store:
                self._load_into(self.model, store)

    def finish_weight_update(self) -> None:
        pass

    @torch.no_grad()
    def _load_into(self, model: Any, store: TensorStore) -> None:
        if self.device.type == "cpu":
            _forget_expert_kernels(model)
        initialize_layerwise_reload(model)
        model.load_weights(_tensors(store))
        finalize_layerwise_reload(model, self.model_config)
        if self.device.type == "cpu":
            _repack_heads(model)

    def shutdown(self) -> None:
        self._staged_model = None
        self._close_mirror()

    def _close_mirror(self) -> None:
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None


class WeightsWorker:
    """Methods for vLLM's workers (`--worker-extension-cls`), called through `/collective_rpc`."""

    weight_transfer_engine: FileWeightTransfer
    rank: int

    def fetch_weights(self, directory: str, number: int) -> None:
        self.weight_transfer_engine.fetch(directory, number)

    def fetched_weights(self) -> dict[str, Any]:
        return self.weight_transfer_engine.fetched()

    def check_adapter(self, directory: str) -> None:
        self.weight_transfer_engine.check_adapter(directory)

    def base_checksums(self) -> dict[str, int]:
        """Checksums of the tensors in the served model's files by name, of the first worker."""
        if self.rank:
            return {}
        directory = Path(self.weight_transfer_engine.model_config.model)
        found = {}
        for path in directory.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (a safetensors handle is not a dict)
                    found[name] = checksum(file.get_tensor(name))
        return found

    def served_config(self) -> dict[str, Any]:
        """The served model's `config.json`, with transformers' defaults filled in."""
        config = self.weight_transfer_engine.model_config.hf_config
        return json.loads(config.to_json_string(use_diff=False))


def _tensors(store: TensorStore) -> Iterator[tuple[str, torch.Tensor]]:
    for name, spec in store.specs.items():
        yield name, as_tensor(store.raw(name), spec)


def as_tensor(raw: np.ndarray, spec: TensorSpec) -> torch.Tensor:
    """A view of bytes `[bytes]` as a tensor of the given type and shape."""
    return torch.from_numpy(np.asarray(raw)).view(_DTYPES[spec.dtype]).reshape(spec.shape)


def checksum(tensor: torch.Tensor) -> int:
    """As in `models.adapter_files`: a sum of the bits of all values in bfloat16, each times an odd
    number, modulo 2^32."""
    total = tensor.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
    for size in reversed(tensor.shape):
        odd = (2 * np.arange(size, dtype=np.uint32) + 1) * np.uint32(2654435761)
        total = (total * torch.from_numpy(odd.view(np.int32))).sum(-1, dtype=torch.int32)
    return int(total) % 2**32


@torch.no_grad()
def _copy_of(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model with its own tensors, loadable like the original."""
    # Internals of vLLM's reloading, imported here because servers on GPUs do not need them.
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

    tensors: dict[torch.Tensor | None, torch.Tensor | None] = {None: None}

    def own(named: dict[str, Any]) -> dict[str, Any]:
        for tensor in named.values():
            if tensor not in tensors:  # tensors shared between modules stay shared
                tensors[tensor] = copied = tensor.data.clone()
                copied.__class__ = tensor.__class__
                copied.__dict__ = tensor.__dict__.copy()
        return {name: tensors[tensor] for name, tensor in named.items()}

    modules: dict[Any, Any] = {None: None}
    for module in model.modules():
        modules[module] = copied = copy.copy(module)
        if _has_expert_kernel(module):  # which loading replaces
            copied.quant_method = copy.copy(module.quant_method)
        copied._parameters, copied._buffers = own(module._parameters), own(module._buffers)
        copied._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        known, info = get_layerwise_info(module), get_layerwise_info(copied)
        info.restore_device = known.restore_device
        # Copied, because loading makes them refer to the loaded module.
        parameters, buffers = (
            {name: to_meta_tensor(tensor) for name, tensor in named.items()}
            for named in known.restore_metadata
        )
        info.restore_metadata = (parameters, buffers)
    for module in model.modules():
        children = module._modules.items()
        modules[module]._modules = {name: modules[child] for name, child in children}
    return modules[model]


@torch.no_grad()
def _copy_into(model: torch.nn.Module, staged: torch.nn.Module) -> None:
    """Copies the staged tensors in place and takes over the packed matrices."""
    for named in ("named_parameters", "named_buffers"):
        new = dict(getattr(staged, named)())
        for name, tensor in getattr(model, named)():
            tensor.data.copy_(new[name].data)
    for module, other in zip(model.modules(), staged.modules(), strict=True):
        if "cpu_linear" in vars(other):
            module.cpu_linear = other.cpu_linear


def _has_expert_kernel(module: Any) -> bool:
    return getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    """On CPU the matrices of experts are packed when their kernel is made. vLLM keeps the kernel of
    a model that is loaded again, and would leave the new matrices unpacked."""
    modules: Iterator[Any] = model.modules()
    for module in filter(_has_expert_kernel, modules):
        module.quant_method.moe_kernel = None


def _repack_heads(model: torch.nn.Module) -> None:
    """On CPU an LM head uses a packed copy of its weights. If they are tied to the embedding, vLLM
    repacks the embedding only, and the head would keep its old copy."""
    embeddings = [
        m
        for m in model.modules()
        if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)
    ]
    for head in model.modules():
        if not isinstance(head, ParallelLMHead):
            continue
        tied = next((e for e in embeddings if e.weight is head.weight), None)
        if tied is not None and hasattr(tied, "cpu_linear"):
            head.cpu_linear = tied.cpu_linear
        else:
            head.quant_method.process_weights_after_loading(head)
