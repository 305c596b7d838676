"""Admission control of asynchronous training: how many groups may be in flight.

While the learner works, groups of episodes are played for later updates with the weights that the
engine has. The number of groups that have been trained on, wait for the learner or are being played
never exceeds `(max_staleness + version + 1) x batch_size`, where `version` is the number of updates
whose weights the engine has. Work is delayed rather than discarded: nothing that was played is
thrown away because it is too old. With `max_staleness` 0, no group starts before the weights of the
previous update are in the engine.

The controller is a value without I/O, clock or threads; every event returns the next state.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Admission:
    """The state. Counts are groups of episodes, the unit that an update consumes."""

    batch_size: int  # groups per update
    max_staleness: int
    version: int = 0  # updates whose weights the engine has
    taken: int = 0  # batches that the learner has taken
    ready: int = 0  # complete groups that wait for the learner
    running: int = 0

    @property
    def room(self) -> int:
        """Groups that may start now. It is negative after a restore with a smaller bound."""
        limit = (self.max_staleness + self.version + 1) * self.batch_size
        return limit - self.taken * self.batch_size - self.ready - self.running

    def start(self) -> "Admission":
        """A group starts."""
        if self.room <= 0:
            raise ValueError(f"no room for another group: {self}")
        return dataclasses.replace(self, running=self.running + 1)

    def finish(self, accepted: bool) -> "Admission":
        """A group has ended: it waits for the learner, or it is dropped and leaves its place."""
        if self.running <= 0:
            raise ValueError(f"no group is running: {self}")
        return dataclasses.replace(self, running=self.running - 1, ready=self.ready + int(accepted))

    def take(self) -> "Admission":
        """The learner takes a batch of ready groups; an incomplete batch counts like a full one."""
        return dataclasses.replace(
            self, taken=self.taken + 1, ready=max(0, self.ready - self.batch_size)
        )

    def publish(self, version: int) -> "Admission":
        """The engine has the weights of update `version`."""
        if not self.version <= version <= self.taken:
            raise ValueError(f"version {version} does not follow: {self}")
        return dataclasses.replace(self, version=version)
