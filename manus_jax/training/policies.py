"""Creates the models of a run: policy, critic and reference, with or without adapters."""

import jax
from jax.sharding import Mesh

from manus_jax.algorithms.recipes import Recipe
from manus_jax.config.commands import TrainConfig
from manus_jax.learner.learner import BaseReference, Learner, LearnerSpec, Reference
from manus_jax.learner.mesh import param_shardings
from manus_jax.learner.update import require_finite
from manus_jax.models.loading import PolicySource
from manus_jax.models.transformer import Critic, Transformer, critic_from_policy, init_adapters
from manus_jax.training.learner_specs import critic_spec, policy_spec


def make_learner(
    source: PolicySource, spec: LearnerSpec, mesh: Mesh, seed: int, name: str
) -> Learner:
    """A language model in training from `source`, which `name` names in messages."""
    if spec.lora is None:
        params = source.load(param_shardings(spec.shapes, mesh))
        require_finite(params, name)
        return Learner(params, spec, mesh)
    (shapes,) = spec.frozen
    base = source.load(param_shardings(shapes, mesh), jax.tree.leaves(shapes)[0].dtype.name)
    require_finite(base, name)
    placed = param_shardings(spec.shapes, mesh)
    adapters = init_adapters(Transformer, source.card.architecture, spec.lora, seed, placed)
    return Learner(adapters, spec, mesh, (base,))


def build_learners(
    config: TrainConfig, recipe: Recipe, source: PolicySource, mesh: Mesh
) -> tuple[dict[str, Learner], Reference | BaseReference | None]:
    """The policy and, if the recipe needs them, the critic and the reference."""
    arch, seed = source.card.architecture, config.train.seed
    spec = policy_spec(config, recipe, arch, mesh)
    name = f"the model {config.model.path or 'of the warm start'}"
    policy = make_learner(source, spec, mesh, seed, name)
    reference: Reference | BaseReference | None = None
    if recipe.needs_reference and spec.lora is not None:
        reference = BaseReference(spec, mesh)
    elif recipe.needs_reference:
        settings = config.algorithm
        on_host = settings.reference == "host"
        reference = Reference(policy.state.params, on_host, settings.reference_dtype)
    learners = {"policy": policy}
    if recipe.needs_critic:
        value_spec = critic_spec(config, arch, mesh)
        placed = param_shardings(value_spec.shapes, mesh)
        if value_spec.lora is None:
            critic = jax.jit(critic_from_policy, out_shardings=placed)(policy.state.params)
            learners["critic"] = Learner(critic, value_spec, mesh)
        else:
            critic = init_adapters(Critic, arch, value_spec.lora, seed, placed)
            base = {"backbone": policy.frozen[0]["backbone"]}
            learners["critic"] = Learner(critic, value_spec, mesh, (base,))
    return learners, reference
