"""Server health and back-off: a state machine without I/O, locks or clock.

States are frozen; a transition takes the time, and where needed a random number, as arguments.
Each failure marks a server down for a time that doubles with every consecutive failure.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BackOff:
    """Waiting times that grow with consecutive failures, shortened by random jitter."""

    first: float = 0.5
    factor: float = 2.0
    limit: float = 60.0
    jitter: float = 0.5

    def seconds(self, failures: int, chance: float) -> float:
        """The wait after the n-th consecutive failure; `chance` in 0..1 removes up to `jitter`."""
        # The exponent is capped: after 64 doublings every wait has reached the limit.
        whole = min(self.first * self.factor ** min(failures - 1, 64), self.limit)
        return whole * (1.0 - self.jitter * chance)


@dataclass(frozen=True)
class HealthPolicy:
    """Bad answers before a server is marked down, and silent failures before it is replaced."""

    back_off: BackOff = field(default_factory=BackOff)
    bad_answers: int = 3
    broken_after: int = 4


@dataclass(frozen=True)
class Health:
    """Whether a server is down, and when to try it again."""

    incidents: int = 0  # times marked down since it last worked
    retry_at: float = 0.0
    problem: str = ""  # why it is down

    @property
    def down(self) -> bool:
        return self.incidents > 0

    def may_retry(self, now: float) -> bool:
        return now >= self.retry_at

    def mark_down(
        self, problem: str, now: float, back_off: BackOff, chance: float = 0.0
    ) -> "Health":
        incidents = self.incidents + 1
        return Health(incidents, now + back_off.seconds(incidents, chance), problem)


HEALTHY = Health()
