"""`python -m manus_jax.convert from-hf|to-hf`: converts between Hugging Face and Orbax."""

from pathlib import Path

from manus_jax import command
from manus_jax.models import huggingface, orbax_params
from manus_jax.models.architecture import ModelError
from manus_jax.models.huggingface import ModelCard
from manus_jax.models.loading import open_step, open_tokenizer
from manus_jax.training.run_directory import disk_errors


def from_hf(hf: Path, out: Path) -> Path:
    """Writes `out/checkpoints/0` and `out/model`: a run directory that contains only a model."""
    if orbax_params.list_steps(out / "checkpoints") or (out / "config.gin").exists():
        raise ModelError(f"{out} holds a run already; choose another --out")
    if (out / "config.json").exists():
        raise ModelError(f"{out} holds a Hugging Face model; choose another --out")
    card = huggingface.read_card(hf)
    huggingface.verify_model(hf)
    if any(hf.glob("tokenizer*")):
        open_tokenizer(hf, card.architecture.vocab_size)
    else:
        print(f"{hf} has no tokenizer: the result can be converted back, but not trained or played")
    huggingface.check_finite(hf)
    params, card = huggingface.open_params(hf)
    card.save(out / "model")
    return orbax_params.save_params(out, params, {"source": str(hf)})


def to_hf(checkpoint: Path, out: Path) -> None:
    """Writes a checkpoint's parameters as a Hugging Face directory."""
    step_dir, card_dir = orbax_params.find_checkpoint(checkpoint)
    card = ModelCard.load(card_dir)
    huggingface.check_new(out)
    huggingface.save_hf(open_step(step_dir, card), card, out)


def main(arguments: list[str]) -> None:
    parser = command.Parser(prog="python -m manus_jax.convert", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    read = commands.add_parser("from-hf", help="a Hugging Face directory into an Orbax checkpoint")
    read.add_argument("--hf", type=command.path, required=True, help="the Hugging Face directory")
    read.add_argument(
        "--out", type=command.output_directory, required=True, help="the run directory to make"
    )
    write = commands.add_parser("to-hf", help="an Orbax checkpoint into a Hugging Face directory")
    write.add_argument(
        "--checkpoint", type=command.path, required=True, help="a run directory or a step below it"
    )
    write.add_argument(
        "--out", type=command.output_directory, required=True, help="the directory to make"
    )
    args = parser.parse_args(arguments)
    with disk_errors(args.out, "Free some space and run the command again"):
        if args.command == "from-hf":
            print(f"wrote {from_hf(args.hf, args.out)}")
        else:
            to_hf(args.checkpoint, args.out)
            print(f"wrote {args.out}")


if __name__ == "__main__":
    command.run(main, interrupted="the output is not complete; run the command again")
