"""`python -m manus_jax.train --gin_file=F`: reinforcement learning of an agent."""

import dataclasses
from pathlib import Path

from manus_jax import command
from manus_jax.config.binding import argument_parser
from manus_jax.config.commands import READS, read_train_config
from manus_jax.config.run_config import config_text
from manus_jax.training.build import open_trainer
from manus_jax.training.build_rollout import refuse_unread_by_engine, unread_by_engine
from manus_jax.training.job import joined
from manus_jax.training.run_directory import disk_errors
from manus_jax.training.run_summary import print_summary
from manus_jax.vllm.options import check_gpus_of_many, claim_gpus


def main(arguments: list[str]) -> None:
    parser = argument_parser("train", "Trains an agent with reinforcement learning.")
    args = parser.parse_args(arguments)
    settings = read_train_config(args.gin_file, args.gin_param)
    refuse_unread_by_engine(settings.engine.name)
    settings = dataclasses.replace(settings, engine=claim_gpus(settings.engine))
    train = settings.train
    written = config_text(settings, READS["train"] - unread_by_engine(settings.engine.name))
    with joined(settings.distributed) as job, disk_errors(Path(train.run_dir)):
        if job.count > 1:
            check_gpus_of_many(settings.engine)
        with open_trainer(settings, written, job) as trainer:
            trainer.run()
            if train.export and not train.val_only:
                trainer.export()
        if job.primary:
            print_summary(trainer.directory, train.baselines, train.next_command)


if __name__ == "__main__":
    command.run(main)
