"""`python -m manus_jax.train --gin_file=F`: reinforcement learning of an agent."""

from pathlib import Path

from manus_jax import command
from manus_jax.config.commands import READS, read_train_config
from manus_jax.config.run_config import config_text
from manus_jax.rollout.build_rollout import (
    claim_devices,
    read_with_engine,
    with_engine_settings,
)
from manus_jax.status import STATUS, recorded
from manus_jax.training.build import open_trainer
from manus_jax.training.compilation_cache import use_compilation_cache
from manus_jax.training.job import joined
from manus_jax.training.run_directory import disk_errors
from manus_jax.training.run_summary import print_summary


def main(arguments: list[str]) -> None:
    parser = command.config_parser("train", "Trains an agent with reinforcement learning.")
    args = parser.parse_args(arguments)
    settings = with_engine_settings(read_train_config(args.gin_file, args.gin_param))
    train = settings.train
    read = read_with_engine(READS["train"], settings.engine.name)
    written = command.config_comment(parser, args) + config_text(settings, read)
    settings = claim_devices(settings)
    use_compilation_cache(settings.compilation)
    with (
        joined(settings.distributed) as job,
        recorded("train", settings.status.every_s, settings.status.watchdog_minutes, job.number),
        disk_errors(Path(train.run_dir)),
    ):
        with open_trainer(settings, written, job) as trainer:
            trainer.run()
            if train.export and not train.val_only:
                with STATUS.phase("export"):
                    trainer.export()
        if job.primary:
            print_summary(trainer.directory, train.baselines, train.next_command)


if __name__ == "__main__":
    command.run(main)
