"""The settings of each command: its config dataclass, and which bindings it reads."""

import dataclasses
import re
import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

from manus_jax.config.binding import (
    ConfigError,
    build,
    engine_groups,
    parse,
    refuse_unread,
    refuse_unused_macros,
    setting_names,
)
from manus_jax.config.settings import (
    AlgorithmSettings,
    ChatSettings,
    CompilationSettings,
    ComputeSettings,
    DataSettings,
    DistributedSettings,
    EngineSettings,
    EnvPoolSettings,
    EnvSettings,
    EvaluateSettings,
    LoraSettings,
    MeshSettings,
    ModelSettings,
    OptimizerSettings,
    RolloutSettings,
    ScratchSettings,
    SftSettings,
    StatusSettings,
    TrainSettings,
    WarmStartSettings,
)

C = TypeVar("C")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    train: TrainSettings
    algorithm: AlgorithmSettings
    env: EnvSettings
    rollout: RolloutSettings
    engine: EngineSettings
    data: DataSettings
    model: ModelSettings
    scratch: ScratchSettings | None  # None if model.path is set
    warm_start: WarmStartSettings
    optimizer: OptimizerSettings
    mesh: MeshSettings
    compute: ComputeSettings
    chat: ChatSettings = dataclasses.field(default_factory=ChatSettings)
    distributed: DistributedSettings = dataclasses.field(default_factory=DistributedSettings)
    status: StatusSettings = dataclasses.field(default_factory=StatusSettings)
    lora: LoraSettings = dataclasses.field(default_factory=LoraSettings)
    compilation: CompilationSettings = dataclasses.field(default_factory=CompilationSettings)
    env_pool: EnvPoolSettings = dataclasses.field(default_factory=EnvPoolSettings)
    engine_settings: Any = None  # the chosen engine's own group, e.g. VllmSettings


@dataclasses.dataclass(frozen=True)
class SftConfig:
    sft: SftSettings
    data: DataSettings
    model: ModelSettings
    scratch: ScratchSettings | None  # None if model.path is set
    optimizer: OptimizerSettings
    mesh: MeshSettings
    compute: ComputeSettings
    chat: ChatSettings = dataclasses.field(default_factory=ChatSettings)
    distributed: DistributedSettings = dataclasses.field(default_factory=DistributedSettings)
    status: StatusSettings = dataclasses.field(default_factory=StatusSettings)
    lora: LoraSettings = dataclasses.field(default_factory=LoraSettings)
    compilation: CompilationSettings = dataclasses.field(default_factory=CompilationSettings)


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    evaluate: EvaluateSettings
    env: EnvSettings
    rollout: RolloutSettings
    engine: EngineSettings
    chat: ChatSettings = dataclasses.field(default_factory=ChatSettings)
    status: StatusSettings = dataclasses.field(default_factory=StatusSettings)
    compilation: CompilationSettings = dataclasses.field(default_factory=CompilationSettings)
    env_pool: EnvPoolSettings = dataclasses.field(default_factory=EnvPoolSettings)
    engine_settings: Any = None  # the chosen engine's own group, e.g. VllmSettings


@dataclasses.dataclass(frozen=True)
class EndpointConfig:
    rollout: RolloutSettings
    engine: EngineSettings
    chat: ChatSettings = dataclasses.field(default_factory=ChatSettings)
    compilation: CompilationSettings = dataclasses.field(default_factory=CompilationSettings)
    engine_settings: Any = None  # the chosen engine's own group, e.g. VllmSettings


def _groups(config: type) -> dict[str, type]:
    """The settings classes of a config dataclass, by its fields' names."""
    hints = typing.get_type_hints(config)
    return {
        name: typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint
        for name, hint in hints.items()
        if hint is not Any
    }


def _settings_of(config: type, *but: str) -> frozenset[str]:
    names = setting_names(*(group.gin_name for group in _groups(config).values()))  # type: ignore[attr-defined]
    assert names >= set(but)
    return names - set(but)


READS = {
    # Episodes always fit a row: rollout.max_total_tokens is at most data.max_length.
    "train": _settings_of(TrainConfig, "data.overlong"),
    "sft": _settings_of(SftConfig, "data.stage_tasks"),
    # Without a learner, the engine has all devices.
    "evaluate": _settings_of(EvaluateConfig, "engine.devices", "rollout.min_in_flight"),
    "endpoint": setting_names(
        *("rollout.max_total_tokens", "rollout.generation_timeout"),
        *("rollout.temperature", "rollout.top_p", "rollout.top_k"),
        *("engine", "chat", "compilation"),
    )
    - {"engine.devices"},
}
"""The settings that each command reads; an engine may read fewer (`build_rollout.reads`)."""


def read_train_config(files: Sequence[str], params: Sequence[str]) -> TrainConfig:
    """The settings of `train` from gin files and bindings.

    A binding that the command does not read is an error.
    """
    return _named_run_dir(_read("train", TrainConfig, files, params))


def read_sft_config(files: Sequence[str], params: Sequence[str]) -> SftConfig:
    """The settings of `sft`, like `read_train_config`."""
    return _read("sft", SftConfig, files, params)


def read_evaluate_config(files: Sequence[str], params: Sequence[str]) -> EvaluateConfig:
    """The settings of `evaluate`, like `read_train_config`."""
    return _read("evaluate", EvaluateConfig, files, params)


def read_endpoint_config(files: Sequence[str], params: Sequence[str]) -> EndpointConfig:
    """The settings of `endpoint`, like `read_train_config`."""
    return _read("endpoint", EndpointConfig, files, params)


def _read(command: str, config: type[C], files: Sequence[str], params: Sequence[str]) -> C:
    parse(files, params)
    # The groups of engines are checked later, when the engine is known.
    of_engines = setting_names(*engine_groups())
    readers = {
        name: read | of_engines if "engine.name" in read else read for name, read in READS.items()
    }
    refuse_unread(command, lambda name: name not in readers[command], readers)
    refuse_unused_macros()
    groups = _groups(config)
    built = dict(zip(groups, build(*groups.values()), strict=True))
    if "scratch" in built and built["model"].path is not None:
        scratch = setting_names("scratch")
        refuse_unread(
            f"{command} with model.path",
            scratch.__contains__,
            {f"{command} without model.path": scratch},
        )
        built["scratch"] = None
    return config(**built)


def _named_run_dir(config: TrainConfig) -> TrainConfig:
    """The settings with `{recipe}` and `{env}` in `train.run_dir` replaced by their names."""
    names = {"{recipe}": config.algorithm.recipe, "{env}": "_".join(config.env.names)}
    run_dir = config.train.run_dir
    for placeholder, name in names.items():
        run_dir = run_dir.replace(placeholder, name)
    if unknown := re.search(r"\{\w*\}", run_dir):
        raise ConfigError(f"train.run_dir: {unknown[0]} is not one of {', '.join(names)}")
    return dataclasses.replace(config, train=dataclasses.replace(config.train, run_dir=run_dir))
