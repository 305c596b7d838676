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
from manus_jax.data.chat import ChatStream, ChatTemplateError, Message, train_tokenizer
from manus_jax.models import adapter_files, huggingface, orbax_params
from manus_jax.models.adapter_files import Adaptation
from manus_jax.models.architecture import Architecture, ModelError, check_format
from manus_jax.models.families import FAMILIES
from manus_jax.models.huggingface import ModelCard
from manus_jax.models.lora import merged_params, split
from manus_jax.models.transformer import Compute, Params, Transformer, abstract_model, init_params

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_PROBE = "Go to the red ball 12."


@dataclasses.dataclass(frozen=True)
class PolicySource:
    """A model card, its tokenizer, and two ways to its parameters.

    `load(shardings, dtype)` returns arrays, float32 by default; `open()` returns `DiskArray`s if
    they are on disk.
    """

    card: ModelCard
    tokenizer: PreTrainedTokenizerBase
    load: Callable[..., Params]
    open: Callable[[], Params]

    def keep_card(self, directory: Path) -> "PolicySource":
        """Writes the card to `directory` (process 0 only) and refers to that copy."""
        if jax.process_index() != 0:
            return self
        self.card.save(directory)
        return dataclasses.replace(self, card=ModelCard.load(directory))


def open_tokenizer(directory: Path, vocab_size: int) -> PreTrainedTokenizerBase:
    """Opens the tokenizer of a Hugging Face directory, for a model with `vocab_size` tokens.

    `tokenizer.json` is read as it is if the config names the generic class. AutoTokenizer would
    replace its pre-tokenizer in a directory of a Qwen2 model, and imports torch where it is
    installed, which takes seconds.
    """
    if not any((directory / name).exists() for name in _VOCABULARIES):
        # transformers would make one without words
        raise ModelError(f"{directory} contains no tokenizer, such as {_VOCABULARIES[0]}")
    try:
        config = directory / "tokenizer_config.json"
        named = json.loads(config.read_text()).get("tokenizer_class") if config.is_file() else None
        if named in ("TokenizersBackend", "PreTrainedTokenizerFast"):
            from transformers import PreTrainedTokenizerFast as Tokenizer
        else:
            from transformers import AutoTokenizer as Tokenizer
        tokenizer = Tokenizer.from_pretrained(directory, local_files_only=True)
        same = tokenizer.decode(tokenizer(_PROBE, add_special_tokens=False)["input_ids"])
    except Exception as error:  # malformed files raise all kinds of errors in transformers
        raise ModelError(
            f"{directory}: the tokenizer's files are damaged, or transformers does not support "
            f"them: {' '.join(str(error).split())[:200]}"
        ) from None
    if same.strip() != _PROBE:
        raise ModelError(f"{directory}: the tokenizer turns {_PROBE!r} into {same[:100]!r}")
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= vocab_size:
        raise ModelError(
            f"{directory}: the tokenizer has token {largest}, but the model only has {vocab_size} "
            "tokens"
        )
    return tokenizer


def _check_chat(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Raises ModelError if the chat template cannot render an episode."""
    try:
        stream = ChatStream(tokenizer)
        message = [Message("user", _PROBE)]
        prompts = [stream.start(message), stream.extend([stream.stop_id], message)]
    except ChatTemplateError as error:
        raise ModelError(f"{directory}: {error}") from None
    if any(_PROBE not in tokenizer.decode(prompt) for prompt in prompts):
        raise ModelError(f"{directory}: the chat template omits the text of a user's message")


def check_length(source: PolicySource, length: int, name: str) -> None:
    """Raises ModelError if episodes of `length` tokens exceed the positions of the model `name`."""
    positions = source.card.architecture.max_positions
    if length > positions:
        raise ModelError(
            f"rollout.max_total_tokens = {length} exceeds the {positions} positions of {name}"
        )


def require_path(path: Path) -> None:
    """Raises ModelError if this host has no model at `path`."""
    path = path.expanduser()
    if not path.exists():
        start = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise ModelError(
            f"the model {path} does not exist{start} on the host {socket.gethostname()}: put it "
            "there, or name a directory that every host can read"
        )


def from_path(path: Path, adapters: tuple[Path, ...] = ()) -> PolicySource:
    """Opens a Hugging Face directory, a PEFT adapter, a run directory or a checkpoint of one.

    Adapters are merged with their base, which is where they say. `adapters` are those that have
    this model as their base.
    """
    path = Path(path).expanduser()
    require_path(path)
    if (resolved := path.resolve()) in adapters:
        raise ModelError(f"the adapter {path} has itself as its base model")
    above = (*adapters, resolved)
    check_format(path)
    if (path / "config.json").is_file():
        if jax.process_index() == 0:
            huggingface.verify_model(path)
        card = huggingface.read_card(path)
        return _with_tokenizer(
            card,
            path,
            lambda shardings, dtype="float32": huggingface.load_params(path, shardings, dtype)[0],
            lambda: huggingface.open_params(path)[0],
        )
    if (path / adapter_files.CONFIG).is_file():
        adaptation = adapter_files.read_adaptation(path)
        base = from_path(adapter_files.base_path(adaptation, Path(), path), above)
        arch = base.card.architecture
        weights = adapter_files.read_adapter(path, adaptation.lora, arch)
        return _with_adapters(base, adaptation, lambda: weights, path)
    step_dir, card_dir = orbax_params.find_checkpoint(path)
    card = ModelCard.load(card_dir)
    if adapter_files.has_adapters(step_dir):
        orbax_params.verify_step(step_dir)  # before it names another model
    if saved := adapter_files.checkpoint_adaptation(step_dir):
        base = from_path(adapter_files.base_path(saved, step_dir.parents[1], step_dir), above)
        return _with_adapters(base, saved, lambda: _adapters(step_dir, card), step_dir)
    return _with_tokenizer(
        card,
        card_dir,
        lambda shardings, dtype="float32": load_step(step_dir, card, shardings, dtype),
        lambda: open_step(step_dir, card),
    )


def _with_tokenizer(
    card: ModelCard,
    directory: Path,
    load: Callable[..., Params],
    open_params: Callable[[], Params],
) -> PolicySource:
    tokenizer = open_tokenizer(directory, card.architecture.vocab_size)
    _check_chat(tokenizer, directory)
    return PolicySource(card, tokenizer, load, open_params)


def _with_adapters(
    base: PolicySource, adaptation: Adaptation, read: Callable[[], Params], path: Path
) -> PolicySource:
    """`base` with the adapters that `read` returns, NumPy arrays; those at `path`."""

    def load(shardings: Any, dtype: str = "float32") -> Params:
        params = base.load(shardings, dtype)
        adaptation.check_base(params, f"the adapter {path}")
        return merged_params(params, read(), adaptation.lora)

    def open_merged() -> Params:
        params = base.open()
        adaptation.check_base(params, f"the adapter {path}")
        return adapter_files.merged_on_disk(params, read(), adaptation.lora)

    return dataclasses.replace(base, load=load, open=open_merged)


def _adapters(step_dir: Path, card: ModelCard) -> Params:
    """The adapters of a checkpoint as NumPy arrays."""
    adaptation = adapter_files.checkpoint_adaptation(step_dir)
    assert adaptation is not None
    _, shapes = abstract_model(Transformer, card.architecture, Compute(), adaptation.lora)
    stored = orbax_params.open_params(step_dir, split(shapes)[0])
    return jax.tree.map(lambda x: x.read(()), stored)


def open_step(step_dir: Path, card: ModelCard) -> Params:
    """A checkpoint's parameters as `DiskArray`s; adapters are merged with their base."""
    if adapter_files.has_adapters(step_dir):
        return from_path(step_dir).open()
    return orbax_params.open_params(
        step_dir, abstract_model(Transformer, card.architecture, Compute())[1]
    )


def load_step(step_dir: Path, card: ModelCard, shardings: Any, dtype: str = "float32") -> Params:
    """Loads a checkpoint's parameters with the given shardings."""
    _, shapes = abstract_model(Transformer, card.architecture, Compute())
    target = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, dtype, sharding=s), shapes, shardings
    )
    return orbax_params.load_params(step_dir, target)


def scratch_architecture(settings: ScratchSettings) -> Architecture:
    sizes = {name: value for name, value in vars(settings).items() if name != "tokens"}
    return Architecture(**sizes, **FAMILIES[settings.family].switches)


def from_scratch(
    settings: ScratchSettings, texts: Iterable[str], seed: int, directory: Path
) -> PolicySource:
    """A randomly initialised model and a tokenizer trained on `texts`, saved in `directory`."""
    if (directory / "tokenizer.json").is_file():
        huggingface.verify_model(directory)
        tokenizer = open_tokenizer(directory, settings.vocab_size)
    else:
        work = directory.with_name(f".{directory.name}.tmp-{os.getpid()}")
        tokenizer = train_tokenizer(texts, settings.vocab_size, work, settings.tokens == "phrases")
        directory.mkdir(parents=True, exist_ok=True)
        # tokenizer.json is moved last: if it exists, the other files are complete.
        for file in sorted(work.iterdir(), key=lambda file: file.name == "tokenizer.json"):
            file.replace(directory / file.name)
        work.rmdir()
    arch = scratch_architecture(settings)
    card = huggingface.new_card(arch, directory)
    load = lambda shardings: init_params(Transformer, arch, Compute(), seed, shardings)
    return PolicySource(card, tokenizer, load, lambda: load(None))
