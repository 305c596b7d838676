"""Forks a game by replaying its actions in a fresh session.

Environment servers have no route that copies a game. A game whose item and actions determine what
happens can be played again up to any turn; every answer is compared with the recorded one, so a
fork either is in the same state, as far as the agent and its reward can tell, or fails.
"""

import dataclasses

from manus_jax.agentgym.client import Session, StepResult
from manus_jax.limits import shown


class NotDeterministic(Exception):
    """The answer to a replayed action differs; `turn` is the first one that does."""

    def __init__(self, item_id: str, turn: int | None, recorded: object, answer: object) -> None:
        where = "the first observation" if turn is None else f"the answer to turn {turn}"
        super().__init__(
            f"{item_id} is not deterministic: {where} was {shown(recorded)} and is {shown(answer)} "
            "when the same actions are replayed"
        )
        self.turn = turn


@dataclasses.dataclass
class RecordedGame:
    """A session that records its answers, with the methods that players use."""

    session: Session

    def __post_init__(self) -> None:
        self.row = self.session.row
        self.first = ""
        self.steps: list[tuple[str, StepResult]] = []

    @property
    def episode_reward(self) -> float:
        return self.session.episode_reward

    @property
    def success(self) -> bool:
        return self.session.success

    @property
    def available_actions(self) -> tuple[str, ...]:
        return self.session.available_actions

    def reset(self, item: int) -> str:
        self.first = self.session.reset(item)
        return self.first

    def step(self, action: str) -> StepResult:
        result = self.session.step(action)
        self.steps.append((action, result))
        return result


def replay(
    session: Session, game: RecordedGame, item: int, item_id: str, valid: list[bool]
) -> None:
    """Brings a fresh session to the state before turn `len(valid)` of a recorded game.

    `valid` says which of the turns before it had an action; the others were not sent to the
    environment. Raises NotDeterministic at the first answer that differs.
    """
    first = session.reset(item)
    if first != game.first:
        raise NotDeterministic(item_id, None, game.first, first)
    steps = iter(game.steps)
    for turn, sent in enumerate(valid):
        if not sent:
            continue
        action, recorded = next(steps)
        answer = session.step(action)
        for name in ("observation", "reward", "done"):
            before, now = getattr(recorded, name), getattr(answer, name)
            if before != now:
                raise NotDeterministic(item_id, turn, before, now)
