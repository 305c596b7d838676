"""Reward functions on episodes, and the metrics of a batch."""

import dataclasses
import threading

import pytest
from made_trajectories import forked, made, segment, two_turns

from manus_jax.rewards import REWARDS, RewardError, RewardSettings
from manus_jax.rollout.metrics import rollout_metrics
from manus_jax.rollout.scoring import score_episode, score_episodes, shuffle_rewards
from manus_jax.rollout.trajectory import EpisodeSpec, FailedEpisode, Trajectory

FAILED = FailedEpisode(two_turns("f").spec, "timeout", "no answer", 2)


def test_the_environments_reward_as_a_function_changes_nothing() -> None:
    scored = score_episode(forked(), RewardSettings("env"))
    assert scored.episode_reward == forked().episode_reward == 0.25
    assert scored.turn_rewards == forked().turn_rewards == (0.5, 0.0, -0.25)


@pytest.mark.bug("B6")
def test_a_function_sees_the_episode_and_its_ground_truth() -> None:
    scored = score_episode(two_turns(), RewardSettings("action_similarity"))
    assert scored.episode_reward == 1.0  # both turns move up, the reference once
    weights = {"weights": {"goal": 1.0, "valid_actions": 0.5}}
    both = score_episode(two_turns(), RewardSettings("weighted", weights))
    assert both.episode_reward == 1.5
    assert both.turn_rewards == (0.25, 0.25)


def test_penalties_come_off_any_function() -> None:
    invalid = made(two_turns().segments, [0.0, 1.0], penalties={0: -0.1})
    scored = score_episode(invalid, RewardSettings("goal"))
    assert scored.episode_reward == pytest.approx(0.9)
    assert scored.turn_rewards == (-0.1, 0.0)


def test_a_function_that_raises_names_itself_and_the_episode() -> None:
    with pytest.raises(RewardError, match="reward function 'f1' failed on episode maze_3#0: Value"):
        broken = dataclasses.replace(two_turns().spec.task, ground_truth=object())
        spec = dataclasses.replace(two_turns().spec, task=broken)
        score_episode(dataclasses.replace(two_turns(), spec=spec), RewardSettings("f1"))


def test_on_error_determines_whether_an_episode_without_score_is_dropped_or_raises() -> None:
    broken = dataclasses.replace(two_turns("b").spec.task, ground_truth=None)
    spec = dataclasses.replace(two_turns("b").spec, task=broken)
    outcomes = [two_turns("a"), dataclasses.replace(two_turns("b"), spec=spec), FAILED]
    settings = RewardSettings("f1")
    with pytest.raises(RewardError, match="'f1' failed on episode b"):
        score_episodes(outcomes, settings, "raise")
    good, bad, failed = score_episodes(outcomes, settings, "drop")
    assert isinstance(good, Trajectory) and good.score.total == 0.0
    assert isinstance(bad, FailedEpisode) and bad.kind == "reward"
    assert "'f1' failed on episode b" in bad.error
    assert failed is FAILED


def test_episodes_are_scored_at_the_same_time_and_keep_their_order() -> None:
    together = threading.Barrier(4, timeout=20)

    with REWARDS.restored():

        @REWARDS.register("waits")
        def waits(solution_str, ground_truth, **facts):
            together.wait()
            return 1.0

        outcomes = [two_turns("a"), FAILED, two_turns("b"), two_turns("c"), two_turns("d")]
        scored = score_episodes(outcomes, RewardSettings("waits"), "raise")
    assert [outcome.spec.uid for outcome in scored] == ["a", "f", "b", "c", "d"]
    assert all(outcome.score.total == 1.0 for outcome in scored if isinstance(outcome, Trajectory))


@pytest.mark.bug("B10")
def test_metrics_by_hand() -> None:
    invalid = made([segment([(None, 2), (0, 4)])], [0.0], "i", {0: -0.5}, end_reason="max_turns")
    outcomes = [two_turns(prompts_extended=1), forked(prompts_forked=1), invalid, FAILED]
    metrics = rollout_metrics(outcomes)
    wanted = {
        "rollout/episodes": 3,
        "rollout/failed": 1,
        "rollout/failed/timeout": 1,
        "rollout/retries": 1,
        "rollout/prompt_extended": 1,
        "rollout/prompt_forked": 1,
        "env/number_of_actions/mean": 2,
        "env/number_of_actions/max": 3,
        "env/number_of_actions/min": 1,
        "env/finish_ratio": 2 / 3,
        "env/number_of_valid_action": 5 / 3,
        "env/ratio_of_valid_action": 5 / 6,
        "episode/success_rate": 1 / 3,
        "episode/env_reward": 1.25 / 3,
        "episode/reward/mean": 0.75 / 3,
        "episode/reward/min": -0.5,
        "response_length/mean": (5 + 8 + 4) / 3,
        "reward/invalid_action_penalty": -0.5 / 3,
        "rollout/generation_seconds_per_turn": 0.5,
        "rollout/environment_seconds_per_turn": 0.25,
        "episode/ended_by/max_turns": 1 / 3,
    }
    assert {key: metrics[key] for key in wanted} == pytest.approx(wanted)


def test_the_parts_of_the_reward_are_metrics() -> None:
    scored = score_episodes([two_turns(), forked()], RewardSettings("agentgym"), "raise")
    metrics = rollout_metrics(scored)
    assert metrics["reward/env"] == pytest.approx(0.25 * (1.0 + 0.25) / 2)
    assert metrics["reward/actions"] == pytest.approx(0.35)
    assert metrics["reward/format"] == pytest.approx(-0.125)
    assert "reward/length" in metrics


@pytest.mark.bug("B28")
def test_failures_and_episodes_without_turns_divide_by_nothing() -> None:
    assert rollout_metrics([])["rollout/episodes"] == 0
    assert rollout_metrics([FAILED])["rollout/failed"] == 1
    silent = dataclasses.replace(two_turns(), turns=(), segments=(), env_reward=0.0)
    assert rollout_metrics([silent])["env/ratio_of_valid_action"] == 0.0


def test_refused_actions_and_repeated_failures_are_counted() -> None:
    """Four turns: fine, refused, the same text refused again, and another refused one."""
    episode = made([segment([(0, 1), (1, 1), (2, 1), (3, 1)])], [0.0] * 4)
    texts = ("look", "fly", "fly", "jump")
    turns = [
        dataclasses.replace(turn, text=text, rejected=text != "look")
        for turn, text in zip(episode.turns, texts, strict=True)
    ]
    metrics = rollout_metrics([dataclasses.replace(episode, turns=tuple(turns))])
    assert metrics["env/ratio_of_valid_action"] == 0.25
    assert metrics["env/ratio_of_rejected_action"] == 0.75
    assert metrics["env/repeated_failures"] == 1


def test_groups_entropy_and_repetition_by_hand() -> None:
    """Two groups of two; one has different rewards and a success."""
    spec = lambda uid, group: EpisodeSpec(two_turns().task, uid, group)
    won = two_turns(spec=spec("a0", "a"))
    lost = dataclasses.replace(won, spec=spec("a1", "a"), env_reward=0.0, success=False)
    others = [dataclasses.replace(lost, spec=spec(uid, "b")) for uid in ("b0", "b1")]
    alone = dataclasses.replace(won, spec=spec("c0", "c"))  # its group's other episode failed
    metrics = rollout_metrics([won, lost, *others, alone])
    assert metrics["rollout/groups_with_signal"] == 0.5
    assert metrics["episode/pass_at_k"] == 0.5
    # Turns at positions 3, 4 and 7, 8, 9; log-probs are -0.1 x (position + 1).
    assert metrics["rollout/entropy"] == pytest.approx((0.4 + 0.5 + 0.8 + 0.9 + 1.0) / 5)
    assert metrics["repetition/between_turns"] == 0
    assert "rollout/groups_with_signal" not in rollout_metrics([alone])


def test_repeated_tokens_turns_and_observations_are_counted() -> None:
    """Ten equal tokens are nine pairs, one of them new; the other turns have 3 + 1 new pairs."""
    tokens = segment([(None, 2), (0, 10), (None, 2), (1, 4), (None, 2), (2, 2)])
    tokens.token_ids[2:12] = 7
    episode = made([tokens], [0.0] * 3)
    turns = [
        dataclasses.replace(turn, text=x) for turn, x in zip(episode.turns, "xyy", strict=True)
    ]
    turns[1] = dataclasses.replace(turns[1], observation=turns[0].observation)
    metrics = rollout_metrics([dataclasses.replace(episode, turns=tuple(turns))])
    assert metrics["repetition/within_turns"] == pytest.approx(8 / 13)
    assert metrics["repetition/between_turns"] == 0.5
    assert metrics["env/ratio_of_unchanged_observation"] == pytest.approx(1 / 3)


def test_shuffled_rewards_are_a_permutation_that_depends_on_the_seed() -> None:
    rewards = [float(i) for i in range(20)]
    penalized = [
        made([segment([(None, 1), (0, 2)])], [x + 0.5], penalties={0: -0.5}) for x in rewards
    ]
    orders = []
    for seed in ((0, 1), (0, 2), (0, 1)):
        shuffled = shuffle_rewards(penalized, seed)
        orders.append([t.episode_reward for t in shuffled])
        assert sorted(orders[-1]) == rewards != orders[-1]
        # No process reward reveals which turns were good.
        assert {t.turn_rewards for t in shuffled} == {(0.0,)}
        assert [t.turns[0].text for t in shuffled] == [t.turns[0].text for t in penalized]
    assert orders[0] == orders[2] != orders[1]
