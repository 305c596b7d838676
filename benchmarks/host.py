"""Measures what a turn of an episode costs on the host: everything except the model.

    python benchmarks/host.py                          # 128, 1,000 and 4,000 episodes in flight
    python benchmarks/host.py --in_flight 128 --rounds 3 --against ../parent

The engine is a timer that answers every request with the same text after a fixed delay. TextCraft
is served by four processes (`python -m envs.serve`). Episodes are played as in training, through
`run_episodes`, each in a new process that imports this project from its own folder or, with
`--against`, in turn from another one. `cpu_ms_per_turn` is the processor time of that process, in
user and system mode, between the first lease and the last outcome, divided by the turns; the
servers' processor time is reported separately. `long_context` is one call of the vLLM client with a
prompt of 11,000 tokens, and one turn of the player with as many, without the server's time. The
last line of output is one JSON object.
"""

import argparse
import heapq
import http.server
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

# Python puts this folder first on the path, where envs.py would hide the package `envs`.
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path.pop(0)

SERVERS, TURNS, GROUP = 4, 10, 8
LONG_PROMPT, LONG_CALLS, SAMPLED = 11_000, 100, 64
ANSWER = "Thought:\nI check what I have before I craft anything.\n\nAction:\ninventory"
HERE = Path(__file__).resolve().parent.parent


class DelayedEngine:
    """Answers every request after `delay` seconds with the same tokens."""

    on_learner_device: ClassVar[bool] = False

    def __init__(self, token_ids: tuple[int, ...], delay: float, max_length: int) -> None:
        from manus_jax.engines.protocol import Generation

        self.version, self.max_length = 0, max_length
        count = len(token_ids)
        self._answer = Generation(token_ids, (-1.0,) * count, (0,) * count, "stop")
        self._delay = delay
        self._due: list[tuple[float, int, Future[Any]]] = []
        self._count = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._respond, daemon=True).start()

    def submit(self, request: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        with self._changed:
            self._count += 1
            heapq.heappush(self._due, (time.monotonic() + self._delay, self._count, future))
            if len(self._due) == 1:
                self._changed.notify()
        return future

    def release(self, session: str) -> None:
        pass

    def update_weights(self, params: Any, version: int) -> None:
        self.version = version

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass

    def _respond(self) -> None:
        while True:
            with self._changed:
                while not self._due:
                    self._changed.wait()
                wait = self._due[0][0] - time.monotonic()
                ready = []
                while self._due and self._due[0][0] <= time.monotonic():
                    ready.append(heapq.heappop(self._due)[2])
            if wait > 0:
                time.sleep(wait)
            for future in ready:
                if future.set_running_or_notify_cancel():
                    future.set_result(self._answer)


def make_tokenizer() -> Any:
    from manus_jax.agentgym.prompts import PROMPTS
    from manus_jax.data.chat import train_tokenizer

    prompts = [part for p in PROMPTS.values() for part in (p.instruction, *p.actions)]
    return train_tokenizer([*prompts, ANSWER], 2000)


def ticks(pids: list[int]) -> int:
    """Processor time of processes."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total


def play(in_flight: int, episodes: int, delay: float, urls: list[str], pids: list[int]) -> Any:
    from manus_jax.agentgym.environments import open_environments
    from manus_jax.config.settings import RolloutSettings
    from manus_jax.data.tasks import Task
    from manus_jax.rollout.llm_player import EngineAgent
    from manus_jax.rollout.runner import run_episodes
    from manus_jax.rollout.trajectory import EpisodeSpec, FailedEpisode

    tokenizer = make_tokenizer()
    stop = tokenizer.eos_token_id
    ids = tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
    settings = RolloutSettings(max_turns=TURNS, max_in_flight=in_flight, max_total_tokens=8192)
    agent = EngineAgent(DelayedEngine((*ids, stop), delay, 8192), tokenizer)

    def specs(name: str, count: int) -> list[Any]:
        items = [n // GROUP for n in range(count)]
        tasks = [Task("textcraft", item, f"textcraft_{item}") for item in items]
        return [EpisodeSpec(task, f"{name}{n}", task.item_id) for n, task in enumerate(tasks)]

    with open_environments({"textcraft": urls}) as pool:
        run_episodes(specs("warm-up", 32), agent, pool, settings)
        chosen = specs("", episodes)
        served, cpu, began = ticks(pids), time.process_time(), time.perf_counter()
        outcomes = run_episodes(chosen, agent, pool, settings)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        served = ticks(pids) - served
    failed = [outcome for outcome in outcomes if isinstance(outcome, FailedEpisode)]
    if failed:
        raise SystemExit(f"{len(failed)} episodes failed, the first with: {failed[0].error}")
    turns = sum(len(outcome.turns) for outcome in outcomes)
    return {
        "turns": turns,
        "turns_per_s": turns / seconds,
        "cpu_ms_per_turn": 1000 * cpu / turns,
        "server_cpu_ms_per_turn": 1000 * served / os.sysconf("SC_CLK_TCK") / turns,
        "peak_mb": int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1000,
    }


def answering_like_vllm(urls: "multiprocessing.Queue[str]") -> None:
    """Serves one canned generation; the delay of a model is left out."""
    tokens = [{"token": f"token_id:{n}", "token_id": n, "logprob": -1.0} for n in range(SAMPLED)]
    choice = {
        "finish_reason": "length",
        "token_ids": list(range(SAMPLED)),
        "logprobs": {"content": tokens},
        "weight_versions": [{"start": 0, "end": SAMPLED, "version": "0"}],
    }
    content = json.dumps({"choices": [choice]}).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    urls.put(f"http://127.0.0.1:{server.server_port}")
    server.serve_forever()


def long_context() -> dict[str, float]:
    from manus_jax.agentgym.table import environment
    from manus_jax.config.settings import RolloutSettings
    from manus_jax.data.tasks import Task
    from manus_jax.engines.cancellation import Cancellation, EpisodeCancellation
    from manus_jax.engines.protocol import Request, Sampling
    from manus_jax.rollout.action_formats import format_for
    from manus_jax.rollout.llm_player import EngineAgent
    from manus_jax.rollout.player import EpisodeContext
    from manus_jax.rollout.prompts import opening
    from manus_jax.rollout.trajectory import EpisodeSpec
    from manus_jax.vllm.client import VllmServer

    context = multiprocessing.get_context("spawn")
    urls = context.Queue()
    process = context.Process(target=answering_like_vllm, args=(urls,), daemon=True)
    process.start()
    server = VllmServer(urls.get())
    sampling = Sampling(max_tokens=SAMPLED)
    prompts = [tuple((n * 7919 + i) % 150_000 for i in range(LONG_PROMPT)) for n in range(8)]

    def call(n: int) -> None:
        server.generate(Request(prompts[n % 8], sampling, n, "s"), str(n), lambda _: 0, 150_000)

    request_ms = cpu_ms(call)
    process.kill()

    tokenizer = make_tokenizer()
    settings = RolloutSettings(max_total_tokens=10**6, max_observation_tokens=10**6)
    ids = tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
    engine = DelayedEngine((*ids, tokenizer.eos_token_id), 0.0, 10**6)
    task = Task("textcraft", 0, "textcraft_0")
    action_format = format_for(environment("textcraft"), "auto")
    episode = EpisodeContext(
        EpisodeSpec(task, "long", "textcraft_0"),
        opening(task, action_format, settings),
        action_format,
        settings,
        EpisodeCancellation(Cancellation()),
        1,
    )
    player = EngineAgent(engine, tokenizer).player(episode)
    word = " inventory"
    player.observe(word * (LONG_PROMPT // len(tokenizer(word)["input_ids"])))

    def turn(n: int) -> None:
        player.act(n)
        player.observe("Inventory: nothing")

    return {"vllm_request_cpu_ms": request_ms, "player_turn_cpu_ms": cpu_ms(turn)}


def cpu_ms(call: Any) -> float:
    for n in range(10):
        call(n)
    began = time.process_time()
    for n in range(10, 10 + LONG_CALLS):
        call(n)
    return 1000 * (time.process_time() - began) / LONG_CALLS


def in_new_process(source: Path, *arguments: str) -> Any:
    command = [sys.executable, __file__, "--worker", *arguments]
    environ = {**os.environ, "PYTHONPATH": str(source), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--in_flight", type=int, nargs="+", default=[128, 1000, 4000])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--turns", type=int, default=10_000, help="at least, per measurement")
    parser.add_argument("--delay", type=float, default=0.1, help="of the engine, in seconds")
    parser.add_argument("--against", type=Path, help="another checkout of this project")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker == ["long_context"]:
        print(json.dumps(long_context()))
        return
    if options.worker:
        in_flight, episodes, delay, urls, pids = (json.loads(text) for text in options.worker)
        print(json.dumps(play(in_flight, episodes, delay, urls, pids)))
        return
    sys.path.insert(0, str(HERE))
    from manus_jax.agentgym.environments import embedded_server
    from manus_jax.servers.processes import ServerProcess

    sources = {"this": HERE} | ({"against": options.against} if options.against else {})
    load_before = os.getloadavg()[0]
    rounds: dict[str, dict[str, list[Any]]] = {source: {} for source in sources}
    with ExitStack() as stack:
        servers = [ServerProcess(embedded_server("textcraft")) for _ in range(SERVERS)]
        for server in servers:
            stack.callback(server.wait, timeout=10)
            stack.callback(server.terminate)
        while any(server.url is None for server in servers):
            if any(server.exit_status is not None for server in servers):
                raise SystemExit("an environment server did not come up")
            time.sleep(0.05)
        where = json.dumps([s.url for s in servers]), json.dumps([s.pid for s in servers])
        for number in range(options.rounds):
            for in_flight in options.in_flight:
                episodes = in_flight * max(1, round(options.turns / TURNS / in_flight))
                what = str(in_flight), str(episodes), str(options.delay), *where
                for source, folder in sources.items():
                    row = in_new_process(folder, *what)
                    rounds[source].setdefault(str(in_flight), []).append(row)
                    print(f"round {number}, {source}, {in_flight} in flight: {row}", flush=True)
        for number in range(options.rounds):
            for source, folder in sources.items():
                row = in_new_process(folder, "long_context")
                rounds[source].setdefault("long_context", []).append(row)
                print(f"round {number}, {source}, long context: {row}", flush=True)

    medians = {
        source: {
            case: {key: round(statistics.median(r[key] for r in rows), 3) for key in rows[0]}
            for case, rows in cases.items()
        }
        for source, cases in rounds.items()
    }
    few, many = (str(n) for n in (min(options.in_flight), max(options.in_flight)))
    report = {
        "benchmark": "host",
        "compared": f"{few} and {many} episodes in flight; {' and '.join(map(str, sources))}",
        "growth": {
            source: round(cases[many]["cpu_ms_per_turn"] / cases[few]["cpu_ms_per_turn"], 3)
            for source, cases in medians.items()
        },
        **medians,
        "delay_s": options.delay,
        "turns_per_episode": TURNS,
        "machine": {
            "cores": os.cpu_count(),
            "load_before": round(load_before, 2),
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
        },
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
