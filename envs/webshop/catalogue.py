"""The products of the shop and the search over them.

Product number n is drawn from a generator seeded with n, so the catalogue is the same everywhere.
Search ranks by BM25 over all the text of a product.
"""

import hashlib
import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from envs.webshop.departments import BRANDS, DEPARTMENTS, STYLES, Department

PRODUCTS = 2400
MAX_RESULTS = 50
MAX_QUERY_WORDS = 64
_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")


@dataclass(frozen=True)
class Product:
    """One product. All its attributes appear in its title or features."""

    asin: str
    department: str
    kind: str
    title: str
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    price: float
    description: str
    features: tuple[str, ...]

    def text(self) -> str:
        """All the text that search considers."""
        values = [value for choices in self.options.values() for value in choices]
        parts = [self.title, self.title, self.kind, self.department, self.description]
        return " ".join([*parts, *self.features, *values])


@cache
def products() -> tuple[Product, ...]:
    """The whole catalogue."""
    return tuple(_product(number) for number in range(PRODUCTS))


@cache
def by_asin() -> Mapping[str, Product]:
    """The catalogue by lower-case asin."""
    return {product.asin.lower(): product for product in products()}


def search(query: str) -> list[Product]:
    """The best matches for a query, at most MAX_RESULTS, best first."""
    return _index().search(words(query)[:MAX_QUERY_WORDS])


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _product(number: int) -> Product:
    rng = random.Random(f"product {number}")
    kinds = [(department, kind) for department in DEPARTMENTS for kind in department.kinds]
    department, kind = kinds[number % len(kinds)]
    attributes = tuple(rng.sample(department.attributes, rng.randint(3, 6)))
    shown = attributes[: rng.randint(1, 2)]
    brand, style = rng.choice(BRANDS), rng.choice(STYLES)
    title = f"{brand} {style} {kind.title()}, {' '.join(a.title() for a in shown)}"
    title = title.replace("'S", "'s")
    digest = hashlib.sha256(f"asin {number}".encode()).hexdigest()
    price = rng.randint(department.low * 100, department.high * 100) / 100
    return Product(
        asin=f"B0{digest[:8].upper()}",
        department=department.name,
        kind=kind,
        title=title,
        attributes=attributes,
        options=_options(department, rng),
        price=price,
        description=(
            f"The {style} line by {brand} brings you {kind} for every day."
            f" {rng.choice(_PRAISE)} {rng.choice(_CARE)}"
        ),
        features=tuple(f"{attribute.capitalize()}: {_why(rng)}" for attribute in attributes),
    )


def _options(department: Department, rng: random.Random) -> dict[str, tuple[str, ...]]:
    """Each option of the department with some of its values, in the department's order."""
    chosen = {}
    for name, values in department.options:
        some = set(rng.sample(values, rng.randint(2, min(6, len(values)))))
        chosen[name] = tuple(value for value in values if value in some)
    return chosen


_PRAISE = (
    "Our customers come back for it.",
    "A welcome gift for friends and family.",
    "Made with care in small series.",
    "Tested by our own staff for a year.",
    "A quiet favourite of the season.",
)
_CARE = (
    "Returns are free within thirty days.",
    "Packed without plastic.",
    "Please check the chosen options before you order.",
    "Ships within two days.",
)
_REASONS = (
    "just what you asked for",
    "you will notice the difference",
    "a detail that matters",
    "chosen by most of our customers",
    "made to last",
)


def _why(rng: random.Random) -> str:
    return rng.choice(_REASONS)


class _Index:
    """BM25 over the catalogue."""

    K1 = 1.2
    B = 0.75

    def __init__(self, catalogue: Sequence[Product]) -> None:
        self._catalogue = catalogue
        counts = [Counter(words(product.text())) for product in catalogue]
        lengths = [sum(count.values()) for count in counts]
        average = sum(lengths) / len(lengths)
        postings: dict[str, list[tuple[int, float]]] = {}
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            norm = self.K1 * (1 - self.B + self.B * length / average)
            for word, times in count.items():
                weight = times * (self.K1 + 1) / (times + norm)
                postings.setdefault(word, []).append((number, weight))
        self._postings = postings

    def search(self, query: Sequence[str]) -> list[Product]:
        scores: dict[int, float] = {}
        for word in dict.fromkeys(query):
            found = self._postings.get(word, ())
            rarity = math.log(1 + (len(self._catalogue) - len(found) + 0.5) / (len(found) + 0.5))
            for number, weight in found:
                scores[number] = scores.get(number, 0.0) + rarity * weight
        best = sorted(scores, key=lambda number: (-round(scores[number], 9), number))
        return [self._catalogue[number] for number in best[:MAX_RESULTS]]


@cache
def _index() -> _Index:
    return _Index(products())
