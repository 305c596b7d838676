"""The vLLM plug-in (`vllm.general_plugins` entry point): registers the weight transfer back end."""

import contextlib

BACKEND = "manus_jax"


def register() -> None:
    """Enables `--weight-transfer-config '{"backend": "manus_jax"}'`; may be called repeatedly."""
    from vllm.distributed.weight_transfer import (  # type: ignore[import-not-found, unused-ignore]
        WeightTransferEngineFactory,
    )

    with contextlib.suppress(ValueError):  # already registered
        WeightTransferEngineFactory.register_engine(
            BACKEND, "manus_jax.vllm.transfer", "FileWeightTransfer"
        )
