import math

import pytest

from manus_jax.agentgym.rewards import EpisodeReward, RewardKind, RewardRule, any_reward
from manus_jax.agentgym.table import ENVIRONMENTS


def rewards_of(rule: RewardRule, steps: list[tuple[float, bool]]) -> tuple[list[float], float]:
    episode = EpisodeReward(rule)
    return [episode.record(value, done) for value, done in steps], episode.total


def test_final_counts_only_the_step_that_ends_the_episode() -> None:
    steps = [(0.5, False), (0.7, False), (1.0, True)]
    assert rewards_of(RewardRule(RewardKind.FINAL), steps) == ([0.0, 0.0, 1.0], 1.0)


def test_final_of_an_episode_that_never_ended_is_zero() -> None:
    assert rewards_of(RewardRule(RewardKind.FINAL), [(0.5, False), (0.7, False)]) == (
        [0.0, 0.0],
        0.0,
    )


def test_cumulative_becomes_the_growth_of_each_step() -> None:
    # A sciworld episode: scores 3, 3, 20, then a wrong focus at -100.
    rule = ENVIRONMENTS["sciworld"].reward
    rewards, total = rewards_of(rule, [(3, False), (3, False), (20, False), (-100, True)])
    assert rewards == pytest.approx([0.03, 0.0, 0.17, -1.2])
    assert total == -1.0
    assert math.fsum(rewards) == pytest.approx(total)


def test_cumulative_reaches_success_at_the_whole_score() -> None:
    episode = EpisodeReward(ENVIRONMENTS["sciworld"].reward)
    episode.record(75, False)
    assert not episode.success
    episode.record(100, True)
    assert episode.success
    assert episode.total == 1.0


def test_best_so_far_never_falls_and_never_counts_twice() -> None:
    steps = [(0.25, False), (0.25, False), (0.5, False), (0.0, True)]
    assert rewards_of(RewardRule(RewardKind.MAX_SO_FAR), steps) == ([0.25, 0.0, 0.25, 0.0], 0.5)


def test_a_turn_that_is_not_recorded_leaves_the_value_of_the_last_valid_step() -> None:
    episode = EpisodeReward(ENVIRONMENTS["sciworld"].reward)
    episode.record(40, False)
    # The last turn did not parse and never reached the server.
    assert episode.total == 0.4


def test_thirds_that_add_up_to_one_are_a_success() -> None:
    episode = EpisodeReward(RewardRule(RewardKind.MAX_SO_FAR))
    episode.record(1 / 3 + 1 / 3 + 1 / 3 - 1e-9, True)
    assert episode.success


def test_babyai_takes_reward_and_any_of_it_is_success() -> None:
    rule = ENVIRONMENTS["babyai"].reward
    assert rule.field == "reward"
    assert rule.success is any_reward
    assert rewards_of(rule, [(0, False), (0.44, True)]) == ([0.0, 0.44], 0.44)


def test_babyai_success_past_the_step_limit_is_worth_nothing_rather_than_less() -> None:
    # 1 - 0.9 * t / T falls below 0 when t is larger than 1.11 T.
    assert rewards_of(ENVIRONMENTS["babyai"].reward, [(-0.35, True)]) == ([0.0], 0.0)


def test_maze_failure_keeps_its_minus_one() -> None:
    assert rewards_of(ENVIRONMENTS["maze"].reward, [(0, False), (-1, True)]) == ([0.0, -1.0], -1.0)


def test_todo_progress_before_the_end_is_not_its_verdict() -> None:
    assert rewards_of(ENVIRONMENTS["todo"].reward, [(0.5, False), (False, True)])[1] == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, 10.0, -0.5])
def test_a_value_off_the_declared_scale_is_an_error(value: float) -> None:
    with pytest.raises(ValueError, match="reward"):
        EpisodeReward(RewardRule(RewardKind.FINAL)).record(value, True)
