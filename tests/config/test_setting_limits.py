"""Every setting of every command refuses wrong types, values outside its limits and absurd ones."""

import dataclasses
import math
import types
import typing
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manus_jax.config import commands, settings
from manus_jax.config.binding import ConfigError, build, parse, setting_names
from manus_jax.config.commands import READS
from manus_jax.limits import MAX_TEXT, Range, path_problem, url_problem

GROUPS = {
    group.gin_name: group
    for group in vars(settings).values()
    if isinstance(group, type) and hasattr(group, "gin_name")
}
SETTINGS = sorted(setting_names(*GROUPS))
REQUIRED = {
    "train": {"train.run_dir": "runs/x", "env.names": ["maze"]},
    "sft": {"sft.run_dir": "runs/x"},
    "evaluate": {"evaluate.out_dir": "x", "evaluate.policies": ["oracle"], "env.names": ["maze"]},
    "vllm": {"vllm.servers": 1},
}
READ = {
    "train": commands.read_train_config,
    "sft": commands.read_sft_config,
    "evaluate": commands.read_evaluate_config,
}
# What a value at the end of its range needs of other settings of its group.
COMPANIONS: dict[str, dict[str, Any]] = {
    "algorithm.kl_horizon": {"algorithm.kl_controller": "adaptive"},
    "algorithm.target_kl": {"algorithm.kl_controller": "adaptive"},
    "data.max_length": {"data.rows": 1},
    "data.rows": {"data.max_length": 2},
    "data.train_weights": {"data.train_files": ["a.json"]},
    "data.stage_tasks": {"data.train_files": ["a.json", "b.json"]},
    "distributed.process_id": {"distributed.processes": None},
    "env_pool.first_retry": {"env_pool.longest_retry": 10**6},
    "env_pool.longest_retry": {"env_pool.first_retry": 0.001},
    "lora.alpha": {"lora.rank": 1},
    "lora.export_merged": {"lora.rank": 1},
    "lora.target_modules": {"lora.rank": 1},
    "mesh.data": {"mesh.fsdp": 1},
    "mesh.sequence": {"mesh.fsdp": 1},
    "mesh.tensor": {"mesh.fsdp": 1},
    "optimizer.min_lr_ratio": {"optimizer.schedule": "cosine"},
    "rollout.max_total_tokens": {"rollout.min_turn_tokens": 1},
    "rollout.min_in_flight": {"rollout.max_in_flight": 10**5},
    "rollout.min_turn_tokens": {"rollout.max_tokens_per_turn": 1},
    "rollout.thinking_tokens": {"rollout.max_tokens_per_turn": 2**22},
    "scratch.num_heads": {"scratch.num_kv_heads": 1},
    "scratch.num_kv_heads": {"scratch.num_heads": 1024},
    "train.batch_size": {"train.group_size": 1},
    "train.group_size": {"train.batch_size": 1},
    "train.turns_schedule_steps": {"train.turns_schedule": [1]},
    "vllm.first_retry": {"vllm.longest_retry": 10**6},
    "vllm.gpu_memory_utilization": {"vllm.gpus": 1},
    "vllm.gpus": {"vllm.servers": 0},
    "vllm.learner_memory_fraction": {"vllm.gpus": 1},
    "vllm.longest_retry": {"vllm.first_retry": 0.001},
}


def reader_of(name):
    """The command whose check covers the setting; `vllm` is checked when the engine is known."""
    return next((command for command in READ if name in READS[command]), "vllm")


def read(command, bindings):
    params = [f"{name} = {value!r}".replace("inf", "1e999") for name, value in bindings.items()]
    if command == "vllm":
        parse([], params)
        return build(settings.VllmSettings)[0]
    return getattr(READ[command]([], params), next(iter(bindings)).partition(".")[0])


def field_of(name):
    group, _, field = name.partition(".")
    found = next(f for f in dataclasses.fields(GROUPS[group]) if f.name == field)
    return found, typing.get_type_hints(GROUPS[group])[field]


def options(hint):
    """The types that a setting may have, without None."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [option for part in typing.get_args(hint) for option in options(part)]
    return [] if hint is type(None) else [hint]


def wrong_types(hint):
    """Values that no type of the setting admits."""
    candidates = [True, 3, 3.5, "text", b"text", None, [], [True], [3.5], ["", 3], [[]], {}, {3: 3}]
    kinds = options(hint)
    optional = len(kinds) < len(typing.get_args(hint))
    return [v for v in candidates if not (v is None and optional) and not fits(v, kinds)]


def fits(value, kinds):
    for kind in kinds:
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if kind is bool:
            good = isinstance(value, bool)
        elif kind is float:
            good = isinstance(value, int | float) and not isinstance(value, bool)
        elif origin is Literal:
            good = value in args
        elif origin is tuple:
            good = isinstance(value, list) and all(fits(v, options(args[0])) for v in value)
        elif origin is dict:
            good = isinstance(value, dict) and all(isinstance(k, str) for k in value)
        else:
            good = isinstance(value, kind) and not isinstance(value, bool)
        if good:
            return True
    return False


def number_type(hint):
    """int or float if the setting is a number or a list of numbers, and whether it is a list."""
    for kind in options(hint):
        if kind in (int, float):
            return kind, False
        inner = options(typing.get_args(kind)[0]) if typing.get_origin(kind) is tuple else []
        if inner and inner[0] in (int, float):
            return inner[0], True
    return None, False


def outside(limits: Range, kind):
    """The values next to the range, and values far outside."""
    step = (lambda x, _: x + 1) if kind is int else (lambda x, _: math.nextafter(x, math.inf))
    back = (lambda x, _: x - 1) if kind is int else (lambda x, _: math.nextafter(x, -math.inf))
    if limits.at_least is not None:
        yield back(limits.at_least, None)
    if limits.above is not None:
        yield limits.above
    if limits.at_most is not None:
        yield step(limits.at_most, None)
    if limits.below is not None:
        yield limits.below
    yield from (10**30, -(10**30)) if kind is int else (1e300, -1e300, math.inf, -math.inf, 10**400)


NUMBERS = [name for name in SETTINGS if number_type(field_of(name)[1])[0]]


def test_the_range_of_every_number_has_two_ends():
    for name in NUMBERS:
        limits = field_of(name)[0].metadata["range"]
        assert limits.at_least is not None or limits.above is not None, name
        assert limits.at_most is not None or limits.below is not None, name


def refused(name, value):
    """The message that refuses a value of the setting; it names the setting and is one line."""
    command = reader_of(name)
    given = {name: value} | {k: v for k, v in REQUIRED[command].items() if k != name}
    with pytest.raises(ConfigError) as caught:
        read(command, given)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    assert name in message, message
    return message


@pytest.mark.parametrize("name", SETTINGS)
def test_a_value_of_another_type_is_refused(name):
    hint = field_of(name)[1]
    values = wrong_types(hint)
    assert values
    for value in values:
        assert " is not " in refused(name, value), value


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_outside_of_its_range_is_refused(name):
    field, hint = field_of(name)
    kind, listed = number_type(hint)
    for value in outside(field.metadata["range"], kind):
        assert " must be " in refused(name, [value] if listed else value), value


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_at_the_end_of_its_range_is_accepted(name):
    field, hint = field_of(name)
    kind, listed = number_type(hint)
    limits = field.metadata["range"]
    command = reader_of(name)
    ends = [x for x in (limits.at_least, limits.at_most) if x is not None]
    ends += [math.nextafter(x, math.inf) for x in (limits.above,) if x is not None]
    ends += [math.nextafter(x, -math.inf) for x in (limits.below,) if x is not None]
    if name in ("vllm.gpus", "vllm.servers"):
        ends.remove(0)  # 0 is the number of a GPU, and no server is started without GPUs
    for value in ends:
        given = {name: [kind(value)] if listed else kind(value)}
        more = REQUIRED[command] | COMPANIONS.get(name, {})
        group = read(command, given | {k: v for k, v in more.items() if k != name})
        got = getattr(group, name.partition(".")[2])
        assert got == ((kind(value),) if listed else kind(value))


TEXTS = [
    name
    for name in SETTINGS
    if any(
        kind is str or typing.get_args(kind)[:1] == (str,)
        for kind in options(field_of(name)[1])
        if typing.get_origin(kind) is not dict
    )
]


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_no_file_or_address_can_have_is_refused(name):
    hint = field_of(name)[1]
    listed = not any(kind is str for kind in options(hint))
    for text in ("a\0b", "\ud800", "x" * (MAX_TEXT + 1)):
        refused(name, [text] if listed else text)
    if listed or field_of(name)[0].default != "":
        refused(name, [""] if listed else "")
    kind = field_of(name)[0].metadata.get("text", "text")
    for text in {
        "path": ("  ", "x" * 256, "gs://bucket/run"),
        "url": ("ftp://x", "http://", "h:0", "a b", "http://a..b", f"http://{'x' * 64}"),
    }.get(kind, ()):
        refused(name, [text] if listed else text)


def test_the_address_of_a_bucket_is_refused_with_advice():
    for address in ("gs://bucket/run", "s3://bucket"):
        assert "mount the bucket" in (path_problem(address) or "")
    assert path_problem("gs:/bucket") is None and path_problem("runs/gs") is None


@given(st.text())
def test_a_path_is_accepted_or_refused_in_words(text):
    problem = path_problem(text)
    assert problem is None or problem.strip()
    if problem is None:
        text.encode()
        assert text.strip() and "\0" not in text


@given(st.text() | st.from_regex(r"https?://[a-z\[\]:.@/]{0,9}:\d{1,6}"))
def test_an_address_is_accepted_or_refused_in_words(text):
    assert url_problem(text) in (None, "is not an address: write http://HOST:PORT")


@pytest.mark.parametrize(
    "bindings",
    [
        {"scratch.num_heads": 3, "scratch.num_kv_heads": 2},
        {"scratch.head_dim": 31},
        {"mesh.data": -1},
        {"mesh.data": 0},
        {"distributed.processes": 2, "distributed.process_id": 2},
        {"data.train_weights": [1.0]},
        {"data.rows": 2**17, "data.max_length": 2**14},
        {"rollout.max_total_tokens": 16},
        {"rollout.min_turn_tokens": 4096, "rollout.max_tokens_per_turn": 4096},
        {"train.batch_size": 10**5, "train.group_size": 11},
        {"algorithm.dual_clip": 0.5},
        {"env_pool.first_retry": 61},
        {"env.urls": {"wordle": ["http://h:1"]}},
        {"env.urls": {"maze": []}},
        {"env.urls": {"maze": ["http://h:65536"]}},
        {"env.names": ["maze", "maze"]},
        {"env.names": []},
        {"train.baselines": ["oracle", "oracle"]},
        {"train.run_dir": ""},
    ],
)
def test_settings_that_contradict_each_other_are_refused(bindings):
    with pytest.raises(ConfigError) as caught:
        read("train", REQUIRED["train"] | bindings)
    assert "\n" not in str(caught.value)
    assert any(name in str(caught.value) for name in bindings)
