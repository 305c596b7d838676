"""A few hundred inputs that no command can use: one line, exit code 2, before any work starts.

Each case runs a command in this process. What a command does after its checks (servers, models,
compilers) is replaced by `Started`, so a case fails if the command gets that far.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from manus_jax import (
    command,
    convert,
    endpoint,
    evaluate,
    plan,
    publish,
    report,
    serve,
    sft,
    traces,
    train,
)
from manus_jax.config.binding import ConfigError
from manus_jax.evaluation import comparison
from manus_jax.models import loading
from manus_jax.planning import plans
from manus_jax.rollout import traces as played_traces
from manus_jax.training import build, supervised

COMMANDS = {
    name: module.main
    for name, module in (
        *(("train", train), ("sft", sft), ("evaluate", evaluate), ("plan", plan)),
        *(("serve", serve), ("publish", publish), ("convert", convert), ("endpoint", endpoint)),
        *(("report", report), ("traces", traces)),
    )
}
REQUIRED = {
    "train": {
        "train.run_dir": "'run'",
        "env.names": "['maze']",
        "warm_start.steps": "1",
        "rollout.max_total_tokens": "512",
        "data.max_length": "512",
        "data.rows": "8",
    },
    "sft": {"sft.run_dir": "'run'", "data.train_files": "['good.jsonl']", "data.rows": "8"},
    "evaluate": {
        "evaluate.out_dir": "'out'",
        "evaluate.policies": "['oracle']",
        "env.names": "['maze']",
    },
}
REQUIRED["plan"] = REQUIRED["train"] | {"engine.name": "'vllm'"}


class Started(Exception):
    """A command has passed its checks."""


@pytest.fixture(autouse=True)
def no_work(monkeypatch):
    def started(*_, **__):
        raise Started

    monkeypatch.setattr(build, "open_servers", started)
    monkeypatch.setattr(comparison, "open_servers", started)
    monkeypatch.setattr(supervised, "Learner", started)
    monkeypatch.setattr(loading, "from_scratch", started)
    monkeypatch.setattr(plans, "plan_mesh", started)
    monkeypatch.setattr(serve, "run_server", started)
    monkeypatch.setattr(played_traces, "open_environments", started)


def row(**columns):
    return json.dumps(columns) + "\n"


TURNS = [{"from": "human", "value": "Go."}, {"from": "gpt", "value": "left"}]
CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
FILES = {
    "file": "x",
    "directory/inside": "x",
    "empty": "",
    "good.jsonl": row(item_id="maze_3", conversations=TURNS),
    "empty.jsonl": "",
    "empty.parquet": "",
    "binary.parquet": bytes(range(256)),
    "binary.jsonl": bytes(range(256)),
    "cut.json": '[{"item_id": "maze_1"',
    "deep.json": "[" * 100_000,
    "nothing.json": "[]",
    "number.json": "3",
    "null.json": "null",
    "no_id.jsonl": row(x=1),
    "bare_id.jsonl": row(item_id=7),
    "no_number.jsonl": row(item_id="maze"),
    "negative.jsonl": row(item_id="maze_-3"),
    "nan.jsonl": '{"item_id": NaN}\n',
    "other_env.jsonl": row(item_id="wordle_3"),
    "prompt.jsonl": row(item_id="maze_3", prompt=3),
    "roles.jsonl": row(item_id="maze_3", prompt=[{"role": 3, "content": None}]),
    "digits.jsonl": row(item_id="maze_\u0663"),
    "too_far.jsonl": row(item_id="maze_1000"),
    "loss.jsonl": row(conversations=[TURNS[0], {**TURNS[1], "loss": "false"}]),
    "no_turns.jsonl": row(conversations=[]),
    "no_list.jsonl": row(conversations=3),
    "no_answer.jsonl": row(conversations=TURNS[:1]),
    "stranger.jsonl": row(conversations=[{"from": "stranger", "value": "x"}]),
    "no_text.jsonl": row(conversations=[{"from": "human", "value": 3}]),
    "no_tokenizer/config.json": json.dumps(CONFIG),
    "cut_config/config.json": '{"model_type"',
    "list_config/config.json": "[]",
    "empty_config/config.json": "",
    "unknown_model/config.json": '{"model_type": "gpt9"}',
    "no_sizes/config.json": '{"model_type": "qwen2"}',
    "no_checkpoint/checkpoints/none": "",
    "no_checkpoint/model/config.json": json.dumps(CONFIG),
    "empty_checkpoint/checkpoints/3/none": "",
    "empty_checkpoint/model/config.json": json.dumps(CONFIG),
    "comment.gin": "# nothing\n",
    "typo.gin": "train.batchsize = 3\n",
    "range.gin": "train.batch_size = 0\n",
    "syntax.gin": "train.batch_size 3\n",
    "loop.gin": "include 'loop.gin'\n",
    "exit.gin": "import exits\n",
    "exits.py": "import sys\nsys.exit(5)\n",
    "config/config.json": json.dumps(CONFIG),
    "binary.json": bytes(range(256)),
    "lost.gin": "include 'nowhere.gin'\n",
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    path = tmp_path_factory.mktemp("inputs")
    for name, content in FILES.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    for name in ("link.gin", "link", "linked_run/checkpoints"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).symlink_to(Path(name).name)
    os.mkfifo(path / "pipe.gin")
    os.mkfifo(path / "pipe")
    os.mkfifo(path / "pipe.jsonl")
    (path / "device.jsonl").symlink_to("/dev/zero")
    return path


@pytest.fixture(autouse=True)
def here(inputs, monkeypatch):
    monkeypatch.chdir(inputs)
    monkeypatch.syspath_prepend(str(inputs))
    for written in ("run", "out"):
        shutil.rmtree(written, ignore_errors=True)


# A setting, and values that are refused; the command's other settings are valid.
BINDINGS = {
    "train": {
        "algorithm.recipe": ["'gropo'", "''", "3", "None"],
        "algorithm.reward": ["'nope'", "''", "None"],
        "algorithm.reward_parameters": [
            *("{'x': 1}", "{1: 1}", "[]", "3", "{'scale': 'big'}", "{'scale': None}"),
            *("{'scale': True}", "{'scale': 1e999}", "{'clip': -1}", "{'clip': [1]}"),
        ],
        "algorithm.reward_allocation": ["'nope'", "''", "['last_token']"],
        "chat.template_kwargs": ["{1: 2}", "[]", "{'messages': 3}", "{'enable_thinking': False}"],
        "chat.thinking": ["'kep'", "'off'", "None", "True"],
        "env.python": ["{'maze': 'nope'}", "{'maze': '/bin/true'}", "{'maze': 'directory'}"],
        "lora.alpha": ["0", "3.0", "1e999"],
        "lora.rank": ["0", "-1", "1.5", "100000", "True"],
        "lora.target_modules": ["['q_proj']", "[]", "''"],
        "optimizer.name": ["'sgd'", "3"],
        "rollout.strategy": ["'program'", "'nope'", "''", "3"],
        "rollout.strategy_parameters": ["{'x': 1}", "3", "[]", "{1: 1}"],
        "train.trajectories": [
            *("['nope']", "['pipe']", "['good.jsonl']", "[3]", "['']", "['file', 'file']"),
        ],
        "algorithm.kl_estimator": ["'k9'", "''"],
        "algorithm.kl_placement": ["'los'", "'none'"],
        "algorithm.kl_coef": ["0", "-0.1", "1e9"],
        "algorithm.kl_controller": ["'adaptive'", "'none'"],
        "algorithm.aggregation": ["'mean'", "'seq-mean-token-sum-norm'"],
        "algorithm.corrections": ["['x']", "'token_tis'", "['token_tis', 'token_tis']", "[1]"],
        "algorithm.clip_low": ["-1", "1.1", "'0.2'"],
        "algorithm.dual_clip": ["1", "0.5", "-3"],
        "algorithm.similarity": ["0", "1.5"],
        "algorithm.mini_batch_size": ["0", "-1", "2.5"],
        # Not read by grpo, by a fixed KL coefficient, or without a schedule.
        "algorithm.critic_lr": ["1e-3"],
        "algorithm.cliprange_value": ["0.1"],
        "algorithm.step_weight": ["0.5"],
        "algorithm.max_gen_batches": ["3"],
        "algorithm.norm_constant": ["100.0"],
        "algorithm.target_kl": ["0.2"],
        "algorithm.kl_horizon": ["3"],
        "train.turns_schedule_steps": ["3"],
        "optimizer.min_lr_ratio": ["0.1"],
        "train.max_staleness": ["-1", "1001", "0.5", "100000"],
        "rollout.action_format": ["'recat'", "''"],
        "rollout.temperature": ["0", "-1", "1e-30", "0.001", "1e999", "'hot'"],
        "rollout.top_p": ["0", "1e-30"],
        "rollout.generation_timeout": ["0", "1e-9"],
        "train.val_temperature": ["-1", "1e-30", "0.001"],
        "rollout.max_tokens_per_turn": ["0", "1000000000000", "True"],
        "rollout.max_total_tokens": ["1024", "16", "0"],
        "rollout.prompt_source": ["'data'", "None"],
        "env.names": [
            *("['mazee']", "['webarena']", "['maze', 'maze']", "'maze'", "[]", "['']"),
            *("['gym:']", "['mcp:']", "['verifiers: ']", "['openenv:h:1']", "['json:loads']"),
        ],
        "env.urls": [
            *("{'wordle': 'http://h:1'}", "{'maze': []}", "{'maze': ['ftp://h']}", "['http://h']"),
            *("{'maze': 'http://h:99999'}", "{'maze': 3}", "{'maze': 'a b'}", "{3: 'http://h:1'}"),
        ],
        "engine.name": ["'vlm'", "'vllm'", "''", "None"],
        "engine.slots": ["0", "-1", "1000000000", "1.5", "12"],
        "engine.cache_tokens": ["0", "-1", "1.5", "1024", "10000"],
        "engine.tensor": ["0", "3", "1.5", "'all'"],
        "engine.devices": ["-1", "8", "0.5"],
        "rollout.min_in_flight": ["0", "100000", "'few'"],
        "vllm.servers": ["1", "-1", "'one'"],
        "vllm.urls": ["['http://h:1']", "'http://h:1'"],
        "train.run_dir": [
            *("''", "' '", "'file'", "'file/run'", "'{nope}'", "'a\\0b'", "'/dev/null/x'", "3"),
            *("'link'", "'linked_run'", "'/proc/run'"),
            *(repr("x" * 300), repr("x/" * 3000), "None"),
        ],
        "train.batch_size": ["0", "-1", "1000000000", "2.0", "True", "'8'", "None", "[8]", "10**9"],
        "train.group_size": ["1", "0", "100000000"],
        "train.seed": ["-1", "4294967296", "0.5"],
        "train.max_bad_updates": ["0", "-1"],
        "train.turns_schedule": ["[0]", "[-1]", "[3, 0]", "3", "[2.5]", "['3']", "[True]"],
        "train.baselines": ["['orcale']", "'oracle'", "['oracle', 'oracle']", "[3]"],
        "train.wandb_project": ["3", "'\\0'"],
        "train.total_steps": ["0", "1000000000000", "1e3"],
        "train.save_freq": ["0", "-5", "0.5"],
        "warm_start.steps": ["0", "-1", "1.5"],
        "warm_start.random_share": ["1.5", "-0.1", "2"],
        "optimizer.lr": ["0", "-1", "1e-300", "1e999", "1e30", "'1e-3'", "nan", "inf", "None"],
        # 1 or 0 in float32.
        "optimizer.b1": ["1", "2", "-0.1", "0.9999999999"],
        "optimizer.b2": ["1.0", "1e9", "0.9999999999"],
        "optimizer.eps": ["-1", "0", "2", "1e-300"],
        "optimizer.weight_decay": ["-1", "1e9"],
        "optimizer.schedule": ["'cos'", "3", "None"],
        "optimizer.grad_clip": ["0", "-1", "1e-300", "1e999"],
        "mesh.fsdp": ["0", "-2", "3", "1.5", "10000000"],
        "mesh.data": ["-1", "3"],
        "mesh.tensor": ["3", "0"],
        "mesh.slices": ["0", "2", "-1"],
        "compute.attention": ["'splash'", "'triton'", "'flash'"],
        "compute.dtype": ["'float16'", "'int8'", "32"],
        "scratch.hidden_size": ["0", "-1", "100000000", "'big'"],
        "scratch.num_layers": ["0", "1001", "None"],
        "scratch.num_heads": ["5", "0"],
        "scratch.num_kv_heads": ["3", "0", "8"],
        "scratch.head_dim": ["3", "0"],
        "scratch.vocab_size": ["0", "258", "100000000"],
        "model.path": [
            *("'nope'", "''", "'file'", "'directory'", "'no_tokenizer'", "'cut_config'"),
            *("'list_config'", "'empty_config'", "'unknown_model'", "'no_sizes'", "3", "'a\\0b'"),
            *("'no_checkpoint'", "'empty_checkpoint'"),
        ],
        "data.train_files": [
            *("['nope.json']", "['file']", "['directory']", "['empty.jsonl']", "['']", "'x.json'"),
            *("['empty.parquet']", "['binary.parquet']", "['binary.jsonl']", "['cut.json']"),
            *("['deep.json']", "['nothing.json']", "['number.json']", "['null.json']"),
            *("['no_id.jsonl']", "['bare_id.jsonl']", "['no_number.jsonl']"),
            *("['negative.jsonl']", "['nan.jsonl']", "['other_env.jsonl']", "['prompt.jsonl']"),
            *(
                "['roles.jsonl']",
                "['digits.jsonl']",
                "['too_far.jsonl']",
                "[3]",
                "['a\\0b.json']",
                "[" + repr("x" * 300) + "]",
            ),
            *("['pipe.jsonl']", "['device.jsonl']", "['good.jsonl', 'good.jsonl']"),
        ],
        "data.val_files": ["['nope.json']", "['empty.jsonl']", "['other_env.jsonl']"],
        "data.train_weights": ["[1.0]", "[0]", "[-1]", "1.0"],
        "data.rows": ["0", "-1", "100000000"],
        "data.max_length": ["1", "0", "256", "1000000000000"],
        "data.overlong": ["'cut'"],
        "distributed.coordinator": ["'host'", "''", "'host:0'", "'host:99999'"],
        "distributed.process_id": ["-1", "'first'"],
        "distributed.mode": ["'yes'", "True"],
        "sft.batch_size": ["3"],
        "evaluate.samples": ["3"],
    },
    "sft": {
        "sft.run_dir": ["''", "'file'", "'file/run'", "'a\\0b'", "3"],
        "sft.total_steps": ["0", "-1", "10000000000"],
        "sft.batch_size": ["0", "1000000000", "1.5"],
        "sft.seed": ["-1", "4294967296"],
        "optimizer.lr": ["1e30", "1e999", "-1"],
        "data.train_files": [
            *("[]", "['nope.jsonl']", "['empty.jsonl']", "['binary.parquet']", "['cut.json']"),
            *("['no_id.jsonl']", "['no_turns.jsonl']", "['no_list.jsonl']", "['no_answer.jsonl']"),
            *(
                "['loss.jsonl']",
                "['stranger.jsonl']",
                "['no_text.jsonl']",
                "['number.json']",
                "['directory']",
            ),
        ],
        "data.val_files": ["['nope.jsonl']", "['no_turns.jsonl']"],
        "data.overlong": ["'truncate'", "None"],
        "mesh.fsdp": ["2", "0"],
        "scratch.num_heads": ["5", "0"],
        "scratch.vocab_size": ["1"],
        "compute.attention": ["'splash'"],
        "model.path": ["'nope'", "'no_tokenizer'", "'cut_config'", "'directory'", "'file'"],
        "train.batch_size": ["3"],
        "rollout.max_turns": ["3"],
        "vllm.servers": ["1"],
    },
    "evaluate": {
        "evaluate.policies": [
            *("[]", "['orcale']", "['nope']", "['oracle', 'oracle']", "[3]", "'oracle'", "['']"),
            *("['file']", "['directory']", "['no_tokenizer']", "['cut_config']"),
            *("['list_config']", "['unknown_model']", "['no_sizes']", "['empty_checkpoint']"),
            *("['openai:']", "['openai:m']", "['openai:m@h:1']", "['openai:m@http://a..b/v1']"),
        ],
        "evaluate.out_dir": ["''", "'file'", "'file/out'", "'a\\0b'", "'link'", repr("x" * 300)],
        "evaluate.samples": ["0", "-1", "1000000000"],
        "evaluate.tasks_per_env": ["0", "1000000000"],
        "evaluate.split": ["'val'", "''"],
        "evaluate.task_files": [
            *("['nope.json']", "['empty.jsonl']", "['nothing.json']", "['other_env.jsonl']"),
            *("['cut.json']", "['directory']", "'good.jsonl'", "['good.jsonl', 'good.jsonl']"),
        ],
        "evaluate.seed": ["-1", "4294967296"],
        "env.names": ["['nope']", "[]", "['webarena']"],
        "rollout.action_format": ["'nope'"],
        "rollout.top_p": ["0", "1.1"],
        "engine.slots": ["0"],
        "engine.name": ["'vllm'", "'nope'"],
        "train.seed": ["3"],
        "model.path": ["'x'"],
    },
    "plan": {
        "algorithm.recipe": ["'gropo'"],
        "algorithm.reward_allocation": ["'nope'"],
        "mesh.data": ["-1", "0"],
        "data.rows": ["0"],
        "vllm.tensor_parallel": ["0", "'two'"],
        "engine.name": ["'nope'"],
        "model.path": ["'nope'", "'cut_config'"],
    },
}

TOPOLOGY = "--topology=cuda:8x80GB"
DATA = "good.jsonl"
LONG = "x" * 300
MODEL = ["--model", "no_tokenizer"]
TRACES = ["maze", "--n", "1", "--out", "t.parquet"]
ARGUMENTS: dict[str, list[list[str]]] = {
    "train": [
        *([f"--gin_file={f}"] for f in ("nope.gin", "file", "empty", "directory", "binary.jsonl")),
        *([f"--gin_file={f}"] for f in ("", "a\0b", LONG, "x" * 5000, "\udcff", "comment.gin")),
        *([f"--gin_file={f}"] for f in ("typo.gin", "range.gin", "syntax.gin", "loop.gin")),
        *(["--gin_file=lost.gin"], ["--gin_fil=x"], ["--ginfile", "x"], ["--gin_params=a.b=1"]),
        *(["--gin_param=x"], ["--gin_param="], ["--gin_param==3"], ["--gin_param=a = 3"]),
        *(["--gin_param=train.batchsize = 3"], ["--gin_param=trian.batch_size = 3"]),
        *(["--gin_param=batch_size = 3"], ["--gin_param=train = 3"], ["--gin_param=a/b.c = 1"]),
        *(["--gin_param=train.seed = %X"], ["--gin_param=train.seed = @train"], ["--gin_param"]),
        *(["--gin_param=train.seed = [["], ["--gin_param=train.seed = '"], ["more"], ["-x"]),
        *(["--gin_param=train.seed == 1"], ["--gin_param=train.seed ="], ["--resume"]),
        *(["--gin_file=link.gin"], ["--gin_file=/dev/zero"], ["--gin_file=pipe.gin"]),
        *(["--gin_file=exit.gin"], ["x" * 100_000], ["--gin_file=--"], ["--gin_param=--"]),
    ],
    "plan": [
        *([], ["--topology"], ["--topology="], ["--topology=v9:2x2"], ["--topology=v5e"]),
        *(["--topology=v5e:8"], ["--topology=v5e:0x0"], ["--topology=v5e:2x2x2x2"]),
        *(["--topology=v5e:999999x9"], ["--topology=cuda:0x80GB"], ["--topology=cuda:8x16GB"]),
        *(["--topology=cuda:999999999x80GB"], ["--topology=cuda"], ["--topolgy=v5e:2x2"]),
        *([TOPOLOGY, f"--slices={n}"] for n in ("0", "-1", "x", "1.5", "", "2", "99999999")),
        *([TOPOLOGY, f"--trained={n}"] for n in ("7", "0", "-1", "nan", "inf", "x", "1.01")),
        *([TOPOLOGY, f"--json={p}"] for p in ("", "pipe", "file/x", "directory", "a\0b", LONG)),
        *([TOPOLOGY, f"--architecture={a}"] for a in ("gpt-9", "", "file", "directory", "a\0b")),
        *([TOPOLOGY, f"--architecture={a}"] for a in ("cut_config", "no_sizes", "list_config")),
        *([TOPOLOGY, f"--architecture={a}"] for a in ("binary.json", "deep.json", "link", "pipe")),
        *([TOPOLOGY, "--json=link"], [TOPOLOGY, "--json=/"], [TOPOLOGY, "--json=comment.gin"]),
        *([TOPOLOGY, TOPOLOGY], [TOPOLOGY, "--slices=1_0"], [TOPOLOGY, "--slices= 1"]),
        *([TOPOLOGY, "--architectur=qwen3-8b"], [TOPOLOGY, "more"], [TOPOLOGY, "--slice=1"]),
    ],
    "serve": [
        *([], ["--model"], ["--modle", "x"]),
        *(["--model", m] for m in ("nope", "file", "directory", "", "a\0b", LONG)),
        *([*MODEL, "--port", p] for p in ("0", "-1", "65536", "http", "80.5", "")),
        *([*MODEL, "--slots", n] for n in ("0", "-1", "many", "1000000000")),
        *([*MODEL, "--max-length", n] for n in ("0", "-1", "x", "1000000000000")),
        *([*MODEL, "--python", p] for p in ("/nope/python", "directory")),
        *([*MODEL, "--host", h] for h in ("0.0.0.0", "not a host", "")),
        *([*MODEL, "--api-key-file", f] for f in ("nope", "directory", "empty", "a\0b", "pipe")),
        *([*MODEL, "--api-key-file", f] for f in ("binary.jsonl", "link", "/dev/zero")),
        *([*MODEL, "--address-file", f] for f in ("directory", "file/x", "", "a\0b")),
        *([*MODEL, "--prot=3"], [*MODEL, "--", "--api-key=x"]),
    ],
    "endpoint": [
        *([], ["--model"], ["--modl", "x"], [*MODEL, "--gin_param=train.seed = 1"]),
        *(["--model", m] for m in ("nope", "file", "directory", "", "a\0b", LONG, "cut_config")),
        *([*MODEL, "--port", p] for p in ("-1", "65536", "http", "")),
    ],
    "publish": [
        *([], ["nope"], ["--to", "out"], ["nope", "--to", "out"], ["file", "--to", "out"]),
        *(["directory", "--to", "out"], ["no_checkpoint", "--to", "out"]),
        *(["empty_checkpoint", "--to", "out"], ["a\0b", "--to", "out"], ["", "--to", "out"]),
        *(["directory", "--to", p] for p in ("", "file", "file/x", "a\0b", LONG)),
        *(["directory", "--to", "out", "--poll", n] for n in ("0", "-1", "nan", "inf", "often")),
        *(["directory", "--to", "out", "--snapshot-every", n] for n in ("0", "-1", "x", "0.5")),
        *(
            ["directory", "--to", "out", "--server", u]
            for u in ("", "a b", "ftp://h", "http://h:0")
        ),
        *(["directory", "--to", p] for p in ("pipe", "--")),
        *(["directory", "--to", "out", "--poll", "3"], ["directory", "--to=--"]),
        *(["directory", "--to", "out", "--flolow"], ["directory", "--to", "out", "more"]),
    ],
    "convert": [
        *([], ["form-hf"], ["from-hf"], ["to-hf"], ["from-hf", "--hf", "x"], ["--hf", "x"]),
        *(
            ["from-hf", "--hf", h, "--out", "out"]
            for h in ("nope", "file", "directory", "", "a\0b")
        ),
        ["from-hf", "--hf", "no_tokenizer", "--out", "pipe"],
        *(["from-hf", "--hf", h, "--out", "out"] for h in ("no_tokenizer", "cut_config", LONG)),
        *(["from-hf", "--hf", h, "--out", "out"] for h in ("list_config", "no_sizes")),
        *(["from-hf", "--hf", "no_tokenizer", "--out", o] for o in ("", "file", "file/x", "a\0b")),
        *(["to-hf", "--checkpoint", c, "--out", "out"] for c in ("nope", "file", "directory", "")),
        *(["to-hf", "--checkpoint", "no_checkpoint", "--out", o] for o in ("out", "file/x", "")),
        *(["to-hf", "--checkpoint", "empty_checkpoint", "--out", o] for o in ("/", "link")),
        ["from-hf", "--hf", "no_tokenizer", "--out", "config"],
        *(["to-hf", "--checkpoint", "empty_checkpoint", "--out", "out"], ["to-hf", "--chekpoint"]),
        *(
            ["to-hf", "--checkpoint", "empty_checkpoint/checkpoints/9", "--out", "out"],
            ["to-hf", "x"],
        ),
    ],
    "report": [
        *([], ["nope"], ["file"], ["directory"], [""], ["a\0b"], [LONG], ["directory", "more"]),
        *(["directory", "--out", o] for o in ("", "pipe", "file/x", "directory", "a\0b", "link")),
        *(["directory", "--outt", "x"], ["directory", "--ot=x"]),
    ],
    "traces": [
        *([], ["maze"], ["maze", "--n", "1"], ["maze", "--out", "t.parquet"]),
        *([name, *TRACES[1:]] for name in ("mazee", "", "webarena", "movie")),
        *([name, *TRACES[1:]] for name in ("gym:", "mcp:", "verifiers:", "openenv:ftp://h")),
        *([*TRACES, "--policy", p] for p in ("", "nope", "openai:", "openai:m@http://a..b/v1")),
        *(["maze", "--n", n, "--out", "t.parquet"] for n in ("0", "-1", "x", "1.5", "100000")),
        *(["maze", "--n", "1", "--out", o] for o in ("", "file/x", "directory", "a\0b", LONG)),
        *(["maze", "--n", n, "--out", "t.parquet"] for n in ("\u0661", "1_0", " 1")),
        *(["maze", "--n", "1", "--out", "t.json"], [*TRACES, "--n", "2"]),
        *([*TRACES, "--min_reward", x] for x in ("1.5", "nan", "-1e9", "much")),
        *([*TRACES, "--attempts", n] for n in ("0", "1001", "2.0")),
        *([*TRACES, "--split", "val"], [*TRACES, "--split", ""], [*TRACES, "--splt=train"]),
        *([*TRACES, "--seed", n] for n in ("-1", "x", "1.5", "4294967296")),
    ],
}


def flags(name, **changed):
    given = REQUIRED.get(name, {}) | changed
    return [f"--gin_param={setting} = {value}" for setting, value in given.items()]


def cases() -> Iterator[tuple[str, str, list[list[str]]]]:
    """A command, what is wrong, and the arguments of each case."""
    for name, settings in BINDINGS.items():
        more = [TOPOLOGY] if name == "plan" else []
        for setting, values in settings.items():
            yield name, setting, [[*flags(name, **{setting: v}), *more] for v in values]
    for name, lists in ARGUMENTS.items():
        yield name, "arguments", [[*flags(name), *arguments] for arguments in lists]


CASES = list(cases())


@pytest.mark.parametrize(
    ("name", "lists"),
    [(name, lists) for name, _, lists in CASES],
    ids=[f"{name} {what}" for name, what, _ in CASES],
)
def test_an_input_that_cannot_be_used_is_one_line(name, lists, capsys, monkeypatch):
    for arguments in lists:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as stopped:
            command.run(COMMANDS[name])
        printed = capsys.readouterr()
        assert stopped.value.code == 2, (arguments, printed)
        (line,) = printed.err.splitlines()
        assert line.startswith("error: ") and len(line) < 1500, arguments
        assert not Path("run").exists() and not Path("out").exists(), arguments


def test_there_are_some_hundred_cases():
    assert sum(len(lists) for _, _, lists in CASES) > 550


@pytest.mark.parametrize(
    "sizes",
    [
        {"scratch.hidden_size": 65536, "scratch.intermediate_size": 262144},
        {"engine.slots": 65536, "rollout.max_total_tokens": 32768, "data.max_length": 32768},
        {"data.rows": 65536, "data.max_length": 16384},
    ],
)
def test_sizes_that_exceed_the_memory_of_the_machine_are_refused(sizes):
    with pytest.raises(ConfigError, match=r"needs at least .* GiB of memory, and this machine has"):
        train.main(flags("train", **sizes))


@pytest.mark.parametrize("name", REQUIRED)
def test_the_settings_that_the_cases_change_are_valid(name):
    with pytest.raises(Started):
        COMMANDS[name]([*flags(name), *([TOPOLOGY] if name == "plan" else [])])
