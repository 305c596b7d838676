"""The failures that a run survives, and those that end it."""

import numpy as np
import pytest

from manus_jax.learner.update import TrainState, WeightsError, require_finite
from manus_jax.training.failures import (
    FailureBudget,
    TrainingError,
    refuse_fewer_steps,
    require_updates,
)


def step(used=8, played=8, failed=0, **kinds):
    counts = {f"rollout/failed/{kind}": float(count) for kind, count in kinds.items()}
    totals = {"rollout/episodes": played, "rollout/failed": failed, "rollout/used": used}
    return {**{name: float(value) for name, value in totals.items()}, **counts}


def test_only_consecutive_skipped_updates_of_one_learner_end_the_run():
    budget = FailureBudget(3)
    budget.after_updates("policy", [1, 1, 0, 1, 1])
    budget.after_updates("critic", [1, 1])
    budget.after_updates("policy", [0])
    with pytest.raises(TrainingError, match="3 updates of the critic in a row were not finite"):
        budget.after_updates("critic", [1, 0])


def test_a_step_with_failed_episodes_is_reported_and_ends_nothing():
    budget = FailureBudget(1)
    assert budget.after_step(step(), "") is None
    metrics = step(used=6, played=6, failed=2, timeout=2) | {"training/skipped_updates": 1.0}
    warning = budget.after_step(metrics, "timeout: slow")
    assert warning == (
        "2 of 8 episodes were dropped: timeout 2; 1 updates were not finite and have been skipped"
    )


def test_steps_without_a_played_episode_end_the_run_with_the_error_of_one():
    budget = FailureBudget(2)
    lost = step(used=0, played=0, failed=8, engine=8)
    assert "nothing to train on" in budget.after_step(lost, "engine: no")
    assert budget.after_step(step(), "") is None
    budget.after_step(lost, "engine: no")
    with pytest.raises(TrainingError, match=r"2 steps in a row .* \(engine 8\): engine: no"):
        budget.after_step(lost, "engine: no")


def test_steps_whose_groups_are_all_dropped_end_the_run():
    budget = FailureBudget(2)
    uniform = step(used=0)
    budget.after_step(uniform, "")
    with pytest.raises(TrainingError, match="every group was dropped"):
        budget.after_step(uniform, "")


def test_a_model_that_no_update_has_changed_is_not_exported():
    require_updates(TrainState({}, {}, np.int32(5), np.int32(4)), 5)
    with pytest.raises(TrainingError, match="none of 5 steps updated the model"):
        require_updates(TrainState({}, {}, np.int32(5), np.int32(5)), 5)


def test_weights_that_are_not_finite_are_named():
    params = {"layers": {"q_proj": np.ones((2, 2)), "k_proj": np.array([1.0, np.nan])}}
    with pytest.raises(WeightsError, match=r"the model m has weights .* in layers/k_proj"):
        require_finite(params, "the model m")
    require_finite({"embed": np.ones(3)}, "the model m")


def test_a_run_past_its_last_step_is_refused():
    refuse_fewer_steps(3, "train.total_steps", 3)
    with pytest.raises(TrainingError, match=r"at step 3, past train.total_steps = 2; raise it"):
        refuse_fewer_steps(3, "train.total_steps", 2)
