"""Evaluation of one policy on one evaluation set: success rate and score with intervals.

`python -m manus_jax.evaluate` and validation during training both use this module, so their numbers
are comparable. Episodes that fail for infrastructure reasons are counted but excluded from every
mean; a task whose episodes all failed is excluded too.
"""

import collections
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.config.settings import RolloutSettings
from manus_jax.errors import UserError
from manus_jax.evaluation.eval_sets import EvalSet
from manus_jax.evaluation.statistics import Estimate, average, ks_up_to, pass_at_k, share
from manus_jax.rollout.player import Agent
from manus_jax.rollout.runner import OnDone, run_episodes
from manus_jax.rollout.trajectory import FailedEpisode, Outcome, Trajectory, trajectories


@dataclasses.dataclass(frozen=True)
class Summary:
    """Statistics of the episodes of one environment, or of all environments.

    `success_rate` and `score` are means over tasks of the mean over a task's samples; avg@k is
    another name for the score with k samples. `pass_at[k]` covers the tasks with at least k
    finished samples. Estimates are None if there are no episodes.
    """

    samples: int  # requested per task: the k of avg@k
    episodes: int  # finished
    failed: Mapping[str, int]  # dropped episodes by kind of failure
    success_rate: Estimate | None
    score: Estimate | None  # the environment's reward, at most 1
    pass_at: Mapping[int, Estimate]
    turns: float  # mean per episode
    invalid_action_rate: float  # fraction of turns
    response_length: float  # agent tokens per episode; 0 for policies without tokens

    def numbers(self) -> dict[str, float]:
        """Values by name, without their intervals."""
        failed = {"failed": float(sum(self.failed.values()))}
        if not self.episodes:
            return failed
        known = {name: e.value for name, e in self._estimates().items() if e is not None}
        same_as_others = ("avg@1", "pass@1")
        values = {name: x for name, x in known.items() if name not in same_as_others}
        return failed | values | self._means()

    def record(self) -> dict[str, Any]:
        """The summary as JSON."""
        estimates = {name: e and dataclasses.asdict(e) for name, e in self._estimates().items()}
        counts = {"episodes": self.episodes, "failed": dict(self.failed)}
        return {**counts, **estimates, **self._means()}

    def _estimates(self) -> dict[str, Estimate | None]:
        return {
            "success_rate": self.success_rate,
            "score": self.score,
            f"avg@{self.samples}": self.score,
            **{f"pass@{k}": estimate for k, estimate in self.pass_at.items()},
        }

    def _means(self) -> dict[str, float]:
        names = ("turns", "invalid_action_rate", "response_length")
        return {name: getattr(self, name) for name in names}


class EvaluationError(UserError, RuntimeError):
    """Every episode of a policy failed."""


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """`outcomes` are in the order of the evaluation set's specs."""

    outcomes: tuple[Outcome, ...]
    environments: Mapping[str, Summary]
    overall: Summary

    def check_played(self, policy: str) -> None:
        """Raises EvaluationError if all episodes failed."""
        first = next((o for o in self.outcomes if isinstance(o, FailedEpisode)), None)
        if first is not None and not self.overall.episodes:
            raise EvaluationError(
                f"{policy}: all {len(self.outcomes)} episodes failed, the first with "
                f"{first.kind}: {first.error}"
            )

    def metrics(self, prefix: str = "val") -> dict[str, float]:
        """`val/<env>/success_rate` etc., and `val/success_rate` etc. over all environments.

        An environment's score is also reported as `test_score`, its name in verl.
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
    eval_set: EvalSet,
    settings: RolloutSettings,
    on_done: OnDone | None = None,
    stop: threading.Event | None = None,
) -> EvaluationResult:
    """Plays the evaluation set and calls `on_done(index, outcome)` after every episode.

    Episodes are cancelled when `stop` is set. The caller must call `check_played`.
    """
    specs = eval_set.specs()
    outcomes = run_episodes(specs, agent, pool, settings, on_done, stop, caller_raises=True)
    return summarize_by_env(outcomes, eval_set.samples)


def summarize_by_env(outcomes: Sequence[Outcome], samples: int) -> EvaluationResult:
    """Statistics per environment and overall, of `samples` episodes per task."""
    by_env: dict[str, list[Outcome]] = collections.defaultdict(list)
    for outcome in outcomes:
        by_env[str(outcome.spec.task.env)].append(outcome)
    return EvaluationResult(
        outcomes=tuple(outcomes),
        environments={env: _summarize(played, samples) for env, played in by_env.items()},
        overall=_summarize(outcomes, samples),
    )


def _summarize(outcomes: Sequence[Outcome], samples: int) -> Summary:
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
        invalid_action_rate=sum(not turn.accepted for turn in turns) / max(1, len(turns)),
        response_length=sum(t.agent_tokens for t in played) / episodes,
    )
