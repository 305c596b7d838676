"""The maze: AgentGym's texts and rewards, reproducible layouts, and an oracle."""

import pytest

from envs.game import GameError
from envs.maze import SPEC
from envs.maze.game import MazeGame, describe
from envs.maze.oracle import oracle
from envs.maze.tasks import TEST, TRAIN, Maze, maze

# ####      A corridor: 1,1 to 1,3, and below its left end one dead end.
# #   #
# # ###
CORRIDOR = Maze(frozenset({(1, 1), (1, 2), (1, 3), (2, 1)}), start=(2, 1), goal=(1, 3))


def test_the_observation_names_goal_position_and_walls_in_agentgyms_order() -> None:
    assert describe(CORRIDOR, (2, 1)) == (
        "The goal is at position 1, 3. Your current position is at position 2, 1. "
        "There are walls to your right, to your left, below you."
    )
    assert describe(CORRIDOR, (1, 1)).endswith("There are walls to your left, above you.")
    crossing = Maze(frozenset({(2, 2), (2, 3), (2, 1), (1, 2), (3, 2)}), (2, 1), (2, 3))
    assert describe(crossing, (2, 2)).endswith("2, 2. There are no walls near you.")
    assert describe(CORRIDOR, (1, 2)).endswith("There are walls above you, below you.")
    side = Maze(frozenset({(1, 1), (1, 2), (2, 1), (1, 0)}), (1, 1), (1, 2))
    assert describe(side, (1, 1)).endswith("There is a wall above you.")


def test_distances_are_counted_in_moves() -> None:
    assert CORRIDOR.distances() == {(1, 3): 0, (1, 2): 1, (1, 1): 2, (2, 1): 3}


def test_walls_and_nonsense_leave_the_agent_in_its_place() -> None:
    game = MazeGame()
    first = game.reset(0)
    layout = maze(0)
    for action in ("move sideways", "", "MOVE UP", "x" * 10_000):
        step = game.step(action)
        assert (step.observation, step.reward, step.done) == (first, 0, False)
    row, column = layout.start
    neighbours = {
        "move left": (row, column - 1),
        "move right": (row, column + 1),
        "move up": (row - 1, column),
        "move down": (row + 1, column),
    }
    for action, cell in neighbours.items():
        game.reset(0)
        expected = cell if cell in layout.open_cells else layout.start
        assert game.step(f" {action}\n").observation == describe(layout, expected)


def test_the_51st_move_fails_with_minus_one() -> None:
    game = MazeGame()
    first = game.reset(3)
    for _ in range(50):
        step = game.step("stay")
        assert (step.observation, step.reward, step.done) == (first, 0, False)
    step = game.step("stay")
    assert (step.observation, step.reward, step.done) == ("Failure\n", -1.0, True)
    with pytest.raises(GameError, match="finished"):
        game.step("stay")


def test_a_game_refuses_calls_that_the_protocol_forbids() -> None:
    game = MazeGame()
    with pytest.raises(GameError, match="not been reset"):
        game.step("move up")
    for unknown in (-1, 1000):
        with pytest.raises(GameError, match=f"game {unknown} is not valid"):
            game.reset(unknown)


def test_train_and_test_share_neither_item_nor_maze() -> None:
    assert list(SPEC.items("train")) == list(TRAIN) and list(SPEC.items("test")) == list(TEST)
    assert not set(TRAIN) & set(TEST)
    assert not {maze(item) for item in TRAIN} & {maze(item) for item in TEST}


def test_the_oracle_reaches_every_goal_by_a_shortest_way_within_the_limit() -> None:
    lengths = set()
    for item in [*TRAIN[::5], *TEST]:
        game = MazeGame()
        observation = game.reset(item)
        policy = oracle(item)
        shortest = maze(item).distances()[maze(item).start]
        assert shortest <= 50
        for _ in range(shortest):
            move = policy(observation)
            step = game.step(move.action)
            observation = step.observation
        assert (step.observation, step.reward, step.done) == ("Success\n", 1.0, True), item
        lengths.add(shortest)
    assert min(lengths) == 3 and max(lengths) > 20
