"""Rollouts ahead of the learner: every kind of episode that a synchronous run plays, on a real
environment server; the engine says what a script tells it and has no weights."""

import dataclasses
import threading
import time

import lever_env
import numpy as np
import pytest
from env_servers import AppServer
from scripted_engine import ScriptedEngine, small_tokenizer

from envs.server import build_app
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.config.server_settings import EnvPoolSettings
from manus_jax.config.settings import AlgorithmSettings, RolloutSettings, TrainSettings
from manus_jax.data.mixture import Mixture
from manus_jax.data.tasks import Task
from manus_jax.evaluation.eval_sets import EvalSet
from manus_jax.evaluation.play import evaluate_policy
from manus_jax.rewards import RewardSettings
from manus_jax.rollout.admission import Admission
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.trajectory import FailedEpisode
from manus_jax.training.job import Job
from manus_jax.training.learner_specs import make_recipe
from manus_jax.training.rollouts import Rollouts
from manus_jax.training.run_directory import RunDirectory
from manus_jax.training.timer import Timer
from manus_jax.training.trainer import make_batch
from manus_jax.training.validation import Validation, score

TASKS = [Task("lever_env", item, f"lever_env_{item}") for item in range(8)]
HELD_OUT = tuple(Task("lever_env", item, f"lever_env_{item}") for item in range(90, 93))


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture(scope="module")
def pool():
    server = AppServer()
    urls = {"lever_env": [server(build_app(lever_env.SPEC))]}
    with EnvironmentPool(urls, EnvPoolSettings(first_retry=0.01)) as opened:
        yield opened
    server.stop()


@pytest.fixture
def opened(tokenizer, pool):
    """(script, recipe, rollout settings, train settings) → rollouts; they are closed at the end."""
    made = []

    def make(script, recipe="grpo", rollout=None, max_staleness=1, pool=pool, **train):
        usual = {"run_dir": "x", "batch_size": 2, "group_size": 2, "max_staleness": max_staleness}
        algorithm = AlgorithmSettings(recipe=recipe)
        settings = rollout or RolloutSettings(max_turns=3, action_format="raw")
        engine = ScriptedEngine(tokenizer, script)
        engine.version = 0
        agent = EngineAgent(engine, tokenizer)
        eval_set = EvalSet(HELD_OUT)
        rollouts = Rollouts(
            train=TrainSettings(**(usual | train)),
            algorithm=algorithm,
            recipe=make_recipe(algorithm),
            reward=RewardSettings("env", {}),
            settings=settings,
            mixture=Mixture([("levers", TASKS, 1.0)], seed=3),
            engine=engine,
            agent=agent,
            pool=pool,
            evaluate=lambda name, stop: evaluate_policy(agent, pool, eval_set, settings, stop=stop),
        )
        made.append(rollouts)
        return rollouts

    yield make
    for rollouts in made:
        rollouts.close()
        rollouts.engine.close()


def lost(request, observation):
    return "pull one"


def won(request, observation):
    return lever_env.RIGHT[lever_env.ASKED[1] in observation]


TREE = RolloutSettings(
    max_turns=3,
    action_format="raw",
    strategy="tree",
    strategy_parameters={"branch_at": "turns", "turns": [1], "width": 3},
)


@pytest.mark.parametrize(("rollout", "episodes"), [(None, 4), (TREE, 12)])
def test_a_stream_with_staleness_0_makes_the_batches_of_a_synchronous_run_to_the_bit(
    opened, rollout, episodes
):
    """The answers depend on the seed of each request, and their tokens record the version."""

    def script(request, observation):
        return lever_env.LEVERS[request.seed % 3]

    synchronous = opened(script, rollout=rollout, max_staleness=0)
    streaming = opened(script, rollout=rollout)
    streaming._stream._admission = Admission(batch_size=2, max_staleness=0)
    made = {}
    for name, rollouts in (("synchronous", synchronous), ("streaming", streaming)):
        for step in range(1, 5):
            made[name, step], _ = make_batch(rollouts, step, 512, Timer().phase)
            rollouts.update_weights({}, step)
    for step in range(1, 5):
        one, other = made["synchronous", step], made["streaming", step]
        assert len(one) == episodes and list(one.batch) == list(other.batch)
        for key in one.batch:
            np.testing.assert_array_equal(one.batch[key], other.batch[key])
        for key in ("uid", "group_id", "episode_reward", "parent", "branch_turn"):
            assert list(one.non_tensor_batch[key]) == list(other.non_tensor_batch[key])
        versions = np.asarray(one.batch["versions"])[np.asarray(one.batch["loss_mask"])]
        assert versions.min() == step - 1


def test_dynamic_sampling_replaces_groups_without_a_signal(opened):
    """In every second group one of two episodes wins; in the others both do."""

    def script(request, observation):
        group, _, member = request.session.split("/1/")[0].rpartition("#")
        even = int(group.split(":")[0].split("/")[1]) % 2 == 0
        return (lost if even and member == "1" else won)(request, observation)

    rollouts = opened(
        script, recipe="dapo", rollout=RolloutSettings(max_turns=2, action_format="raw")
    )
    dropped = 0
    for step in (1, 2):
        played = rollouts.take(step)
        dropped += played.metrics["rollout/groups_dropped"]
        groups = {}
        for episode in played.episodes:
            groups.setdefault(episode.group_id, set()).add(episode.env_reward)
        assert len(groups) == 2 and all(len(rewards) == 2 for rewards in groups.values())
        assert len(played.outcomes) == 4 + 2 * played.metrics["rollout/groups_dropped"]
        rollouts.update_weights({}, step)
    assert dropped >= 1


def test_remax_plays_a_greedy_episode_with_each_group_and_does_not_train_on_it(opened):
    temperatures = []

    def script(request, observation):
        greedy = request.session.startswith("greedy/")
        temperatures.append((greedy, request.sampling.temperature))
        return (won if greedy else lost)(request, observation)

    rollouts = opened(script, recipe="remax")
    played = rollouts.take(1)
    groups = {episode.group_id for episode in played.episodes}
    assert len(played.episodes) == len(played.outcomes) == 4
    greedy = rollouts.greedy_rewards(1, played)
    assert greedy.keys() == groups
    assert min(greedy.values()) > max(episode.episode_reward for episode in played.episodes)
    assert set(temperatures) == {(True, 0.0), (False, 1.0)}


def test_the_turn_limit_of_a_group_is_that_of_the_step_it_is_drawn_for(opened):
    rollouts = opened(lost, turns_schedule=(1, 2), turns_schedule_steps=2)
    for step in range(1, 5):
        played = rollouts.take(step)
        drawn_for = {e.uid: int(e.group_id.split(".")[0]) for e in played.episodes}
        for episode in played.episodes:
            assert len(episode.turns) == (1 if drawn_for[episode.uid] <= 2 else 2)
        rollouts.update_weights({}, step)


def test_a_validation_keeps_its_weights_while_training_continues_until_admission_stops_it(
    opened, tmp_path
):
    finish, versions = threading.Event(), set()

    def script(request, observation):
        if request.session.startswith("val/"):
            versions.add(rollouts.engine.version)
            assert finish.wait(30)
            versions.add(rollouts.engine.version)
        return lost(request, observation)

    rollouts = opened(script, max_staleness=2)
    validation = Validation(rollouts, RunDirectory(tmp_path, ""), Job())
    rollouts.take(1)
    rollouts.update_weights({}, 1)
    validation.start(1)
    for step in (2, 3, 4):  # staleness 2: three batches may be trained on before new weights
        rollouts.take(step)
        rollouts.update_weights({}, step)
        assert validation.ended(wait=False) is None
    assert rollouts._stream.admission.room == 0  # the engine still has version 1
    finish.set()
    step, metrics = validation.ended(wait=True)
    assert step == 1 and metrics["val/lever_env/success_rate"] == 0 and score(metrics) is not None
    assert versions == {1}
    rollouts.take(5)
    assert rollouts.engine.version == 4
    assert (tmp_path / "trajectories" / "val_1.jsonl").exists()


@pytest.mark.slow
def test_an_episode_whose_environment_hangs_is_ended_and_replaced(opened):
    """The server keeps its place in the pool, and the group its size."""
    hung, released = threading.Event(), threading.Event()

    class Game(lever_env.LeverGame):
        def step(self, action):
            if not hung.is_set():
                hung.set()
                assert released.wait(30)
            return super().step(action)

    server = AppServer()
    spec = dataclasses.replace(lever_env.SPEC, new_game=Game, cheap=False)
    urls = {"lever_env": [server(build_app(spec))]}
    settings = RolloutSettings(max_turns=2, action_format="raw", episode_timeout=2.0)
    try:
        with EnvironmentPool(urls, EnvPoolSettings(first_retry=0.01)) as pool:
            rollouts = opened(lost, rollout=settings, pool=pool)
            rollouts._stream._admission = Admission(batch_size=2, max_staleness=0)
            began = time.monotonic()
            played = rollouts.take(1)
            assert time.monotonic() - began < 20  # without a limit, the call would take 60 s
            late = {o.spec.uid for o in played.outcomes if isinstance(o, FailedEpisode)}
            assert late and played.metrics["rollout/failed/overdue"] == len(late)
            assert {f"{uid}~replacement" for uid in late} <= {e.uid for e in played.episodes}
            assert len(played.episodes) == 4
            assert not any(pool.problems().values())
            rollouts.close()
    finally:
        released.set()
        server.stop()


def test_closing_ends_a_validation(opened):
    begun, never = threading.Event(), threading.Event()

    def script(request, observation):
        begun.set()
        never.wait(60)
        return lost(request, observation)

    rollouts = opened(script)
    validation = rollouts.validate("val")
    assert begun.wait(30)
    began = time.monotonic()
    rollouts.close()
    assert validation.done() and time.monotonic() - began < 30
    never.set()


def test_the_number_of_episodes_in_flight_follows_the_engine(opened):
    settings = RolloutSettings(max_turns=1, max_in_flight=64, min_in_flight=2)
    rollouts = opened(lost, rollout=settings, batch_size=16)
    gauges = {"queue_length": 0.0, "kv_usage": 0.1}
    rollouts.engine.metrics = lambda: gauges
    raised = rollouts.take(1).metrics
    assert raised["concurrency/raised"] >= 1 and raised["concurrency/limit"] > 2
    rollouts.update_weights({}, 1)
    gauges["kv_usage"] = 1.0
    for step in range(2, 9):
        lowered = rollouts.take(step).metrics
        rollouts.update_weights({}, step)
    assert lowered["concurrency/lowered_for/engine"] >= 1
    assert lowered["concurrency/limit"] < raised["concurrency/limit"]


def test_a_synchronous_run_adapts_between_its_steps(opened):
    settings = RolloutSettings(max_turns=1, max_in_flight=64, min_in_flight=2)
    rollouts = opened(lost, rollout=settings, batch_size=8, max_staleness=0)
    first = rollouts.take(1).metrics
    assert first["concurrency/limit"] > 2
    assert rollouts.take(2).metrics["concurrency/limit"] > first["concurrency/limit"]
