"""The named algorithms end to end: advantages on ragged batches, and losses on packed rows."""

from dataclasses import replace
from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manus_jax.algorithms import aggregation, dpo, gigpo, recipes, sibling
from manus_jax.algorithms.corrections import CORRECTIONS
from manus_jax.algorithms.recipes import RECIPES, Recipe, compute_advantages, policy_loss

every_recipe = pytest.mark.parametrize("name", recipes.RECIPES)
B, T, K = 6, 16, 4
jitted = jax.jit(compute_advantages, static_argnums=0)


def advantages_of(name, batch):
    adv, returns = jitted(RECIPES[name], **batch)
    return np.asarray(adv), None if returns is None else np.asarray(returns)


def random_batch(seed):
    """Six episodes of ragged lengths in groups of 3, 2 and 1, laid out over 10 of 16 columns."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 11, size=B)
    mask = (np.arange(T) < lengths[:, None]) & (rng.random((B, T)) < 0.8)
    mask[:, 0] = True
    turn_ids = np.minimum(np.cumsum(rng.random((B, T)) < 0.3, axis=1), K - 1)
    rewards = np.where(mask, rng.integers(-2, 3, size=(B, T)), 0).astype(np.float32)
    steps = gigpo.Steps(
        rewards=rng.integers(0, 3, size=(B, K)).astype(np.float32),
        mask=np.arange(K) <= turn_ids.max(1, keepdims=True),
        anchor_ids=np.array([0, 0, 0, 8, 8, 16])[:, None] + rng.integers(0, 3, size=(B, K)),
        turn_ids=turn_ids,
    )
    # The first group is a trunk and two branches, the second one two trunks.
    tree = sibling.Tree(
        parents=np.array([0, 0, 0, 3, 4, 5]),
        branch_turns=np.array([0, 1, 1, 0, 0, 0]),
        roots=np.array([True, False, False, True, True, True]),
        taken=steps.mask,
        turn_ids=turn_ids,
    )
    return {
        "token_rewards": rewards,
        "mask": mask,
        "group_ids": np.array([0, 0, 0, 1, 1, 2]),
        "valid": np.ones(B, bool),
        "values": rng.normal(size=(B, T)).astype(np.float32),
        "greedy_scores": rng.normal(size=B).astype(np.float32),
        "steps": steps,
        "tree": tree,
        "preferences": dpo.Preferences(rng.normal(size=B).astype(np.float32), rng.random(B) < 0.5),
    }


def test_the_recipes_are_all_there():
    assert set(recipes.RECIPES) == {
        *("ppo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp"),
        *("reinforce_pp_baseline", "remax", "gigpo", "grpo_passk", "sibling", "rft", "dpo"),
    }


def test_recipes_declare_their_inputs():
    def needing(attribute):
        return {name for name in recipes.RECIPES if getattr(RECIPES[name], attribute)}

    assert needing("needs_critic") == {"ppo"}
    assert needing("needs_greedy_baseline") == {"remax"}
    assert needing("needs_step_groups") == {"gigpo"}
    assert needing("needs_tree") == {"sibling"}
    assert needing("dynamic_sampling") == {"dapo"}
    assert needing("needs_preferences") == {"dpo"}
    assert needing("keeps") == {"rft", "dpo"}
    every = set(recipes.RECIPES)
    assert every - needing("needs_groups") == {"ppo", "remax", "reinforce_pp", "rft"}
    assert every - needing("needs_reference") == {"dr_grpo", "dapo", "gspo", "cispo", "rft"}


def test_unknown_names_and_bad_combinations_are_refused_when_built():
    with pytest.raises(ValueError, match=r"unknown recipe 'grop'.*\(known: ppo, grpo"):
        RECIPES["grop"]
    with pytest.raises(ValueError, match=r"unknown advantage 'x'.*\(known: gae"):
        Recipe("mine", "x")
    with pytest.raises(ValueError, match=r"unknown policy loss 'x'.*\(known: ppo_clip"):
        Recipe("mine", "grpo", loss="x")
    with pytest.raises(ValueError, match=r"kl_placement='none' does not go with kl_coef=0\.1"):
        Recipe("mine", "grpo", kl_coef=0.1)
    with pytest.raises(ValueError, match=r"dual_clip=0\.5 is not above 1"):
        Recipe("mine", "grpo", dual_clip=0.5)
    with pytest.raises(ValueError, match="already"):
        RECIPES.add(RECIPES["grpo"])


@pytest.fixture
def registries():
    with (
        RECIPES.restored(),
        recipes.ADVANTAGES.restored(),
        recipes.POLICY_LOSSES.restored(),
    ):
        yield


def test_a_new_algorithm_is_a_function_and_a_line(registries):
    recipes.ADVANTAGES.register("score")(lambda recipe, episodes: (episodes.scores, None))
    recipes.POLICY_LOSSES.register("square")(lambda recipe, tokens: (tokens.log_probs**2, {}))
    RECIPES.add(Recipe("mine", "score", loss="square", corrections=()))

    mine = RECIPES["mine"]
    adv, _ = compute_advantages(
        mine, jnp.ones((2, 3)), jnp.array([[1, 1, 0], [1, 0, 0]]), jnp.array([0, 1]), jnp.ones(2)
    )
    np.testing.assert_allclose(adv, [[2, 2, 0], [1, 0, 0]])
    fields = {"old_log_probs": -adv, "advantages": adv, "mask": jnp.ones((2, 3))}
    np.testing.assert_allclose(policy_loss(mine)(-adv, fields)[0], adv**2)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("ppo", "values"),
        ("remax", "greedy_scores"),
        ("gigpo", "steps"),
        ("sibling", "tree"),
        ("dpo", "preferences"),
    ],
)
def test_a_missing_input_is_named(name, missing):
    batch = random_batch(0) | {missing: None}
    with pytest.raises(ValueError, match=f"recipe '{name}' needs {missing}"):
        compute_advantages(RECIPES[name], **batch)


def test_group_recipes_give_each_token_its_episodes_advantage():
    # Scores 1 and 3, mean 2, std sqrt(2). RLOO: 1 - 3 and 3 - 1.
    rewards = jnp.array([[0.0, 1.0, 7.0], [3.0, 0.0, 0.0]])
    mask = jnp.array([[1, 1, 0], [1, 0, 1]])
    given = (rewards, mask, jnp.array([0, 0]), jnp.ones(2))
    h = 0.5**0.5
    for name, a in {"grpo": h, "dapo": h, "gspo": h, "dr_grpo": 1.0, "rloo": 2.0}.items():
        adv, returns = compute_advantages(RECIPES[name], *given)
        np.testing.assert_allclose(adv, [[-a, -a, 0], [a, 0, a]], rtol=1e-4, err_msg=name)
        assert returns is None


def test_a_row_without_agent_tokens_does_not_shift_its_group():
    # Scores 1 and 3 alone; with a third of 0 the mean would be 4/3.
    rewards = jnp.array([[1.0, 0.0], [3.0, 0.0], [5.0, 0.0]])
    mask = jnp.array([[1, 1], [1, 0], [0, 0]])
    adv, _ = jitted(RECIPES["dr_grpo"], rewards, mask, jnp.zeros(3, int), jnp.ones(3))
    np.testing.assert_allclose(adv, [[-1, -1], [1, 0], [0, 0]])


def test_ppo_whitens_gae_and_returns_the_targets_of_the_critic():
    batch = random_batch(1)
    adv, returns = advantages_of("ppo", batch)
    mask = batch["mask"]
    to_go = np.flip(np.cumsum(np.flip(batch["token_rewards"], 1), axis=1), 1)
    # At gamma and lam 1 the return is the reward to go and the advantage that minus the value.
    np.testing.assert_allclose(returns[mask], to_go[mask], rtol=1e-4, atol=1e-4)
    raw = (to_go - batch["values"])[mask]
    expected = (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(adv[mask], expected, rtol=1e-4, atol=1e-4)


def test_reinforce_pp_and_remax_start_from_rewards_to_go():
    batch = random_batch(2)
    mask = batch["mask"]
    to_go = np.flip(np.cumsum(np.flip(batch["token_rewards"], 1), axis=1), 1)
    raw = to_go[mask]
    expected = (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8)
    adv, _ = advantages_of("reinforce_pp", batch)
    np.testing.assert_allclose(adv[mask], expected, rtol=1e-4, atol=1e-4)
    adv, _ = advantages_of("remax", batch)
    expected = (to_go - batch["greedy_scores"][:, None])[mask]
    np.testing.assert_allclose(adv[mask], expected, rtol=1e-4, atol=1e-4)


@every_recipe
@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(st.integers(0, 2**31))
def test_advantages_do_not_see_observation_tokens(name, seed):
    """Spreads the agent tokens of every row over other columns, with rubbish between them."""
    batch = random_batch(seed)
    rng = np.random.default_rng(seed)
    spread = {
        "token_rewards": np.full((B, T), 50.0, np.float32),
        "mask": np.zeros((B, T), bool),
        "values": np.full((B, T), -50.0, np.float32),
        "turn_ids": np.zeros((B, T), int),
    }
    places = []
    for row in range(B):
        count = batch["mask"][row].sum()
        places.append(np.sort(rng.choice(T, size=count, replace=False)))
        for key, source in [*batch.items(), ("turn_ids", batch["steps"].turn_ids)]:
            if key in spread:
                spread[key][row, places[row]] = source[row][batch["mask"][row]]
    turn_ids = spread.pop("turn_ids")
    steps = batch["steps"]._replace(turn_ids=turn_ids)
    tree = batch["tree"]._replace(turn_ids=turn_ids)
    before = advantages_of(name, batch)
    after = advantages_of(name, batch | spread | {"steps": steps, "tree": tree})
    for x, y in zip(before, after, strict=True):
        for row in range(B if x is not None else 0):
            expected = x[row, batch["mask"][row]]
            np.testing.assert_allclose(y[row, places[row]], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.bug("B28")
@every_recipe
@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(st.integers(0, 2**31))
def test_advantages_do_not_see_failed_episodes(name, seed):
    batch = random_batch(seed)
    batch["valid"] = np.array([1, 1, 0, 1, 1, 0], bool)
    poisoned = batch | {
        "token_rewards": np.where(batch["valid"][:, None], batch["token_rewards"], np.nan),
        "values": np.where(batch["valid"][:, None], batch["values"], np.inf),
    }
    before, _ = advantages_of(name, batch)
    after, _ = advantages_of(name, poisoned)
    np.testing.assert_array_equal(before, after)
    assert not np.any(before[~batch["valid"]]) and np.all(np.isfinite(before))


LENGTHS = (5, 2, 7, 3, 6)  # unequal: equal ones would hide a wrong aggregation
FLOATS = (
    *("log_probs", "old_log_probs", "sampler_log_probs", "ref_log_probs"),
    *("advantages", "entropy"),
)


def lay_out(rows, width):
    """Packs the same five sequences into rows; numbers outside the mask are rubbish."""
    rng = np.random.default_rng(7)
    fields = {key: np.full((len(rows), width), np.nan, np.float32) for key in FLOATS}
    fields["mask"] = np.zeros((len(rows), width), bool)
    fields["segment_ids"] = np.zeros((len(rows), width), int)
    source = {}
    for i, n in enumerate(LENGTHS):
        base = -rng.random(n)
        source[i] = {key: base + rng.normal(scale=0.3, size=n) for key in FLOATS}
        source[i]["advantages"] = np.full(n, rng.normal())
        source[i]["mask"] = np.arange(n) != 1  # the second token is an observation
    lengths = np.array([source[i]["mask"].sum() for i in range(len(LENGTHS))])
    spans = {}
    for r, row in enumerate(rows):
        start = 0
        for s, i in enumerate(row):
            cut = slice(start, start + LENGTHS[i])
            fields["segment_ids"][r, cut] = s + 1
            for key, values in source[i].items():
                fields[key][r, cut] = values
            spans[i], start = (r, cut), cut.stop
    return fields, lengths, spans


def loss_and_gradient(recipe, rows, width):
    fields, lengths, spans = lay_out(rows, width)
    weights = np.zeros(fields["mask"].shape, np.float32)
    per_sequence = aggregation.sequence_weights(lengths, recipe.aggregation, norm_constant=10)
    for i, span in spans.items():
        weights[span] = per_sequence[i] * fields["mask"][span]

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def step(log_probs):
        loss_t, stats = policy_loss(recipe, num_segments=6)(log_probs, fields)
        return jnp.sum(weights * loss_t), stats

    (loss, stats), gradient = jax.device_get(step(fields["log_probs"]))
    assert np.all(np.isfinite(gradient)) and not np.any(gradient[~fields["mask"]])
    means = {key: np.sum(value) / fields["mask"].sum() for key, value in stats.items()}
    return loss, [gradient[spans[i]] for i in range(len(LENGTHS))], means


@pytest.mark.parametrize("name", ["ppo", "grpo", "dr_grpo", "gspo", "cispo"])
def test_the_update_does_not_depend_on_packing_or_padding(name):
    recipe = replace(
        RECIPES[name],
        entropy_coef=0.01,
        corrections=(CORRECTIONS["token_tis"], CORRECTIONS["sequence_tis"]),
    )
    loss, gradients, stats = loss_and_gradient(recipe, [[0], [1], [2], [3], [4]], 7)
    packed_loss, packed, packed_stats = loss_and_gradient(recipe, [[2, 0], [1, 4, 3]], 13)
    np.testing.assert_allclose(packed_loss, loss, rtol=1e-5)
    assert any(np.any(g) for g in gradients)
    for a, b in zip(gradients, packed, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-7)
    for key, value in stats.items():
        np.testing.assert_allclose(packed_stats[key], value, rtol=1e-4, atol=1e-6, err_msg=key)


def test_grpo_loss_matches_a_numpy_loop():
    recipe = replace(RECIPES["grpo"], entropy_coef=0.01, kl_coef=0.1)
    fields, _, _ = lay_out([[0, 1], [2], [3, 4]], 9)
    loss_t, stats = jax.device_get(jax.jit(policy_loss(recipe))(fields["log_probs"], fields))
    for r, c in np.ndindex(loss_t.shape):
        if not fields["mask"][r, c]:
            assert loss_t[r, c] == 0
            continue
        x = {key: float(fields[key][r, c]) for key in FLOATS}
        ratio, a = np.exp(x["log_probs"] - x["old_log_probs"]), x["advantages"]
        pg = max(-a * ratio, -a * np.clip(ratio, 0.8, 1.2))
        pg = min(pg, -3 * a) if a < 0 else pg
        tis = min(np.exp(x["old_log_probs"] - x["sampler_log_probs"]), 2.0)
        d = x["log_probs"] - x["ref_log_probs"]
        expected = tis * pg + 0.1 * (np.exp(-d) - 1 + d) - 0.01 * x["entropy"]
        np.testing.assert_allclose(loss_t[r, c], expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(stats["pg_loss"][r, c], tis * pg, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(stats["is_weight"][r, c], tis, rtol=1e-5)


def test_fields_follow_from_the_recipe_and_a_missing_one_is_named():
    grpo = RECIPES["grpo"]
    assert grpo.loss_fields == (
        *("old_log_probs", "advantages", "mask", "sampler_log_probs", "ref_log_probs"),
    )
    assert "segment_ids" in RECIPES["gspo"].loss_fields
    assert replace(RECIPES["dapo"], corrections=()).loss_fields == (
        *("old_log_probs", "advantages", "mask"),
    )
    zeros = jnp.zeros((1, 2))
    fields = {"old_log_probs": zeros, "advantages": zeros, "mask": zeros}
    with pytest.raises(ValueError, match="'grpo' needs sampler_log_probs, ref_log_probs in fields"):
        policy_loss(grpo)(zeros, fields)


def test_recipes_are_hashable_static_arguments():
    assert hash(replace(RECIPES["grpo"], clip_high=0.28)) != hash(RECIPES["grpo"])
    assert replace(RECIPES["grpo"]) == RECIPES["grpo"]
