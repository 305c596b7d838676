"""`python -m manus_jax.train --gin_file=F`: reinforcement learning of an agent."""

import dataclasses
from pathlib import Path

from manus_jax import command
from manus_jax.config import binding as config
from manus_jax.errors import UserError
from manus_jax.models import huggingface
from manus_jax.training.build import open_trainer
from manus_jax.training.distributed import Team, joined
from manus_jax.training.following import follow
from manus_jax.training.learner_specs import TrainConfig, read_config
from manus_jax.training.run_directory import disk_errors
from manus_jax.training.run_summary import print_closing
from manus_jax.vllm.open_pool import check_single_process, claim_gpus
from manus_jax.weights.host_tensors import spread


def main(arguments: list[str]) -> None:
    parser = config.argument_parser("train", "Trains an agent with reinforcement learning.")
    args = parser.parse_args(arguments)
    settings, distributed = read_config(args.gin_file, args.gin_param)
    settings = dataclasses.replace(settings, engine_settings=claim_gpus(settings.engine_settings))
    with joined(distributed, (UserError,)) as team:
        if team is not None:
            check_single_process(settings.engine_settings)
        if team is None or team.leads:
            lead(settings, team)
        else:
            follow(settings, team)


def lead(settings: TrainConfig, team: Team | None) -> None:
    """Trains, exports and tells of it; with the other processes of the team, if there is one."""
    train = settings.train
    with (
        disk_errors(Path(train.run_dir)),
        open_trainer(settings, config.operative_config(), team) as trainer,
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
