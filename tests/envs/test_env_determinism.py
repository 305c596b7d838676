"""The same item is the same task in another process with another hash seed."""

import pytest
from fingerprints import fingerprint, fingerprint_elsewhere

from envs.registry import load


@pytest.mark.parametrize("name", ["textcraft", "maze", "wordle"])
def test_items_are_the_same_in_another_process(name: str) -> None:
    spec = load(name)
    items = [*spec.items("train")[::37], *spec.items("test")[::7]][:50]
    assert len(items) >= 45
    assert fingerprint(name, items) == fingerprint_elsewhere(name, items)
