# mypy: disable-error-code="import-not-found, import-untyped, misc"
"""Published versions into a running vLLM: the part that lives in each of its workers.

A worker holds a mirror of the weights in Hugging Face's names. `fetch_weights` starts a thread that
brings the mirror to a version, so that reading and checking cost no generation any time, and
nothing that is wrong with the files can reach the model. Inside vLLM's own update (start, update,
finish) the mirror is loaded through the model's loaders, which know how tensors are fused, split
over devices and laid out. All of it is loaded: vLLM would leave the rest of a fused tensor empty.

On CPU that takes long, since every matrix is packed anew, so it is done by the thread too, into a
twin of the model, and the update only exchanges the two. The server then needs room for the weights
twice; with `MANUS_JAX_STAGE_WEIGHTS=0` it does not. Runs in vLLM's environment, without JAX.
"""

import copy
import dataclasses
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
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

from manus_jax.vllm.plugin import register
from manus_jax.weights.manifest import Identity, TensorSpec, WeightsError
from manus_jax.weights.mirror import Mirror

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

register()  # for a server that was told of this module and not of the entry point


@dataclasses.dataclass
class FileInitInfo(WeightTransferInitInfo):
    """There is nothing to agree on beforehand."""


@dataclasses.dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """The version to load, which must have been fetched."""

    number: int
    id: str


class FileWeightTransfer(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """vLLM's side of `manus_jax.weights`, one in each worker."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        wanted = os.environ.get("MANUS_JAX_STAGE_WEIGHTS", "1") != "0"
        self._stages = wanted and self.device.type == "cpu"
        self._twin: torch.nn.Module | None = None
        self._staged = False  # the twin holds the mirror's version
        self._mirror: Mirror | None = None
        self._thread: threading.Thread | None = None
        self._problem: str | None = None

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        pass

    def fetch(self, directory: str, number: int) -> None:
        """Begins to bring the mirror to a version; a fetch under way is waited for first."""
        if self._thread is not None:
            self._thread.join()
        self._problem, self._staged = None, False
        arguments = (Path(directory), number)
        self._thread = threading.Thread(target=self._fetch, args=arguments, daemon=True)
        self._thread.start()

    def _fetch(self, directory: Path, number: int) -> None:
        try:
            if self._mirror is None:
                self._mirror = Mirror()
            self._mirror.advance(directory, number)
            if self._stages:
                if self._twin is None:
                    self._twin = _twin_of(self.model)
                self._load_into(self._twin)
                self._staged = True
        except (WeightsError, OSError) as error:
            self._problem = str(error)
        except Exception as error:  # of vLLM's loaders; nobody else would tell of it
            self._problem, self._twin = repr(error), None

    def fetched(self) -> dict[str, Any]:
        """`busy`, what went wrong (`error`), the version that is held, and whether it is `staged`:
        ready in the twin, and not to be loaded in the pause."""
        held = None if self._mirror is None else self._mirror.held
        return {
            "busy": self._thread is not None and self._thread.is_alive(),
            "error": self._problem,
            "held": None if held is None else dataclasses.asdict(held),
            "staged": self._staged,
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
        if self._mirror is None or state["busy"] or self._mirror.held != wanted:
            raise ValueError(f"version {wanted.number} was not fetched before its update: {state}")
        if self._twin is not None and self._staged:
            _become(self.model, self._twin)
        else:
            self._load_into(self.model)

    def finish_weight_update(self) -> None:
        pass

    @torch.no_grad()
    def _load_into(self, model: Any) -> None:
        assert self._mirror is not None
        initialize_layerwise_reload(model)
        model.load_weights(_tensors(self._mirror))
        finalize_layerwise_reload(model, self.model_config)
        if self.device.type == "cpu":
            _repack_heads(model)

    def shutdown(self) -> None:
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = self._twin = None


class WeightsWorker:
    """Methods for vLLM's workers (`--worker-extension-cls`), called through `/collective_rpc`."""

    weight_transfer_engine: FileWeightTransfer

    def fetch_weights(self, directory: str, number: int) -> None:
        self.weight_transfer_engine.fetch(directory, number)

    def fetched_weights(self) -> dict[str, Any]:
        return self.weight_transfer_engine.fetched()

    def served_config(self) -> dict[str, Any]:
        """What is served, as transformers completes its `config.json`."""
        config = self.weight_transfer_engine.model_config.hf_config
        return json.loads(config.to_json_string(use_diff=False))


def _tensors(mirror: Mirror) -> Iterator[tuple[str, torch.Tensor]]:
    assert mirror.store is not None
    for name, spec in mirror.store.specs.items():
        yield name, as_tensor(mirror.store.raw(name), spec)


def as_tensor(raw: np.ndarray, spec: TensorSpec) -> torch.Tensor:
    """Bytes `[bytes]` as a tensor of its own type and shape; a view."""
    return torch.from_numpy(np.asarray(raw)).view(_DTYPES[spec.dtype]).reshape(spec.shape)


@torch.no_grad()
def _twin_of(model: torch.nn.Module) -> torch.nn.Module:
    """The same modules with tensors of their own."""
    # Parts of vLLM that only its own reloading uses: a server on GPUs does without them.
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

    tensors: dict[torch.Tensor | None, torch.Tensor | None] = {None: None}

    def own(named: dict[str, Any]) -> dict[str, Any]:
        for tensor in named.values():
            if tensor not in tensors:  # those that modules share stay shared
                tensors[tensor] = twin = tensor.data.clone()
                twin.__class__ = tensor.__class__
                twin.__dict__ = tensor.__dict__.copy()
        return {name: tensors[tensor] for name, tensor in named.items()}

    modules: dict[Any, Any] = {None: None}
    for module in model.modules():
        modules[module] = twin = copy.copy(module)
        twin._parameters, twin._buffers = own(module._parameters), own(module._buffers)
        twin._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        known, info = get_layerwise_info(module), get_layerwise_info(twin)
        info.restore_device = known.restore_device
        # Copies, since they come to refer to the module that is loaded.
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
def _become(model: torch.nn.Module, twin: torch.nn.Module) -> None:
    """Takes over the twin's tensors, in place, and its packed matrices."""
    for named in ("named_parameters", "named_buffers"):
        new = dict(getattr(twin, named)())
        for name, tensor in getattr(model, named)():
            tensor.data.copy_(new[name].data)
    for module, other in zip(model.modules(), twin.modules(), strict=True):
        if "cpu_linear" in vars(other):
            module.cpu_linear = other.cpu_linear


def _repack_heads(model: torch.nn.Module) -> None:
    """On CPU an LM head multiplies with a packed copy of its weights. Where it shares them with the
    embedding, vLLM loads and packs the embedding, and the head keeps its old copy."""
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
