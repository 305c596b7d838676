"""The architecture of a decoder, read from a Hugging Face `config.json`.

All families (`models/families/`) are the same decoder with a few switches, and an `Architecture`
consists of its sizes and these switches. A setting that the decoder does not implement is an error
that names it, never ignored.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal

from manus_jax.errors import UserError
from manus_jax.models.families import FAMILIES
from manus_jax.models.families.family import Family, Unsupported

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_positions",
)


_POSITIVE = (
    *("rope_theta", "local_rope_theta", "rope_factor"),
    *("norm_eps", "initializer_range", "embed_scale"),
)
_LARGEST = 2**31 - 1
_TEXT_MODEL_HINT = (
    "; its text model can be saved as gemma3_text with transformers and torch: "
    "Gemma3ForCausalLM.from_pretrained(DIR).save_pretrained(OUT)"
)


class ModelError(UserError, ValueError):
    """A model cannot be used; the message gives the reason and, if there is one, the remedy."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of the rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        values = dataclasses.astuple(self)
        if not all(0 < value < math.inf for value in values) or (
            self.high_freq_factor <= self.low_freq_factor
        ):
            raise ModelError(
                f"rope scaling {values} must be positive and finite, with high_freq_factor above "
                "low_freq_factor"
            )


@dataclasses.dataclass(frozen=True)
class Architecture:
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = True
    max_positions: int = 32_768
    initializer_range: float = 0.02
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norm_plus_one: bool = False  # norms multiply by 1 + weight
    output_norms: bool = False  # norms also after attention and after the MLP
    embed_scale: float = 1.0
    query_scale: float | None = None  # None: head_dim ** -0.5
    rope_factor: float = 1.0  # positions are divided by it
    # Local layers see only the last `sliding_window` tokens and have their own RoPE base.
    sliding_window: int | None = None
    local_layers: tuple[bool, ...] = ()
    local_rope_theta: float = 10_000.0
    # Mixture of experts: `intermediate_size` is that of one expert.
    num_experts: int = 0  # 0: a dense MLP
    experts_per_token: int = 0
    normalize_experts: bool = True  # the weights of a token's experts sum to one

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ModelError(f"unknown model family {self.family!r} (known: {', '.join(FAMILIES)})")
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in _POSITIVE:
            if not 0 < getattr(self, name) < math.inf:
                raise ModelError(f"{name} is {getattr(self, name)}; it must be positive and finite")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads are not divisible by {self.num_kv_heads} "
                "key-value heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd; rotary embeddings need it even")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ModelError(f"sliding_window is {self.sliding_window}; it must be at least 1")
        if len(self.local_layers) not in (0, self.num_layers):
            raise ModelError(f"{len(self.local_layers)} kinds of layers for {self.num_layers}")
        if not (0 < self.experts_per_token <= self.num_experts) and self.num_experts:
            raise ModelError(
                f"experts_per_token is {self.experts_per_token}, of {self.num_experts} experts"
            )
        if any(self.local_layers) and self.sliding_window is None:
            raise ModelError("sliding layers need sliding_window")

    @property
    def has_local_layers(self) -> bool:
        return any(self.local_layers)

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one layer's parameters by name, without the layer axis."""
        d, f = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "input_norm": (d,),
            "q_proj": (q, d),
            "k_proj": (kv, d),
            "v_proj": (kv, d),
            "o_proj": (d, q),
            "post_norm": (d,),
        }
        matrices = {"gate": (f, d), "up": (f, d), "down": (d, f)}
        if n := self.num_experts:
            shapes |= {"router": (n, d), **{f"expert_{k}": (n, *s) for k, s in matrices.items()}}
        else:
            shapes |= {f"{name}_proj": shape for name, shape in matrices.items()}
        if self.qkv_bias:
            shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
        if self.output_norms:
            shapes |= {"attention_out_norm": (d,), "mlp_out_norm": (d,)}
        if self.qk_norm:
            shapes |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        return shapes

    @property
    def active_share(self) -> float:
        """The share of the experts' parameters that a token uses."""
        return self.experts_per_token / self.num_experts if self.num_experts else 1.0

    @property
    def num_params(self) -> int:
        """Number of parameters; a tied head is counted once."""
        layer = sum(math.prod(shape) for shape in self.layer_shapes.values())
        vocabulary = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + vocabulary + self.hidden_size


def from_hf_config(config: dict[str, Any], source: str = "config.json") -> Architecture:
    """Converts the dict of a Hugging Face `config.json`."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        hint = _TEXT_MODEL_HINT if name == "gemma3" else ""
        raise ModelError(
            f"{source}: model_type {name!r} is not supported (known: {', '.join(FAMILIES)}){hint}"
        )
    try:
        fields = _read_fields(config, FAMILIES[name])
        return Architecture(**{key: _checked(key, value) for key, value in fields.items()})
    except KeyError as error:
        raise ModelError(f"{source}: {error.args[0]!r} is missing") from None
    except (ModelError, Unsupported) as error:
        raise ModelError(f"{source}: {error}") from None
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"{source}: a value has the wrong type: {error}") from None


def _read_fields(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """The fields of an `Architecture`, not yet checked."""
    optional = lambda key, default: default if config.get(key) is None else config[key]
    heads, hidden = _whole(config["num_attention_heads"]), _whole(config["hidden_size"])
    fields = {
        "family": family.name,
        "vocab_size": config["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": config["intermediate_size"],
        "num_layers": _whole(config["num_hidden_layers"]),
        "num_heads": heads,
        "num_kv_heads": optional("num_key_value_heads", heads),
        "head_dim": optional("head_dim", family.head_dim or hidden // max(1, heads)),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "max_positions": config.get("max_position_embeddings", 32_768),
        "initializer_range": config.get("initializer_range", 0.02),
        **family.switches,
        **(family.read(config) if family.read is not None else {}),
    }
    _refuse_unsupported(config, fields)
    if "rope_theta" not in fields:
        rope = _rope_parameters(config)
        fields["rope_scaling"] = _rope_scaling(rope)
        fields["rope_theta"] = 10_000.0 if rope.get("rope_theta") is None else rope["rope_theta"]
    return fields


def _checked(name: str, value: Any) -> Any:
    """A value of the type that the field has; TypeError for others."""
    kind = {field.name: field.type for field in dataclasses.fields(Architecture)}[name]
    if kind is float or (kind == float | None and value is not None):
        return _real(value)
    if kind is int or (kind == int | None and value is not None):
        return _whole(value)
    return _flag(value) if kind is bool else value


def _whole(value: Any) -> int:
    if type(value) is not int or value > _LARGEST:
        raise TypeError(f"{value!r} is not a whole number up to {_LARGEST}")
    return value


def _real(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(f"{value!r} is not true or false")
    return value


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE settings from `rope_parameters` or from the older pair of keys; both must agree."""
    older = dict(config.get("rope_scaling") or {})
    if "type" in older:
        older.setdefault("rope_type", older.pop("type"))
    if config.get("rope_theta") is not None:
        older["rope_theta"] = config["rope_theta"]
    rope = dict(config.get("rope_parameters") or older)
    for key, value in older.items():
        if rope.get(key, value) != value:
            raise ModelError(f"{key} is {value!r}, and {rope[key]!r} in rope_parameters")
    return rope


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"rope scaling {kind!r} is not supported (known: default, llama3)")
    return RopeScaling(
        factor=_real(rope["factor"]),
        low_freq_factor=_real(rope["low_freq_factor"]),
        high_freq_factor=_real(rope["high_freq_factor"]),
        original_max_position_embeddings=_whole(rope["original_max_position_embeddings"]),
    )


def _refuse_unsupported(config: dict[str, Any], fields: dict[str, Any]) -> None:
    refused = {
        "use_sliding_window": "sliding-window attention",
        "mlp_bias": "biases in the MLP",
        "quantization_config": "quantised weights",
        "attention_bias": "a bias of all projections",
    }
    for key, what in refused.items():
        if config.get(key):
            raise ModelError(f"{key} is set, but {what} is not supported for {fields['family']}")
    kinds = config.get("layer_types") or []
    if "local_layers" not in fields and (
        not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)
    ):
        raise ModelError("layer_types may only contain 'full_attention'")
    if "activation" not in fields and config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {config['hidden_act']!r} is not supported; only silu is")


def to_hf_config(arch: Architecture, dtype: str = "float32") -> dict[str, Any]:
    """A `config.json` for transformers and vLLM, for models initialised here."""
    rope: dict[str, Any] = {"rope_theta": arch.rope_theta, "rope_type": "default"}
    if arch.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **dataclasses.asdict(arch.rope_scaling)}
    config: dict[str, Any] = {
        "architectures": [FAMILIES[arch.family].hf_class],
        "model_type": arch.family,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": arch.norm_eps,
        "rope_theta": arch.rope_theta,
        "rope_parameters": rope,
        "tie_word_embeddings": arch.tie_embeddings,
        "max_position_embeddings": arch.max_positions,
        "initializer_range": arch.initializer_range,
        "use_cache": True,
        "dtype": dtype,
    }
    if arch.rope_scaling is not None:
        config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    write = FAMILIES[arch.family].write
    return config if write is None else config | write(arch)


def read_hf_config(directory: Path) -> dict[str, Any]:
    """Reads `directory/config.json`; raises ModelError if it is missing or malformed."""
    if not directory.is_dir():
        problem = "is not a directory" if directory.exists() else "does not exist"
        raise ModelError(f"model directory {directory} {problem}")
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory} is not a Hugging Face directory: it has no config.json")
    return read_json_object(directory / "config.json")


def check_format(path: Path) -> None:
    """Raises ModelError, with a remedy, if the weights are in a format that is not read here."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    if any(file.suffix == ".safetensors" for file in files):
        return
    gguf = next((file for file in files if file.suffix == ".gguf"), None)
    other = next((file for file in files if file.suffix in (".bin", ".pt", ".pth")), None)
    if gguf is None and (other is None or not (path / "config.json").is_file()):
        return
    directory = path if path.is_dir() else path.parent
    source = f"'{directory}'" + (f", gguf_file='{gguf.name}'" if gguf is not None else "")
    raise ModelError(
        f"{gguf or other} is not in the safetensors format: use the model's safetensors "
        f'repository, or convert it where torch is installed: python -c "from transformers import '
        f"AutoModelForCausalLM as M, AutoTokenizer as T; [x.from_pretrained({source})"
        f".save_pretrained('{directory}-safetensors') for x in (M, T)]\""
    )


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value
