"""A turn as reward functions see it, for tests."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Said:
    text: str
    action: str | None = None
    reward: float = 0.0
    observation: str = ""

    @property
    def valid(self) -> bool:
        return self.action is not None
