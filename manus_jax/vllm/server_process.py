"""The vLLM server process behind `manus_jax.serve`: its command, environment and lifecycle.

It is vLLM's own server with the options that reinforcement learning needs: log-probs of the
distribution that is sampled from, tokens in and out, and the plug-in that takes new weights. This
module does not import JAX.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from manus_jax.engines.protocol import EngineError
from manus_jax.files import CHECKSUMS, verify_checksums
from manus_jax.models.architecture import check_format
from manus_jax.servers.launch import adopt_orphans, die_with_parent, end_children
from manus_jax.vllm.access import KEY_VARIABLE, MIDDLEWARE
from manus_jax.vllm.addresses import AddressError, check_address_file, register, unregister
from manus_jax.vllm.client import BadAnswer, IncompatibleServer, ServerFailure, VllmServer
from manus_jax.vllm.gpu_partition import ORDER_VARIABLE, VISIBLE_VARIABLE
from manus_jax.vllm.plugin import BACKEND
from manus_jax.vllm.served_model import cpu_cache_bytes, weight_dtype
from manus_jax.weights.manifest import SNAPSHOT, WeightsError, published_versions, version_directory
from manus_jax.weights.shared_mirror import remove_unused_mirrors

_log = logging.getLogger(__name__)
PYTHON_VARIABLE = "MANUS_JAX_VLLM_PYTHON"
CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_CACHE_OPTIONS = (
    "--kv-cache-memory-bytes",
    "--gpu-memory-utilization",
    "--num-gpu-blocks-override",
)
_READY_POLL_SECONDS = 0.5  # until the server is ready
_LISTED_POLL_SECONDS = 5.0  # afterwards, to keep its address in the file
_STOP_SECONDS = 15.0
_WORKER_STOP_SECONDS = 5.0
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM allocates
MAX_LORA_RANK = _LORA_RANKS[-1]
_ADAPTERS = 4  # that may be in use at once; a fifth waits
_MODEL_FILES = {
    "weights": ("*.safetensors",),
    "tokenizer": ("tokenizer*", "vocab*"),
}
_PROBE_SECONDS = 120.0  # a first look at an interpreter on a network drive is slow
_PRINT_BUILD = """
from importlib.metadata import distributions
found = {d.name: d.version for d in distributions() if d.name in ("vllm", "vllm-cpu")}
is_cpu = "vllm-cpu" in found or found.get("vllm", "").endswith("cpu")
print("none" if not found else "cpu" if is_cpu else "other")
"""


def model_directory(path: Path, max_length: int | None) -> Path:
    """A Hugging Face directory itself, or the newest snapshot among published versions.

    Raises WeightsError for a model that vLLM cannot load with that many tokens.
    """
    check_format(path)
    numbers = reversed(published_versions(path))
    snapshots = (version_directory(path, number) / SNAPSHOT for number in numbers)
    complete = (snapshot for snapshot in snapshots if (snapshot / CHECKSUMS).exists())
    found = next((d for d in (path, *complete) if (d / "config.json").is_file()), None)
    if found is None:
        raise WeightsError(
            f"{path} is neither a Hugging Face directory (no config.json) nor one with published "
            "versions"
        )
    try:
        config = json.loads((found / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise WeightsError(f"{found / 'config.json'} is not the config of a model")
    for name, patterns in _MODEL_FILES.items():
        if not any(next(found.glob(pattern), None) for pattern in patterns):
            raise WeightsError(f"{found} contains no {name} ({', '.join(patterns)})")
    positions = config.get("max_position_embeddings")
    if max_length is not None and isinstance(positions, int) and max_length > positions:
        raise WeightsError(
            f"--max-length {max_length} exceeds the {positions} positions of the model in {found}"
        )
    if (found / CHECKSUMS).exists():  # it was written by this package
        verify_checksums(found)
    return found


def vllm_python(given: str | None) -> str:
    """The interpreter that has vLLM: the given one, the environment's, or this one."""
    python = given or os.environ.get(PYTHON_VARIABLE) or sys.executable
    if shutil.which(python) is None:
        raise WeightsError(f"{python} is not an interpreter: give vLLM's with --python")
    return python


def is_cpu_build(python: str) -> bool:
    """Whether that interpreter's vLLM runs on the CPU; WeightsError if it has no vLLM."""
    command = [python, "-c", _PRINT_BUILD]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS)
        build = ended.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        build = ""
    if build not in ("cpu", "other"):
        raise WeightsError(
            f"{python} has no vLLM: give the interpreter that has it with --python or "
            f"{PYTHON_VARIABLE}"
        )
    return build == "cpu"


def cpu_arguments(max_length: int | None, cache_bytes: int | None = None) -> list[str]:
    """What vLLM needs on a CPU: no compiler, a size of the KV cache, and no chunked prefill,
    because a prompt split in two kills the engine when its request has a seed ("CPU Generator does
    not use offset")."""
    arguments = ["--enforce-eager", "--no-enable-chunked-prefill"]
    if cache_bytes is not None:
        arguments += ["--kv-cache-memory-bytes", str(cache_bytes)]
    if max_length is not None:
        arguments += ["--max-num-batched-tokens", str(max(2048, max_length))]
    return arguments


def server_command(
    python: str,
    model: Path,
    *,
    host: str,
    port: int,
    max_length: int | None,
    slots: int,
    dtype: str,
    keyed: bool,
    lora_rank: int | None = None,
    more: Sequence[str] = (),
) -> list[str]:
    """The command line of a server; `more` comes last and takes precedence.

    `dtype` "auto" is the type of the model's weights; vLLM's own "auto" would make float32 16 bits.
    With `lora_rank` it takes adapters up to that rank instead of whole models.
    """
    dtype = weight_dtype(model) if dtype == "auto" else dtype
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "policy", "--host", host, "--port", str(port)]
    command += ["--dtype", dtype, "--max-num-seqs", str(slots)]
    if max_length is not None:
        command += ["--max-model-len", str(max_length)]
    command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    command += ["--worker-extension-cls", "manus_jax.vllm.transfer.WeightsWorker"]
    command += ["--weight-transfer-config", f'{{"backend": "{BACKEND}"}}']
    if lora_rank is not None:
        rank = next(size for size in _LORA_RANKS if size >= lora_rank)
        command += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(_ADAPTERS)]
    if keyed:
        command += ["--middleware", MIDDLEWARE]
    if is_cpu_build(python):
        sized = CACHE_VARIABLE in os.environ or any(
            word.replace("_", "-").startswith(_CACHE_OPTIONS) for word in more
        )
        size = None if sized else cpu_cache_bytes(model, dtype, slots, max_length)
        command += cpu_arguments(max_length, size)
    return [*command, *more]


def server_environment(
    python: str, api_key: str | None, gpus: str | None, adapters: bool = False
) -> dict[str, str]:
    """The environment of this process, with vLLM's routes for reinforcement learning enabled."""
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    if adapters:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if api_key is not None:
        environment[KEY_VARIABLE] = api_key
    if gpus is not None:
        environment[VISIBLE_VARIABLE] = gpus
        environment.setdefault(ORDER_VARIABLE, "PCI_BUS_ID")
    environment.setdefault("HF_HUB_OFFLINE", "1")
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    # No requests arrive during an update of the learner. With vLLM's default of 5 s, connections
    # would close just as the next request is sent, which would then be retried as failed.
    environment.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "600")
    home = Path(__file__).resolve().parents[2]
    # vLLM's interpreter can import this package from a source tree. The packages beside an
    # installed one belong to another environment and must not be visible.
    if python != sys.executable and home.name != "site-packages":
        rest = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{home}{os.pathsep}{rest}" if rest else str(home)
    return environment


def run_server(
    command: Sequence[str],
    environment: dict[str, str],
    url: str,
    model: Path,
    addresses: Path | None,
) -> int:
    """Runs the server until it ends or this process gets a signal; returns the exit code.

    While the server answers, its address is in the file. The address is removed before the server
    is stopped, so that a pool uses other servers while this one can still refuse requests. vLLM
    sometimes does not stop with requests in flight; it is then killed. Its workers, which may end
    after it, have ended on return: the next server finds their memory free.
    """
    stopping = threading.Event()
    signals: list[int] = []

    def stop(number: int, _: object) -> None:
        signals.append(number)
        stopping.set()

    if addresses is not None:
        check_address_file(addresses)
    server = VllmServer(url, api_key=environment.get(KEY_VARIABLE))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    adopt_orphans()
    parent = os.getpid()
    process = subprocess.Popen(
        command, env=environment, preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM)
    )
    ready = False
    try:
        while process.poll() is None and not stopping.wait(
            _LISTED_POLL_SECONDS if ready else _READY_POLL_SECONDS
        ):
            if not ready and not _serves(server, model):
                continue
            if addresses is not None:
                with _tolerated():
                    register(addresses, url)
            if not ready:
                print(f"serving {url}", flush=True)
                ready = True
    finally:
        if addresses is not None:
            with _tolerated():
                unregister(addresses, url)
        if process.poll() is None:
            process.terminate()
    try:
        code = process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    end_children(_WORKER_STOP_SECONDS)
    remove_unused_mirrors()  # vLLM's workers do not always end in an orderly way
    return 128 + signals[0] if signals else code


def _serves(server: VllmServer, model: Path) -> bool:
    """Whether vLLM answers with that model.

    Raises EngineError if another program answers: a server that cannot listen may live for minutes.
    """
    try:
        server.check_health()
        server.read_model()
    except (BadAnswer, IncompatibleServer) as error:
        raise EngineError(f"another program listens at {server.url}: {error}") from None
    except ServerFailure:
        return False
    if server.model_path != str(model):
        raise EngineError(f"another server listens at {server.url}, with {server.model_path}")
    return True


@contextlib.contextmanager
def _tolerated() -> Iterator[None]:
    """Logs problems with the address file: a server that works is not ended for them."""
    try:
        yield
    except AddressError as error:
        _log.warning("%s", error)
