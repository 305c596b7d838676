"""`python -m manus_jax.evaluate --gin_file=F`: plays an evaluation set with several policies."""

from rich.console import Console

from manus_jax import command
from manus_jax.config.commands import READS, read_evaluate_config
from manus_jax.config.run_config import config_text
from manus_jax.evaluation import comparison
from manus_jax.rollout.build_rollout import read_with_engine, with_engine_settings
from manus_jax.status import recorded
from manus_jax.training.compilation_cache import use_compilation_cache


def main(arguments: list[str]) -> None:
    parser = command.config_parser("evaluate", "Plays a fixed set of tasks with policies.")
    args = parser.parse_args(arguments)
    settings = with_engine_settings(read_evaluate_config(args.gin_file, args.gin_param))
    use_compilation_cache(settings.compilation)
    read = read_with_engine(READS["evaluate"], settings.engine.name)
    with recorded("evaluate", settings.status.every_s, settings.status.watchdog_minutes):
        results = comparison.run(settings, config_text(settings, read))
        console = Console()
        if not console.is_terminal:
            console = Console(width=140)
        console.print(comparison.comparison_table(results, settings.evaluate.samples))
        print(f"results                  {settings.evaluate.out_dir}/evaluation.json")
        for name, result in results.items():
            result.check_played(name)


if __name__ == "__main__":
    command.run(main, interrupted="results of unfinished policies are lost")
