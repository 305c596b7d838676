"""The options of vLLM that a server may be given in addition, with the types of their values.

Others are refused: they would run code from elsewhere, open the server to others, or change what
it samples from. Imports no JAX.
"""

import difflib
import json
from collections.abc import Callable, Sequence

from manus_jax.config.binding import ConfigError

Values = tuple[str, Callable[[str], bool]]
"""What the values of an option are, and whether a text is one; ValueError counts as False."""


def _number(kind: type[float], lowest: float, highest: float) -> Values:
    name = f"a {'whole ' if kind is int else ''}number from {lowest:g} to {highest:g}"
    return name, lambda text: lowest <= kind(text) <= highest


def _choice(*values: str) -> Values:
    return f"one of {', '.join(values)}", lambda text: text in values


_COUNT, _SIZE = _number(int, 1, 10**6), _number(int, 1, 10**15)
_NAME: Values = "a name", lambda text: text.isascii() and text.isidentifier()
_JSON: Values = "a JSON object", lambda text: isinstance(json.loads(text), dict)
_FLAGS = (
    "--async-scheduling",
    "--disable-cascade-attn",
    "--disable-custom-all-reduce",
    "--disable-log-stats",
    "--disable-sliding-window",
    "--disable-uvicorn-access-log",
    "--enable-chunked-prefill",
    "--enable-flashinfer-autotune",
    "--enable-log-requests",
    "--enable-mfu-metrics",
    "--enable-prefix-caching",
    "--enable-return-routed-experts",
    "--enforce-eager",
    "--kv-cache-metrics",
    "--numa-bind",
    "--use-fp64-gumbel",
)
_VALUES: dict[str, Values] = {
    "--attention-backend": _NAME,
    "--block-size": _COUNT,
    "--compilation-config": _JSON,
    "--cpu-offload-gb": _number(float, 0, 10**6),
    "--distributed-executor-backend": _choice("mp", "ray", "uni"),
    "--distributed-timeout-seconds": _COUNT,
    "--gpu-memory-utilization": _number(float, 0.001, 1),
    "--kv-cache-dtype": _NAME,
    "--kv-cache-memory-bytes": _SIZE,
    "--long-prefill-token-threshold": _number(int, 0, 10**9),
    "--max-cpu-loras": _COUNT,
    "--max-cudagraph-capture-size": _COUNT,
    "--max-loras": _COUNT,
    "--max-num-batched-tokens": _SIZE,
    "--max-num-scheduled-tokens": _SIZE,
    "--max-parallel-loading-workers": _COUNT,
    "--num-gpu-blocks-override": _SIZE,
    "--optimization-level": _choice("0", "1", "2", "3"),
    "--performance-mode": _choice("balanced", "interactivity", "throughput"),
    "--pipeline-parallel-size": _number(int, 1, 1000),
    "--prefix-caching-hash-algo": _choice("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"),
    "--safetensors-load-strategy": _choice("eager", "lazy", "prefetch"),
    "--scheduling-policy": _choice("fcfs", "priority"),
    "--seed": _number(int, 0, 2**32 - 1),
    "--shutdown-timeout": _number(int, 0, 10**6),
    "--tensor-parallel-size": _number(int, 1, 1000),
    "--uvicorn-log-level": _choice("critical", "error", "warning", "info", "debug", "trace"),
}
_OWN_OPTIONS = {
    "--host": "--host",
    "--port": "--port",
    "--model": "--model",
    "--dtype": "--dtype",
    "--max-lora-rank": "--lora-rank",
    "--max-model-len": "--max-length",
    "--max-num-seqs": "--slots",
}
"""Options of vLLM that are options of `manus_jax.serve`."""
_FIXED = (
    "--enable-lora",
    "--enable-scale-out",
    "--logprobs-mode",
    "--middleware",
    "--served-model-name",
    "--weight-transfer-config",
    "--worker-extension-cls",
)


def check_options(arguments: Sequence[str], where: str) -> None:
    """Raises ConfigError for an option that is not known or whose value is not valid."""
    words = list(arguments)
    while words:
        option, equals, value = words.pop(0).partition("=")
        if not option.startswith("--"):
            raise ConfigError(f"{where}: {option[:100]!r} is not an option of vLLM such as --seed")
        option = option.replace("_", "-")
        if option in (*_FLAGS, *(flag.replace("--", "--no-", 1) for flag in _FLAGS)):
            if equals:
                raise ConfigError(f"{where}: {option} takes no value")
            continue
        if option not in _VALUES:
            raise ConfigError(f"{where}: {_why_unknown(option)}")
        if not equals and (not words or words[0].startswith("--")):
            raise ConfigError(f"{where}: {option} needs a value")
        value = value if equals else words.pop(0)
        name, holds = _VALUES[option]
        try:
            valid = holds(value)
        except (ValueError, RecursionError):
            valid = False
        if not valid:
            raise ConfigError(f"{where}: {option} {value[:100]!r} is not {name}")


def _why_unknown(option: str) -> str:
    if option == "--api-key":
        return (
            "--api-key on a command line can be read by others: set VLLM_API_KEY in the "
            "environment, or --api-key-file"
        )
    if option in _OWN_OPTIONS:
        return f"{option} is not passed on to vLLM: {_OWN_OPTIONS[option]} goes before the --"
    if option in _FIXED:
        return f"{option} is set by manus_jax.serve, because learning depends on it"
    close = difflib.get_close_matches(option, [*_FLAGS, *_VALUES], n=1)
    hint = f"did you mean {close[0]}?" if close else f"known are {', '.join([*_FLAGS, *_VALUES])}"
    return f"{option[:100]} is not an option of vLLM that a server may be given; {hint}"
