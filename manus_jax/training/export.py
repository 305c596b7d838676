"""The weights of a policy for the engine, and the trained model in `export/<step>/`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manus_jax.learner.learner import Learner
from manus_jax.learner.update import require_finite
from manus_jax.models.adapter_files import Adaptation, AdapterWeights, fingerprint, save_adapter
from manus_jax.models.huggingface import ModelCard, is_complete, save_hf
from manus_jax.training.job import Job
from manus_jax.training.run_directory import RunDirectory
from manus_jax.weights.host_tensors import gather_to_host, types_of


def describe_adapters(policy: Learner, base: Path, directory: RunDirectory) -> Adaptation | None:
    """The adaptation of a policy whose base was loaded from `base`; None without LoRA.

    A base in the run directory is named by a relative path, so that the directory can be moved.
    """
    if policy.spec.lora is None:
        return None
    base, run = base.expanduser().absolute(), directory.path.absolute()
    named = base.relative_to(run) if base.is_relative_to(run) else base
    return Adaptation(policy.spec.lora, str(named), fingerprint(policy.frozen[0]))


def engine_weights(
    policy: Learner,
    adaptation: Adaptation | None,
    directory: RunDirectory,
    job: Job,
    types: Mapping[tuple[str, ...], Any],
) -> Any:
    """The weights for an engine: parameters, or adapters if an `adaptation` is given.

    With several processes, parameters are gathered in the `types` that the engine uses.
    """
    if adaptation is None:
        return gather_to_host(policy.merged(), job.primary, types)
    adapters = gather_to_host(policy.state.params, job.primary)
    return AdapterWeights(adapters, adaptation, directory.path.absolute() / adaptation.base)


def export_policy(
    policy: Learner,
    adaptation: Adaptation | None,
    directory: RunDirectory,
    step: int,
    job: Job,
    merged: bool = False,
) -> None:
    """Writes what does not exist yet: a Hugging Face directory, or a PEFT adapter and, if wanted,
    the merged model."""
    card, export = ModelCard.load(directory.model), directory.export(step)
    if adaptation is not None:
        if not is_complete(export):
            require_finite(policy.state.params, "the trained adapter")
            adapters = gather_to_host(policy.state.params, job.primary)
            base = directory.path.absolute() / adaptation.base
            arch = card.architecture
            job.on_primary(lambda: save_adapter(adapters, adaptation, base, arch, export))
        export = directory.merged_export(step)
    if (adaptation is None or merged) and not is_complete(export):
        require_finite(policy.state.params, "the trained model")
        params = gather_to_host(policy.merged(), job.primary, types_of(card))
        job.on_primary(lambda: save_hf(params, card, export))
