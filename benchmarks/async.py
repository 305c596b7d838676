"""Compares asynchronous with synchronous training, and simulates the controllers at scale.

    python benchmarks/async.py [simulation] [training] [vllm]

training: updates per minute of the quickstart with `train.max_staleness` 0, 1 and 2. The
environment's steps take 50 ms in the median and 2 s in 2 of 100 cases; the engine has a device of
its own. The runs take turns, a few updates at a time, and each is resumed from its checkpoint, so
that the load of the machine affects all of them. Updates after a start, which compile, and those
with a validation are left out.

vllm: the same with a vLLM server; MANUS_JAX_VLLM_PYTHON is its interpreter. A server on a CPU takes
several times the processor time of the embedded engine for a token. With the 96 episodes of the
quickstart's updates, two cores are then busy in a synchronous run already, and there is nothing to
overlap; an update has 16 episodes here, for which the environments take most of the time.

simulation: admission control and adaptive concurrency with a virtual clock, 4,096 episodes ahead,
of which 10 of 100 fail and 1 of 100 hangs until its deadline. The ideal is an engine that never
waits.
"""

import argparse
import asyncio
import heapq
import itertools
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Python puts this folder first on the path, where envs.py would hide the package `envs`.
if sys.path[0] == str(Path(__file__).resolve().parent):
    sys.path.pop(0)

from manus_jax.rollout.admission import Admission
from manus_jax.rollout.concurrency import Concurrency, Window

ROOT = Path(__file__).parents[1]
STALENESS = (0, 1, 2)
SMALL_BATCHES = ("train.batch_size = 4", "train.group_size = 4")
MEDIAN_S, SLOW_S, SLOW_SHARE = 0.05, 2.0, 0.02


def step_latency(dice: random.Random) -> float:
    return SLOW_S if dice.random() < SLOW_SHARE else MEDIAN_S * dice.lognormvariate(0.0, 0.3)


class Simulation:
    """A run without threads and clock: an engine with `slots`, environments, and a learner.

    A request takes about a second of a slot, and a quarter more if there are more episodes than
    `cached`, because their keys and values have to be computed again. That work is not useful.
    """

    SLOTS, CACHED = 1024, 1536
    BATCH, GROUP, STALENESS = 128, 8, 3  # (3 + 1) x 128 x 8 = 4,096 episodes ahead
    DEADLINE_S, UPDATE_S = 30.0, 4.0

    def __init__(self, limit: Concurrency, failing: float, hanging: float, seed: int = 0) -> None:
        self.limit, self.failing, self.hanging = limit, failing, hanging
        self.dice = random.Random(seed)
        self.admission = Admission(self.BATCH, self.STALENESS)
        self.now = self.useful = 0.0
        self.updates = self.episodes = self.in_flight = self.generating = self.begun = 0
        self.updating = False
        self.members: dict[int, list[bool]] = {}  # episodes that have ended, by group
        self.waiting: deque[int] = deque()  # episodes, by group
        self.requests: deque[Callable[[], None]] = deque()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.window: list[tuple[bool, int, int]] = []  # failed, in flight, queued
        self.latencies: list[float] = []

    def run(self, updates: int) -> None:
        self.fill()
        while self.updates < updates:
            self.now, _, event = heapq.heappop(self.events)
            event()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), event))

    def fill(self) -> None:
        while self.admission.room > 0:
            self.admission = self.admission.start()
            self.members[self.begun] = []
            self.waiting += [self.begun] * self.GROUP
            self.begun += 1
        while self.waiting and self.in_flight < self.limit.limit:
            self.in_flight += 1
            self.start(self.waiting.popleft())

    def start(self, group: int) -> None:
        turns = self.dice.randint(4, 12)
        fate = self.dice.random()
        ends = self.dice.randrange(turns) if fate < self.failing + self.hanging else turns
        hangs = self.failing <= fate < self.failing + self.hanging
        began = self.now

        def act(turn: int) -> None:
            if turn < ends:
                self.request(lambda: self.after(self.latency(), lambda: act(turn + 1)))
            elif turn < turns and hangs:
                self.after(max(0.0, began + self.DEADLINE_S - self.now), lambda: end(True))
            else:
                end(turn < turns)

        def end(failed: bool) -> None:
            self.decide(failed)
            self.in_flight -= 1
            self.episodes += not failed
            self.members[group].append(failed)
            if len(self.members[group]) == self.GROUP:
                usable = self.members.pop(group).count(False) >= 2
                self.admission = self.admission.finish(usable)
                self.learn()
            self.fill()

        act(0)

    def latency(self) -> float:
        self.latencies.append(step_latency(self.dice))
        return self.latencies[-1]

    def request(self, done: Callable[[], None]) -> None:
        seconds = self.dice.uniform(0.5, 1.5)
        again = 0.25 * seconds if self.in_flight > self.CACHED else 0.0

        def begin() -> None:
            self.generating += 1
            self.after(seconds + again, finish)

        def finish() -> None:
            self.generating -= 1
            self.useful += seconds
            done()
            while self.requests and self.generating < self.SLOTS:
                self.requests.popleft()()

        self.requests.append(begin)
        while self.requests and self.generating < self.SLOTS:
            self.requests.popleft()()

    def decide(self, failed: bool) -> None:
        self.window.append((failed, self.in_flight, len(self.requests)))
        if len(self.window) < self.limit.window:
            return
        failures, in_flight, queued = zip(*self.window, strict=True)
        seen = Window(
            episodes=len(failures),
            failed=sum(failures),
            in_flight=statistics.mean(in_flight),
            queued=statistics.mean(queued),
            kv_usage=statistics.mean(min(1.0, count / self.CACHED) for count in in_flight),
            environment_seconds=statistics.median(self.latencies) if self.latencies else 0.0,
        )
        self.limit = self.limit.decide(seen)
        self.window, self.latencies = [], []

    def learn(self) -> None:
        if self.updating or self.admission.ready < self.BATCH:
            return
        self.updating = True
        self.admission = self.admission.take()

        def updated() -> None:
            self.updating = False
            self.updates += 1
            self.admission = self.admission.publish(self.updates)
            self.fill()
            self.learn()

        self.after(self.UPDATE_S, updated)

    @property
    def share_of_ideal(self) -> float:
        return self.useful / (self.SLOTS * self.now)


def simulate(updates: int = 40) -> dict[str, Any]:
    """Adaptive concurrency, and fixed numbers of episodes in flight for comparison."""
    adaptive = Simulation(Concurrency.between(256, 4096), failing=0.10, hanging=0.01)
    adaptive.run(updates)
    fixed = {}
    for count in (512, 1024, 2048, 4096):
        run = Simulation(Concurrency(count, count, count), failing=0.10, hanging=0.01)
        run.run(updates)
        fixed[count] = round(run.share_of_ideal, 3)
    return {
        "compared": "useful engine time against an engine that never waits; 4,096 episodes ahead, "
        "10 % failing, 1 % hanging",
        "share_of_ideal": round(adaptive.share_of_ideal, 3),
        "in_flight_at_the_end": adaptive.limit.limit,
        "episodes": adaptive.episodes,
        "share_of_ideal_with_a_fixed_number_in_flight": fixed,
    }


def serve_slowly(port_file: Path) -> None:
    """Serves BabyAI with slow steps until the process is ended; writes its address to the file."""
    import uvicorn

    from envs.bounded_connection import BoundedConnection
    from envs.registry import load
    from envs.serve import listen
    from envs.server import build_app

    app, dice = build_app(load("babyai")), random.Random(0)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/step"):
            await asyncio.sleep(step_latency(dice))
        await app(scope, receive, send)

    bound = listen("127.0.0.1", 0)
    port_file.write_text(f"http://127.0.0.1:{bound.getsockname()[1]}{load('babyai').prefix}")
    config = uvicorn.Config(slow, http=BoundedConnection, log_level="error", backlog=2048)
    uvicorn.Server(config).run(sockets=[bound])


def train(
    config: str, devices: int, run_dir: Path, url: str, steps: int, staleness: int, *more: str
) -> None:
    """Trains to `steps`, from the checkpoint if there is one, on a number of CPU devices."""
    bindings = (
        f"train.run_dir = '{run_dir}'",
        f"train.total_steps = {steps}",
        f"train.max_staleness = {staleness}",
        f"env.urls = {{'babyai': '{url}'}}",
        *("train.val_before_train = False", "train.baselines = []", "train.val_tasks = 8"),
        *("train.test_freq = 1000000", "train.save_freq = 1000000", "train.export = False"),
        *more,
    )
    done = subprocess.run(
        [sys.executable, "-m", "manus_jax.train", f"--gin_file={ROOT / config}"]
        + [f"--gin_param={binding}" for binding in bindings],
        cwd=ROOT,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"training with staleness {staleness} failed; see its messages above")


def compare_training(
    config: str, devices: int, more: tuple[str, ...], rounds: int, steps: int
) -> dict[str, Any]:
    """Updates per minute for each staleness, in runs that take turns."""
    folder = Path(tempfile.mkdtemp(prefix="async"))
    port_file = folder / "url"
    # -P: this folder has a file named envs.py.
    server = subprocess.Popen([sys.executable, "-P", __file__, "--serve", str(port_file)], cwd=ROOT)
    seconds: dict[int, list[float]] = {staleness: [] for staleness in STALENESS}
    waits: dict[int, list[float]] = {staleness: [] for staleness in STALENESS}
    ratios: dict[int, list[float]] = {staleness: [] for staleness in STALENESS[1:]}
    try:
        while not port_file.exists() or not (url := port_file.read_text()):
            if server.poll() is not None:
                raise SystemExit("the environment server did not start")
        base = folder / "base"
        train(config, devices, base, url, 1, 0, *more)  # its warm start is that of all runs
        for staleness in STALENESS:
            shutil.copytree(base / "warm_start", folder / str(staleness) / "warm_start")
        for number in range(1, rounds + 1):
            for staleness in STALENESS:
                run_dir = folder / str(staleness)
                train(config, devices, run_dir, url, number * steps, staleness, *more)
                lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
                first, last = (number - 1) * steps, number * steps
                timed = [x for x in lines if first + 2 < x["step"] < last]
                seconds[staleness].append(statistics.mean(x["timing_s/step"] for x in timed))
                waits[staleness].append(statistics.mean(x["timing_s/gen"] for x in timed))
            for staleness in ratios:
                ratios[staleness].append(seconds[0][-1] / seconds[staleness][-1])
            print(f"round {number}: {seconds}", flush=True)
    finally:
        server.terminate()
        server.wait(10)
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "compared": f"{config} with {', '.join(more)}: updates per minute by train.max_staleness, "
        f"interleaved, {rounds} rounds of {steps} updates",
        "updates_per_minute": {
            str(s): [round(60 / x, 2) for x in taken] for s, taken in seconds.items()
        },
        "learner_waits_s": {str(s): [round(x, 2) for x in taken] for s, taken in waits.items()},
        "speedup": {str(s): round(statistics.median(x), 2) for s, x in ratios.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parts = ("simulation", "training", "vllm")
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="per round and run")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve_slowly(options.serve)
        return
    report: dict[str, Any] = {"benchmark": "async"}
    load_before = os.getloadavg()[0]
    for part in options.parts or parts[:2]:
        if part == "simulation":
            report[part] = simulate()
        elif part == "training":
            own_device = ("engine.devices = 1",)
            report[part] = compare_training(
                "configs/quickstart.gin", 2, own_device, options.rounds, options.steps
            )
        else:
            report[part] = compare_training(
                "configs/quickstart_vllm.gin", 1, SMALL_BATCHES, options.rounds, options.steps
            )
        print(f"{part}: {report[part]}", flush=True)
    report["machine"] = {
        "cpus": os.cpu_count(),
        "load_before": round(load_before, 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
