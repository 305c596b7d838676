"""Limits on consecutive failures: isolated ones are reported, repeated ones end the run."""

from collections.abc import Mapping

from manus_jax.errors import UserError


class TrainingError(UserError, RuntimeError):
    """The run cannot continue; the message gives the reason and where to look."""


class FailureBudget:
    """Counts consecutive updates with a non-finite gradient and steps without episodes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._bad_updates = self._lost_steps = 0

    def after_step(self, metrics: Mapping[str, float], bad_updates: int) -> str | None:
        """A warning about the step, or None; raises TrainingError when the limit is reached."""
        self._bad_updates = self._bad_updates + bad_updates if bad_updates else 0
        played, failed = metrics["rollout/episodes"], metrics["rollout/failed"]
        self._lost_steps = 0 if played else self._lost_steps + 1
        kinds = ", ".join(
            f"{name.removeprefix('rollout/failed/')} {count:.0f}"
            for name, count in metrics.items()
            if name.startswith("rollout/failed/")
        )
        report = []
        if failed:
            report.append(f"{failed:.0f} of {played + failed:.0f} episodes were dropped: {kinds}")
        if bad_updates:
            report.append(f"{bad_updates} updates skipped: the gradient is not finite")
        if self._bad_updates >= self._limit:
            raise TrainingError(
                f"{self._bad_updates} updates in a row had a gradient that is not finite; the last "
                "checkpoint is intact. Check the run's trajectories and rewards, or lower "
                "optimizer.lr"
            )
        if self._lost_steps >= self._limit:
            raise TrainingError(
                f"no episode could be played to its end in {self._lost_steps} steps in a row "
                f"({kinds}); the last checkpoint is intact. The run's trajectories contain the "
                "errors"
            )
        return "; ".join(report) or None
