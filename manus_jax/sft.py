"""`python -m manus_jax.sft --gin_file=configs/sft_textcraft.gin`: supervised fine-tuning."""

from pathlib import Path

from manus_jax import command
from manus_jax.config import binding as config
from manus_jax.config.settings import (
    ComputeSettings,
    DataSettings,
    DistributedSettings,
    MeshSettings,
    ModelSettings,
    OptimizerSettings,
    ScratchSettings,
    SftSettings,
)
from manus_jax.training import supervised
from manus_jax.training.job import joined
from manus_jax.training.run_directory import disk_errors


def main(arguments: list[str]) -> None:
    parser = config.argument_parser("sft", "Fine-tunes a model on agent conversations.")
    args = parser.parse_args(arguments)
    config.parse(args.gin_file, args.gin_param)
    classes: list[type] = [
        SftSettings,
        DataSettings,
        ModelSettings,
        OptimizerSettings,
        MeshSettings,
        ComputeSettings,
        DistributedSettings,
    ]
    sft, data, model, optimizer, mesh, compute, distributed = config.build(*classes)
    scratch = None
    if model.path is None:
        classes.append(ScratchSettings)
        (scratch,) = config.build(ScratchSettings)
    config.refuse_unread(classes)
    settings = supervised.SftConfig(sft, data, model, scratch, optimizer, mesh, compute)
    with joined(distributed) as job, disk_errors(Path(sft.run_dir)):
        last = supervised.run(settings, config.operative_config(), job)
    if not job.primary:
        return
    for name in ("train/loss", "val/loss", "val/unigram_entropy"):
        if name in last:
            print(f"{name:24s} {last[name]:.4f}")
    print(f"run directory            {sft.run_dir}")
    if sft.export:
        print(f"Hugging Face model       {sft.run_dir}/export/{sft.total_steps}")


if __name__ == "__main__":
    command.run(main)
