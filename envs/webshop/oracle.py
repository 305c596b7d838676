"""The webshop oracle.

It searches with the words of the instruction, goes to the first result that meets the goal in full,
chooses its options and buys it. If no result does, it searches for the title of the product from
which the goal was generated.
"""

from collections.abc import Iterator

from envs.game import Move, Policy
from envs.webshop.catalogue import Product, by_asin, search
from envs.webshop.game import PER_PAGE
from envs.webshop.tasks import Goal, goal, score


def oracle(item: int) -> Policy:
    """A policy that wins the item."""
    plan = _plan(goal(item))

    def policy(_: str) -> Move:
        return next(plan)

    return policy


def _plan(wanted: Goal) -> Iterator[Move]:
    query, product, place = _find(wanted)
    yield Move(f"I look for {wanted.kind} with the words of the instruction.", f"search[{query}]")
    for _ in range(place // PER_PAGE):
        yield Move("Nothing here fits in every point, so I look at the next page.", "click[next >]")
    yield Move(
        f"{product.title} at ${product.price:.2f} fits, so I open it.",
        f"click[{product.asin.lower()}]",
    )
    for name, value in wanted.options.items():
        yield Move(f"The {name} has to be {value}.", f"click[{value}]")
    yield Move("Everything is chosen as asked, so I buy it.", "click[buy now]")


def _find(wanted: Goal) -> tuple[str, Product, int]:
    """A query, a result that meets the goal in full, and its position in the results."""
    words = [*wanted.attributes, wanted.kind, *wanted.options.values()]
    product = by_asin()[wanted.asin.lower()]
    queries = (" ".join(words), " ".join(words[: len(wanted.attributes) + 1]), product.title)
    for query in queries:
        for place, found in enumerate(search(query)):
            if _fits(wanted, found):
                return query, found, place
    raise ValueError(f"no search finds {wanted.asin} for {wanted.instruction}")


def _fits(wanted: Goal, product: Product) -> bool:
    options = product.options
    offered = all(value in options.get(name, ()) for name, value in wanted.options.items())
    return offered and score(wanted, product, wanted.options) == 1
