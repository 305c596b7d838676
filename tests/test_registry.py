"""The registry that every kind of component shares."""

import pytest

from manus_jax.agentgym.table import ENVIRONMENTS
from manus_jax.algorithms.aggregation import AGGREGATIONS
from manus_jax.algorithms.corrections import CORRECTIONS
from manus_jax.algorithms.kl import ESTIMATORS
from manus_jax.algorithms.recipes import ADVANTAGES, POLICY_LOSSES, RECIPES
from manus_jax.algorithms.reward_allocation import ALLOCATIONS
from manus_jax.errors import UserError
from manus_jax.registry import Registry
from manus_jax.rewards import REWARDS
from manus_jax.rollout.action_formats import FORMATS
from manus_jax.rollout.build_rollout import ENGINES


def test_components_are_found_by_name_in_the_order_of_registration():
    numbers: Registry[int] = Registry("number")
    numbers.register("two")(2)
    numbers.register("one")(1)
    assert numbers["one"] == 1
    assert list(numbers) == ["two", "one"]
    assert "one" in numbers and "three" not in numbers and len(numbers) == 2


def test_a_second_component_of_the_same_name_is_rejected_and_the_first_stays():
    numbers: Registry[int] = Registry("number")
    numbers.register("one")(1)
    with pytest.raises(UserError, match="the number 'one' is already registered"):
        numbers.register("one")(11)
    assert numbers["one"] == 1


def test_an_unknown_name_lists_what_exists_and_suggests_the_closest():
    numbers: Registry[int] = Registry("number")
    numbers.register("seven")(7)
    with pytest.raises(UserError, match=r"unknown number 'sevn'; did you mean 'seven'\?"):
        numbers["sevn"]
    with pytest.raises(UserError, match=r"\(known: seven\)"):
        numbers["x"]


def test_an_object_with_a_name_is_added_under_it_until_the_block_ends():
    class Named:
        name = "one"

    numbers: Registry[Named] = Registry("number", reserved=("auto",))
    with numbers.restored():
        one = numbers.add(Named())
        assert dict(numbers.items()) == {"one": one} and list(numbers.values()) == [one]
    assert "one" not in numbers
    with pytest.raises(UserError, match="the number 'auto' is already registered"):
        numbers.register("auto")(one)


REGISTRIES = (
    REWARDS,
    FORMATS,
    ENVIRONMENTS,
    ADVANTAGES,
    POLICY_LOSSES,
    RECIPES,
    ESTIMATORS,
    CORRECTIONS,
    AGGREGATIONS,
    ALLOCATIONS,
    ENGINES,
)


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.kind)
def test_every_kind_of_component_rejects_duplicates_and_unknown_names_alike(registry):
    taken = next(iter(registry))
    component = registry[taken]
    with pytest.raises(UserError, match=f"the {registry.kind} '{taken}' is already registered"):
        registry.register(taken)(component)
    with pytest.raises(UserError, match=rf"unknown {registry.kind} 'nowhere'.*\(known: .*{taken}"):
        registry["nowhere"]
    assert registry[taken] is component
