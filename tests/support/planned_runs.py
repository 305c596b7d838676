"""A small model and a run's settings to plan for."""

import json

from manus_jax import plan

TINY = {
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
SETTINGS = (
    "train.run_dir = 'unused'",
    "train.batch_size = 4",
    "train.group_size = 8",
    "env.names = ['maze']",
    "rollout.max_total_tokens = 256",
    "data.max_length = 256",
    "data.rows = 8",
    "compute.dtype = 'bfloat16'",
    "engine.name = 'vllm'",
    "model.path = 'models/none'",
)


def arguments(topology, architecture, *params):
    flags = [f"--topology={topology}", f"--architecture={architecture}"]
    return flags + [f"--gin_param={p}" for p in (*SETTINGS, *params)]


def planned(tmp_path, *args):
    out = tmp_path / "plan.json"
    plan.main([*args, "--json", str(out)])
    return json.loads(out.read_text())


def write_tiny(directory, **sizes):
    path = directory / "config.json"
    path.write_text(json.dumps({**TINY, **sizes}))
    return str(path)
