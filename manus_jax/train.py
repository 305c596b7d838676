"""`python -m manus_jax.train --gin_file=F`: reinforcement learning of an agent."""

from pathlib import Path

from manus_jax import command, config
from manus_jax.models import huggingface
from manus_jax.rollout.vllm_options import claim_gpus
from manus_jax.runtime.assembly import open_trainer
from manus_jax.runtime.closing import print_closing
from manus_jax.runtime.designs import TrainConfig
from manus_jax.runtime.run_directory import disk_errors
from manus_jax.settings import (
    AlgorithmSettings,
    ComputeSettings,
    DataSettings,
    EngineSettings,
    EnvSettings,
    MeshSettings,
    ModelSettings,
    OptimizerSettings,
    RolloutGroup,
    ScratchSettings,
    TrainSettings,
    WarmStartSettings,
)


def main(arguments: list[str]) -> None:
    parser = config.argument_parser("train", "Trains an agent with reinforcement learning.")
    args = parser.parse_args(arguments)
    config.parse(args.gin_file, args.gin_param)
    classes = {
        "train": TrainSettings,
        "algorithm": AlgorithmSettings,
        "env": EnvSettings,
        "rollout": RolloutGroup,
        "engine": EngineSettings,
        "data": DataSettings,
        "model": ModelSettings,
        "warm_start": WarmStartSettings,
        "optimizer": OptimizerSettings,
        "mesh": MeshSettings,
        "compute": ComputeSettings,
    }
    built = dict(zip(classes, config.build(*classes.values()), strict=True))
    read: list[type] = [*classes.values()]
    built["engine"] = claim_gpus(built["engine"])
    built["scratch"] = None
    if built["model"].path is None:
        read.append(ScratchSettings)
        (built["scratch"],) = config.build(ScratchSettings)
    config.refuse_unread(read)
    settings = TrainConfig(**built)
    with (
        disk_errors(Path(settings.train.run_dir)),
        open_trainer(settings, config.operative_config()) as trainer,
    ):
        trainer.run()
        step = settings.train.total_steps
        export = trainer.directory.export(step)
        if settings.train.export and not settings.train.val_only and not export.exists():
            export.parent.mkdir(exist_ok=True)
            card = huggingface.ModelCard.load(trainer.directory.model)
            huggingface.save_hf(trainer.policy.state.params, card, export)
    print_closing(trainer.directory, settings.train.yardsticks, settings.train.next_command)


if __name__ == "__main__":
    command.run(main)
