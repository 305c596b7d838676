"""Checks that a pool can use a vLLM server: its context length, plug-in and model."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from manus_jax.models.architecture import Architecture, ModelError, from_hf_config
from manus_jax.vllm.client import IncompatibleServer, ServerInfo, VllmServer

_NOT_COMPARED = ("max_positions", "initializer_range")  # they do not affect the forward pass


def check_compatible(
    server: VllmServer,
    info: ServerInfo,
    max_length: int,
    needs_weights: bool,
    model: Architecture | None,
) -> None:
    """Raises IncompatibleServer with the reason and what to do. `model` None accepts any model."""
    if info.max_length < max_length:
        raise IncompatibleServer(
            f"{server.url} has a context of {info.max_length} tokens and {max_length} are needed: "
            f"start it with --max-model-len {max_length}"
        )
    if needs_weights and not info.takes_weights:
        raise IncompatibleServer(
            f"{server.url} was started without this project's plug-in and takes no weights: start "
            "it with `python -m manus_jax.serve`"
        )
    if model is not None and info.takes_weights:
        different = difference(model, server.served_config())
        if different is not None:
            raise IncompatibleServer(
                f"{server.url} serves another model than the one that is trained: {different}; "
                "start it from that model's directory, or from the versions in vllm.weights_dir"
            )


def difference(model: Architecture, served: Mapping[str, Any]) -> str | None:
    """How a served model, given its `config.json`, differs; None if it is equivalent."""
    try:
        other = from_hf_config(dict(served), "its config.json")
    except ModelError as error:
        return str(error)
    names = [field.name for field in dataclasses.fields(model) if field.name not in _NOT_COMPARED]
    values = [(name, getattr(other, name), getattr(model, name)) for name in names]
    unlike = [f"{name} is {there} and not {here}" for name, there, here in values if there != here]
    return ", ".join(unlike) or None
