"""The goals of the shop: what to buy, in words, and the score of a purchase.

A goal is generated from a product of the catalogue, so it can always be met. The score is
WebShop's: the share of attributes, options and price that match, scaled by how close the kind of
product is.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from envs.game import GameError, fixed_splits
from envs.webshop.catalogue import Product, products, words

GOALS = 4000
TEST_GOALS = 500
_PRICE_STEPS = (10, 20, 30, 40, 50, 60, 80, 100, 130, 160, 200, 250, 300, 400, 500, 600, 800)

items = fixed_splits(train=range(TEST_GOALS, GOALS), test=range(TEST_GOALS))


@dataclass(frozen=True)
class Goal:
    """What the customer wants: a kind of product, with attributes and options, below a price."""

    asin: str
    """The product from which the goal was generated. Any other match is as good."""
    department: str
    kind: str
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    price_below: float

    @property
    def instruction(self) -> str:
        options = "".join(
            f"{' with' if number == 0 else ', and'} {name}: {value}"
            for number, (name, value) in enumerate(self.options.items())
        )
        return (
            f"Find me {', '.join(self.attributes)} {self.kind}{options},"
            f" and price lower than {self.price_below:.2f} dollars"
        )


@lru_cache(maxsize=4096)
def goal(item: int) -> Goal:
    """The goal of an item; GameError for an unknown item."""
    if not 0 <= item < GOALS:
        raise GameError(f"The session_id {item} does not exist: webshop has 0 to {GOALS - 1}.")
    rng = random.Random(f"goal {item}")
    # Every eighth product is reserved for test goals, so no goal occurs in both splits.
    for_test = item < TEST_GOALS
    pool = [p for number, p in enumerate(products()) if (number % 8 == 0) == for_test]
    product = rng.choice(pool)
    attributes = rng.sample(product.attributes, rng.randint(1, min(3, len(product.attributes))))
    names = list(product.options)
    named = sorted(rng.sample(names, rng.randint(1, len(names))), key=names.index)
    above = [step for step in _PRICE_STEPS if step > product.price]
    return Goal(
        asin=product.asin,
        department=product.department,
        kind=product.kind,
        attributes=tuple(attributes),
        options={name: rng.choice(product.options[name]) for name in named},
        price_below=float(rng.choice(above[:3])),
    )


def score(wanted: Goal, product: Product, chosen: Mapping[str, str]) -> float:
    """The score of a purchase, 0 to 1."""
    attributes = sum(attribute in product.attributes for attribute in wanted.attributes)
    options = sum(chosen.get(name) == value for name, value in wanted.options.items())
    price = product.price < wanted.price_below
    total = len(wanted.attributes) + len(wanted.options) + 1
    return kind_match(wanted, product) * (attributes + options + price) / total


def kind_match(wanted: Goal, product: Product) -> float:
    """1 for the requested kind, less for related kinds, 0 for anything else."""
    if product.kind == wanted.kind:
        return 1.0
    if set(words(product.kind)) & set(words(wanted.kind)):
        return 0.5
    return 0.1 if product.department == wanted.department else 0.0
