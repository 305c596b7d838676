"""The registry that every kind of component shares."""

import pytest

from manus_jax.errors import UserError
from manus_jax.registry import Registry


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
