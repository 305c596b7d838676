"""The reward functions, compared with hand calculations."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_turns import Said

from manus_jax.rewards import RewardError, RewardSettings, Score, compute
from manus_jax.rewards.text import tagged_blocks

FACTS = {
    "env_reward": 0.75,
    "success": False,
    "env": "maze",
    "item_id": "maze_3",
    "finish_reason": "max_turns",
    "extra": {},
}


def score(name: str, said: str = "", truth=None, turns=(), facts=None, **parameters) -> Score:
    given = FACTS | (facts or {})
    return compute(RewardSettings(name, parameters), "e", said, truth, turns, **given)


def total(name: str, *arguments, **keywords) -> float:
    return score(name, *arguments, **keywords).total


def words(count: int) -> str:
    return "<think>" + "word " * count + "</think>"


def test_env_is_the_environments_reward_with_each_turns_growth() -> None:
    turns = (Said("a", "x", 0.5), Said("b", None, 0.0), Said("c", "y", 0.25))
    assert score("env", turns=turns) == Score(0.75, {"env": 0.75}, (0.5, 0.0, 0.25))
    assert total("env", turns=turns, scale=-100.0, clip=5.0) == -5.0


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"success": True, "finish_reason": "done", "env_reward": 0.9}, 1.0),
        ({"finish_reason": "done", "env_reward": 0.0}, -1.0),
        ({"finish_reason": "done", "env_reward": 0.4}, 0.4),
        ({"finish_reason": "max_turns", "env_reward": 0.0}, 0.0),
    ],
)
def test_goal_is_one_for_a_win_and_minus_one_for_a_loss(facts, expected) -> None:
    assert total("goal", facts=facts) == expected


@pytest.mark.parametrize(
    ("said", "full", "simple"),
    [
        ("<think>a</think><memory>b</memory><plan>c</plan><think>d</think><act>e</act>", 1.0, 1.0),
        ("<act>e</act><plan>c</plan><memory>b</memory><think>d</think>", 1 / 3, -0.5),
        ("<think>a</think><act>e</act>", 0.25, 1.0),
        ("<act>e</act><think>a</think>", 0.25, -0.5),
        ("<think>a<act>e</act>", -0.5, -0.5),
        ("just words", -0.5, -0.5),
    ],
)
def test_format_rewards_the_tags_and_their_order(said, full, simple) -> None:
    assert total("format", said) == pytest.approx(full)
    assert total("format", said, mode="simple") == simple


@pytest.mark.parametrize(
    ("count", "expected"),
    [(50, 0.5), (35, 0.5), (65, 0.5), (7, 0.2), (91, 0.35), (130, 0.125), (900, 0.125), (0, 0.125)],
)
def test_length_falls_off_on_both_sides_of_the_target(count, expected) -> None:
    assert total("length", words(count)) == pytest.approx(expected)


def test_length_without_thoughts_is_the_minimum() -> None:
    assert total("length", "no tags here") == -0.25
    assert total("length", "five words and no tags", tag=None, target=5) == 0.5


def test_length_penalty_counts_characters_outside_the_bounds() -> None:
    long, short, right = (Said("x" * n, "x") for n in (460, 11, 100))
    assert total("length_penalty", turns=(right, long)) == pytest.approx(-0.1)
    assert total("length_penalty", turns=(short,), shape="quadratic") == pytest.approx(-0.81)
    assert total("length_penalty", turns=(long,), shape="log") == pytest.approx(
        -0.01 * math.log(11)
    )
    assert total("length_penalty", turns=(long, right)) == 0


def test_valid_actions_is_the_share_of_turns_with_one() -> None:
    turns = (Said("a", "x"), Said("b"), Said("c", "y"), Said("d", "z"))
    assert score("valid_actions", turns=turns).turn_scores == (0.25, 0.0, 0.25, 0.25)
    assert total("valid_actions", turns=turns) == 0.75
    assert total("valid_actions", turns=()) == 0.0


def test_pattern_looks_at_the_last_turn() -> None:
    turns = (Said("<response>no</response>"), Said("Action:\nmove\nup"))
    assert total("pattern", turns=turns, pattern=r"Action:.*up") == 1.0
    assert total("pattern", turns=turns, pattern=r"<response>") == 0.0


@pytest.mark.bug("B35")
@pytest.mark.parametrize(
    ("said", "truth", "expected"),
    [
        ("<answer>The  Eiffel-Tower!</answer>", "eiffeltower", 1.0),
        ("<answer>no</answer> then <answer>An Apple</answer>", ["pear", "apple"], 1.0),
        ("<answer>apple</answer> then <answer>no</answer>", ["apple"], 0.0),
        ("apple", "apple", 0.0),
        ("<answer>42</answer>", {"target": [41, 42]}, 1.0),
        ("<answer>two words</answer>", "twowords", 0.0),
    ],
)
def test_exact_match_compares_the_last_answer_normalized(said, truth, expected) -> None:
    assert total("exact_match", said, truth) == expected


def test_one_answer_tag_is_enough_as_only_the_agents_words_are_read() -> None:
    assert total("exact_match", "<answer>Paris</answer>", "paris") == 1.0


def test_exact_match_may_take_substrings_and_reward_the_form() -> None:
    said = "<answer>It is in Paris, France</answer>"
    assert total("exact_match", said, "Paris", format_score=0.1) == 0.1
    assert total("exact_match", said, "Paris", substring=True) == 1.0
    assert total("exact_match", "", "x", turns=(Said("no"), Said("X.")), tag=None) == 1.0


def test_f1_of_hand_counted_words() -> None:
    # cat sat on mat | cat on mat: 3 common of 4 and 3.
    said = "<answer>The cat sat on a mat</answer>"
    assert total("f1", said, ["dog", "cat on the mat"]) == pytest.approx(6 / 7)
    assert total("f1", said, "dog") == 0.0
    assert total("f1", "nothing", "dog") == 0.0
    assert total("f1", "<answer>the</answer>", "a") == 1.0


def test_bleu_of_hand_counted_ngrams() -> None:
    said = "<answer>the cat is on the mat</answer>"
    truth = "the cat sat on the mat"
    # Precisions 5/6, 3/5, 1/4, 0/3.
    assert total("bleu", said, truth, max_order=3, smooth=False) == pytest.approx(0.5)
    assert total("bleu", said, truth, smooth=False) == 0.0
    assert total("bleu", said, truth) == pytest.approx((1 / 18) ** 0.25)
    assert total("bleu", f"<answer>{truth}</answer>", truth) == pytest.approx(1.0)


def test_bleu_clips_repeated_words_and_punishes_brevity() -> None:
    # Seven times "the", of which the references have at most two.
    said = "<answer>the the the the the the the</answer>"
    truth = ["The cat is on the mat", "There is a cat on the mat"]
    assert total("bleu", said, truth, max_order=1) == pytest.approx(2 / 7)
    short = "<answer>the cat</answer>"
    assert total("bleu", short, "the cat sat on", max_order=1) == pytest.approx(math.exp(-1))
    assert total("bleu", "<answer></answer>", "x") == 0.0


@pytest.mark.parametrize("name", ["exact_match", "f1", "bleu"])
def test_an_answer_cannot_be_judged_without_a_right_one(name: str) -> None:
    with pytest.raises(RewardError, match=f"'{name}' failed on episode e: ValueError: the ground"):
        total(name, "<answer>x</answer>", None)


CONVERSATION = [
    {"from": "human", "value": "You do things. Action: none"},
    {"from": "gpt", "value": "OK.", "loss": False},
    {"from": "human", "value": "Go."},
    {"from": "gpt", "value": "Thought:\nI do.\n\nAction:\nget  1 log\n"},
    {"from": "gpt", "value": "<act>Craft 4 planks.</act>"},
]


@pytest.mark.parametrize(
    "truth",
    [
        ["get 1 log", "craft 4 planks"],
        '["Get 1 Log", "craft 4 planks"]',
        CONVERSATION,
        json.dumps(CONVERSATION),
        "<act>get 1 log</act> and <act>craft 4 planks</act>",
    ],
)
def test_reference_actions_are_found_in_every_form_of_ground_truth(truth) -> None:
    done = ("inventory", "GET 1 log", "inventory", "craft 4 planks")
    assert total("action_similarity", "", truth, tuple(Said("", a) for a in done)) == 1.0
    assert total("action_similarity", "", truth, (Said("", "craft 4 planks"),)) == 0.0
    assert total("action_similarity", "", truth, (Said("", "get 1 log"), Said("x"))) == 0.5
    assert total("action_similarity", "Action: get 1 log", truth) == 0.5


def test_without_a_reference_the_likeness_is_in_the_middle() -> None:
    assert total("action_similarity", "", None, maximum=1.0, minimum=-0.5) == 0.25


@pytest.mark.bug("B35")
def test_normalizing_an_action_keeps_its_words_apart() -> None:
    turns = (Said("", "get 1\n\tlog"),)
    assert total("action_similarity", "", ["get 1 log"], turns) == 1.0
    assert total("action_similarity", "", ["get1log"], turns) == 0.0


def test_agentgym_adds_its_weighted_parts() -> None:
    said = words(50) + "<act>get 1 log</act>"
    turns = (Said(said, "get 1 log", 0.75),)
    given = score("agentgym", said, ["get 1 log", "craft 4 planks"], turns)
    assert given.components == pytest.approx(
        {"env": 0.25 * 0.75, "format": 0.25 * 0.25, "length": 0.15 * 0.5, "actions": 0.35 * 0.5}
    )
    assert given.total == pytest.approx(0.1875 + 0.0625 + 0.075 + 0.175)
    assert given.turn_scores == pytest.approx((0.1875,))
    simple = score("agentgym", said, None, turns, format_mode="simple", env_weight=1.0)
    assert simple.components["format"] == 0.25
    assert simple.components["env"] == 0.75


def test_weighted_adds_any_functions_and_their_turns() -> None:
    turns = (Said("a", "x", 0.75), Said("b"))
    given = score(
        "weighted",
        "<answer>no</answer>",
        "yes",
        turns,
        weights={"env": 1.0, "valid_actions": 0.5, "exact_match": 2.0},
        parameters={"exact_match": {"format_score": 0.1}},
    )
    assert given.components == pytest.approx(
        {"env": 0.75, "valid_actions": 0.25, "exact_match": 0.2}
    )
    assert given.total == pytest.approx(1.2)
    assert given.turn_scores == pytest.approx((1.0, 0.0))


def test_the_parts_of_a_weighted_sum_are_checked_before_any_episode() -> None:
    with pytest.raises(ValueError, match="unknown reward function 'f2'"):
        RewardSettings("weighted", {"weights": {"f2": 1.0}})
    with pytest.raises(RewardError, match="parameters for 'f1', which has no weight"):
        RewardSettings("weighted", {"weights": {"env": 1.0}, "parameters": {"f1": {}}})
    with pytest.raises(RewardError, match="'env' has no parameter 'x'"):
        RewardSettings("weighted", {"weights": {"env": 1.0}, "parameters": {"env": {"x": 1}}})
    with pytest.raises(RewardError, match="'weighted' needs the parameter 'weights'"):
        RewardSettings("weighted")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["<think>", "</think>", "<act>", "</act>", "a ", "<", "\n"])))
def test_blocks_are_closed_by_their_own_tag_and_in_order(parts) -> None:
    text = "".join(parts)
    position = 0
    for block in tagged_blocks(text, ["think", "act"]):
        opened = text.index(f"<{block.tag}>", position)
        closed = text.index(f"</{block.tag}>", opened)
        assert text[opened:closed].removeprefix(f"<{block.tag}>").strip() == block.content
        position = closed


def test_blocks_of_a_huge_text_are_found_in_one_pass() -> None:
    assert tagged_blocks("<think>" * 300_000 + "</act>" * 300_000, ["think", "act"]) == []
