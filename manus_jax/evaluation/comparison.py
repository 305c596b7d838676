"""Comparison of several policies on one evaluation set: models, the oracle and a random policy.

Mistakes in the policies, the evaluation set and the servers are reported before the first episode.
The policies then play one after another against the same servers, and the results are written after
each of them.
"""

import contextlib
import dataclasses
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from manus_jax.agentgym.environments import check_items
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.config.binding import ConfigError
from manus_jax.config.commands import EvaluateConfig
from manus_jax.config.settings import RolloutSettings
from manus_jax.evaluation.eval_sets import EvalSet, make_eval_set
from manus_jax.evaluation.play import EvaluationError, EvaluationResult, Summary, evaluate_policy
from manus_jax.evaluation.statistics import Estimate
from manus_jax.files import write_atomically
from manus_jax.models import loading
from manus_jax.models.transformer import Params
from manus_jax.progress import ProgressLine
from manus_jax.rollout.api_player import PREFIX, ApiPolicy
from manus_jax.rollout.baseline_players import OraclePolicy, RandomPolicy
from manus_jax.rollout.build_rollout import check_engine, check_play, open_engine, open_servers
from manus_jax.rollout.llm_player import ChatTokenizer, EngineAgent
from manus_jax.rollout.player import Agent
from manus_jax.rollout.strategies import check_strategy_service, episodes_per_spec
from manus_jax.rollout.trajectory import Outcome, Trajectory
from manus_jax.rollout.trajectory_files import write_trajectories
from manus_jax.servers.chat_api import ChatApi
from manus_jax.status import STATUS

RUN_DIRECTORIES = ("checkpoints", "export", "model", "trajectories", "warm_start")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A named policy. `open()` is a context manager that yields its agent.

    `check_service()` raises if a server that the policy calls does not answer.
    """

    name: str
    check: Callable[[str, RolloutSettings], None]
    open: Callable[[], contextlib.AbstractContextManager[Agent]]
    check_service: Callable[[], None] = lambda: None

    @property
    def file_name(self) -> str:
        return re.sub(r"[^\w.-]+", "-", self.name).strip("-.") or "policy"


def run(config: EvaluateConfig, operative_config: str) -> dict[str, EvaluationResult]:
    """Plays the evaluation set with every policy; writes evaluation.json and trajectories/."""
    evaluate, env, rollout = config.evaluate, config.env, config.rollout
    check_play(env, rollout)
    if (several := episodes_per_spec(rollout)) > 1:
        raise ConfigError(
            f"rollout.strategy = {rollout.strategy!r} plays up to {several} episodes together, and "
            "an evaluation counts each by itself; evaluate.samples plays several of a task"
        )
    eval_set = make_eval_set(
        env, evaluate.tasks_per_env, evaluate.task_files, evaluate.split, evaluate.samples
    )
    episodes = len(eval_set.specs())
    slots = min(config.engine.slots, rollout.max_in_flight, episodes)
    candidates = [make_candidate(name, config, slots) for name in evaluate.policies]
    _check_candidates(candidates, eval_set, rollout)
    if "oracle" in evaluate.policies:
        check_items(env.urls, config.env_pool, "evaluate.policies has 'oracle'")
    check_strategy_service(rollout)
    for candidate in candidates:
        candidate.check_service()
    out_dir = _make_directory(evaluate.out_dir)

    results: dict[str, EvaluationResult] = {}
    record: dict[str, Any] = {
        "samples": eval_set.samples,
        "seed": evaluate.seed,
        "rollout": dataclasses.asdict(rollout),
        "policies": {},
        "items": {e: [t.item for t in eval_set.tasks if t.env == e] for e in env.names},
    }
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(open_servers(env, config.env_pool))
        line = stack.enter_context(ProgressLine("evaluate", len(candidates) * episodes))
        for candidate in candidates:
            began = time.monotonic()
            done = len(results) * episodes
            result = _play(candidate, pool, eval_set, rollout, slots, line, done)
            results[candidate.name] = result
            record["policies"][candidate.name] = {
                "trajectories": f"trajectories/{candidate.file_name}.jsonl",
                "seconds": round(time.monotonic() - began, 3),
                "overall": result.overall.record(),
                "environments": {e: s.record() for e, s in result.environments.items()},
            }
            try:
                write_trajectories(out_dir / "trajectories", candidate.file_name, result.outcomes)
                write_atomically(out_dir / "evaluation.json", json.dumps(record, indent=1) + "\n")
                write_atomically(out_dir / "config.gin", operative_config)
            except OSError as error:
                raise EvaluationError(f"results cannot be written: {error}") from None
    return results


def make_candidate(name: str, config: EvaluateConfig, slots: int) -> Candidate:
    """The policy of that name; verifies a model's files without loading them."""
    if name in ("oracle", "random"):
        agent = OraclePolicy() if name == "oracle" else RandomPolicy(config.evaluate.seed)
        return Candidate(name, agent.check, lambda: contextlib.nullcontext(agent))
    if name.startswith(PREFIX):
        try:
            external = ApiPolicy(ChatApi.parse(name.removeprefix(PREFIX)), config.evaluate.seed)
        except ValueError as error:
            raise ConfigError(f"evaluate.policies: {error}") from None
        return Candidate(
            name,
            external.check,
            lambda: contextlib.nullcontext(external),
            external.require_answer,
        )
    path = Path(name).expanduser()
    if not path.is_dir():
        raise ConfigError(
            f"evaluate.policies: {name!r} is neither 'oracle' nor 'random' nor an existing "
            "directory (a Hugging Face directory, a run or a checkpoint) nor openai:MODEL@URL"
        )
    if config.evaluate.samples > 1 and config.rollout.temperature == 0:
        raise ConfigError(
            f"evaluate.samples = {config.evaluate.samples} and rollout.temperature = 0: greedy "
            "episodes of a task are identical; set evaluate.samples = 1 or a temperature > 0"
        )
    source = loading.from_path(path)
    params = source.open()  # they stay on disk, but are verified
    length = config.rollout.max_total_tokens
    loading.check_length(source, length, name)
    settings = dataclasses.replace(config.engine, slots=slots)
    check_engine(source, params, settings, config.engine_settings, length)
    return Candidate(
        name,
        ChatTokenizer(source.tokenizer, config.chat).check,
        lambda: _open_model(source, params, config, slots, length),
    )


@contextlib.contextmanager
def _open_model(
    source: loading.PolicySource,
    params: Params,
    config: EvaluateConfig,
    slots: int,
    length: int,
) -> Iterator[Agent]:
    """Runs a model in its own engine, which is closed on exit."""
    settings = dataclasses.replace(config.engine, slots=slots)
    with open_engine(source, params, settings, config.engine_settings, length) as engine:
        agent = EngineAgent(engine, source.tokenizer, config.evaluate.seed, config.chat)
        with contextlib.closing(agent):
            yield agent


def _play(
    candidate: Candidate,
    pool: EnvironmentPool,
    eval_set: EvalSet,
    rollout: RolloutSettings,
    slots: int,
    line: ProgressLine,
    done: int,
) -> EvaluationResult:
    """Plays one policy; `done` is the number of episodes that other policies have finished."""
    won = played = ended = 0
    name = candidate.name
    label = name if len(name) < 32 else f"…{name[-30:]}"

    def on_done(index: int, outcome: Outcome) -> None:
        nonlocal won, played, ended
        ended += 1
        if isinstance(outcome, Trajectory):
            played, won = played + 1, won + outcome.success
        line.update(
            done + ended,
            {f"{label} success": won / max(1, played), "failed": float(ended - played)},
        )

    # No more episodes than slots: a stream evicted between turns has to be recomputed.
    settings = dataclasses.replace(rollout, max_in_flight=slots)
    with candidate.open() as agent:
        return evaluate_policy(agent, pool, eval_set, settings, on_done)


def _check_candidates(
    candidates: Sequence[Candidate], eval_set: EvalSet, rollout: RolloutSettings
) -> None:
    names = [candidate.file_name for candidate in candidates]
    for candidate in candidates:
        if names.count(candidate.file_name) > 1:
            raise ConfigError(
                f"evaluate.policies: {candidate.name!r} and another policy would both write their "
                f"trajectories to {candidate.file_name}.jsonl; write one of the paths differently"
            )
        for env in eval_set.environments:
            try:
                candidate.check(env, rollout)
            except ValueError as error:
                raise ConfigError(f"evaluate.policies: {candidate.name}: {error}") from None


def _make_directory(path: str) -> Path:
    """Creates the directory; refuses one whose files the results would replace or mix with."""
    out_dir = Path(path).expanduser()
    try:
        real = Path(os.path.realpath(out_dir))
        for directory in (real, *real.parents):
            inside = real.relative_to(directory).parts[:1]
            if _is_run(directory) and (not inside or inside[0] in RUN_DIRECTORIES):
                raise ConfigError(
                    f"evaluate.out_dir {out_dir} belongs to the run {directory}, whose files it "
                    "would overwrite; choose another directory"
                )
        if (out_dir / "config.gin").exists() and not (out_dir / "evaluation.json").exists():
            raise ConfigError(
                f"evaluate.out_dir {out_dir} contains a config.gin that is not from an evaluation; "
                "choose another directory"
            )
        out_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out_dir):
            pass
        STATUS.use_directory(out_dir)
    except OSError as error:
        raise ConfigError(f"evaluate.out_dir {out_dir} cannot be written: {error}") from None
    return out_dir


def _is_run(directory: Path) -> bool:
    return any((directory / name).exists() for name in ("metrics.jsonl", "checkpoints"))


def comparison_table(results: Mapping[str, EvaluationResult], samples: int) -> Table:
    """One row per policy and environment, plus one over all environments if there are several."""
    table = Table(title="Means over tasks with 95% intervals", title_justify="left")
    several = f" avg@{samples}" if samples > 1 else ""
    for name in ("policy", "environment"):
        table.add_column(name)
    numbers = ["tasks", f"success{several}", f"score{several}"]
    numbers += [f"pass@{samples}"] if samples > 1 else []
    for name in (*numbers, "turns", "invalid", "failed"):
        table.add_column(name, justify="right")
    for policy, result in results.items():
        rows = dict(result.environments)
        if len(rows) > 1:
            rows["all"] = result.overall
        for number, (env, summary) in enumerate(rows.items()):
            label = escape(policy) if number == 0 else ""
            table.add_row(label, env, *_cells(summary, samples), end_section=env == [*rows][-1])
    return table


def _cells(summary: Summary, samples: int) -> list[str]:
    rate = summary.success_rate
    cells = ["0" if rate is None else str(rate.tasks), _interval(rate), _interval(summary.score)]
    if samples > 1:
        cells.append(_interval(summary.pass_at.get(samples)))
    cells += [f"{summary.turns:.1f}", f"{summary.invalid_action_rate:.1%}"]
    return [*cells, str(sum(summary.failed.values()))]


def _interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return "–"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} ({estimate.low:.2f}…{estimate.high:.2f})"
