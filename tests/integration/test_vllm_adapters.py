"""LoRA on vLLM itself, on CPU: each version is an adapter. The numbers are those of transformers.

One server serves all tests; the last one kills it.
"""

import dataclasses
import json
import os
import shutil
import signal
import time

import jax
import numpy as np
import pytest
from test_training import arguments
from test_vllm_real import (
    ARCH,
    LONG_PROMPT,
    PROMPT,
    PYTHON,
    ask,
    before_steps,
    in_flight,
    serving_pids,
)
from test_vllm_real import pytestmark as needs_vllm

from manus_jax import train
from manus_jax.config.server_settings import VllmSettings
from manus_jax.data.chat import train_tokenizer
from manus_jax.engines.protocol import EngineError
from manus_jax.models import adapter_files, huggingface
from manus_jax.models.adapter_files import Adaptation, AdapterWeights, fingerprint
from manus_jax.models.lora import Lora
from manus_jax.models.transformer import Compute, Transformer, init_adapters, init_params
from manus_jax.vllm.access import KEY_VARIABLE
from manus_jax.vllm.open_pool import check_servers, open_vllm
from manus_jax.weights.manifest import label_of

pytestmark = needs_vllm
LORA = Lora(3, 6.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))


class Trained:
    """A pool, and the adapters that it holds."""

    def __init__(self, root):
        self.root, self.version, self.base = root, 0, root / "base"
        (root / "tokenizer").mkdir()
        train_tokenizer(
            ["the quick brown fox jumps over the lazy dog"] * 3, 300, root / "tokenizer"
        )
        self.card = huggingface.new_card(ARCH, root / "tokenizer")
        base = init_params(Transformer, ARCH, Compute(), 0)
        huggingface.save_hf(base, self.card, self.base)
        self.adaptation = Adaptation(LORA, str(self.base), fingerprint(base))
        self.adapters = init_adapters(Transformer, ARCH, LORA, 0)
        settings = VllmSettings(servers=1, python=PYTHON, weights_dir=str(root / "weights"))
        self.pool = open_vllm(
            self.card, self.weights(), settings, slots=8, dtype="float32", max_length=512
        )

    @property
    def server(self):
        (member,) = self.pool._members.values()
        return member.server

    def weights(self):
        return AdapterWeights(self.adapters, self.adaptation, self.base)

    def train(self):
        """The next version, with other adapters."""
        self.version += 1
        rng = np.random.default_rng(self.version)
        moved = lambda x: np.asarray(x) + 0.1 * rng.normal(size=x.shape).astype(np.float32)
        self.adapters = jax.tree.map(moved, self.adapters)
        self.pool.update_weights(self.weights(), self.version)
        return self.version

    def expected(self, prompt, generation, adapters=None):
        """Log-probs of the generated tokens, as transformers computes them with merged weights."""
        torch = pytest.importorskip("torch")
        from transformers import AutoModelForCausalLM

        opened, _ = huggingface.open_params(self.base)
        adapters = self.adapters if adapters is None else adapters
        merged = adapter_files.merged_on_disk(opened, jax.device_get(adapters), LORA)
        shutil.rmtree(self.root / "merged", ignore_errors=True)
        huggingface.save_hf(merged, self.card, self.root / "merged")
        model = AutoModelForCausalLM.from_pretrained(self.root / "merged", dtype=torch.float32)
        ids = torch.tensor([[*prompt, *generation.token_ids]])
        with torch.no_grad():
            log_probs = torch.log_softmax(model(ids).logits[0], -1)
        places = range(len(prompt) - 1, ids.shape[1] - 1)
        return [float(log_probs[place, ids[0, place + 1]]) for place in places]

    def check_sampling(self, *prompts):
        for prompt in prompts or (PROMPT,):
            made = self.pool.submit(ask(prompt)).result(300)
            assert made.versions == (self.version,) * 16
            np.testing.assert_allclose(made.log_probs, self.expected(prompt, made), atol=1e-4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    trained = Trained(tmp_path_factory.mktemp("vllm"))
    yield trained
    trained.pool.close()


def elsewhere(trained, monkeypatch):
    """Settings of another pool with the same server."""
    monkeypatch.setenv(KEY_VARIABLE, trained.pool._api_key)
    return VllmSettings(urls=(trained.server.url,), weights_dir=str(trained.root / "other"))


def test_every_version_is_the_one_that_samples_and_old_ones_are_unloaded(trained):
    trained.check_sampling(PROMPT, LONG_PROMPT)  # whose keys and values are cached then
    for _ in range(2):
        trained.train()
        trained.check_sampling(PROMPT, LONG_PROMPT)
    assert [name.split("-")[0] for name in trained.server._listed()] == ["2"]


def test_a_generation_in_flight_finishes_on_its_adapter_beside_newer_ones(trained):
    for _ in range(5):  # on a busy machine it may have ended before
        before, adapters = trained.version, trained.adapters
        begun = in_flight(trained.pool)
        used = trained.pool._publisher.used  # the adapter is chosen when the request is sent
        while not begun.done() and not any(used.copy().values()):
            time.sleep(0.001)
        trained.train()
        trained.train()
        later = trained.pool.submit(ask()).result(300)
        beside = not begun.done()
        listed = [int(name.split("-")[0]) for name in trained.server._listed()]
        assert later.versions == (trained.version,) * 16
        made = begun.result(300)
        assert made.versions == (before,) * 450
        if beside:
            break
    assert beside and listed == [before, before + 2]
    expected = trained.expected(PROMPT, made, adapters)
    np.testing.assert_allclose(made.log_probs, expected, atol=1e-4)
    np.testing.assert_allclose(later.log_probs, trained.expected(PROMPT, later), atol=1e-4)
    trained.train()
    assert [name.split("-")[0] for name in trained.server._listed()] == [str(trained.version)]


@pytest.mark.parametrize("damage", ["changed", "missing", "rank"])
def test_an_adapter_that_cannot_be_loaded_is_refused_and_the_old_one_keeps_serving(trained, damage):
    publisher, weights = trained.pool._publisher, trained.weights()
    problem = {"changed": "does not match", "missing": "is missing", "rank": "rank 9"}[damage]
    if damage == "rank":
        lora = Lora(9, 6.0, LORA.targets)
        adaptation = dataclasses.replace(weights.adaptation, lora=lora)
        adapters = init_adapters(Transformer, ARCH, lora, 0)
        weights = AdapterWeights(adapters, adaptation, weights.base)
    published = publisher.publish(weights, 1000)
    file = publisher.root / label_of(published.identity) / "adapter_model.safetensors"
    if damage == "missing":
        file.unlink()
    elif damage == "changed":
        data = bytearray(file.read_bytes())
        data[-9] ^= 16
        file.write_bytes(data)
    with pytest.raises(EngineError, match=problem):
        trained.server.load(publisher.root, published.identity)
    trained.check_sampling()


def test_a_server_with_another_base_is_refused(trained, monkeypatch):
    other = dataclasses.replace(trained.adaptation, base="/another", fingerprint="0" * 32)
    weights = dataclasses.replace(trained.weights(), adaptation=other)
    settings = elsewhere(trained, monkeypatch)
    with pytest.raises(EngineError, match=r"not those of the base of the adapters, /another: "):
        open_vllm(trained.card, weights, settings, slots=8, dtype="float32", max_length=512)


def test_a_rank_or_whole_weights_that_the_server_does_not_take_are_refused(trained, monkeypatch):
    settings = elsewhere(trained, monkeypatch)
    check_servers(settings, 512, ARCH, lora_rank=8)
    with pytest.raises(
        EngineError, match=r"up to rank 8 only, and lora.rank is 9: .*--lora-rank 9"
    ):
        check_servers(settings, 512, ARCH, lora_rank=9)
    with pytest.raises(EngineError, match="takes LoRA adapters only: start it without"):
        check_servers(settings, 512, ARCH)


def test_a_run_trains_with_it(trained, monkeypatch, tmp_path):
    elsewhere(trained, monkeypatch)
    own = (
        f"model.path = '{trained.base}'",
        "warm_start.steps = 0",
        "lora.rank = 3",
        "train.total_steps = 2",
        "train.val_before_train = False",
        "rollout.prompt_source = 'observation'",
        "algorithm.old_log_probs = 'recompute'",
        "engine.name = 'vllm'",
        f"vllm.urls = ['{trained.server.url}']",
        f"vllm.weights_dir = '{tmp_path / 'weights'}'",
    )
    train.main(arguments(tmp_path / "run", *own))
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines] == [1, 2]
    assert all(x["mismatch/log_prob_diff_mean"] < 1e-4 for x in lines)
    trained.check_sampling()


def test_a_killed_server_comes_back_with_the_newest_adapter(trained, monkeypatch):
    """With a generation in flight, right before it would load an adapter."""
    (pid,) = serving_pids()
    begun = []

    def kill():
        begun.append(in_flight(trained.pool))
        os.killpg(pid, signal.SIGKILL)

    before_steps(monkeypatch, {"/v1/load_lora_adapter": kill}, "_content")
    version = trained.train()
    assert begun[0].result(600).versions == (version,) * 450
    assert serving_pids() != [pid]
    trained.check_sampling()
