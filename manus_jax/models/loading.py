"""Where a policy comes from: a Hugging Face directory, another run, or nothing at all.

Whatever the source, a run keeps the model's card (config and tokenizer) in its own `model/`, so
that it can be resumed and exported when the source is gone.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from manus_jax.config.settings import ScratchSettings
from manus_jax.data.chat import train_tokenizer
from manus_jax.models import huggingface
from manus_jax.models.architecture import Architecture, ModelError
from manus_jax.models.huggingface import ModelCard
from manus_jax.models.transformer import Compute, Params, Transformer, abstract_model, init_params
from manus_jax.training import checkpoints


@dataclasses.dataclass(frozen=True)
class PolicySource:
    """A model's card and tokenizer, and `load(shardings)`, which makes its parameters."""

    card: ModelCard
    tokenizer: PreTrainedTokenizerBase
    load: Callable[[Any], Params]

    def keep_card(self, directory: Path) -> "PolicySource":
        """Writes the card to `directory` and refers to it there; process 0 does it for all."""
        if jax.process_index() != 0:
            return self
        self.card.save(directory)
        return dataclasses.replace(self, card=ModelCard.load(directory))


def open_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{directory} holds no tokenizer that transformers can read: "
            + " ".join(str(error).split())[:200]
        ) from None


def from_path(path: Path) -> PolicySource:
    """A Hugging Face directory, or a run directory or checkpoint (its newest step)."""
    path = Path(path).expanduser()
    if not path.exists():
        raise ModelError(f"model.path {path} does not exist")
    if (path / "config.json").is_file():
        card = huggingface.read_card(path)
        load = lambda shardings: huggingface.load_params(path, shardings)[0]
        return PolicySource(card, open_tokenizer(path), load)
    step_dir, card_dir = checkpoints.find_checkpoint(path)
    card = ModelCard.load(card_dir)
    return PolicySource(card, open_tokenizer(card_dir), lambda s: load_step(step_dir, card, s))


def load_step(step_dir: Path, card: ModelCard, shardings: Any = None) -> Params:
    """The parameters of a checkpoint, where `shardings` puts them (None: one device)."""
    _, shapes = abstract_model(Transformer, card.architecture, Compute())
    if shardings is None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: device, shapes)
    target = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
    return checkpoints.load_params(step_dir, target)


def from_scratch(
    settings: ScratchSettings, texts: Iterable[str], seed: int, directory: Path
) -> PolicySource:
    """A random small model and a tokenizer trained on `texts`, kept in `directory`."""
    if (directory / "tokenizer.json").is_file():
        tokenizer = open_tokenizer(directory)
    else:
        work = directory.with_name(f".{directory.name}.tmp-{os.getpid()}")
        tokenizer = train_tokenizer(texts, settings.vocab_size, work)
        directory.mkdir(parents=True, exist_ok=True)
        # The file that is looked for comes last, so that it is only found among whole ones.
        for file in sorted(work.iterdir(), key=lambda file: file.name == "tokenizer.json"):
            file.replace(directory / file.name)
        work.rmdir()
    sizes = dataclasses.asdict(settings)
    arch = Architecture(
        **sizes,
        qkv_bias=settings.family == "qwen2",
        qk_norm=settings.family == "qwen3",
    )
    card = huggingface.new_card(arch, directory)
    load = lambda shardings: init_params(Transformer, arch, Compute(), seed, shardings)
    return PolicySource(card, tokenizer, load)
