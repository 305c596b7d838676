"""`python -m manus_jax.evaluate --gin_file=configs/evaluate_textcraft.gin`: policies on a panel."""

from rich.console import Console

from manus_jax import command
from manus_jax.config import binding as config
from manus_jax.config.settings import (
    EngineSettings,
    EnvPoolSettings,
    EnvSettings,
    EvaluateSettings,
    RolloutGroup,
)
from manus_jax.evaluation import comparison
from manus_jax.evaluation.tables import comparison_table
from manus_jax.training.build_rollout import engine_kind


def main(arguments: list[str]) -> None:
    parser = config.argument_parser("evaluate", "Plays a fixed panel of tasks with policies.")
    args = parser.parse_args(arguments)
    config.parse(args.gin_file, args.gin_param)
    classes: list[type] = [
        EvaluateSettings,
        EnvSettings,
        RolloutGroup,
        EngineSettings,
        EnvPoolSettings,
    ]
    evaluate, env, rollout, engine, env_pool = config.build(*classes)
    engine_settings = None
    if (own := engine_kind(engine.name).settings) is not None:
        classes.append(own)
        (engine_settings,) = config.build(own)
    config.refuse_unread(classes)
    results = comparison.run(
        comparison.EvaluateConfig(evaluate, env, rollout, engine, env_pool, engine_settings),
        config.operative_config(),
    )
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    console.print(comparison_table(results, evaluate.samples))
    print(f"results                  {evaluate.out_dir}/evaluation.json")
    comparison.refuse_unplayed(results)


if __name__ == "__main__":
    command.run(main, interrupted="what was not finished is lost")
