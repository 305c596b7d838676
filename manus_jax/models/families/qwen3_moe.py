"""Qwen3-MoE: Qwen3 with a router and experts in place of every MLP."""

from typing import Any

from manus_jax.models.families.family import LAYER_NAMES, Family, Unsupported, refuse


def _read(config: dict[str, Any]) -> dict[str, Any]:
    refuse(config, "mlp_only_layers")
    if config.get("decoder_sparse_step", 1) != 1:
        raise Unsupported("decoder_sparse_step must be 1: every layer has experts")
    # transformers 5 writes num_local_experts
    experts = config.get("num_experts", config.get("num_local_experts", 128))
    return {
        "num_experts": experts,
        "experts_per_token": config.get("num_experts_per_tok", 8),
        "intermediate_size": config.get("moe_intermediate_size", 768),
        "normalize_experts": config.get("norm_topk_prob", False),
    }


def _write(arch: Any) -> dict[str, Any]:
    return {
        "num_experts": arch.num_experts,
        "num_experts_per_tok": arch.experts_per_token,
        "moe_intermediate_size": arch.intermediate_size,
        "norm_topk_prob": arch.normalize_experts,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    {"qk_norm": True},
    {
        **LAYER_NAMES,
        "router": "mlp.gate.weight",
        **{f"expert_{n}": f"mlp.experts.{{}}.{n}_proj.weight" for n in ("gate", "up", "down")},
    },
    _read,
    _write,
    head_dim=128,
)
