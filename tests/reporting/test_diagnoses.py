"""Runs that cannot learn are recognised by their metrics, once, with remedies."""

import dataclasses

import pytest
from made_trajectories import made, segment

from manus_jax.reporting.diagnoses import DIAGNOSES, GONE_AFTER, Diagnostician
from manus_jax.rollout.metrics import rollout_metrics
from manus_jax.rollout.trajectory import EpisodeSpec

HEALTHY = {
    "rollout/episodes": 64.0,
    "rollout/groups_with_signal": 0.5,
    "rollout/entropy": 1.0,
    "episode/success_rate": 0.4,
    "episode/reward/min": 0.0,
    "episode/reward/mean": 0.4,
    "episode/reward/max": 1.0,
    "episode/ended_by/done": 0.5,
    "episode/ended_by/max_turns": 0.5,
    "env/ratio_of_valid_action": 0.9,
    "env/ratio_of_rejected_action": 0.05,
    "env/ratio_of_unchanged_observation": 0.1,
    "repetition/within_turns": 0.1,
    "repetition/between_turns": 0.2,
}
FAILS = {"episode/success_rate": 0.0, "episode/reward/mean": 0.0, "episode/reward/max": 0.0}


def run(*changes):
    """The findings of a run whose steps differ from HEALTHY by these metrics."""
    steps = [{"step": i, **HEALTHY, **change} for i, change in enumerate(changes, 1)]
    return Diagnostician(steps).findings


def test_a_run_that_learns_has_no_findings():
    assert run(*({"episode/success_rate": x / 20} for x in range(20))) == []


@pytest.mark.parametrize(
    ("change", "steps", "words"),
    [
        ({"rollout/groups_with_signal": 0.0, "episode/success_rate": 0.0}, 1, "nothing to learn"),
        ({"rollout/groups_with_signal": 0.0, "episode/success_rate": 1.0}, 3, "harder tasks"),
        (FAILS, 5, "the reward of every episode has been 0"),
        ({"episode/ended_by/max_turns": 1.0}, 2, "all end at the same limit"),
        ({"episode/ended_by/context": 1.0}, 2, "all end at the same limit"),
        ({"repetition/within_turns": 0.8}, 2, "80% of the pairs of tokens"),
        ({"repetition/between_turns": 0.95}, 2, "95% of the turns are equal"),
        ({"env/ratio_of_valid_action": 0.25}, 2, "25% are well-formed and not refused"),
        ({"env/ratio_of_unchanged_observation": 1.0}, 2, "after 100% of all turns"),
    ],
)
def test_a_condition_is_reported_once_after_its_number_of_steps(change, steps, words):
    assert run(*[change] * (steps - 1)) == []
    [finding] = run(*[change] * (steps + 10))
    assert finding.step == steps
    assert words in finding.text
    assert "What often helps: " in finding.text
    assert finding.last == steps + 10


@pytest.mark.parametrize(
    "change",
    [
        {"episode/ended_by/max_turns": 1.0},  # the environment counts what was reached by then
        {"repetition/between_turns": 0.95},
        {"env/ratio_of_valid_action": 0.25},
        FAILS | {"episode/reward/min": 1.0, "episode/reward/max": 1.0},
    ],
)
def test_uniform_behaviour_that_succeeds_is_no_problem(change):
    assert run(*[change | {"episode/success_rate": 0.95}] * 10) == []


def episode(number, says, reward, end_reason, changes_view):
    """Three turns of eight tokens: a group's episode number `number` // 10."""
    tokens = segment([(None, 4), (0, 8), (None, 2), (1, 8), (None, 2), (2, 8)])
    spoken = tokens.loss_mask
    if says == "move":  # the same token, without doubt
        tokens.token_ids[spoken], tokens.log_probs[spoken] = 7, -1e-4
    else:
        tokens.log_probs[spoken] = -1.0
    whole = made([tokens], [0.0, 0.0, reward])
    turns = [
        dataclasses.replace(
            turn,
            text="move" * 8 if says == "move" else f"{says} {turn.text}",
            observation=f"{number} {turn.text}" if changes_view else whole.first_observation,
        )
        for turn in whole.turns
    ]
    spec = EpisodeSpec(whole.spec.task, f"#{number}", str(number // 10))
    return dataclasses.replace(whole, turns=tuple(turns), spec=spec, end_reason=end_reason)


def test_a_collapse_to_one_token_is_reported_in_all_its_signs_and_each_once():
    """The policy repeats a token, which is a well-formed action that changes nothing."""
    healthy = [
        *(episode(n, "go", n % 2, "done", True) for n in (0, 1, 10, 11)),
        episode(12, "go", 0.0, "max_turns", True),
    ]
    collapsed = [episode(n, "move", 0.0, "max_turns", False) for n in (0, 1, 10, 11)]
    steps = [rollout_metrics(healthy), *[rollout_metrics(collapsed)] * 12]
    assert steps[1]["env/ratio_of_valid_action"] == 1
    findings = Diagnostician({"step": i, **m} for i, m in enumerate(steps, 1)).findings
    found = [(finding.step, finding.last, finding.text.partition(":")[0]) for finding in findings]
    assert found == [
        (2, 13, "no group has episodes with different rewards, so there is nothing to learn from "
            "(success 0%). What often helps"),
        (3, 13, "no episode is ended by the environment; all end at the same limit (turns, tokens, "
            "or the policy gave up). What often helps"),
        (3, 13, "the policy repeats itself"),
        (3, 13, "the entropy of the policy has collapsed to 0.0001 nats per token, less than a "
            "tenth of its first value. What often helps"),
        (3, 13, "few actions have an effect"),
        (6, 13, "the reward of every episode has been 0. What often helps"),
    ]  # fmt: skip
    assert "warm start" in findings[0].text.replace("_", " ")
    for remedy in ("easier tasks", "rollout.temperature", "train.group_size"):
        assert remedy in findings[0].text


def test_entropy_is_compared_with_the_first_step():
    low = {"rollout/entropy": 0.09}
    [finding] = run({}, low, {}, low, low)
    assert finding.step == 5
    assert "collapsed to 0.09 nats" in finding.text
    assert run(*[low] * 10) == []  # low from the start
    high = {"rollout/entropy": 5.1}
    [finding] = run({}, high, {}, high, high)
    assert finding.step == 5
    assert "the policy has become random: its entropy is 5.1 nats" in finding.text
    assert run({}, *[low | {"episode/success_rate": 0.95}] * 10) == []  # sure, and right


def test_repetition_is_compared_with_the_first_step():
    more = {"repetition/within_turns": 0.35}  # 0.1 in the first step
    [finding] = run({}, more, more)
    assert (finding.step, "35% of the pairs of tokens" in finding.text) == (3, True)
    assert run(*[more] * 10) == []
    assert run({}, *[{"repetition/within_turns": 0.25}] * 10) == []


def test_a_finding_that_ended_and_came_back_is_reported_again():
    silent = {"rollout/groups_with_signal": 0.0}
    pause = [{}] * (GONE_AFTER - 1)
    [finding] = run(silent, *pause, silent, *pause, silent, {})
    assert (finding.step, finding.last) == (1, 1 + 2 * GONE_AFTER)
    first, second = run(silent, silent, {}, *pause, silent)
    assert (first.step, first.last, second.step) == (1, 2, 3 + GONE_AFTER)


def test_steps_are_taken_one_by_one_or_from_a_file():
    steps = [{"step": i, **HEALTHY, "rollout/groups_with_signal": i % 2} for i in range(1, 30)]
    doctor = Diagnostician(steps[:10])
    later = [finding for step in steps[10:] for finding in doctor.after_step(step)]
    assert doctor.findings == Diagnostician(steps).findings
    assert later == doctor.findings[len(Diagnostician(steps[:10]).findings) :]


def test_metrics_without_episodes_and_older_runs_have_no_findings():
    validation = {"step": 0, "val/success_rate": 0.0}
    old = {"step": 1, "rollout/episodes": 64.0, "episode/success_rate": 0.0}
    assert Diagnostician([validation, old, {"step": 2, "rollout/episodes": 0.0}]).findings == []


def test_every_diagnosis_recommends_a_setting_or_stopping():
    assert all("." in d.remedy or "stop" in d.remedy for d in DIAGNOSES)
