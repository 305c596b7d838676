"""One policy on one panel: how often it succeeds, how well it scores, and how sure that is.

Used by `python -m manus_jax.evaluate` and by validation during training alike, so that their
numbers mean the same. An episode that died of infrastructure is counted and left out of every
mean; a task all of whose episodes died is no task.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.config.settings import RolloutSettings
from manus_jax.errors import UserError
from manus_jax.evaluation.eval_sets import Panel
from manus_jax.evaluation.statistics import Estimate, average, ks_up_to, pass_at_k, share
from manus_jax.rollout.player import Agent
from manus_jax.rollout.runner import OnDone, run_episodes
from manus_jax.rollout.trajectory import FailedEpisode, Outcome, Trajectory, trajectories


class EvaluationError(UserError, RuntimeError):
    """A policy of which no episode could be played."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """The episodes of one environment, or of all.

    `success_rate` and `score` are means over tasks of a task's mean over its samples; avg@k is the
    score under the name that says how many. `pass_at[k]` is over the tasks of which k samples were
    played. Estimates are None where there was nothing to estimate from.
    """

    samples: int  # asked for, per task: the k of avg@k
    episodes: int  # played to an end
    failed: Mapping[str, int]  # dropped, by kind
    success_rate: Estimate | None
    score: Estimate | None  # the environment's reward, whose best is 1
    pass_at: Mapping[int, Estimate]
    turns: float  # per episode
    invalid_action_rate: float  # of turns
    response_length: float  # agent tokens per episode; 0 for a policy that speaks text

    def numbers(self) -> dict[str, float]:
        """Values by name, without intervals."""
        numbers = {"failed": float(sum(self.failed.values()))}
        if self.success_rate is None or self.score is None:
            return numbers
        numbers |= {
            "success_rate": self.success_rate.value,
            "score": self.score.value,
            "turns": self.turns,
            "invalid_action_rate": self.invalid_action_rate,
            "response_length": self.response_length,
        }
        if self.samples > 1:
            numbers[f"avg@{self.samples}"] = self.score.value
            numbers |= {f"pass@{k}": e.value for k, e in self.pass_at.items() if k > 1}
        return numbers

    def record(self) -> dict[str, Any]:
        """All of it as JSON."""
        estimates = {
            "success_rate": self.success_rate,
            "score": self.score,
            f"avg@{self.samples}": self.score,
            **{f"pass@{k}": estimate for k, estimate in self.pass_at.items()},
        }
        return {
            "episodes": self.episodes,
            "failed": dict(self.failed),
            **{name: e and dataclasses.asdict(e) for name, e in estimates.items()},
            "turns": self.turns,
            "invalid_action_rate": self.invalid_action_rate,
            "response_length": self.response_length,
        }


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """`outcomes` are in the order of the panel's specs."""

    outcomes: tuple[Outcome, ...]
    environments: Mapping[str, Summary]
    overall: Summary

    def metrics(self, prefix: str = "val") -> dict[str, float]:
        """`val/<env>/success_rate` and so on, and over all environments `val/success_rate`.

        An environment's score is there as `test_score` too, the name that verl gave it.
        """
        named = {f"{prefix}/{name}": value for name, value in self.overall.numbers().items()}
        for env, summary in self.environments.items():
            named |= {f"{prefix}/{env}/{name}": x for name, x in summary.numbers().items()}
            if summary.score is not None:
                named[f"{prefix}/{env}/test_score"] = summary.score.value
        return named


def evaluate_policy(
    agent: Agent,
    pool: EnvironmentPool,
    panel: Panel,
    settings: RolloutSettings,
    on_done: OnDone | None = None,
) -> EvaluationResult:
    """Plays the panel. `on_done(index, outcome)` is called as episodes end."""
    outcomes = run_episodes(panel.specs(), agent, pool, settings, on_done)
    return evaluation_of(outcomes, panel.samples)


def evaluation_of(outcomes: Sequence[Outcome], samples: int) -> EvaluationResult:
    """The numbers of episodes that were played `samples` times per task."""
    envs = dict.fromkeys(outcome.spec.task.env for outcome in outcomes)
    return EvaluationResult(
        outcomes=tuple(outcomes),
        environments={
            env: summarize([o for o in outcomes if o.spec.task.env == env], samples)
            for env in envs
            if env is not None
        },
        overall=summarize(outcomes, samples),
    )


def summarize(outcomes: Sequence[Outcome], samples: int) -> Summary:
    """One row of the table."""
    played = trajectories(outcomes)
    by_task: dict[str, list[Trajectory]] = collections.defaultdict(list)
    for trajectory in played:
        by_task[trajectory.group_id].append(trajectory)
    counts = [(len(task), sum(t.success for t in task)) for task in by_task.values()]
    pass_at = {
        k: share([pass_at_k(n, c, k) for n, c in counts if n >= k]) for k in ks_up_to(samples)
    }
    failed = collections.Counter(o.kind for o in outcomes if isinstance(o, FailedEpisode))
    turns = [turn for trajectory in played for turn in trajectory.turns]
    episodes = max(1, len(played))
    return Summary(
        samples=samples,
        episodes=len(played),
        failed=dict(sorted(failed.items())),
        success_rate=share([c / n for n, c in counts]),
        score=average([sum(t.env_reward for t in task) / len(task) for task in by_task.values()]),
        pass_at={k: estimate for k, estimate in pass_at.items() if estimate is not None},
        turns=len(turns) / episodes,
        invalid_action_rate=sum(not turn.valid for turn in turns) / max(1, len(turns)),
        response_length=sum(t.agent_tokens for t in played) / episodes,
    )
