"""A bandit of two turns: one of three levers is right in the first, another one in the second."""

import random

from envs.game import EnvironmentSpec, Move, Step, fixed_splits
from manus_jax.agentgym.environments import register_environment
from manus_jax.agentgym.prompts import EnvironmentPrompt, Example
from manus_jax.agentgym.rewards import RewardKind, RewardRule
from manus_jax.agentgym.table import EnvironmentRow
from manus_jax.rewards import REWARDS

LEVERS = ("pull one", "pull two", "pull three")
RIGHT = ("pull two", "pull three")
ASKED = ("Which lever first?", "And then?", "The end.")


class LeverGame:
    def reset(self, item):
        self.right, self.turn = 0, 0
        return self.observation()

    def observation(self):
        return ASKED[self.turn]

    def step(self, action):
        self.right += action.strip() == RIGHT[self.turn]
        self.turn += 1
        return Step(self.observation(), self.right / 2, self.turn == 2)

    def close(self):
        pass


def oracle(item):
    return lambda observation: Move("", RIGHT[ASKED.index(observation)])


SPEC = EnvironmentSpec(
    name="lever_env",
    health="This is environment Levers.",
    family="id",
    item_field="data_idx",
    new_game=LeverGame,
    items=fixed_splits(train=range(90), test=range(90, 126)),
    oracle=oracle,
    cheap=True,
)

register_environment(
    EnvironmentRow(
        "lever_env",
        id_field="id",
        port=36001,
        item_field="data_idx",
        reward=RewardRule(RewardKind.FINAL),
        action="plain_line",
        closes=True,
    ),
    EnvironmentPrompt(
        "Pull the right lever, twice.",
        actions=LEVERS,
        examples=(Example(ASKED[0], "", LEVERS[0]),),
    ),
    spec="lever_env:SPEC",
)

LOTS = random.Random(0)


@REWARDS.register("by_lot")
def by_lot(solution_str, ground_truth, **kwargs):
    return float(LOTS.random() < 0.3)
