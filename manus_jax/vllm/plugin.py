"""What vLLM loads by itself through its `vllm.general_plugins` entry point: one registration."""

import contextlib

BACKEND = "manus_jax"


def register() -> None:
    """Makes `--weight-transfer-config '{"backend": "manus_jax"}'` known; may be called again."""
    from vllm.distributed.weight_transfer import (  # type: ignore[import-not-found, unused-ignore]
        WeightTransferEngineFactory,
    )

    with contextlib.suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine(
            BACKEND, "manus_jax.vllm.transfer", "FileWeightTransfer"
        )
