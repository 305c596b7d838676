"""The pool and its plug-in against vLLM itself, on CPU: the numbers are those of transformers.

Needs an interpreter that has vLLM, named in MANUS_JAX_VLLM_PYTHON. One server serves all tests, of
a model whose embedding is tied to its head, which is the harder case on CPU.
"""

import os
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from manus_jax.config.server_settings import VllmSettings
from manus_jax.data.chat import train_tokenizer
from manus_jax.engines.protocol import EngineError, Request, Sampling
from manus_jax.models import huggingface
from manus_jax.models.architecture import Architecture
from manus_jax.models.lora import Lora, merge, merged_params
from manus_jax.models.transformer import Compute, Transformer, init_adapters, init_params
from manus_jax.vllm.client import RequestRefused, VllmServer
from manus_jax.vllm.open_pool import open_vllm
from manus_jax.weights.manifest import version_directory

PYTHON = os.environ.get("MANUS_JAX_VLLM_PYTHON")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not PYTHON, reason="MANUS_JAX_VLLM_PYTHON does not name an interpreter that has vLLM"
    ),
]
ARCH = Architecture(
    "qwen2", 320, 128, 256, 2, 4, 2, 32, qkv_bias=True, initializer_range=0.1, max_positions=512
)
PROMPT = tuple(range(5, 25))
LONG_PROMPT = tuple(5 + n % 250 for n in range(400))


class Trained:
    """A pool, and the weights that it holds."""

    def __init__(self, root):
        self.root, self.published = root, 0
        tokenizer = root / "tokenizer"
        tokenizer.mkdir()
        train_tokenizer(["the quick brown fox jumps over the lazy dog"] * 3, 300, tokenizer)
        self.card = huggingface.new_card(ARCH, tokenizer)
        self.params = init_params(Transformer, ARCH, Compute(), 0)
        settings = VllmSettings(servers=1, python=PYTHON, weights_dir=str(root / "weights"))
        self.pool = open_vllm(
            self.card, self.params, settings, slots=8, dtype="float32", max_length=512
        )

    def next_number(self):
        self.published += 1
        return self.published

    def train(self, share=1.0):
        """Other weights: that share of them moves."""
        version = self.next_number()
        rng = np.random.default_rng(version)
        moved = lambda x: np.where(rng.random(x.shape) < share, x * 1.3 + 0.02, x)
        self.params = jax.tree.map(
            lambda x: jax.device_put(moved(np.asarray(x)).astype(np.float32)), self.params
        )
        self.pool.update_weights(self.params, version)
        return version

    def expected(self, prompt, generation, temperature):
        """Log-probs of the generated tokens, as transformers computes them."""
        torch = pytest.importorskip("torch")
        from transformers import AutoModelForCausalLM

        directory = self.root / f"hf-{self.pool.version}"
        if not directory.exists():
            huggingface.save_hf(self.params, self.card, directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        ids = torch.tensor([[*prompt, *generation.token_ids]])
        with torch.no_grad():
            log_probs = torch.log_softmax(model(ids).logits[0] / temperature, -1)
        places = range(len(prompt) - 1, ids.shape[1] - 1)
        return [float(log_probs[place, ids[0, place + 1]]) for place in places]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    trained = Trained(tmp_path_factory.mktemp("vllm"))
    yield trained
    trained.pool.close()


def ask(prompt=PROMPT, seed=1, tokens=16, temperature=1.0, **how):
    sampling = Sampling(max_tokens=tokens, temperature=temperature, **how)
    return Request(prompt, sampling, seed, f"{prompt[:3]}")


def serving_pids():
    """Processes that this one started with `manus_jax.serve`."""
    tasks = Path(f"/proc/{os.getpid()}/task")
    children = [pid for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
    command = lambda pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return [int(pid) for pid in children if "manus_jax.serve" in command(pid)]


def in_flight(pool):
    """A long generation that a server works on."""
    future = pool.submit(ask(tokens=450))
    while not pool.metrics()["in_flight"]:
        time.sleep(0.001)
    return future


def before_steps(monkeypatch, actions, method_name="_call"):
    """Does something, once, right before a step of the next update is asked for."""
    call = getattr(VllmServer, method_name)

    def watched(self, method, path, *rest):
        actions.pop(path.partition("?")[0], lambda: None)()
        return call(self, method, path, *rest)

    monkeypatch.setattr(VllmServer, method_name, watched)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_distribution_that_is_sampled_from(trained, temperature):
    made = trained.pool.submit(ask(temperature=temperature)).result(120)
    assert made.versions == (trained.pool.version,) * 16
    np.testing.assert_allclose(
        made.log_probs, trained.expected(PROMPT, made, temperature), atol=1e-4
    )


def test_a_seed_determines_the_sample(trained):
    made = [trained.pool.submit(ask(seed=seed)).result(120).token_ids for seed in (3, 3, 4)]
    assert made[0] == made[1] != made[2]


def test_it_stops_at_the_stop_ids_and_keeps_the_stop_token(trained):
    whole = trained.pool.submit(ask(seed=6)).result(120)
    stop = whole.token_ids[5]
    cut = trained.pool.submit(ask(seed=6, stop_ids=(stop,))).result(120)
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert whole.finish_reason == "length"


@pytest.mark.parametrize("share", [1.0, 0.01])
def test_new_weights_are_the_ones_that_sample(trained, share):
    trained.pool.submit(ask(LONG_PROMPT)).result(120)  # its keys and values are cached now
    version = trained.train(share)
    for prompt in (PROMPT, LONG_PROMPT):
        made = trained.pool.submit(ask(prompt)).result(120)
        assert made.versions == (version,) * 16
        np.testing.assert_allclose(made.log_probs, trained.expected(prompt, made, 1.0), atol=1e-4)


def test_merged_adapters_are_the_ones_that_sample(trained):
    lora, rng = Lora(3, 6.0, ("q_proj", "down_proj")), np.random.default_rng(5)
    adapters = jax.tree.map(
        lambda x: 0.1 * rng.normal(size=x.shape).astype(np.float32),
        init_adapters(Transformer, ARCH, lora, 0),
    )
    version = trained.next_number()
    trained.pool.update_weights(merge(trained.params, adapters, lora), version)
    trained.params = merged_params(trained.params, adapters, lora)
    made = trained.pool.submit(ask()).result(120)
    assert made.versions == (version,) * 16
    np.testing.assert_allclose(made.log_probs, trained.expected(PROMPT, made, 1.0), atol=1e-4)


def test_many_long_prompts_at_once_are_all_served(trained):
    """More prompt tokens than vLLM takes in one step, with seeds, which once ended its engine."""
    prompts = [tuple(5 + (n * k) % 250 for n in range(400)) for k in range(1, 13)]
    futures = [trained.pool.submit(ask(prompt, seed=n)) for n, prompt in enumerate(prompts)]
    made = [future.result(300) for future in futures]
    assert all(len(generation.token_ids) == 16 for generation in made)
    again = trained.pool.submit(ask(prompts[7], seed=7)).result(120)
    assert again.token_ids == made[7].token_ids
    np.testing.assert_allclose(again.log_probs, made[7].log_probs, atol=1e-4)


def test_tokens_per_second_and_the_prefix_cache_are_in_the_metrics(trained):
    for seed in (21, 22):  # the second finds the first one's prompt
        trained.pool.submit(ask(LONG_PROMPT, seed=seed)).result(120)
    (member,) = trained.pool._members.values()
    name = f"server/{member.server.url.removeprefix('http://')}"
    deadline = time.monotonic() + 60
    while not (numbers := trained.pool.metrics())[f"{name}/prefix_cache_hit_rate"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert 0 < numbers[f"{name}/prefix_cache_hit_rate"] < 1
    assert numbers[f"{name}/tokens_per_second"] > 0


def test_a_small_change_travels_as_a_small_file(trained):
    version = trained.train(0.001)
    directory = version_directory(trained.root / "weights" / "versions", version)
    parameters = sum(x.nbytes for x in jax.tree.leaves(trained.params))
    assert (directory / "delta.safetensors").stat().st_size < 0.03 * parameters


def test_a_generation_in_flight_continues_with_the_new_weights(trained, monkeypatch):
    for _ in range(5):  # on a busy machine it may have ended before the pause is asked for
        begun = []
        before_steps(monkeypatch, {"/pause": lambda: begun.append(in_flight(trained.pool))})  # noqa: B023
        before = trained.pool.version
        after = trained.train()
        made = begun[0].result(120)
        assert len(made.token_ids) == 450
        if made.versions != (before,) * 450:
            break
    assert set(made.versions) <= {before, after}
    assert made.versions[-1] == after
    assert list(made.versions) == sorted(made.versions)


def test_a_cancelled_generation_ends_on_the_server(trained):
    assert in_flight(trained.pool).cancel()
    assert trained.pool.submit(ask()).result(120).token_ids


def test_a_request_that_vllm_refuses_fails_at_once(trained):
    with pytest.raises(EngineError, match=r"prompt ids must be in 0\.\.319"):
        trained.pool.submit(ask((1, 99_999)))
    (member,) = trained.pool._members.values()
    with pytest.raises(RequestRefused, match="out of vocabulary"):
        member.server.generate(ask((1, 99_999)), "refused", lambda _: 0, None)
    assert trained.pool.submit(ask()).result(120).token_ids


def test_a_damaged_version_is_not_loaded_and_the_old_one_keeps_serving(trained):
    pool = trained.pool
    held = next(iter(pool._members.values())).server
    number = trained.next_number()
    published = pool._publisher.publish(jax.tree.map(lambda x: x + 1, trained.params), number)
    file = version_directory(pool._publisher.root, number) / "delta.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)
    with pytest.raises(EngineError, match="is damaged"):
        held.load(pool._publisher.root, published.identity)
    made = pool.submit(ask()).result(120)
    np.testing.assert_allclose(made.log_probs, trained.expected(PROMPT, made, 1.0), atol=1e-4)
    data[len(data) // 2] ^= 16
    file.write_bytes(data)


def test_the_only_server_killed_in_an_update_is_waited_for_and_comes_back_with_that_version(
    trained, monkeypatch, caplog
):
    """With a generation in flight, after the weights were loaded and before that was finished."""
    pool = trained.pool
    (pid,) = serving_pids()
    begun = []
    actions = {
        "/pause": lambda: begun.append(in_flight(pool)),
        "/finish_weight_update": lambda: os.killpg(pid, signal.SIGKILL),
    }
    before_steps(monkeypatch, actions)
    version = trained.train()
    made = pool.submit(ask()).result(600)
    assert made.versions == (version,) * 16
    np.testing.assert_allclose(made.log_probs, trained.expected(PROMPT, made, 1.0), atol=1e-4)
    assert begun[0].result(600).versions == (version,) * 450
    assert serving_pids() != [pid]
    assert "does not answer" in caplog.text
    assert "no vLLM server is in service: waiting up to 600 s for one" in caplog.text
    assert "is in service again" in caplog.text
