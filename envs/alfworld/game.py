"""One session of ALFWorld, with AgentGym's observations."""

import re
from collections.abc import Sequence

from envs.alfworld.games import problem
from envs.alfworld.world import World
from envs.game import GameError, Step

_ARRIVAL = re.compile(r"^You arrive at [a-z]+ \d+\. ")


class AlfWorld:
    """The game of one session."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._observation = ""
        self._won = False

    @property
    def world(self) -> World:
        if self._world is None:
            raise GameError("The environment has not been reset: call reset with a game first.")
        return self._world

    def reset(self, item: int) -> str:
        self._world, self._won = World(problem(item)), False
        self._observation = self._world.start()
        return self._observation

    def step(self, action: str) -> Step:
        world = self.world
        if self._won:
            raise GameError("The game is over: call reset to start another one.")
        # AgentGym's server omits where the agent arrives; what it sees there names the place.
        self._observation = _ARRIVAL.sub("", world.step(action))
        self._won = world.won()
        return Step(self._observation, float(self._won), self._won)

    def observation(self) -> str:
        return self._observation if self.world else ""

    def close(self) -> None:
        self._world = None


def plausible_actions(observations: Sequence[str]) -> Sequence[str]:
    """The actions that are possible according to the observations so far.

    Only the first observation lists them; the others name where the agent is and what it sees.
    """
    places = re.findall(r"go to ([a-z]+ \d+)", observations[0])
    here, held, things, closed = "", "", [], False
    for text in observations[1:]:
        if arrived := re.match(r"(?:On the|The|You open the|You close the) ([a-z]+ \d+)", text):
            here, closed = arrived[1], "is closed" in text or text.startswith("You close")
            things = re.findall(r"\ba ([a-z]+ \d+)", text)
        elif taken := re.match(r"You pick up the ([a-z]+ \d+) from", text):
            held = taken[1]
            things = [thing for thing in things if thing != held]
        elif text.startswith("You put the"):
            things, held = [*things, held], ""
    actions = [f"go to {place}" for place in places if place != here] + ["inventory", "look"]
    if here:
        actions.append(f"examine {here}")
    if closed:
        return [*actions, f"open {here}"]
    if held:
        return [*actions, f"examine {held}", *([f"put {held} in/on {here}"] if here else [])]
    return [*actions, *(f"take {thing} from {here}" for thing in things)]
