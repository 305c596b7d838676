"""Gemma 3, text only: sliding windows in most layers, norms before and after attention and MLP.

Norms multiply by 1 + weight, embeddings are scaled by the root of the hidden size, and local layers
have a RoPE base of their own. Gemma 3 4B and larger are published with a vision tower, as
`model_type` "gemma3"; their text model can be saved as a model of this family.
"""

from typing import Any

from manus_jax.models.families.family import ATTENTION_NAMES, Family, Unsupported, refuse

_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def _read(config: dict[str, Any]) -> dict[str, Any]:
    refuse(
        config,
        *("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
    )
    if config.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise Unsupported(f"hidden_activation {config['hidden_activation']!r} is not supported")
    layers, pattern = config["num_hidden_layers"], config.get("sliding_window_pattern", 6)
    kinds = config.get("layer_types") or [
        _LOCAL if (i + 1) % pattern else _GLOBAL for i in range(layers)
    ]
    if len(kinds) != layers or not set(kinds) <= {_LOCAL, _GLOBAL}:
        raise Unsupported(f"layer_types must be {layers} of {_LOCAL!r} and {_GLOBAL!r}")
    rope = config.get("rope_parameters") or {
        _GLOBAL: {
            "rope_theta": config.get("rope_theta", _GLOBAL_THETA),
            **(config.get("rope_scaling") or {}),
        },
        _LOCAL: {"rope_theta": config.get("rope_local_base_freq", _LOCAL_THETA)},
    }
    everywhere, local = rope.get(_GLOBAL) or {}, rope.get(_LOCAL) or {}
    if everywhere.get("rope_type", "default") not in ("default", "linear"):
        raise Unsupported(f"rope scaling {everywhere['rope_type']!r} is not supported")
    if local.get("rope_type", "default") != "default":
        raise Unsupported("rope scaling of sliding layers is not supported")
    return {
        "rope_theta": float(everywhere.get("rope_theta", _GLOBAL_THETA)),
        "rope_factor": float(everywhere.get("factor", 1.0)),
        "local_rope_theta": float(local.get("rope_theta", _LOCAL_THETA)),
        "sliding_window": config.get("sliding_window", 4096),
        "local_layers": tuple(kind == _LOCAL for kind in kinds),
        "query_scale": float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        "embed_scale": config["hidden_size"] ** 0.5,
        "tie_embeddings": config.get("tie_word_embeddings", True),
    }


def _write(arch: Any) -> dict[str, Any]:
    scaling = {"rope_type": "default"}
    if arch.rope_factor != 1.0:
        scaling = {"rope_type": "linear", "factor": arch.rope_factor}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [_LOCAL if local else _GLOBAL for local in arch.local_layers],
        "sliding_window": arch.sliding_window,
        "query_pre_attn_scalar": round(arch.query_scale**-2),
        "rope_parameters": {
            _GLOBAL: {"rope_theta": arch.rope_theta, **scaling},
            _LOCAL: {"rope_theta": arch.local_rope_theta, "rope_type": "default"},
        },
    }


FAMILY = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    {"qk_norm": True, "activation": "gelu_tanh", "norm_plus_one": True, "output_norms": True},
    {
        "input_norm": "input_layernorm.weight",
        "attention_out_norm": "post_attention_layernorm.weight",
        "post_norm": "pre_feedforward_layernorm.weight",
        "mlp_out_norm": "post_feedforward_layernorm.weight",
        **ATTENTION_NAMES,
        **{f"{n}_proj": f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
    },
    _read,
    _write,
    head_dim=256,
)
