"""Which failures a run survives, and which end it.

- An update that is not finite is skipped (`learner.update`); `limit` in a row end the run.
- A step without an episode to train on is reported; `limit` in a row end the run.
- A validation without a finished episode ends the run.
- A policy that no update has changed is not exported; the run fails at its end.

A run that ends in one of these ways has exit code 2, and its last checkpoint is intact.
"""

import collections
from collections.abc import Mapping, Sequence

from manus_jax.errors import UserError
from manus_jax.learner.update import TrainState
from manus_jax.rollout.trajectory import FailedEpisode, Outcome


class TrainingError(UserError, RuntimeError):
    """The run cannot continue; the message gives the reason and where to look."""


class FailureBudget:
    """Counts the skipped updates of each learner and the steps without episodes, in a row."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._skipped: collections.Counter[str] = collections.Counter()
        self._lost_steps = 0

    def after_updates(self, learner: str, skipped: Sequence[float]) -> None:
        """Takes 1 for each skipped update of a learner and 0 for each other one, in order."""
        for bad in skipped:
            self._skipped[learner] = self._skipped[learner] + 1 if bad else 0
            if self._skipped[learner] >= self._limit:
                raise TrainingError(
                    f"{self._limit} updates of the {learner} in a row were not finite and have "
                    "been skipped; the last checkpoint is intact. Lower the learning rate, or "
                    "check the training data: in reinforcement learning, trajectories and rewards"
                )

    def after_step(self, metrics: Mapping[str, float], error: str) -> str | None:
        """A warning about the step, or None; `error` is an example of its failed episodes."""
        played, failed = metrics["rollout/episodes"], metrics["rollout/failed"]
        kinds = ", ".join(
            f"{name.removeprefix('rollout/failed/')} {count:.0f}"
            for name, count in metrics.items()
            if name.startswith("rollout/failed/")
        )
        self._lost_steps = 0 if metrics["rollout/used"] else self._lost_steps + 1
        if self._lost_steps >= self._limit:
            reason = (
                f"no episode could be played to its end ({kinds}): {error}"
                if not played
                else f"every group was dropped ({failed:.0f} of {played + failed:.0f} episodes "
                "failed, and the remaining groups have one episode or equal rewards)"
            )
            raise TrainingError(
                f"{self._lost_steps} steps in a row had nothing to train on: {reason}. The last "
                "checkpoint is intact; the run's trajectories contain the errors"
            )
        report = []
        if failed:
            report.append(f"{failed:.0f} of {played + failed:.0f} episodes were dropped: {kinds}")
        if not metrics["rollout/used"]:
            report.append("there was nothing to train on")
        if skipped := metrics.get("training/skipped_updates"):
            report.append(f"{skipped:.0f} updates were not finite and have been skipped")
        return "; ".join(report) or None


def first_error(outcomes: Sequence[Outcome]) -> str:
    """The error of the first failed episode; empty if there is none."""
    errors = (f"{o.kind}: {o.error}" for o in outcomes if isinstance(o, FailedEpisode))
    return next(errors, "")[:500]


def refuse_fewer_steps(start: int, name: str, total_steps: int) -> None:
    """Raises if a run is already past its last step; its model would be exported as another's."""
    if start > total_steps:
        raise TrainingError(
            f"the run is at step {start}, past {name} = {total_steps}; raise it to at least {start}"
        )


def require_updates(state: TrainState, steps: int) -> None:
    """Raises if the policy is still the model that the run started from."""
    if int(state.step) == int(state.skipped):
        raise TrainingError(
            f"none of {steps} steps updated the model, so it is not exported: no step had data to "
            "train on and a finite gradient; metrics.jsonl counts the failures"
        )
