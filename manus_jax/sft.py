"""`python -m manus_jax.sft --gin_file=configs/sft_textcraft.gin`: supervised fine-tuning."""

from pathlib import Path

from manus_jax import command
from manus_jax.config.commands import READS, read_sft_config
from manus_jax.config.run_config import config_text
from manus_jax.status import recorded
from manus_jax.training import supervised
from manus_jax.training.compilation_cache import use_compilation_cache
from manus_jax.training.job import joined
from manus_jax.training.run_directory import disk_errors


def main(arguments: list[str]) -> None:
    parser = command.config_parser("sft", "Fine-tunes a model on agent conversations.")
    args = parser.parse_args(arguments)
    settings = read_sft_config(args.gin_file, args.gin_param)
    written = command.config_comment(parser, args) + config_text(settings, READS["sft"])
    use_compilation_cache(settings.compilation)
    sft = settings.sft
    with (
        joined(settings.distributed) as job,
        recorded("sft", settings.status.every_s, settings.status.watchdog_minutes, job.number),
        disk_errors(Path(sft.run_dir)),
    ):
        last = supervised.run(settings, written, job)
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
