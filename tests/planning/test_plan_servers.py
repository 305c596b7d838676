"""vLLM's share of a GPU in a plan: weights, episodes, and what to set if it is too small."""

import pytest
from planned_runs import arguments, write_tiny

from manus_jax import plan
from manus_jax.config.binding import ConfigError
from manus_jax.planning.architectures import find_architecture
from manus_jax.planning.chips import GIB
from manus_jax.planning.servers import plan_servers
from manus_jax.planning.tables import describe_servers

QWEN3_8B = find_architecture("qwen3-8b")


@pytest.mark.parametrize("tensor_parallel, heads", [(1, 8), (2, 4), (16, 1)])
def test_the_cache_gets_the_memory_besides_the_weights(tensor_parallel, heads):
    made = plan_servers(QWEN3_8B, 80 * GIB, 0.5, tensor_parallel, 2, 10_000)
    # 8,190,735,360 parameters in two bytes; keys and values of 36 layers with heads of 128. A GPU
    # has at least one of the eight heads.
    weights = 2 * 8_190_735_360 / tensor_parallel
    token = 2 * 36 * heads * 128 * 2
    assert (made.weights, made.token) == (weights, token)
    assert made.tokens == (40 * 2**30 - int(weights)) // token
    assert made.episodes == made.tokens // 10_000
    assert f"{made.tokens:,} tokens or {made.episodes:,} episodes" in describe_servers(made)


def test_a_share_that_is_too_small_is_an_error_with_the_arithmetic():
    with pytest.raises(ConfigError) as caught:
        plan_servers(QWEN3_8B, 80 * GIB, 0.2, 1, 2, 11_264)
    assert str(caught.value) == (
        "vLLM's share of a GPU, 0.2 x 80.00 = 16.00 GiB, does not hold weights of 15.26 GiB and "
        "the KV cache of an episode, 11264 tokens x 144 KiB = 1.55 GiB; set "
        "vllm.gpu_memory_utilization to at least 0.22 or vllm.tensor_parallel to 2"
    )
    assert plan_servers(QWEN3_8B, 80 * GIB, 0.22, 1, 2, 11_264).episodes == 1
    with pytest.raises(ConfigError, match=r"GiB; set vllm.tensor_parallel to 2$"):
        plan_servers(QWEN3_8B, 16 * GIB, 1.0, 1, 2, 11_264)


def test_plan_refuses_it_before_it_compiles(tmp_path):
    shares = ("vllm.gpu_memory_utilization = 0.00002", "vllm.learner_memory_fraction = 0.9")
    args = arguments("cuda:1x80GB", write_tiny(tmp_path), "vllm.gpus = 1", *shares)
    with pytest.raises(ConfigError, match=r"2e-05 x 79\.11 = 0\.00 GiB, does not hold weights"):
        plan.main(args)
