"""Algorithms by name, each a composition of an advantage, a policy loss and corrections.

A recipe names an advantage, a policy loss, an aggregation and corrections, with their settings. The
rest of the program only calls `compute_advantages` and `policy_loss`, which have the same interface
for every algorithm. `dataclasses.replace(RECIPES["grpo"], ...)` changes a setting, and
`RECIPES.add(Recipe("mine", advantage=..., loss=...))` adds an algorithm. New parts are functions
decorated with `@ADVANTAGES.register("name")` or `@POLICY_LOSSES.register("name")` and, if they need
more than the usual inputs, `@needs(...)`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np

from manus_jax.algorithms import advantages, dpo, gigpo, kl, losses, rft, sibling
from manus_jax.algorithms.aggregation import AGGREGATIONS
from manus_jax.algorithms.corrections import CORRECTIONS, Correction, importance_weights
from manus_jax.registry import Registry

KL_PLACEMENTS = ("none", "reward", "loss")


F = TypeVar("F", bound=Callable[..., object])


def needs(*inputs: str) -> Callable[[F], F]:
    """Decorator: declares the inputs that an advantage or a policy loss needs.

    An advantage may need groups (several episodes of one task), values, greedy_scores, steps, the
    tree that branching episodes form, and preferences (successes, and log-probs relative to the
    reference). A policy loss may need segment_ids and any per-token field of the batch, which is
    then in `tokens.fields`.
    """

    def declare(function: F) -> F:
        function.needs = frozenset(inputs)  # type: ignore[attr-defined]
        return function

    return declare


Keeps = Callable[[np.ndarray], np.ndarray]
"""The successes of a group's episodes, bool [n] → which of them are trained on, bool [n]."""


def keeps(select: Keeps) -> Callable[[F], F]:
    """Decorator: declares which episodes of a group an advantage is for; by default all."""

    def declare(function: F) -> F:
        function.keeps = select  # type: ignore[attr-defined]
        return function

    return declare


def _needs_of(function: Callable[..., object]) -> frozenset[str]:
    return getattr(function, "needs", frozenset())


@dataclass(frozen=True)
class Recipe:
    """An algorithm. Frozen and hashable: it can be a static argument of a jitted function."""

    name: str
    advantage: str
    gamma: float = 1.0  # discount per agent token; per step for gigpo
    lam: float = 1.0
    normalize_by_std: bool = True  # in groups
    step_weight: float = 1.0  # omega of gigpo
    beta: float = 0.1  # of dpo
    whiten: bool = False  # the advantages of the whole batch, over its agent tokens

    loss: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    entropy_coef: float = 0.0
    corrections: tuple[Correction, ...] = (CORRECTIONS["token_tis"],)
    aggregation: str = "token-mean"

    kl_placement: str = "none"
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    dynamic_sampling: bool = False  # replace groups whose outcomes are all equal

    def __post_init__(self) -> None:
        ADVANTAGES[self.advantage], POLICY_LOSSES[self.loss]  # RegistryError for unknown names
        AGGREGATIONS[self.aggregation], kl.ESTIMATORS[self.kl_estimator]
        if self.kl_placement not in KL_PLACEMENTS:
            known = ", ".join(KL_PLACEMENTS)
            raise ValueError(f"unknown KL placement {self.kl_placement!r} (known: {known})")
        if (self.kl_placement == "none") != (self.kl_coef == 0.0):
            raise ValueError(
                f"recipe {self.name!r}: kl_placement={self.kl_placement!r} does not go with "
                f"kl_coef={self.kl_coef}; set both, or 'none' and 0"
            )
        if self.needs_tree and self.kl_placement == "reward":
            raise ValueError(
                f"recipe {self.name!r}: the KL of tokens that branches share is part of one "
                "episode's reward only, so rewards with KL cannot be compared; use 'loss'"
            )
        if self.dual_clip and self.dual_clip <= 1.0:
            raise ValueError(f"recipe {self.name!r}: dual_clip={self.dual_clip} is not above 1")

    @property
    def needs_critic(self) -> bool:
        return "values" in _needs_of(ADVANTAGES[self.advantage])

    @property
    def needs_greedy_baseline(self) -> bool:
        return "greedy_scores" in _needs_of(ADVANTAGES[self.advantage])

    @property
    def needs_step_groups(self) -> bool:
        return "steps" in _needs_of(ADVANTAGES[self.advantage])

    @property
    def needs_tree(self) -> bool:
        return "tree" in _needs_of(ADVANTAGES[self.advantage])

    @property
    def needs_groups(self) -> bool:
        """Whether the advantage compares several episodes of one task."""
        return "groups" in _needs_of(ADVANTAGES[self.advantage])

    @property
    def needs_preferences(self) -> bool:
        return "preferences" in _needs_of(ADVANTAGES[self.advantage])

    @property
    def keeps(self) -> Keeps | None:
        """Which episodes of a group are trained on; None: all."""
        return getattr(ADVANTAGES[self.advantage], "keeps", None)

    @property
    def needs_reference(self) -> bool:
        return self.kl_placement != "none" or self.needs_preferences

    @property
    def loss_fields(self) -> tuple[str, ...]:
        """The names of the arrays that the policy loss needs."""
        sequence_level = any(correction.level != "token" for correction in self.corrections)
        fields = {
            "old_log_probs": True,
            "advantages": True,
            "mask": True,
            "segment_ids": sequence_level or "segment_ids" in _needs_of(POLICY_LOSSES[self.loss]),
            "sampler_log_probs": bool(self.corrections),
            "ref_log_probs": self.kl_placement == "loss",
            "entropy": self.entropy_coef != 0.0,
        }
        return (*(name for name, needed in fields.items() if needed), *self.extra_fields)

    @property
    def extra_fields(self) -> tuple[str, ...]:
        """The per-token fields that the policy loss needs in addition to the standard ones."""
        return tuple(sorted(_needs_of(POLICY_LOSSES[self.loss]) - {"segment_ids"}))


class Episodes(NamedTuple):
    """A padded batch of B episodes of T tokens, the input of an advantage function."""

    token_rewards: jax.Array  # [B, T], 0 outside the mask
    mask: jax.Array  # bool [B, T], agent tokens of valid rows
    scores: jax.Array  # [B], the sum of each row's token rewards
    group_ids: jax.Array  # int [B] in [0, B)
    valid: jax.Array  # bool [B]
    values: jax.Array | None  # [B, T]
    greedy_scores: jax.Array | None  # [B]
    steps: gigpo.Steps | None
    tree: sibling.Tree | None
    preferences: dpo.Preferences | None


# Advantages, [B, T] or [B] (the same for every token), and returns for the critic, [B, T] or None.
AdvantagesAndReturns = tuple[jax.Array, jax.Array | None]
AdvantageFn = Callable[[Recipe, Episodes], AdvantagesAndReturns]


ADVANTAGES: Registry[AdvantageFn] = Registry("advantage")


@ADVANTAGES.register("gae")
@needs("values")
def _gae(recipe: Recipe, e: Episodes) -> AdvantagesAndReturns:
    over_rows = jax.vmap(advantages.gae, (0, 0, 0, None, None))
    return over_rows(e.token_rewards, e.values, e.mask, recipe.gamma, recipe.lam)


@ADVANTAGES.register("rewards_to_go")
def _rewards_to_go(recipe: Recipe, e: Episodes) -> AdvantagesAndReturns:
    over_rows = jax.vmap(advantages.rewards_to_go, (0, 0, None))
    return over_rows(e.token_rewards, e.mask, recipe.gamma), None


@ADVANTAGES.register("remax")
@needs("greedy_scores")
def _remax(recipe: Recipe, e: Episodes) -> AdvantagesAndReturns:
    to_go, _ = _rewards_to_go(recipe, e)
    return advantages.remax(to_go, e.greedy_scores), None


@ADVANTAGES.register("grpo")
@needs("groups")
def _grpo(recipe: Recipe, e: Episodes) -> AdvantagesAndReturns:
    return advantages.grpo(e.scores, e.group_ids, e.valid, recipe.normalize_by_std), None


@ADVANTAGES.register("grpo_passk")
@needs("groups")
def _grpo_passk(recipe: Recipe, e: Episodes) -> AdvantagesAndReturns:
    return advantages.grpo_passk(e.scores, e.group_ids, e.valid, recipe.normalize_by_std), None


@ADVANTAGES.register("rloo")
@needs("groups")
def _rloo(recipe: Recipe, e: Episodes) -> AdvantagesAndReturns:
    return advantages.rloo(e.scores, e.group_ids, e.valid), None


@ADVANTAGES.register("reinforce_pp_baseline")
@needs("groups")
def _reinforce_pp_baseline(recipe: Recipe, e: Episodes) -> AdvantagesAndReturns:
    return advantages.reinforce_pp_baseline(e.scores, e.group_ids, e.valid, e.mask), None


@ADVANTAGES.register("gigpo")
@needs("groups", "steps")
def _gigpo(recipe: Recipe, e: Episodes) -> AdvantagesAndReturns:
    assert e.steps is not None
    settings = (recipe.gamma, recipe.step_weight, recipe.normalize_by_std)
    per_step = gigpo.gigpo(e.scores, e.group_ids, e.valid, e.steps, *settings)
    return gigpo.to_tokens(per_step, e.steps.turn_ids, e.mask), None


@ADVANTAGES.register("sibling")
@needs("groups", "tree")
def _sibling(recipe: Recipe, e: Episodes) -> AdvantagesAndReturns:
    assert e.tree is not None
    per_turn = sibling.sibling(e.scores, e.group_ids, e.valid, e.tree, recipe.normalize_by_std)
    return gigpo.to_tokens(per_turn, e.tree.turn_ids, e.mask), None


@ADVANTAGES.register("rft")
@keeps(rft.kept)
def _rft(recipe: Recipe, e: Episodes) -> AdvantagesAndReturns:
    return rft.rft(e.valid), None


@ADVANTAGES.register("dpo")
@needs("groups", "preferences")
@keeps(dpo.kept)
def _dpo(recipe: Recipe, e: Episodes) -> AdvantagesAndReturns:
    assert e.preferences is not None
    return dpo.dpo(e.preferences, e.group_ids, e.valid, recipe.beta), None


def compute_advantages(
    recipe: Recipe,
    token_rewards: chex.Array,
    mask: chex.Array,
    group_ids: chex.Array,
    valid: chex.Array,
    values: chex.Array | None = None,
    greedy_scores: chex.Array | None = None,
    steps: gigpo.Steps | None = None,
    tree: sibling.Tree | None = None,
    preferences: dpo.Preferences | None = None,
) -> AdvantagesAndReturns:
    """Advantages of a padded batch of episodes, [B, T], and returns for the critic, if any.

    Both are 0 outside the mask. The arguments are those of `Episodes`: rewards, mask and values
    [B, T], the others [B]. Rows that are not valid (failed episodes, padding) count nowhere.
    """
    advantage = ADVANTAGES[recipe.advantage]
    given = {
        "values": values,
        "greedy_scores": greedy_scores,
        "steps": steps,
        "tree": tree,
        "preferences": preferences,
    }
    missing = [
        name for name, value in given.items() if value is None and name in _needs_of(advantage)
    ]
    if missing:
        raise ValueError(f"recipe {recipe.name!r} needs {', '.join(missing)}; got None")
    chex.assert_rank([token_rewards, mask, group_ids, valid], [2, 2, 1, 1])
    chex.assert_equal_shape([token_rewards, mask])
    chex.assert_type([token_rewards, group_ids], [float, int])

    # A row without agent tokens has no score; a score of 0 would shift its group's baseline.
    valid = jnp.asarray(valid, bool) & jnp.asarray(mask, bool).any(-1)
    mask = jnp.asarray(mask, bool) & valid[:, None]
    token_rewards = jnp.where(mask, token_rewards, 0.0).astype(jnp.float32)
    episodes = Episodes(
        token_rewards=token_rewards,
        mask=mask,
        scores=token_rewards.sum(-1),
        group_ids=jnp.asarray(group_ids),
        valid=valid,
        values=values,
        greedy_scores=greedy_scores,
        steps=steps,
        tree=tree,
        preferences=preferences,
    )
    adv, returns = advantage(recipe, episodes)
    adv = jnp.broadcast_to(adv[:, None], mask.shape) if adv.ndim == 1 else adv
    return advantages.whiten(adv, mask) if recipe.whiten else jnp.where(mask, adv, 0.0), returns


class Tokens(NamedTuple):
    """Packed rows, [rows, length], the input of a policy loss; floats are 0 outside the mask."""

    log_probs: jax.Array
    old_log_probs: jax.Array
    advantages: jax.Array
    mask: jax.Array  # bool
    segment_ids: jax.Array | None  # int in [0, num_segments), numbered separately in each row
    num_segments: int
    fields: Mapping[str, jax.Array]  # the additional inputs that the loss declares with `needs`


PolicyLossFn = Callable[[Recipe, Tokens], losses.LossAndStats]


POLICY_LOSSES: Registry[PolicyLossFn] = Registry("policy loss")


@POLICY_LOSSES.register("ppo_clip")
def _ppo_clip(r: Recipe, t: Tokens) -> losses.LossAndStats:
    return losses.ppo_clip(
        t.log_probs, t.old_log_probs, t.advantages, r.clip_low, r.clip_high, r.dual_clip
    )


@POLICY_LOSSES.register("gspo")
@needs("segment_ids")
def _gspo(r: Recipe, t: Tokens) -> losses.LossAndStats:
    return losses.gspo(*t[:6], r.clip_low, r.clip_high)


@POLICY_LOSSES.register("cispo")
def _cispo(r: Recipe, t: Tokens) -> losses.LossAndStats:
    return losses.cispo(t.log_probs, t.old_log_probs, t.advantages, r.clip_low, r.clip_high)


@POLICY_LOSSES.register("reinforce")
def _reinforce(r: Recipe, t: Tokens) -> losses.LossAndStats:
    return losses.reinforce(t.log_probs, t.old_log_probs, t.advantages)


def policy_loss(
    recipe: Recipe, num_segments: int | None = None
) -> Callable[[chex.Array, Mapping[str, chex.Array]], losses.LossAndStats]:
    """The recipe's loss as a function of the policy's log-probs, for use inside a jitted step.

    Policy loss times corrections, plus the KL loss, minus the entropy bonus, per token.
    `num_segments` is a static bound on the segments in a row; None takes its length plus one.

    The result is `(log_probs, fields) -> (loss_t, stats)`, all arrays [rows, length]. `fields` has
    the arrays that `recipe.loss_fields` names; the entropy is that of the current policy and is
    differentiated. Outside the mask, losses, stats and gradients are 0 for any array values.
    """

    def loss_fn(log_probs: chex.Array, fields: Mapping[str, chex.Array]) -> losses.LossAndStats:
        missing = [name for name in recipe.loss_fields if name not in fields]
        if missing:
            raise ValueError(f"recipe {recipe.name!r} needs {', '.join(missing)} in fields")
        chex.assert_rank(log_probs, 2)
        chex.assert_equal_shape([log_probs, *(fields[name] for name in recipe.loss_fields)])
        mask = jnp.asarray(fields["mask"], bool)

        def on_mask(x: chex.Array) -> jax.Array:
            return jnp.where(mask, x, 0.0).astype(jnp.float32)

        t = Tokens(
            log_probs=on_mask(log_probs),
            old_log_probs=on_mask(fields["old_log_probs"]),
            advantages=on_mask(fields["advantages"]),
            mask=mask,
            segment_ids=fields.get("segment_ids"),
            num_segments=num_segments or log_probs.shape[1] + 1,
            fields={name: on_mask(fields[name]) for name in recipe.extra_fields},
        )
        loss_t, stats = POLICY_LOSSES[recipe.loss](recipe, t)
        for correction in recipe.corrections:
            sampler_log_probs = on_mask(fields["sampler_log_probs"])
            weights, changed = importance_weights(
                correction, t.old_log_probs, sampler_log_probs, mask, t.segment_ids, t.num_segments
            )
            loss_t = loss_t * weights
            stats["is_weight"] = stats.get("is_weight", 1.0) * weights
            stats["is_changed"] = jnp.maximum(stats.get("is_changed", 0.0), changed)
        stats["pg_loss"] = loss_t
        if recipe.kl_placement == "loss":
            kl_t, kl_stats = losses.kl_loss(
                t.log_probs, on_mask(fields["ref_log_probs"]), recipe.kl_coef, recipe.kl_estimator
            )
            loss_t, stats = loss_t + kl_t, stats | kl_stats
        if recipe.entropy_coef:
            bonus_t, entropy_stats = losses.entropy_bonus(fields["entropy"], recipe.entropy_coef)
            loss_t, stats = loss_t + bonus_t, stats | entropy_stats
        stats = {name: jax.lax.stop_gradient(on_mask(value)) for name, value in stats.items()}
        return on_mask(loss_t), stats

    return loss_fn


RECIPES: Registry[Recipe] = Registry("recipe")


def _with_kl(placement: str, coef: float, estimator: str, recipe: Recipe) -> Recipe:
    return replace(recipe, kl_placement=placement, kl_coef=coef, kl_estimator=estimator)


for _recipe in (
    _with_kl("reward", 0.001, "k1", Recipe("ppo", "gae", whiten=True)),
    _with_kl("loss", 0.001, "k3", Recipe("grpo", "grpo")),
    # No division by std or length, the two biases of GRPO that the Dr. GRPO paper removes.
    Recipe("dr_grpo", "grpo", normalize_by_std=False, aggregation="seq-mean-token-sum-norm"),
    # Clip-higher, equal weight for every token, no KL, only groups whose rewards differ.
    Recipe("dapo", "grpo", clip_high=0.28, dual_clip=None, dynamic_sampling=True),
    Recipe(
        "gspo",
        "grpo",
        loss="gspo",
        clip_low=3e-4,
        clip_high=4e-4,
        dual_clip=None,
        corrections=(CORRECTIONS["geometric_tis"],),
        aggregation="seq-mean-token-mean",
    ),
    # The ratio has no lower bound; the upper bound, 5, is from arxiv.org/abs/2510.13786.
    Recipe("cispo", "grpo", loss="cispo", clip_low=1.0, clip_high=4.0, dual_clip=None),
    # The next four use the clipped loss: its gradient is REINFORCE's while the ratio is 1, and
    # clipping keeps later updates within a trust region.
    _with_kl("reward", 0.001, "k1", Recipe("rloo", "rloo")),
    _with_kl("reward", 0.001, "k1", Recipe("remax", "remax")),
    _with_kl("reward", 0.001, "k1", Recipe("reinforce_pp", "rewards_to_go", whiten=True)),
    _with_kl("loss", 0.001, "k2", Recipe("reinforce_pp_baseline", "reinforce_pp_baseline")),
    _with_kl("loss", 0.01, "k3", Recipe("gigpo", "gigpo", gamma=0.95, normalize_by_std=False)),
    _with_kl("loss", 0.001, "k3", Recipe("grpo_passk", "grpo_passk")),
    _with_kl("loss", 0.001, "k3", Recipe("sibling", "sibling", normalize_by_std=False)),
    # Neither is a policy gradient of the reward: who sampled the episodes does not matter.
    Recipe("rft", "rft", loss="reinforce", corrections=()),
    Recipe("dpo", "dpo", loss="reinforce", corrections=(), aggregation="seq-mean-token-sum"),
):
    RECIPES.add(_recipe)
