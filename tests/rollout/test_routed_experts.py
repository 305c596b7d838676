"""The experts that an engine chose, from generations to columns of a batch and packed rows."""

from typing import Any

import numpy as np
import pytest
from scripted_engine import ScriptedEngine, says, small_tokenizer, spec_of

from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.config.settings import RolloutSettings
from manus_jax.engines.protocol import Generation, Request
from manus_jax.learner.packing import PackedRows, RowShape, add_packing
from manus_jax.rollout.batch import RewardAllocation, to_batch
from manus_jax.rollout.episode import play_episode
from manus_jax.rollout.llm_player import EngineAgent
from manus_jax.rollout.token_stream import TokenStream
from manus_jax.rollout.trajectory import Trajectory

ROUTING = (3, 2)  # layers, experts per token


def experts_of(ids: Any) -> np.ndarray:
    """Experts [tokens, layers, experts per token] that tell tokens, layers and ranks apart."""
    scale = np.array([[1, 2], [3, 4], [5, 6]], np.int64)
    return (np.asarray(ids, np.int64)[:, None, None] * scale % 127 + 1).astype(np.uint8)


class RoutingEngine(ScriptedEngine):
    """Returns the experts of all tokens that it has read, without those that are known."""

    def _generate(self, request: Request) -> Generation:
        made = super()._generate(request)
        read = [*request.prompt_ids, *made.token_ids][request.known_experts : -1]
        return Generation(
            made.token_ids, made.log_probs, made.versions, made.finish_reason, experts_of(read)
        )


@pytest.mark.parametrize("memory_turns", [None, 1])
def test_each_token_has_the_experts_that_were_chosen_for_it(
    pool: EnvironmentPool, memory_turns: int | None
) -> None:
    engine = RoutingEngine(small_tokenizer(), says("Action: move up"))
    settings = RolloutSettings(max_turns=3, max_total_tokens=4096, memory_turns=memory_turns)
    trajectory = play_episode(
        spec_of("maze_3"), EngineAgent(engine, engine.tokenizer), pool, settings
    )
    engine.close()
    assert isinstance(trajectory, Trajectory), trajectory
    known = [request.known_experts for request in engine.requests]
    first = len(engine.requests[0].prompt_ids) + len(engine.generations[0].token_ids) - 1
    assert known[:2] == [0, first] and (known[2] > first) == (memory_turns is None)
    for segment in trajectory.segments:
        assert segment.experts is not None and segment.experts.dtype == np.int16
        np.testing.assert_array_equal(segment.experts[:-1], experts_of(segment.token_ids)[:-1])
        assert (segment.experts[-1] == -1).all()  # nothing read the last token

    batch = add_packing(to_batch([trajectory], RewardAllocation(), routing=ROUTING), 4096)
    column = batch.batch["routed_experts"]
    assert column.shape == (len(batch), batch.batch["input_ids"].shape[1], *ROUTING)
    assert (np.asarray(column)[~np.asarray(batch.batch["attention_mask"])] == -1).all()
    rows = PackedRows(batch, RowShape(1, 4096), 2).arrays(["routed_experts"])
    packed, ids = rows["routed_experts"], rows["input_ids"]
    read = packed[..., 0, 0] > 0
    assert read.sum() == sum(len(s) - 1 for s in trajectory.segments)
    np.testing.assert_array_equal(packed[read], experts_of(ids[read]))


def test_experts_that_were_returned_first_are_kept() -> None:
    stream = TokenStream([1, 2])
    generation = lambda ids, experts: Generation(
        ids, (-1.0,) * len(ids), (0,) * len(ids), "stop", experts
    )
    stream.add_sampled(generation((3, 4), experts_of([1, 2, 3])), 0)
    stream.add_given([5])
    stream.add_sampled(generation((6,), experts_of([7, 7, 7, 4, 5])), 1)  # of all tokens again
    stream.add_given([8])
    stream.add_sampled(generation((9,), None), 2)
    segment = stream.frozen()
    assert segment is not None and segment.experts is not None
    np.testing.assert_array_equal(segment.experts[:5], experts_of([1, 2, 3, 4, 5]))
    assert (segment.experts[5:] == -1).all()


def test_episodes_without_experts_have_a_column_of_unknown_ones() -> None:
    stream = TokenStream([1, 2])
    stream.add_sampled(Generation((3,), (-1.0,), (0,), "stop"), 0)
    assert stream.known_experts == 0
    segment = stream.frozen()
    assert segment is not None and segment.experts is None
