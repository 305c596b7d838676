"""Initial policies: from a Hugging Face directory, from another run, or initialised at random.

Every run stores the model card (config and tokenizer) in its own `model/` directory, so that it can
be resumed and exported without the original source.
"""

import dataclasses
import json
import os
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from transformers import PreTrainedTokenizerBase

from manus_jax.config.settings import ScratchSettings
from manus_jax.data.chat import train_tokenizer
from manus_jax.models import huggingface, orbax_params
from manus_jax.models.architecture import Architecture, ModelError
from manus_jax.models.huggingface import ModelCard
from manus_jax.models.transformer import Compute, Params, Transformer, abstract_model, init_params


@dataclasses.dataclass(frozen=True)
class PolicySource:
    """A model card, its tokenizer, and two ways to its parameters.

    `load(shardings)` returns float32 arrays; `open()` returns `DiskArray`s if they are on disk.
    """

    card: ModelCard
    tokenizer: PreTrainedTokenizerBase
    load: Callable[[Any], Params]
    open: Callable[[], Params]

    def keep_card(self, directory: Path) -> "PolicySource":
        """Writes the card to `directory` (process 0 only) and refers to that copy."""
        if jax.process_index() != 0:
            return self
        self.card.save(directory)
        return dataclasses.replace(self, card=ModelCard.load(directory))


def open_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Opens the tokenizer of a Hugging Face directory.

    `tokenizer.json` is read as it is if the config names the generic class. AutoTokenizer would
    replace its pre-tokenizer in a directory of a Qwen2 model, and imports torch where it is
    installed, which takes seconds.
    """
    try:
        config = directory / "tokenizer_config.json"
        named = json.loads(config.read_text()).get("tokenizer_class") if config.is_file() else None
        if named in ("TokenizersBackend", "PreTrainedTokenizerFast"):
            from transformers import PreTrainedTokenizerFast as Tokenizer
        else:
            from transformers import AutoTokenizer as Tokenizer
        return Tokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # malformed files raise all kinds of errors in transformers
        raise ModelError(
            f"{directory} contains no tokenizer that transformers can read: "
            + " ".join(str(error).split())[:200]
        ) from None


def require_path(path: Path) -> None:
    """Raises ModelError if there is nothing at `model.path` on this host."""
    path = path.expanduser()
    if not path.exists():
        start = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise ModelError(
            f"model.path {path} does not exist{start} on the host {socket.gethostname()}: put the "
            "model there, or set model.path to a directory that every host can read"
        )


def from_path(path: Path) -> PolicySource:
    """Opens a Hugging Face directory, a run directory (its newest step) or a checkpoint."""
    path = Path(path).expanduser()
    require_path(path)
    if (path / "config.json").is_file():
        if jax.process_index() == 0:
            huggingface.verify_model(path)
        card = huggingface.read_card(path)
        return _with_tokenizer(
            card,
            path,
            lambda shardings: huggingface.load_params(path, shardings)[0],
            lambda: huggingface.open_params(path)[0],
        )
    step_dir, card_dir = orbax_params.find_checkpoint(path)
    card = ModelCard.load(card_dir)
    return _with_tokenizer(
        card,
        card_dir,
        lambda shardings: load_step(step_dir, card, shardings),
        lambda: open_step(step_dir, card),
    )


def _with_tokenizer(
    card: ModelCard,
    directory: Path,
    load: Callable[[Any], Params],
    open_params: Callable[[], Params],
) -> PolicySource:
    tokenizer, size = open_tokenizer(directory), card.architecture.vocab_size
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= size:
        raise ModelError(
            f"{directory}: the tokenizer has token {largest}, but the model only has {size} tokens"
        )
    return PolicySource(card, tokenizer, load, open_params)


def open_step(step_dir: Path, card: ModelCard) -> Params:
    """A checkpoint's parameters as `DiskArray`s."""
    return orbax_params.open_params(
        step_dir, abstract_model(Transformer, card.architecture, Compute())[1]
    )


def load_step(step_dir: Path, card: ModelCard, shardings: Any) -> Params:
    """Loads a checkpoint's parameters with the given shardings."""
    _, shapes = abstract_model(Transformer, card.architecture, Compute())
    target = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
    return orbax_params.load_params(step_dir, target)


def scratch_architecture(settings: ScratchSettings) -> Architecture:
    family = settings.family
    return Architecture(**vars(settings), qkv_bias=family == "qwen2", qk_norm=family == "qwen3")


def from_scratch(
    settings: ScratchSettings, texts: Iterable[str], seed: int, directory: Path
) -> PolicySource:
    """A randomly initialised model and a tokenizer trained on `texts`, saved in `directory`."""
    if (directory / "tokenizer.json").is_file():
        huggingface.verify_model(directory)
        tokenizer = open_tokenizer(directory)
    else:
        work = directory.with_name(f".{directory.name}.tmp-{os.getpid()}")
        tokenizer = train_tokenizer(texts, settings.vocab_size, work)
        directory.mkdir(parents=True, exist_ok=True)
        # tokenizer.json is moved last: if it exists, the other files are complete.
        for file in sorted(work.iterdir(), key=lambda file: file.name == "tokenizer.json"):
            file.replace(directory / file.name)
        work.rmdir()
    arch = scratch_architecture(settings)
    card = huggingface.new_card(arch, directory)
    load = lambda shardings: init_params(Transformer, arch, Compute(), seed, shardings)
    return PolicySource(card, tokenizer, load, lambda: load(None))
