"""Step groups: clustering of anchors on the host, and the two-level advantage on their ids."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jit_and_eager import both

from manus_jax.algorithms import gigpo

# Two episodes of one task. Both start in A; the first goes on to B and succeeds, the second to C.
STEPS = gigpo.Steps(
    rewards=jnp.array([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
    mask=jnp.array([[1, 1, 0], [1, 1, 0]]),
    anchor_ids=jnp.array([[0, 1, 0], [0, 2, 0]]),
    turn_ids=jnp.array([[0, 0, 0, 1], [0, 1, 1, 1]]),
)
SCORES, GROUPS, VALID = jnp.array([1.0, 0.0]), jnp.array([0, 0]), jnp.array([True, True])


def test_identical_anchors_of_one_group_share_an_id():
    ids = gigpo.cluster_anchors([["A", "B", "A"], ["B"], ["A", "C"]], [0, 0, 1], None, 3)
    assert ids.shape == (3, 3) and ids.dtype == np.int32
    a, b, again = ids[0]
    assert a == again and ids[1, 0] == b and a != b
    # The same text in another task's group is another anchor.
    assert len({int(a), int(b), int(ids[2, 0]), int(ids[2, 1])}) == 4
    assert ids.max() < ids.size


def test_similar_anchors_share_an_id_from_the_threshold_on():
    # 20 characters, one of which differs: ratio 2*19/40 = 0.95.
    near, far = "x" * 19 + "b", "y" * 20
    texts = [["x" * 19 + "a", near, far]]
    assert gigpo.cluster_anchors(texts, [0], 0.95, 3).tolist() == [[0, 0, 1]]
    assert gigpo.cluster_anchors(texts, [0], 0.96, 3).tolist() == [[0, 1, 2]]
    assert gigpo.cluster_anchors(texts, [0], None, 3).tolist() == [[0, 1, 2]]


def test_clusters_are_padded_to_the_steps_asked_for():
    assert gigpo.cluster_anchors([["A"]], [0], None, 4).shape == (1, 4)


@both
def test_step_returns_are_discounted_inside_the_episode(variant):
    # 0 + 0.5 * 1 and 1; nothing comes out of padding.
    returns = variant(partial(gigpo.step_returns, gamma=0.5))(STEPS.rewards, STEPS.mask)
    np.testing.assert_allclose(returns, [[0.5, 1, 0], [0, 0, 0]])


@both
def test_gigpo_mean_norm_matches_hand_calculation(variant):
    # Episode part: scores {1, 0} minus 0.5. Step part in A: returns {0.5, 0} minus 0.25; B and C
    # are alone: 0. With omega 2: 0.5 + 2 * 0.25, 0.5; -0.5 - 2 * 0.25, -0.5.
    fn = variant(partial(gigpo.gigpo, gamma=0.5, step_weight=2.0))
    np.testing.assert_allclose(
        fn(SCORES, GROUPS, VALID, STEPS), [[1.0, 0.5, 0], [-1.0, -0.5, 0]], rtol=1e-6
    )


@both
def test_gigpo_mean_std_norm_matches_hand_calculation(variant):
    # Of two numbers, ±half their distance over distance / sqrt(2): ±0.7071 in both parts.
    h = 0.5**0.5
    fn = variant(partial(gigpo.gigpo, gamma=0.5, normalize_by_std=True))
    np.testing.assert_allclose(
        fn(SCORES, GROUPS, VALID, STEPS), [[2 * h, h, 0], [-2 * h, -h, 0]], rtol=1e-4
    )


def test_each_episode_counts_once_for_any_number_of_steps():
    # Three steps of score 1 against one step of score 0: the mean is 1/2, not 3/4.
    steps = gigpo.Steps(
        rewards=jnp.zeros((2, 3)),
        mask=jnp.array([[1, 1, 1], [1, 0, 0]]),
        anchor_ids=jnp.arange(6).reshape(2, 3),
        turn_ids=jnp.zeros((2, 1), int),
    )
    adv = jax.jit(partial(gigpo.gigpo, gamma=1.0))(SCORES, GROUPS, VALID, steps)
    np.testing.assert_allclose(adv, [[0.5, 0.5, 0.5], [-0.5, 0, 0]])


def test_an_invalid_episode_leaves_both_parts_untouched():
    extra = jax.tree.map(lambda x: jnp.concatenate([x, x[:1]]), STEPS)
    extra = extra._replace(rewards=extra.rewards.at[2].set(100.0))
    fn = jax.jit(partial(gigpo.gigpo, gamma=0.5, normalize_by_std=True))
    adv = fn(jnp.array([1.0, 0.0, 100.0]), jnp.zeros(3, int), jnp.array([1, 1, 0]), extra)
    np.testing.assert_allclose(adv[:2], fn(SCORES, GROUPS, VALID, STEPS), rtol=1e-6)
    np.testing.assert_array_equal(adv[2], [0, 0, 0])


def test_padding_that_shares_an_id_with_a_cluster_does_not_enter_it():
    # STEPS pads with id 0, the id of A; its mean would be pulled to 0.125 otherwise.
    returns = jnp.array([[0.5, 1, 0], [0, 0, 0]])
    adv = jax.jit(gigpo.step_advantages)(returns, STEPS.mask, STEPS.anchor_ids)
    np.testing.assert_allclose(adv, [[0.25, 0, 0], [-0.25, 0, 0]])


def test_tokens_get_the_advantage_of_their_turn():
    adv = jax.jit(gigpo.to_tokens)(
        jnp.array([[1.0, 2.0, 0], [3.0, 4.0, 0]]),
        STEPS.turn_ids,
        jnp.array([[1, 0, 1, 1], [1, 1, 0, 1]]),
    )
    np.testing.assert_allclose(adv, [[1, 0, 1, 2], [3, 4, 0, 4]])


def test_step_advantages_match_numpy_reference_on_ragged_episodes():
    rng = np.random.default_rng(3)
    mask = np.arange(5) < rng.integers(1, 6, size=(8, 1))
    ids = rng.integers(0, 6, size=(8, 5))
    returns = rng.normal(size=(8, 5)).astype(np.float32)
    expected = np.zeros((8, 5))
    for i in range(6):
        inside = mask & (ids == i)
        if inside.sum() > 1:
            x = returns[inside].astype(np.float64)
            expected[inside] = (x - x.mean()) / (x.std(ddof=1) + 1e-6)
    adv = jax.jit(partial(gigpo.step_advantages, normalize_by_std=True))(returns, mask, ids)
    np.testing.assert_allclose(adv, expected, rtol=1e-4, atol=1e-5)
