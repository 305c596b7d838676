"""SQL questions as a game with a single query per episode.

The result is compared with that of the reference query as a set of rows, so any SQL that answers
the question wins.
"""

from envs.game import GameError, Step
from envs.sqlgym.query import QueryError, WorkerError, run, run_untrusted, same_rows
from envs.sqlgym.questions import Question
from envs.sqlgym.schema import image
from envs.sqlgym.tasks import question

STATE_CHARACTERS = 100


class SqlGame:
    """The question of one session."""

    def __init__(self) -> None:
        self._question: Question | None = None
        self._done = False

    def reset(self, item: int) -> str:
        self._question = question(item)
        self._done = False
        return self.observation()

    def step(self, action: str) -> Step:
        asked = self._asked()
        if self._done:
            raise GameError("The episode has ended: reset before the next step.")
        data = image(asked.database)
        right = False
        try:
            rows = run_untrusted(data, action)
            right = same_rows(rows, run(data, asked.sql))
            # A row has more than one character, so the rest would be cut anyway.
            state = str(rows[:STATE_CHARACTERS])
        except QueryError as error:
            state = str(error)
        except WorkerError as error:
            raise GameError(f"The query was not run: {error}.") from None
        self._done = True
        result = state[:STATE_CHARACTERS]
        return Step(result, float(right), True, {"ground_truth": asked.sql})

    def observation(self) -> str:
        """The question, also after the query, as on AgentGym's server."""
        asked = self._asked()
        return f"{asked.database.describe()}\n\n{asked.text}"

    def close(self) -> None:
        self._question = None

    def _asked(self) -> Question:
        if self._question is None:
            raise GameError("The game has not been reset: call reset with an item_id first.")
        return self._question
