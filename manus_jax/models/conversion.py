"""Converts models between Hugging Face directories and Orbax checkpoints, bit for bit."""

from pathlib import Path

from manus_jax.models import huggingface, orbax_params
from manus_jax.models.architecture import ModelError
from manus_jax.models.huggingface import ModelCard
from manus_jax.models.loading import open_step, open_tokenizer


def from_hf(hf: Path, out: Path) -> Path:
    """Writes `out/checkpoints/0` and `out/model`: a run directory that contains only a model."""
    if orbax_params.list_steps(out / "checkpoints") or (out / "config.gin").exists():
        raise ModelError(f"{out} holds a run already; choose another --out")
    # An interrupted conversion leaves parts of these, and is run again.
    others = [path.name for path in out.glob("[!.]*") if path.name not in ("checkpoints", "model")]
    if others:
        raise ModelError(f"{out} is not empty, it contains {others[0]}; choose another --out")
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
