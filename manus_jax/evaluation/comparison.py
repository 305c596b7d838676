"""Several policies on one panel: models beside the oracle, the score to reach, and chance.

The one idea: everything that can be wrong with any of the policies, the panel or the servers is
found before the first episode. Then the policies play one after the other against the same
servers, and what is known after each of them is on disk.
"""

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.config.binding import ConfigError
from manus_jax.config.settings import (
    EngineSettings,
    EnvPoolSettings,
    EnvSettings,
    EvaluateSettings,
    RolloutGroup,
)
from manus_jax.evaluation.eval_sets import Panel, make_panel
from manus_jax.evaluation.play import EvaluationError, EvaluationResult, evaluate_policy
from manus_jax.models import loading as policy_source
from manus_jax.models.architecture import ModelError
from manus_jax.rollout.baseline_players import OraclePolicy, RandomPolicy
from manus_jax.rollout.llm_player import EngineAgent, Voice
from manus_jax.rollout.player import Agent
from manus_jax.rollout.settings import RolloutSettings
from manus_jax.rollout.trajectory import FailedEpisode, Outcome, Trajectory
from manus_jax.rollout.trajectory_files import write_trajectories
from manus_jax.training.build_rollout import (
    check_play,
    make_rollout,
    open_engine,
    open_servers,
)
from manus_jax.training.progress import ProgressLine
from manus_jax.training.run_directory import write_atomically


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    evaluate: EvaluateSettings
    env: EnvSettings
    rollout: RolloutGroup
    engine: EngineSettings
    env_pool: EnvPoolSettings = dataclasses.field(default_factory=EnvPoolSettings)
    engine_settings: Any = None  # the chosen engine's own group, e.g. VllmSettings


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A policy by name. `open()` makes its agent, for the length of a block."""

    name: str
    check: Callable[[str, RolloutSettings], None]
    open: Callable[[], contextlib.AbstractContextManager[Agent]]

    @property
    def file_name(self) -> str:
        return re.sub(r"[^\w.-]+", "-", self.name).strip("-.") or "policy"


def run(config: EvaluateConfig, operative_config: str) -> dict[str, EvaluationResult]:
    """Plays the panel with every policy; writes evaluation.json and trajectories/."""
    evaluate, env = config.evaluate, config.env
    rollout = make_rollout(config.rollout, evaluate.seed)
    check_play(env, rollout)
    panel = make_panel(
        env, evaluate.tasks_per_env, evaluate.task_files, evaluate.split, evaluate.samples
    )
    slots = min(config.engine.slots, rollout.max_in_flight, len(panel.specs()))
    contestants = [contestant(name, config, slots) for name in evaluate.policies]
    _check_contestants(contestants, panel, rollout)
    out_dir = _make_directory(evaluate.out_dir, operative_config)

    results: dict[str, EvaluationResult] = {}
    record = _heading(config, panel)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(open_servers(env, config.env_pool))
        total = len(contestants) * len(panel.specs())
        line = stack.enter_context(ProgressLine("evaluate", total))
        for one in contestants:
            began = time.monotonic()
            done = len(results) * len(panel.specs())
            result = _play(one, pool, panel, rollout, slots, line, done)
            results[one.name] = result
            path = write_trajectories(out_dir / "trajectories", one.file_name, result.outcomes)
            record["policies"][one.name] = {
                "trajectories": str(path.relative_to(out_dir)),
                "seconds": round(time.monotonic() - began, 3),
                "overall": result.overall.record(),
                "environments": {e: s.record() for e, s in result.environments.items()},
            }
            write_atomically(out_dir / "evaluation.json", json.dumps(record, indent=1) + "\n")
    return results


def refuse_unplayed(results: Mapping[str, EvaluationResult]) -> None:
    """EvaluationError for a policy all of whose episodes failed."""
    for name, result in results.items():
        first = next((o for o in result.outcomes if isinstance(o, FailedEpisode)), None)
        if first is not None and not result.overall.episodes:
            raise EvaluationError(
                f"{name}: all {len(result.outcomes)} episodes failed, the first with "
                f"{first.kind}: {first.error}"
            )


def contestant(name: str, config: EvaluateConfig, slots: int) -> Contestant:
    """The oracle, chance, or the model at a path, whose files are checked and not yet loaded."""
    agent: Agent
    if name == "oracle":
        agent = OraclePolicy()
        return Contestant(name, agent.check, lambda: contextlib.nullcontext(agent))
    if name == "random":
        agent = RandomPolicy(config.evaluate.seed)
        return Contestant(name, agent.check, lambda: contextlib.nullcontext(agent))
    path = Path(name).expanduser()
    if not path.is_dir():
        raise ConfigError(
            f"evaluate.policies: {name!r} is neither 'oracle' nor 'random' nor a directory that "
            "exists (a Hugging Face directory, a run, or a checkpoint of one)"
        )
    if config.evaluate.samples > 1 and config.rollout.temperature == 0:
        raise ConfigError(
            f"evaluate.samples = {config.evaluate.samples} and rollout.temperature = 0: greedy "
            "episodes of a task are all the same; set samples to 1, or a temperature"
        )
    source = policy_source.from_path(path)
    length, positions = config.rollout.max_total_tokens, source.card.architecture.max_positions
    if length > positions:
        raise ModelError(
            f"rollout.max_total_tokens = {length} is beyond the {positions} positions of {name}"
        )
    return Contestant(
        name, Voice(source.tokenizer).check, lambda: _playing(source, config, slots, length)
    )


@contextlib.contextmanager
def _playing(
    source: policy_source.PolicySource, config: EvaluateConfig, slots: int, length: int
) -> Iterator[Agent]:
    """A model in an engine of its own, gone with the block."""
    settings = dataclasses.replace(config.engine, slots=slots)
    own = config.engine_settings
    with open_engine(source, source.load(None), settings, own, length) as engine:
        yield EngineAgent(engine, source.tokenizer)


def _play(
    one: Contestant,
    pool: EnvironmentPool,
    panel: Panel,
    rollout: RolloutSettings,
    slots: int,
    line: ProgressLine,
    done: int,
) -> EvaluationResult:
    """One policy's turn; `done` episodes of others are on the progress line already."""
    won = played = ended = 0
    label = one.name if len(one.name) < 32 else f"…{one.name[-30:]}"

    def on_done(index: int, outcome: Outcome) -> None:
        nonlocal won, played, ended
        ended += 1
        if isinstance(outcome, Trajectory):
            played, won = played + 1, won + outcome.success
        line.update(
            done + ended,
            {f"{label} success": won / max(1, played), "failed": float(ended - played)},
        )

    # As many as the engine keeps: a stream that is evicted between turns is computed twice.
    settings = dataclasses.replace(rollout, max_in_flight=slots)
    with one.open() as agent:
        return evaluate_policy(agent, pool, panel, settings, on_done)


def _check_contestants(
    contestants: Sequence[Contestant], panel: Panel, rollout: RolloutSettings
) -> None:
    names = [one.file_name for one in contestants]
    for one in contestants:
        if names.count(one.file_name) > 1:
            raise ConfigError(
                f"evaluate.policies: the trajectories of {one.name!r} and of another policy would "
                f"both be written to {one.file_name}.jsonl; write one of the paths differently"
            )
        for env in panel.environments:
            try:
                one.check(env, rollout)
            except ValueError as error:
                raise ConfigError(f"evaluate.policies: {one.name}: {error}") from None


def _make_directory(path: str, operative_config: str) -> Path:
    out_dir = Path(path).expanduser()
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(out_dir / "config.gin", operative_config)
    except OSError as error:
        raise ConfigError(f"evaluate.out_dir {out_dir} cannot be written: {error}") from None
    return out_dir


def _heading(config: EvaluateConfig, panel: Panel) -> dict[str, Any]:
    items = {env: [t.item for t in panel.tasks if t.env == env] for env in panel.environments}
    return {
        "samples": panel.samples,
        "seed": config.evaluate.seed,
        "rollout": dataclasses.asdict(config.rollout),
        "policies": {},
        "items": items,
    }
