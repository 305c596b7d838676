"""The shop as a text game: pages, a search bar and buttons to click.

A page is an immutable value. Every action maps a page to the next one, and the observation is the
page's visible text, with WebShop's [SEP] between its parts.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, Literal

from envs.game import GameError, Step
from envs.webshop.catalogue import Product, by_asin, search
from envs.webshop.tasks import Goal, goal, score

PER_PAGE = 10
_ACTION = re.compile(r"^\s*(search|click)\[(.+)\]\s*$", re.DOTALL | re.IGNORECASE)
_SUB_PAGES = ("Description", "Features", "Reviews")
_LINKS = frozenset((*_SUB_PAGES, "Back to Search", "< Prev", "Next >", "Buy Now"))
_ASIN = re.compile("B[0-9A-Z]{9}")
_OPTION_NAMES = frozenset(
    ("color", "size", "width", "style", "flavor name", "scent", "fit type", "capacity", "material")
)

Kind = Literal["search", "results", "item", "sub", "end"]


@dataclass(frozen=True)
class Page:
    """The page that the customer sees. Fields that the search page does not need have defaults."""

    kind: Kind = "search"
    results: tuple[Product, ...] = ()
    query: str = ""
    number: int = 1
    product: Product | None = None
    sub: str = ""


class WebShop:
    """The visit of one customer."""

    def __init__(self) -> None:
        self._goal: Goal | None = None
        self._item = 0
        self._page = Page()
        self._chosen: dict[str, str] = {}
        self._reward = 0.0

    @property
    def goal(self) -> Goal:
        """What is to be bought."""
        if self._goal is None:
            raise GameError("The game has not been reset: call reset with a session_id first.")
        return self._goal

    def reset(self, item: int) -> str:
        self._goal = goal(item)
        self._item = item
        self._page = Page()
        self._chosen = {}
        self._reward = 0.0
        return self.observation()

    def step(self, action: str) -> Step:
        wanted = self.goal
        if self._page.kind == "end":
            raise GameError("The episode has ended: reset before the next step.")
        parsed = _ACTION.match(action)
        if parsed is not None:
            verb, argument = parsed.group(1).lower(), parsed.group(2).strip().lower()
            if verb == "search" and self._page.kind == "search":
                self._page = Page("results", tuple(search(argument)), argument)
            elif verb == "click" and argument in self.clickables():
                self._click(argument, wanted)
        return Step(self.observation(), self._reward, self._page.kind == "end")

    def observation(self) -> str:
        return " [SEP] ".join(self._parts())

    def close(self) -> None:
        self._goal = None

    def clickables(self) -> list[str]:
        """What `click[…]` accepts on this page, in lower case."""
        page = self._page
        if page.kind == "search":
            return ["search"]
        if page.kind == "end":
            return []
        if page.kind == "results":
            turns = [name.lower() for name in self._turns()]
            return ["back to search", *turns, *(p.asin.lower() for p in self._shown())]
        if page.kind == "sub":
            return ["back to search", "< prev"]
        values = [value for choices in self._product().options.values() for value in choices]
        sub_pages = [name.lower() for name in _SUB_PAGES]
        return ["back to search", "< prev", *sub_pages, "buy now", *dict.fromkeys(values)]

    def available_actions(self) -> dict[str, Any]:
        if self._goal is None:
            return {"has_search_bar": False, "clickables": []}
        return {
            "has_search_bar": self._page.kind == "search",
            "clickables": self.clickables(),
        }

    def state(self) -> dict[str, Any]:
        """The page as a browser would show it: address, a minimal HTML body, the instruction."""
        parts = self._parts()
        body = "".join(f"<p>{escape(part)}</p>" for part in parts)
        path = {
            "search": "",
            "results": f"search_results/{self._page.query}/{self._page.number}",
            "end": "done",
        }
        product = self._page.product
        where = path.get(self._page.kind, f"item_page/{product.asin if product else ''}")
        return {
            "url": f"webshop://{self._item}/{where}",
            "html": f"<html><body>{body}</body></html>",
            "instruction_text": self.goal.instruction,
        }

    def _click(self, name: str, wanted: Goal) -> None:
        page = self._page
        if name == "back to search":
            self._page = Page()
        elif page.kind == "results":
            if name in ("next >", "< prev"):
                self._page = replace(page, number=page.number + (1 if name == "next >" else -1))
            else:
                self._page = replace(page, kind="item", product=by_asin()[name])
                self._chosen = {}
        elif name == "< prev":
            self._page = replace(page, kind="item" if page.kind == "sub" else "results", sub="")
        elif name == "buy now":
            self._reward = score(wanted, self._product(), self._chosen)
            self._page = replace(page, kind="end")
        elif page.kind == "item":
            self._choose(name)

    def _choose(self, name: str) -> None:
        """Opens a sub-page or selects an option value."""
        for sub in _SUB_PAGES:
            if name == sub.lower():
                self._page = replace(self._page, kind="sub", sub=sub)
                return
        for option, values in self._product().options.items():
            if name in values:
                self._chosen[option] = name

    def _parts(self) -> list[str]:
        wanted = self.goal
        page = self._page
        if page.kind == "search":
            return ["WebShop", "Instruction:", wanted.instruction, "Search"]
        if page.kind == "end":
            return _receipt(self._product(), self._chosen, self._reward)
        head = ["Instruction:", wanted.instruction, "Back to Search"]
        if page.kind == "results":
            title = f"Page {page.number} (Total results: {len(page.results)})"
            rows = [part for p in self._shown() for part in (p.asin, p.title, f"${p.price:.2f}")]
            return [*head, title, *self._turns(), *rows]
        product = self._product()
        if page.kind == "sub":
            return [*head, "< Prev", *_sub_page(product, page.sub)]
        options = [part for name, values in product.options.items() for part in (name, *values)]
        price = f"Price: ${product.price:.2f}"
        tail = [product.title, price, "Rating: N.A.", *_SUB_PAGES, "Buy Now"]
        return [*head, "< Prev", *options, *tail]

    def _shown(self) -> tuple[Product, ...]:
        start = (self._page.number - 1) * PER_PAGE
        return self._page.results[start : start + PER_PAGE]

    def _turns(self) -> list[str]:
        """The buttons to the neighbouring pages of the results."""
        page = self._page
        turns = ["< Prev"] if page.number > 1 else []
        if page.number * PER_PAGE < len(page.results):
            turns.append("Next >")
        return turns

    def _product(self) -> Product:
        if self._page.product is None:
            raise GameError("No product is open.")
        return self._page.product


def plausible_actions(observations: Sequence[str]) -> Sequence[str]:
    """A search for the instruction where there is a search bar, else a click on a button.

    Buttons are products, options and the links that every page has.
    """
    parts = [part.strip() for part in observations[-1].split("[SEP]")]
    if "Search" in parts:
        return [f"search[{max(parts, key=len)}]"]
    buttons = [part for part in parts if part in _LINKS or _ASIN.fullmatch(part)]
    price = next((i for i, part in enumerate(parts) if part.startswith("Price:")), None)
    if price is not None and "< Prev" in parts:
        # An item page: the options and their names stand before the title.
        named = parts[parts.index("< Prev") + 1 : price - 1]
        buttons += [part for part in named if part.lower() not in _OPTION_NAMES]
    return [f"click[{part.lower()}]" for part in buttons] or ["click[back to search]"]


def _sub_page(product: Product, name: str) -> tuple[str, ...]:
    if name == "Description":
        return (product.description,)
    return product.features if name == "Features" else ("There are no reviews yet.",)


def _receipt(product: Product, chosen: Mapping[str, str], reward: float) -> list[str]:
    return [
        "Thank you for shopping with us!",
        "Purchased",
        "asin",
        product.asin,
        "options",
        json.dumps(dict(chosen)),
        "Reward",
        "Your score (min 0.0, max 1.0)",
        str(reward),
    ]
