"""Measures the throughput of the environment servers and the memory per session.

    python benchmarks/envs.py                      # all environments, ten seconds each
    python benchmarks/envs.py --envs textcraft babyai --seconds 30

Each environment is served by one process (`python -m envs.serve`). 32 clients (fewer if the server
allows fewer sessions) in two processes, so that they are not the bottleneck, replay recorded oracle
episodes from the whole training split without pauses. Each client sends steps and resets over one
persistent connection. The reference figures are measurements of AgentGym's servers with 32 threads
(textcraft 778 and babyai 140 steps/s); there are none for the other environments. ScienceWorld
steps are also measured with one client, alternating with the same moves in an unmodified simulator
without a server. Memory is the growth of the server's resident set while sessions are created and
reset. On a machine with other load, use the server's CPU time per step, which includes resets. The
last line of output is one JSON object.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

# Python puts this folder first on the path, where this file would hide the package `envs`.
sys.path.pop(0)

from envs.registry import ENVIRONMENTS as EMBEDDED
from envs.registry import load
from manus_jax.agentgym.client import Session
from manus_jax.agentgym.environments import embedded_server
from manus_jax.agentgym.failures import EnvironmentFailure
from manus_jax.agentgym.table import environment
from manus_jax.servers.processes import ServerProcess

CLIENTS = 32
CLIENT_PROCESSES = 2
EPISODES = 16
LONGEST_EPISODE = 200
AGENTGYM_STEPS_PER_SECOND = {"textcraft": 778.0, "babyai": 140.0}
FEW_SESSIONS = {"sciworld": 4}  # each session starts a Java process

Script = tuple[int, list[str]]
"""An item and the actions that solve it."""


def recorded_episodes(name: str) -> list[Script]:
    """Plays oracle episodes in this process; returns their items and moves."""
    spec = load(name)
    if spec.oracle is None:
        raise SystemExit(f"{name} has no oracle to play it")
    scripts = []
    game = spec.new_game()
    items = spec.items("train")
    for item in items[:: max(1, len(items) // EPISODES)][:EPISODES]:
        policy = spec.oracle(item)
        moves: list[str] = []
        observation, done = game.reset(item), False
        while not done and len(moves) < LONGEST_EPISODE:
            move = policy(observation)
            moves.append(move.action)
            step = game.step(move.action)
            observation, done = step.observation, step.done
        scripts.append((item, moves))
    game.close()
    return scripts


def play(name: str, url: str, scripts: Iterable[Script], ending: Event) -> list[float]:
    """One client: plays the episodes until `ending` is set; returns the latency of each step."""
    latencies = []
    session = Session(environment(name), url)
    session.create()
    for item, moves in scripts:
        session.reset(item)
        for move in moves:
            start = time.perf_counter()
            session.step(move)
            latencies.append(time.perf_counter() - start)
            if ending.is_set():
                session.close()
                return latencies
    session.close()
    return latencies


def client_process(
    name: str,
    url: str,
    scripts: list[Script],
    clients: int,
    begun: Barrier,
    ending: Event,
    results: "multiprocessing.Queue[list[float] | str]",
) -> None:
    """Runs several concurrent clients; puts their latencies, or an error, into `results`."""
    begun.wait()
    with ThreadPoolExecutor(clients) as threads:
        futures = [
            threads.submit(
                play,
                name,
                url,
                # Each client starts with a different episode.
                itertools.islice(itertools.cycle(scripts), index, None),
                ending,
            )
            for index in range(clients)
        ]
        try:
            results.put([seconds for future in futures for seconds in future.result()])
        except EnvironmentFailure as failure:
            ending.set()
            results.put(str(failure))


def measure_speed(
    name: str, server: ServerProcess, url: str, scripts: list[Script], seconds: float
) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    begun, ending = context.Barrier(CLIENT_PROCESSES + 1), context.Event()
    play(name, url, scripts, ending)  # warm-up, for data that the server loads on first use
    results: multiprocessing.Queue[list[float] | str] = context.Queue()
    share = max(1, min(CLIENTS, load(name).max_sessions) // CLIENT_PROCESSES)
    workers = [
        context.Process(
            target=client_process, args=(name, url, scripts, share, begun, ending, results)
        )
        for _ in range(CLIENT_PROCESSES)
    ]
    for worker in workers:
        worker.start()
    begun.wait()
    busy = processor_seconds(server)
    start = time.perf_counter()
    ending.wait(seconds)
    elapsed = time.perf_counter() - start
    ending.set()
    taken: list[float] = []
    for _ in workers:
        result = results.get()
        if isinstance(result, str):
            raise SystemExit(result)
        taken += result
    busy = processor_seconds(server) - busy
    for worker in workers:
        worker.join()
    taken.sort()
    return {
        "steps_per_second": round(len(taken) / elapsed, 1),
        "step_ms_median": round(1000 * taken[len(taken) // 2], 2),
        "step_ms_p99": round(1000 * taken[len(taken) * 99 // 100], 2),
        "server_cpu_ms_per_step": round(1000 * busy / len(taken), 3),
        "clients": share * CLIENT_PROCESSES,
    }


def measure_next_to_simulator(url: str, scripts: list[Script]) -> dict[str, float]:
    """The median time of a ScienceWorld step through the server and in a bare simulator."""
    from scienceworld import ScienceWorldEnv

    from envs.sciworld.simulators import MEMORY_OPTIONS
    from envs.sciworld.tasks import pair

    os.environ["JAVA_TOOL_OPTIONS"] = MEMORY_OPTIONS
    simulator = ScienceWorldEnv()
    session = Session(environment("sciworld"), url)
    session.create()
    served: list[float] = []
    bare: list[float] = []
    for turn in range(5):
        for item, moves in scripts:
            task, variation = pair(item)
            session.reset(item)
            simulator.load(task.name, variation, "")
            for step, taken in ((session.step, served), (simulator.server.step, bare)):
                for move in moves:
                    start = time.perf_counter()
                    step(move)
                    taken.append(time.perf_counter() - start)
        if turn < 3:  # warm-up of the Java compiler
            served.clear()
            bare.clear()
    session.close()
    simulator.close()
    return {
        "step_ms_one_client": round(1000 * statistics.median(served), 2),
        "simulator_step_ms": round(1000 * statistics.median(bare), 2),
        "times_the_simulator": round(statistics.median(served) / statistics.median(bare), 2),
    }


def processes_of(server: ServerProcess) -> Iterator[list[str]]:
    """The fields of /proc/PID/stat for the server and the processes that it started."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # Fields from the third on: the second, the process name, may contain any character.
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == server.pid:
            yield fields


def resident_megabytes(server: ServerProcess) -> float:
    pages = sum(int(fields[21]) for fields in processes_of(server))
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def processor_seconds(server: ServerProcess) -> float:
    ticks = sum(int(fields[11]) + int(fields[12]) for fields in processes_of(server))
    return ticks / os.sysconf("SC_CLK_TCK")


def measure_memory(name: str, server: ServerProcess, url: str, sessions: int) -> dict[str, float]:
    items = load(name).items("train")
    before = resident_megabytes(server)
    opened = []
    for index in range(sessions):
        session = Session(environment(name), url)
        session.create()
        session.reset(items[index % len(items)])
        session.disconnect()
        opened.append(session)
    after = resident_megabytes(server)
    for session in opened:
        session.close()
    return {
        "server_mb": round(before, 1),
        "mb_per_1000_sessions": round((after - before) * 1000 / sessions, 1),
        "sessions_measured": sessions,
    }


def measure(name: str, seconds: float, sessions: int) -> dict[str, float]:
    server = ServerProcess(embedded_server(name))
    try:
        while server.url is None:
            if server.exit_status is not None:
                raise SystemExit(f"the {name} server did not come up:\n{server.tail}")
            time.sleep(0.05)
        memory = measure_memory(name, server, server.url, FEW_SESSIONS.get(name, sessions))
        scripts = recorded_episodes(name)
        row = {**measure_speed(name, server, server.url, scripts, seconds), **memory}
        row["server_mb_at_the_end"] = round(resident_megabytes(server), 1)
        if name == "sciworld":
            row |= measure_next_to_simulator(server.url, scripts)
    except EnvironmentFailure as failure:
        raise SystemExit(str(failure)) from failure
    finally:
        server.terminate()
        server.wait(timeout=10)
    if name in AGENTGYM_STEPS_PER_SECOND:
        row["agentgym_steps_per_second"] = AGENTGYM_STEPS_PER_SECOND[name]
        row["speedup"] = round(row["steps_per_second"] / AGENTGYM_STEPS_PER_SECOND[name], 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--envs", nargs="+", default=list(EMBEDDED), choices=EMBEDDED)
    parser.add_argument("--seconds", type=float, default=10.0, help="per environment")
    parser.add_argument("--sessions", type=int, default=1000, help="for the memory figure")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    rows, left_out = {}, {}
    for name in options.envs:
        missing = load(name).requirements()
        if missing is not None:
            print(f"{name}: not measured: {missing}", flush=True)
            left_out[name] = missing
            continue
        rows[name] = measure(name, options.seconds, options.sessions)
        print(f"{name}: {rows[name]}", flush=True)
    report = {
        "benchmark": "env_servers",
        "compared": "python -m envs.serve against AgentGym's own servers, 32 clients",
        "environments": rows,
        "not_measured": left_out,
        "speedup": {name: row["speedup"] for name, row in rows.items() if "speedup" in row},
        "machine": {
            "cpus": os.cpu_count(),
            "load_before": round(load_before, 2),
            "platform": platform.platform(),
            "python": platform.python_version(),
        },
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
