"""Oracle episodes in process: the game itself, with no server, client or prompt around it."""

from envs.game import EnvironmentSpec, Step


def oracle_episode(spec: EnvironmentSpec, item: int, limit: int = 200) -> list[Step]:
    """The outcomes of the oracle's moves up to the end of the episode, or to the limit."""
    assert spec.oracle is not None
    game = spec.new_game()
    try:
        policy, observation = spec.oracle(item), game.reset(item)
        steps: list[Step] = []
        while len(steps) < limit and not (steps and steps[-1].done):
            steps.append(game.step(policy(observation).action))
            observation = steps[-1].observation
        return steps
    finally:
        game.close()
