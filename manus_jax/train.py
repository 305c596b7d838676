"""`python -m manus_jax.train --gin_file=F`: reinforcement learning of an agent."""

import dataclasses
from pathlib import Path

from manus_jax import command
from manus_jax.config import binding as config
from manus_jax.config.commands import READS, TrainConfig, read_train_config
from manus_jax.config.run_config import config_text
from manus_jax.errors import UserError
from manus_jax.models import huggingface
from manus_jax.training.build import open_trainer
from manus_jax.training.build_rollout import refuse_unread_by_engine, unread_by_engine
from manus_jax.training.distributed import Team, joined
from manus_jax.training.following import follow
from manus_jax.training.run_directory import disk_errors
from manus_jax.training.run_summary import print_closing
from manus_jax.vllm.options import check_gpus_of_many, claim_gpus
from manus_jax.weights.host_tensors import spread


def main(arguments: list[str]) -> None:
    parser = config.argument_parser("train", "Trains an agent with reinforcement learning.")
    args = parser.parse_args(arguments)
    settings = read_train_config(args.gin_file, args.gin_param)
    refuse_unread_by_engine(settings.engine.name)
    settings = dataclasses.replace(settings, engine=claim_gpus(settings.engine))
    with joined(settings.distributed, (UserError,)) as team:
        if team is not None:
            check_gpus_of_many(settings.engine)
        if team is None or team.leads:
            lead(settings, team)
        else:
            follow(settings, team)


def lead(settings: TrainConfig, team: Team | None) -> None:
    """Trains, exports and tells of it; with the other processes of the team, if there is one."""
    train = settings.train
    read = READS["train"] - unread_by_engine(settings.engine.name)
    with (
        disk_errors(Path(train.run_dir)),
        open_trainer(settings, config_text(settings, read), team) as trainer,
    ):
        trainer.run()
        export = trainer.directory.export(train.total_steps)
        if train.export and not train.val_only and not export.exists():
            export.parent.mkdir(exist_ok=True)
            card = huggingface.ModelCard.load(trainer.directory.model)
            params = trainer.policy.state.params
            huggingface.save_hf(
                params if team is None else spread(params, team.together), card, export
            )
    print_closing(trainer.directory, train.yardsticks, train.next_command)


if __name__ == "__main__":
    command.run(main)
