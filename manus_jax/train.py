"""`python -m manus_jax.train --gin_file=F`: reinforcement learning of an agent."""

import dataclasses
from pathlib import Path

from manus_jax import command
from manus_jax.config import binding as config
from manus_jax.training.build import open_trainer
from manus_jax.training.job import joined
from manus_jax.training.learner_specs import read_config
from manus_jax.training.run_directory import disk_errors
from manus_jax.training.run_summary import print_summary
from manus_jax.vllm.options import check_gpus_of_many, claim_gpus


def main(arguments: list[str]) -> None:
    parser = config.argument_parser("train", "Trains an agent with reinforcement learning.")
    args = parser.parse_args(arguments)
    settings, distributed = read_config(args.gin_file, args.gin_param)
    settings = dataclasses.replace(settings, engine=claim_gpus(settings.engine))
    train = settings.train
    with joined(distributed) as job, disk_errors(Path(train.run_dir)):
        if job.count > 1:
            check_gpus_of_many(settings.engine)
        with open_trainer(settings, config.operative_config(), job) as trainer:
            trainer.run()
            if train.export and not train.val_only:
                trainer.export()
        if job.primary:
            print_summary(trainer.directory, train.baselines, train.next_command)


if __name__ == "__main__":
    command.run(main)
