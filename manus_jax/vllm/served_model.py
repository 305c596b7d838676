"""How to serve a model, from its files: the type of its weights and the size of the KV cache.

vLLM's own defaults do not fit: with `--dtype auto` it computes float32 models in 16 bits, and on a
CPU it takes 92% of the machine's memory for the KV cache and does not start if less is free. This
module does not import JAX.
"""

import json
from pathlib import Path
from typing import Any

_TYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_BYTES = {"float32": 4}  # other types take two
_PAGE = 128  # tokens that vLLM allocates at once on a CPU
_LEAST_BYTES = 256 << 20
_SHARE_OF_MEMORY = 4
"""At most this part of the free memory, because several servers may start at once."""


def weight_dtype(model: Path) -> str:
    """The type of a model's weights: what `config.json` says, or else its first safetensors file.

    "auto" if neither says it.
    """
    config = json.loads((model / "config.json").read_text())
    for part in (config, config.get("text_config") or {}):
        found = part.get("dtype") or part.get("torch_dtype")
        if found in _TYPE_NAMES.values():
            return str(found)
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            try:
                entries = json.loads(file.read(min(size, 100 << 20)))
            except ValueError:  # vLLM says what is wrong with the file
                return "auto"
        types = [entry["dtype"] for name, entry in entries.items() if name != "__metadata__"]
        return _TYPE_NAMES.get(max(types, key=types.count), "auto") if types else "auto"
    return "auto"


def cpu_cache_bytes(model: Path, dtype: str, slots: int, max_length: int | None) -> int:
    """The size of the KV cache on a CPU: room for all slots, bounded by a part of the free memory.

    vLLM shares the cache between the requests, and says so if it cannot hold a single one.
    """
    config = json.loads((model / "config.json").read_text())
    config = config.get("text_config") or config
    number = lambda name, default: value if (value := config.get(name)) else default
    heads = number("num_attention_heads", 1)
    head_dim = number("head_dim", number("hidden_size", 0) // heads)
    width = 2 * number("num_hidden_layers", 0) * number("num_key_value_heads", heads) * head_dim
    length = max_length or number("max_position_embeddings", 0)
    pages = slots * (-(-length // _PAGE) + 1)
    needed = pages * _PAGE * width * _BYTES.get(dtype, 2)
    return max(_LEAST_BYTES, min(needed, _free_memory() // _SHARE_OF_MEMORY))


def _free_memory() -> int:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    values: dict[str, Any] = {words[0]: words[1] for words in lines}
    return int(values["MemAvailable:"]) << 10
