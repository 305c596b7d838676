"""Episodes on real servers: exact tokens, one mask, limits and turns."""

import copy
import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from scripted_engine import ScriptedEngine, oracle, says, spec_of

from envs.maze.game import MazeGame
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.config.settings import RolloutSettings
from manus_jax.data.chat import ChatTemplateError
from manus_jax.engines.protocol import Sampling
from manus_jax.rollout.episode import play_episode
from manus_jax.rollout.llm_player import EngineAgent, turn_seed
from manus_jax.rollout.trajectory import FailedEpisode, Trajectory, episode_specs

EngineOf = Callable[..., ScriptedEngine]
UP = "Thought:\nup\n\nAction:\nmove up"


def settings(**changes: object) -> RolloutSettings:
    usual = {"max_turns": 40, "max_total_tokens": 8192}
    return RolloutSettings(prompt_layout="acknowledged", **(usual | changes))


def played(
    engine: ScriptedEngine, pool: EnvironmentPool, item_id: str, seed: int = 0, **changes: object
):
    agent = EngineAgent(engine, engine.tokenizer, seed)
    return play_episode(spec_of(item_id), agent, pool, settings(**changes))


@pytest.mark.bug("B3", "B19", "B23")
@pytest.mark.parametrize("item_id", ["maze_3", "textcraft_7", "wordle_11"])
def test_trained_tokens_are_exactly_the_sampled_tokens(
    item_id: str, engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    engine = engine_of(oracle())
    trajectory = played(engine, pool, item_id)
    assert isinstance(trajectory, Trajectory)
    assert (trajectory.success, trajectory.env_reward, trajectory.end_reason) == (True, 1.0, "done")
    assert sum(turn.reward for turn in trajectory.turns) == 1.0
    [segment] = trajectory.segments
    # The last prompt with the last generation is the whole stream: no padding, nothing after it.
    last = (*engine.requests[-1].prompt_ids, *engine.generations[-1].token_ids)
    assert tuple(segment.token_ids) == last
    assert len(trajectory.turns) == len(engine.generations)
    mask = np.zeros(len(segment), bool)
    for number, (turn, request, made) in enumerate(
        zip(trajectory.turns, engine.requests, engine.generations, strict=True)
    ):
        span = slice(turn.start, turn.stop)
        assert tuple(segment.token_ids[: turn.start]) == request.prompt_ids
        assert tuple(segment.token_ids[span]) == made.token_ids
        assert tuple(segment.log_probs[span]) == made.log_probs
        assert tuple(segment.versions[span]) == made.versions
        assert set(segment.turn_ids[span]) == {number}
        mask[span] = True
    assert (segment.loss_mask == mask).all()
    assert (segment.log_probs[~mask] == 0).all()
    assert (segment.versions[~mask] == -1).all()
    assert (segment.turn_ids[~mask] == -1).all()
    assert trajectory.prompts_extended == len(trajectory.turns) - 1
    assert trajectory.prompts_forked == 0
    assert engine.open_sessions == set()


@pytest.mark.bug("B19")
def test_every_turn_is_trained_with_its_end_token_and_its_text_is_that_of_the_tokens(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    engine = engine_of(oracle())
    trajectory = played(engine, pool, "maze_7")
    [segment] = trajectory.segments
    stop_id = engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert len(trajectory.turns) > 3
    for turn in trajectory.turns:
        assert segment.token_ids[turn.stop - 1] == stop_id
        assert segment.loss_mask[turn.stop - 1]
        assert engine.tokenizer.decode(segment.token_ids[turn.start : turn.stop - 1]) == turn.text
    assert segment.loss_mask[-1]


@pytest.mark.bug("B17")
def test_the_prompt_and_the_observations_are_given_and_the_text_matches_the_log(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    engine = engine_of(oracle())
    trajectory = played(engine, pool, "maze_7")
    [segment] = trajectory.segments
    wanted = "".join(
        f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n"
        for message in trajectory.opening
    )
    for turn in trajectory.turns[:-1]:
        wanted += f"<|im_start|>assistant\n{turn.text}<|im_end|>\n"
        wanted += f"<|im_start|>user\n{turn.observation}<|im_end|>\n"
    wanted += f"<|im_start|>assistant\n{trajectory.turns[-1].text}<|im_end|>"
    assert engine.tokenizer.decode(segment.token_ids) == wanted
    assert not segment.loss_mask[: trajectory.turns[0].start].any()


@pytest.mark.bug("B4")
def test_the_item_of_the_row_is_the_item_that_is_played(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    engine = engine_of(says(UP))
    for item in (7, 3, 7):
        trajectory = played(engine, pool, f"maze_{item}", max_turns=1)
        assert trajectory.first_observation == MazeGame().reset(item)


@pytest.mark.bug("B5")
def test_a_group_is_one_item_and_its_members_differ_in_their_uid() -> None:
    tasks = [spec_of("maze_7").task, spec_of("maze_3").task, spec_of("maze_7").task]
    specs = episode_specs(tasks, group_size=3, prefix="12/")
    assert [spec.task.item for spec in specs] == [7, 7, 7, 3, 3, 3, 7, 7, 7]
    groups = [spec.group_id for spec in specs]
    assert [groups.count(group) for group in dict.fromkeys(groups)] == [3, 3, 3]
    assert len({spec.uid for spec in specs}) == 9
    assert all(spec.uid.startswith("12/") for spec in specs)


@pytest.mark.bug("B10")
def test_an_invalid_action_is_answered_counted_and_never_sent(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    answers = ["I would rather not.", UP, "<act>move up</act>"]
    engine = engine_of(says(answers))
    trajectory = played(engine, pool, "maze_3", max_turns=3, invalid_action_penalty=0.25)
    assert [turn.valid for turn in trajectory.turns] == [False, True, False]
    assert trajectory.turns[0].observation.startswith('Invalid action: there is no "Action:".')
    told = engine.observation(engine.requests[1])
    assert told == trajectory.turns[0].observation
    assert [turn.penalty for turn in trajectory.turns] == [-0.25, 0, -0.25]
    assert trajectory.turn_rewards == (-0.25, 0, -0.25)
    assert (trajectory.env_reward, trajectory.episode_reward) == (0, -0.5)
    assert trajectory.end_reason == "max_turns"


@pytest.mark.bug("B23")
def test_a_turn_that_is_cut_is_closed_with_tokens_that_are_not_trained(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    engine = engine_of(says(UP), stops=False)
    trajectory = played(
        engine, pool, "maze_3", max_turns=2, max_tokens_per_turn=20, min_turn_tokens=1
    )
    [segment] = trajectory.segments
    stop_id = engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
    first, second = trajectory.turns
    assert first.cut and second.cut
    assert first.stop - first.start == second.stop - second.start == 20
    assert stop_id not in segment.token_ids[first.start : first.stop]
    assert segment.token_ids[first.stop] == stop_id
    assert not segment.loss_mask[first.stop : second.start].any()
    assert segment.loss_mask.sum() == 40


def test_a_model_that_never_stops_is_bounded_in_every_turn_and_in_all(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    engine = engine_of(says("on and on "), stops=False)
    trajectory = played(engine, pool, "maze_3", max_tokens_per_turn=100, max_total_tokens=800)
    assert trajectory.end_reason == "context"
    assert 1 < len(trajectory.turns) < 40
    [segment] = trajectory.segments
    assert len(segment) <= 800
    assert all(turn.stop - turn.start <= 100 for turn in trajectory.turns)
    # What was heard after the last turn and never answered is no part of the sample.
    assert segment.loss_mask[-1]


def test_the_engines_context_is_a_limit_too(engine_of: EngineOf, pool: EnvironmentPool) -> None:
    engine = engine_of(says(UP), max_length=700)
    trajectory = played(engine, pool, "maze_3", max_total_tokens=10**6)
    assert trajectory.end_reason == "context"
    assert len(trajectory.segments[0]) <= 700


def test_a_prompt_that_fills_the_context_is_a_failure_and_not_tried_again(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    engine = engine_of(says(UP), max_length=300)
    failed = played(engine, pool, "maze_3")
    assert isinstance(failed, FailedEpisode)
    assert (failed.kind, failed.attempts) == ("prompt_too_long", 1)
    assert "raise rollout.max_total_tokens" in failed.error
    assert engine.requests == []


@pytest.mark.bug("B29")
def test_a_prompt_that_leaves_room_for_exactly_one_turn_is_played(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    probe = engine_of(says(UP))
    opening = len(played(probe, pool, "maze_3", max_turns=1).segments[0].token_ids)
    turn = len(probe.generations[0].token_ids)
    trajectory = played(
        engine_of(says(UP), max_length=opening), pool, "maze_3", max_tokens_per_turn=turn
    )
    assert (len(trajectory.turns), trajectory.end_reason) == (1, "context")
    assert not trajectory.turns[0].cut
    shorter = played(
        engine_of(says(UP), max_length=opening - 1), pool, "maze_3", max_tokens_per_turn=turn,
        min_turn_tokens=turn,
    )  # fmt: skip
    assert shorter.kind == "prompt_too_long"


@pytest.mark.bug("B29")
def test_an_observation_longer_than_its_limit_is_cut_in_the_middle(
    engine_of: EngineOf, pool: EnvironmentPool, chat_tokenizer
) -> None:
    def seen(**limit: int) -> Trajectory:
        return played(engine_of(oracle()), pool, "textcraft_7", **limit)

    whole, trajectory = seen(), seen(max_observation_tokens=60)
    told = trajectory.first_observation
    assert "characters are left out here" in told
    assert len(chat_tokenizer(told)["input_ids"]) <= 60
    assert told.startswith("Crafting") and told.endswith(whole.first_observation[-5:])
    assert trajectory.success
    assert len(seen(max_observation_chars=50).first_observation) < 110
    assert seen(max_observation_tokens=1).first_observation.strip().startswith("[...")


def test_memory_of_some_turns_forks_and_trains_every_token_once(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    engine = engine_of(oracle())
    trajectory = played(engine, pool, "maze_7", memory_turns=2)
    turns = len(trajectory.turns)
    assert trajectory.success and turns == 7
    # Turns 0, 1 and 2 fit into one stream; each one after that needs a new prompt.
    assert len(trajectory.segments) == turns - 2
    assert (trajectory.prompts_extended, trajectory.prompts_forked) == (2, turns - 3)
    trained = [int(turn) for s in trajectory.segments for turn in s.turn_ids[s.loss_mask]]
    sampled = [n for n, made in enumerate(engine.generations) for _ in made.token_ids]
    assert trained == sampled
    for turn, request, made in zip(
        trajectory.turns, engine.requests, engine.generations, strict=True
    ):
        segment = trajectory.segments[turn.segment]
        assert tuple(segment.token_ids[: turn.stop]) == (*request.prompt_ids, *made.token_ids)
    last = engine.tokenizer.decode(trajectory.segments[-1].token_ids)
    assert "[4 earlier turns are left out here." in last
    assert trajectory.first_observation in last
    assert trajectory.turns[3].observation in last  # what turn 4, the first one kept, answers
    assert trajectory.turns[2].text not in last
    # The kept turns stand there with their own tokens, given and not trained.
    for kept in (4, 5):
        ids = engine.generations[kept].token_ids
        stream = tuple(trajectory.segments[-1].token_ids)
        at = next(i for i in range(len(stream)) if stream[i : i + len(ids)] == ids)
        assert not trajectory.segments[-1].loss_mask[at : at + len(ids)].any()
    assert engine.open_sessions == set()
    assert len({request.session for request in engine.requests}) == len(trajectory.segments)


def test_memory_of_no_turn_shows_the_newest_observation_alone(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    engine = engine_of(says(UP))
    trajectory = played(engine, pool, "maze_7", memory_turns=0, max_turns=3)
    assert len(trajectory.segments) == 3
    text = engine.tokenizer.decode(trajectory.segments[2].token_ids)
    assert text.count("move up") == 2  # in the list of actions, and in the new turn
    assert trajectory.turns[1].observation in text


def test_seeds_depend_on_the_run_the_episode_and_the_turn_alone(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    digest = hashlib.sha256(b"5/2/maze_3#0").digest()
    assert turn_seed(5, "maze_3#0", 2) == int.from_bytes(digest[:4], "little") // 2
    engine = engine_of(oracle())
    played(engine, pool, "maze_3", seed=5)
    engine.version = 99
    played(engine, pool, "maze_3", seed=5)
    seeds = [request.seed for request in engine.requests]
    half = len(seeds) // 2
    assert seeds[:half] == seeds[half:] == [turn_seed(5, "maze_3#0", n) for n in range(half)]
    assert len(set(seeds)) == half
    many = {
        turn_seed(run, f"e{n}", turn) for run in range(3) for n in range(9) for turn in range(9)
    }
    assert len(many) == 243
    assert all(0 <= seed < 2**31 for seed in many)


def test_requests_have_the_stop_tokens_of_turns_and_the_sampling_settings(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    engine = engine_of(says(UP))
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens_per_turn": 50}
    played(engine, pool, "maze_3", max_turns=1, **sampling)
    [request] = engine.requests
    stop_id = engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert request.sampling == Sampling(0.5, 0.9, 7, max_tokens=50, stop_ids=(stop_id,))


def test_another_format_is_asked_for_and_read(engine_of: EngineOf, pool: EnvironmentPool) -> None:
    engine = engine_of(says("<think>it may help</think>\n<act>inventory</act>"))
    trajectory = played(engine, pool, "textcraft_3", action_format="act", max_turns=1)
    assert trajectory.turns[0].action == "inventory"
    assert trajectory.turns[0].observation.startswith("Inventory:")
    assert "<act>the action</act>" in trajectory.opening[0].content


@pytest.mark.bug("B24")
def test_a_tokenizer_without_chat_template_is_refused_at_once(
    engine_of: EngineOf, chat_tokenizer
) -> None:
    bare = copy.deepcopy(chat_tokenizer)
    bare.chat_template = None
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        EngineAgent(engine_of(says(UP)), bare)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_turns": 0},
        {"max_total_tokens": 1},
        {"memory_turns": -1},
        {"invalid_action_penalty": -0.1},
        {"max_in_flight": 0},
        {"generation_timeout": 0},
        {"max_tokens_per_turn": 0},
        {"min_turn_tokens": 0},
        {"max_observation_chars": 0},
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RolloutSettings(**wrong)


def test_an_action_that_the_environment_refuses_is_marked(
    engine_of: EngineOf, pool: EnvironmentPool
) -> None:
    answers = ["Action: get 1 oak log", "Action: dance"]
    trajectory = played(engine_of(says(answers)), pool, "textcraft_3", max_turns=2)
    assert trajectory.turns[1].observation == "Could not execute dance"
    assert [turn.valid for turn in trajectory.turns] == [True, True]
    assert trajectory.turns[1].rejected and not trajectory.turns[1].accepted
