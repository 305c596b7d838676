"""Opens the vLLM pool of a run from its settings (`vllm.*`).

The servers run elsewhere (`urls`, `address_file`) or are started here (`servers`, `gpus`). Weights
are transferred through a directory shared by learner and servers; for servers started here it may
be a temporary one.
"""

import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from manus_jax.config.server_settings import VllmSettings
from manus_jax.engines.protocol import EngineError
from manus_jax.models.adapter_files import AdapterWeights
from manus_jax.models.architecture import Architecture
from manus_jax.models.huggingface import ModelCard
from manus_jax.servers.processes import (
    ServerCommand,
    ServerSupervisor,
    SupervisorSettings,
    answers,
    free_ports,
)
from manus_jax.status import STATUS
from manus_jax.vllm.access import KEY_VARIABLE, read_api_key
from manus_jax.vllm.adapter_server import MERGED, AdapterServer
from manus_jax.vllm.addresses import AddressFollower, read_addresses
from manus_jax.vllm.client import IncompatibleServer, ServerFailure, VllmServer
from manus_jax.vllm.gpu_partition import group_gpus, split_gpus, visible_gpus
from manus_jax.vllm.pool import VllmPool
from manus_jax.vllm.server_process import MAX_LORA_RANK, is_cpu_build, vllm_python
from manus_jax.weights.adapters import AdapterPublisher
from manus_jax.weights.publisher import Publisher

_log = logging.getLogger(__name__)
_POLL_SECONDS = 1.0
_STOP_SECONDS = 20.0


def open_vllm(
    card: ModelCard | None,
    params: Any,
    settings: VllmSettings,
    *,
    slots: int,
    dtype: str,
    max_length: int,
) -> VllmPool:
    """A pool with the given weights, whole or `AdapterWeights`, as version 0; closing it stops the
    servers started here.

    The API key of servers elsewhere comes from the environment. Servers started here get a random
    one, because other users of the machine can reach their routes. `card` may be None if the
    servers keep their weights; they may then serve any model.
    """
    if settings.address_file is None and not settings.urls:
        on_cpu = is_cpu_build(vllm_python(settings.python))  # raises if there is no vLLM to start
        if on_cpu and settings.router_replay:
            raise EngineError("vllm.router_replay is set, and vLLM returns experts on GPUs only")
    api_key = read_api_key(None)
    resources = contextlib.ExitStack()
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(resources.close)
        root, publisher, first = Path(), None, None
        if settings.push:
            assert card is not None
            root = _weights_root(settings, resources)
            publisher = _open_publisher(card, params, settings, root)
            resources.callback(publisher.close)
            first = publisher.publish(params, 0).identity
        follower = None
        if settings.address_file is not None:
            urls = _await_addresses(Path(settings.address_file), settings.patience)
            follower = AddressFollower(Path(settings.address_file), urls)
            resources.callback(follower.close)
        elif settings.urls:
            urls = list(settings.urls)
        else:
            assert publisher is not None
            served, rank = publisher.root, None
            if isinstance(params, AdapterWeights):
                served, rank = params.base, params.adaptation.lora.rank
                check_base(served)
            api_key = secrets.token_urlsafe(32)
            logs = root / "logs"
            if settings.weights_dir is None:
                logs = Path(tempfile.mkdtemp(prefix="manus-jax-vllm-logs-"))
            supervisor = supervise(settings, served, slots, dtype, max_length, logs, api_key, rank)
            if settings.weights_dir is None:
                resources.callback(_remove_logs, logs, supervisor)
            resources.callback(supervisor.stop)
            urls = supervisor.start()
        pool = VllmPool(
            urls,
            max_length,
            settings,
            publisher=publisher,
            target=first,
            model=None if card is None else card.architecture,
            dtype=dtype,
            api_key=api_key,
            resources=resources,
        )
        on_failure.callback(pool.close)
        resources.enter_context(STATUS.serving("vllm", pool.problems))
        pool.await_service()
        if follower is not None:
            follower.start(pool.add_server, pool.remove_server)
        on_failure.pop_all()
    return pool


def _open_publisher(
    card: ModelCard, params: Any, settings: VllmSettings, root: Path
) -> Publisher | AdapterPublisher:
    if isinstance(params, AdapterWeights):
        return AdapterPublisher(root / "adapters", card, params.adaptation)
    every = settings.snapshot_every
    return Publisher(root / "versions", card, snapshot_every=every, background=True)


def check_base(base: Path) -> None:
    """Raises EngineError if vLLM cannot load the base of adapters."""
    if not (base / "config.json").is_file():
        raise EngineError(
            f"vLLM cannot load {base}, the base of the adapters, which is not a Hugging Face "
            f"directory: set model.path to one (`python -m manus_jax.convert to-hf`), or {MERGED}"
        )


def check_servers(
    settings: VllmSettings,
    max_length: int,
    model: Architecture | None,
    lora_rank: int | None = None,
    base: Path | None = None,
) -> None:
    """Raises, before any weights are loaded, if servers elsewhere cannot be used.

    The directory of the weights must be writable. Servers that do not answer yet are waited for
    later; if some answer, one of them must have the context, the plug-in and the model, and take
    adapters of `lora_rank`, if given. Servers started here must be able to load `base`, the model
    of the adapters, if it is known.
    """
    if settings.gpus is not None and jax.process_count() > 1:
        raise EngineError(
            "vllm.gpus splits one machine between one learner process and vLLM; with several "
            "learner processes, start the servers separately (scripts/serve_vllm.sh) and set "
            "vllm.urls or vllm.address_file"
        )
    if lora_rank is not None and lora_rank > MAX_LORA_RANK:
        raise EngineError(
            f"vLLM takes adapters up to rank {MAX_LORA_RANK}, and lora.rank is {lora_rank}: choose "
            f"a lower one, or {MERGED}"
        )
    if settings.servers or settings.gpus is not None:
        vllm_python(settings.python)
    if base is not None and settings.address_file is None and not settings.urls:
        check_base(base)
    if settings.weights_dir is not None:
        _require_writable(Path(settings.weights_dir))
    urls = list(settings.urls)
    if settings.address_file is not None and Path(settings.address_file).exists():
        urls = read_addresses(Path(settings.address_file))
    api_key, refusal = read_api_key(None), None
    for url in urls:
        server = VllmServer(url, settings, api_key)
        if lora_rank is not None:
            server = AdapterServer(url, settings, api_key, lora_rank)
        try:
            server.examine(max_length, settings.push, model)
            return
        except IncompatibleServer as error:
            refusal = refusal or error
        except ServerFailure:
            continue
        finally:
            server.close()
    if refusal is not None:
        raise EngineError(f"none of the {len(urls)} vLLM servers can be used: {refusal}")


def _require_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise EngineError(
            f"vllm.weights_dir {directory} cannot be written on the host {socket.gethostname()} by "
            f"the user {os.getuid()} ({error.strerror}): change its permissions or set another one"
        ) from None


def supervise(
    settings: VllmSettings,
    model: Path,
    slots: int,
    dtype: str,
    max_length: int,
    logs: Path,
    api_key: str,
    lora_rank: int | None = None,
) -> ServerSupervisor:
    """A supervisor, not yet started, of servers on this machine, each with its own GPUs if any.

    A server that dies is restarted at its address from the newest snapshot in `model`, or from that
    model itself with adapters; the pool then brings it to the current weights.
    """
    groups: list[tuple[str, ...]] = [()] * settings.servers
    if settings.gpus is not None:
        gpus = settings.gpus
        if isinstance(gpus, int):  # no learner has claimed GPUs
            gpus = split_gpus(visible_gpus(), gpus, shared=True)[1]
        groups = group_gpus([str(gpu) for gpu in gpus], settings.tensor_parallel)
    more = ["--enable-return-routed-experts"] * settings.router_replay
    if settings.tensor_parallel > 1:
        more += ["--tensor-parallel-size", str(settings.tensor_parallel)]
    if settings.gpu_memory_utilization is not None:
        more += ["--gpu-memory-utilization", f"{settings.gpu_memory_utilization:g}"]
    common = ["--model", str(model), "--max-length", str(max_length), "--dtype", dtype]
    common += ["--slots", str(-(-slots // len(groups)))]
    if lora_rank is not None:
        common += ["--lora-rank", str(lora_rank)]
    if settings.python is not None:
        common += ["--python", settings.python]
    environment = {**os.environ, KEY_VARIABLE: api_key}
    if settings.gpus is None:
        # vLLM would bind the threads of all servers to the same cores. Each server gets its share
        # of the cores, less one, which vLLM leaves to its scheduler process.
        cores = len(os.sched_getaffinity(0)) // len(groups)
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores - 1)))
    logs.mkdir(parents=True, exist_ok=True)
    commands = []
    for port, gpus in zip(free_ports(len(groups)), groups, strict=True):
        own = ["--port", str(port), *(["--gpus", ",".join(gpus)] if gpus else [])]
        arguments = (*common, *own, "--", *more, *settings.server_arguments)
        log = logs / f"vllm-{port}.log"
        commands.append(
            ServerCommand(
                "vLLM",
                "manus_jax.serve",
                arguments,
                environment,
                log=log,
                parent_death_signal=signal.SIGTERM,  # the process then stops vLLM
            )
        )
    return ServerSupervisor(
        commands,
        SupervisorSettings(startup_timeout=settings.start_timeout, stop_timeout=_STOP_SECONDS),
    )


def _weights_root(settings: VllmSettings, resources: contextlib.ExitStack) -> Path:
    if settings.weights_dir is not None:
        return Path(settings.weights_dir)
    root = Path(tempfile.mkdtemp(prefix="manus-jax-vllm-"))
    resources.callback(shutil.rmtree, root, ignore_errors=True)
    return root


def _remove_logs(logs: Path, supervisor: ServerSupervisor) -> None:
    """Removes the logs unless a server failed; the message about it names its log."""
    if not supervisor.failures:
        shutil.rmtree(logs, ignore_errors=True)


def _await_addresses(path: Path, patience: float) -> list[str]:
    """The addresses in the file, as soon as one of the servers answers."""
    deadline = time.monotonic() + patience
    while True:
        urls = read_addresses(path)
        if any(answers(f"{url}/health") for url in urls):
            return urls
        if time.monotonic() > deadline:
            why = f"none of its {len(urls)} servers answers" if urls else "it lists none"
            raise EngineError(
                f"no vLLM server in the address file {path} after {patience:g} s: {why}; start "
                f"servers with `python -m manus_jax.serve --address-file {path}`"
            )
        _log.info("waiting for a vLLM server in %s", path)
        time.sleep(_POLL_SECONDS)
