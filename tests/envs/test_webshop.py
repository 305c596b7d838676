"""webshop: pages, search and score of a generated shop, over HTTP as AgentGym serves it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from env_servers import Client
from fingerprints import fingerprint, fingerprint_elsewhere
from oracle_episodes import oracle_episode

from envs.game import GameError
from envs.webshop import SPEC
from envs.webshop.catalogue import MAX_RESULTS, Product, by_asin, products, search
from envs.webshop.game import WebShop
from envs.webshop.tasks import Goal, goal, score

SHIRT = Product(
    asin="B000000001",
    department="clothing",
    kind="men's t-shirts",
    title="Alderway Classic Men's T-Shirts",
    attributes=("machine wash", "slim fit"),
    options={"color": ("black", "white"), "size": ("small", "large")},
    price=19.5,
    description="",
    features=(),
)
WANTED = Goal(
    asin=SHIRT.asin,
    department="clothing",
    kind="men's t-shirts",
    attributes=("machine wash", "slim fit"),
    options={"color": "black", "size": "large"},
    price_below=20.0,
)


def test_the_instruction_reads_like_webshops() -> None:
    assert WANTED.instruction == (
        "Find me machine wash, slim fit men's t-shirts with color: black, and size: large,"
        " and price lower than 20.00 dollars"
    )


@pytest.mark.parametrize(
    ("change", "chosen", "expected"),
    [
        ({}, {"color": "black", "size": "large"}, 1.0),
        ({}, {"color": "black"}, 4 / 5),
        ({}, {"color": "white", "size": "small"}, 3 / 5),
        ({"price": 20.0}, {"color": "black", "size": "large"}, 4 / 5),
        ({"attributes": ("slim fit",)}, {"color": "black", "size": "large"}, 4 / 5),
        ({"attributes": (), "price": 99.0}, {}, 0.0),
        ({"kind": "men's joggers"}, {"color": "black", "size": "large"}, 0.5),
        ({"kind": "rain jackets"}, {"color": "black", "size": "large"}, 0.1),
        ({"kind": "herbal tea", "department": "grocery"}, {"color": "black"}, 0.0),
    ],
)
def test_the_score_is_the_share_of_matching_attributes_times_that_of_the_category(
    change: dict[str, object], chosen: dict[str, str], expected: float
) -> None:
    product = replace(SHIRT, **change)  # type: ignore[arg-type]
    assert score(WANTED, product, chosen) == pytest.approx(expected)


def test_the_catalogue_is_large_and_its_codes_are_unique() -> None:
    assert len(products()) == 2400 and len(by_asin()) == len(products())
    for product in products()[::100]:
        assert all(f.split(":")[0].lower() in product.attributes for f in product.features)
        assert len(product.options) >= 2 and product.price > 0


def test_search_prefers_products_with_the_words_and_lists_an_exact_title_first() -> None:
    for product in products()[::97]:
        titles = [found.title for found in search(product.title)]
        assert product.title in titles[:3]
    assert all("bookcases" in found.kind for found in search("solid wood bookcases")[:10])
    assert len(search("the")) <= MAX_RESULTS and search("zzzz") == [] and search("") == []


def test_a_visit_leads_through_the_pages_and_ends_with_a_purchase() -> None:
    shop = WebShop()
    wanted = goal(3)
    head = f"Instruction: [SEP] {wanted.instruction} [SEP] Back to Search"
    assert shop.reset(3) == f"WebShop [SEP] Instruction: [SEP] {wanted.instruction} [SEP] Search"
    assert shop.available_actions() == {"has_search_bar": True, "clickables": ["search"]}

    first = shop.step(f"search[{wanted.kind} {wanted.department}]").observation
    assert first.startswith(f"{head} [SEP] Page 1 (Total results: 50) [SEP] Next > [SEP] B0")
    assert shop.available_actions()["clickables"][:2] == ["back to search", "next >"]
    second = shop.step("click[Next >]").observation
    assert " Page 2 (Total results: 50) [SEP] < Prev [SEP] Next > [SEP] B0" in second
    assert shop.step("click[< Prev]").observation == first
    for _ in range(4):
        shop.step("click[next >]")
    assert "next >" not in shop.clickables()

    code = shop.clickables()[2]
    product = by_asin()[code]
    page = shop.step(f"click[{code}]").observation
    assert page.startswith(f"{head} [SEP] < Prev [SEP] {next(iter(product.options))} [SEP] ")
    assert page.endswith(
        f"{product.title} [SEP] Price: ${product.price:.2f} [SEP] Rating: N.A. [SEP] Description"
        " [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    features = shop.step("click[features]").observation
    assert features == " [SEP] ".join([head, "< Prev", *product.features])
    assert shop.step("click[< prev]").observation == page
    value = next(iter(product.options.values()))[0]
    assert shop.step(f"click[{value}]").observation == page
    bought = shop.step("click[Buy Now]")
    assert bought.done and bought.observation.startswith("Thank you for shopping with us!")
    option = next(iter(product.options))
    assert bought.reward == pytest.approx(score(wanted, product, {option: value}))
    with pytest.raises(GameError):
        shop.step("click[buy now]")


def test_actions_that_the_page_does_not_offer_have_no_effect() -> None:
    shop = WebShop()
    start = shop.reset(5)
    for action in (
        "buy now",
        "click[buy now]",
        "click[]",
        "search[",
        "click[back]",
        "",
        "x" * 9999,
    ):
        step = shop.step(action)
        assert (step.observation, step.reward, step.done) == (start, 0, False)
    results = shop.step("search[lamps]").observation
    assert shop.step("search[chairs]").observation == results


def test_options_of_one_product_are_forgotten_at_the_next() -> None:
    wanted = goal(3)
    shop = WebShop()
    shop.reset(3)
    shop.step(f"search[{wanted.kind}]")
    one, two = shop.clickables()[2:4]
    shop.step(f"click[{one}]")
    for values in by_asin()[one].options.values():
        shop.step(f"click[{values[0]}]")
    shop.step("click[< prev]")
    shop.step(f"click[{two}]")
    step = shop.step("click[buy now]")
    assert "options [SEP] {} [SEP]" in step.observation


def test_the_oracle_wins_on_the_test_split() -> None:
    for item in SPEC.items("test")[::10]:
        steps = oracle_episode(SPEC, item)
        assert steps[-1].done and steps[-1].reward == 1 and len(steps) <= 10


def test_splits_are_disjoint_in_items_and_in_goals() -> None:
    train, test = SPEC.items("train"), SPEC.items("test")
    assert not set(train) & set(test)
    assert not {goal(n).asin for n in train} & {goal(n).asin for n in test}
    with pytest.raises(GameError, match="does not exist"):
        goal(4000)


@pytest.mark.slow
def test_items_are_the_same_in_another_process() -> None:
    items = list(range(0, 4000, 200))
    assert fingerprint("webshop", items) == fingerprint_elsewhere("webshop", items)


def test_the_server_speaks_the_protocol_of_the_table(served: Callable[[str], str]) -> None:
    client = Client(served("webshop"))
    assert client.get("/") == (200, "ok")
    session = client.ok("/create")
    assert isinstance(session, int)
    assert client.post("/step", {"env_idx": session, "action": "search[x]"})[0] == 500
    observation, nothing = client.ok("/reset", {"env_idx": session, "session_id": 7})
    assert nothing is None and client.get(f"/observation?env_idx={session}")[1] == observation
    text = goal(7).instruction
    assert client.get(f"/instruction_text?env_idx={session}") == (200, text)
    step = client.ok("/step", {"env_idx": session, "action": f"search[{goal(7).kind}]"})
    assert set(step) == {"state", "reward", "done", "info"} and step["info"] is None
    available = client.get(f"/available_actions?env_idx={session}")[1]
    assert available["has_search_bar"] is False and "back to search" in available["clickables"]
    state = client.get(f"/state?env_idx={session}")[1]
    assert set(state) == {"url", "html", "instruction_text"} and text in state["instruction_text"]
    megabyte = client.ok("/step", {"env_idx": session, "action": "search[" + "x" * 1_000_000})
    assert megabyte["state"] == step["state"]
    assert isinstance(client.ok("/reset", {"env_idx": session, "session_id": None})[0], str)
    assert client.post("/reset", {"env_idx": session, "session_id": 10**7})[0] == 500
    assert session in client.get("/list_envs")[1]
    assert client.ok("/close", {"env_idx": session}) is True
