"""Rewards by name; the error of a failed function names it and the episode."""

import math

import pytest
from reward_turns import Said

from manus_jax.errors import UserError
from manus_jax.rewards import (
    FACTS,
    REWARDS,
    RewardError,
    RewardSettings,
    Score,
    compute,
)

TURNS = (Said("a", "x", 0.25), Said("b", "y", 0.5))


@pytest.fixture(autouse=True)
def registry_as_it_was():
    with REWARDS.restored():
        yield


def registered(result):
    @REWARDS.register("mine")
    def mine(solution_str, ground_truth, **kwargs):
        return result() if callable(result) else result

    return RewardSettings("mine")


def test_the_rewards_of_the_project_are_there_by_name() -> None:
    wanted = {"env", "goal", "format", "length", "exact_match", "f1", "bleu", "agentgym"}
    assert wanted | {"action_similarity", "weighted"} <= set(REWARDS)


@pytest.mark.bug("B6")
def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(UserError, match=r"unknown reward function 'f2'.*\(known: .*f1.*bleu"):
        REWARDS["f2"]
    with pytest.raises(UserError, match="unknown reward function 'f2'"):
        RewardSettings("f2")


def test_a_registered_function_is_given_the_episode_and_its_facts() -> None:
    seen = {}

    @REWARDS.register("mine")
    def compute_score(solution_str, ground_truth, *, bonus=0.0, **kwargs):
        seen.update(kwargs, solution=solution_str, truth=ground_truth)
        return 0.5 + bonus

    settings = RewardSettings("mine", {"bonus": 0.25})
    facts = dict.fromkeys(FACTS, "f") | {"turns": TURNS}
    score = compute(settings, "e", "said", "truth", **facts)
    assert score == Score(0.75, {"mine": 0.75})
    assert set(seen) == {*FACTS, "solution", "truth"}
    assert (seen["solution"], seen["truth"]) == ("said", "truth")


def test_a_name_is_given_once() -> None:
    registered(1.0)
    with pytest.raises(UserError, match="the reward function 'mine' is already registered"):
        registered(2.0)


def test_parameters_are_checked_before_any_episode() -> None:
    with pytest.raises(RewardError, match=r"'bleu' has no parameter 'order'; it has tag, max_ord"):
        RewardSettings("bleu", {"order": 3})
    with pytest.raises(RewardError, match=r"'env' has no parameter 'env_reward'; it has scale"):
        RewardSettings("env", {"env_reward": 3})
    with pytest.raises(RewardError, match="'pattern' needs the parameter 'pattern'"):
        RewardSettings("pattern")


def test_per_turn_scores_sum_to_the_total() -> None:
    score = compute(registered([0.1, 0.2]), "e", "", None, TURNS)
    assert score.turn_scores == (0.1, 0.2)
    assert score.total == pytest.approx(0.3)


def test_a_function_that_raises_names_itself_and_the_episode() -> None:
    settings = registered(lambda: 1 / 0)
    with pytest.raises(RewardError) as caught:
        compute(settings, "textcraft_31 #4", "", None, TURNS)
    assert str(caught.value) == (
        "reward function 'mine' failed on episode textcraft_31 #4: "
        "ZeroDivisionError: division by zero"
    )


@pytest.mark.parametrize(
    ("result", "what"),
    [
        (math.nan, "its score is nan"),
        (-math.inf, "its score is -inf"),
        (None, "its score is not a number but NoneType"),
        ("1x", "its score is not a number but str"),
        (Score(math.nan), "its total is nan"),
        (Score(1.0, {"part": math.inf}), "its component 'part' is inf"),
        ([0.0, math.nan], "its turn score is nan"),
        ([0.0, 1.0, 2.0], "it gave 3 turn scores for 2 turns"),
        (Score(1.0, {}, (1.0,)), "it gave 1 turn scores for 2 turns"),
    ],
)
def test_scores_that_are_not_finite_numbers_are_errors_and_never_zero(result, what) -> None:
    with pytest.raises(RewardError, match=f"'mine' failed on episode e: {what}"):
        compute(registered(result), "e", "", None, TURNS)


def test_a_number_of_another_library_is_a_number() -> None:
    np = pytest.importorskip("numpy")
    assert compute(registered(np.float32(0.5)), "e", "", None, TURNS).total == 0.5


@pytest.mark.parametrize(
    ("function", "parameters", "message"),
    [
        ("env", {"scale": "2"}, "scale = '2' must be float"),
        ("env", {"scale": float("nan")}, "scale = nan must be float"),
        ("env", {"scale": True}, "scale = True must be float"),
        ("env", {"clip": "all"}, r"clip = 'all' must be (float \| None|Optional\[float\])"),
        ("format", {"mode": "fulll"}, "mode = 'fulll' must be .*'full', 'simple'"),
        ("length", {"target": 0}, "target must be at least 1"),
        ("length", {"target": 2.5}, "target = 2.5 must be int"),
        ("length", {"tolerance": 1.0}, r"tolerance in \[0, 1\)"),
        ("length_penalty", {"shape": "cubic"}, "shape = 'cubic' must be"),
        ("bleu", {"max_order": 0}, "max_order must be at least 1"),
        ("pattern", {"pattern": "("}, "unterminated subpattern"),
        ("agentgym", {"length_target": 0}, "target must be at least 1"),
        ("agentgym", {"format_mode": "none"}, "unknown mode 'none'"),
        ("weighted", {"weights": ["env"]}, r"weights = \['env'\] must be"),
        ("weighted", {"weights": {"env": "1"}}, "weights = .* must be"),
        ("weighted", {"weights": {"envv": 1.0}}, "unknown reward function 'envv'"),
        (
            "weighted",
            {"weights": {"length": 1.0}, "parameters": {"length": {"target": 0}}},
            "target must be at least 1",
        ),
    ],
)
def test_parameters_that_cannot_work_are_refused_before_any_episode(
    function: str, parameters: dict, message: str
) -> None:
    with pytest.raises(
        RewardError if "unknown reward" not in message else UserError, match=message
    ):
        RewardSettings(function, parameters)


def test_every_reward_of_the_project_accepts_its_defaults() -> None:
    needed = {
        "pattern": {"pattern": "a"},
        "weighted": {"weights": {"env": 1, "f1": 0.5}},
        "judge": {"model": "m@http://127.0.0.1:1/v1", "rubric": __file__},
    }
    for name in list(REWARDS):
        RewardSettings(name, needed.get(name, {}))
