"""TextCraft: AgentGym's texts, this project's recipes and tasks, and an oracle that wins."""

from collections.abc import Sequence

import pytest

from envs.game import GameError
from envs.textcraft.book import load_book
from envs.textcraft.game import TextCraft
from envs.textcraft.oracle import oracle
from envs.textcraft.tasks import Craft, items, number_of_items, task


def item_with_goal(goal: str) -> int:
    return next(item for item in range(number_of_items()) if task(item).goal == goal)


def play(goal: str, actions: Sequence[str]) -> list[tuple[str, float, bool]]:
    game = TextCraft()
    game.reset(item_with_goal(goal))
    steps = [game.step(action) for action in actions]
    return [(step.observation, step.reward, step.done) for step in steps]


def test_a_whole_episode_reads_like_agentgyms() -> None:
    assert play(
        "crafting table",
        [
            "inventory",
            "get 1 oak logs",
            "inventory",
            "craft 4 oak planks using 1 oak logs",
            "inventory",
            "craft 1 crafting table using 4 oak planks",
        ],
    ) == [
        ("Inventory: You are not carrying anything.", 0, False),
        ("Got 1 oak logs", 0, False),
        ("Inventory: [oak logs] (1)", 0, False),
        ("Crafted 4 minecraft:oak_planks", 0, False),
        ("Inventory: [oak planks] (4)", 0, False),
        ("Crafted 1 minecraft:crafting_table", 1, True),
    ]


@pytest.mark.parametrize(
    ("action", "observation"),
    [
        ("dance", "Could not execute dance"),
        ("", "Could not execute "),
        ("get stick", "Could not execute get stick"),
        ("get 2 planks", "Could not find planks"),
        ("get 2 stick", "Could not find stick"),
        ("get 1 unicorn", "Could not find unicorn"),
        ("get 1 sand, 1 gravel", "Could not find sand, 1 gravel"),
        (f"get {'9' * 5000} sand", "Could not execute get " + "9" * 196 + "..."),
        ("craft 1 foo using 1 bar", "Could not find enough items to craft minecraft:foo"),
        ("craft 1 stick using bamboo", "Wrong item format: bamboo"),
        ("craft 1 stick using 2 bamboo", "Could not find enough items to craft minecraft:stick"),
    ],
)
def test_an_action_that_does_not_work_only_gets_an_answer(action: str, observation: str) -> None:
    assert play("crafting table", [action, "inventory"]) == [
        (observation, 0, False),
        ("Inventory: You are not carrying anything.", 0, False),
    ]


def test_a_recipe_has_to_be_met_exactly() -> None:
    refusal = (
        "Could not find a valid recipe for ItemTagWithCount("
        "item_tag=ItemTag(tag=None, item_id='minecraft:oak_planks'), count=4)"
    )
    played = play(
        "crafting table",
        [
            "get 5 oak log",
            "craft 4 oak planks using 1 oak log",
            "get 2 oak logs",
            "craft 4 oak planks using 2 oak logs",
            "inventory",
        ],
    )
    assert [observation for observation, _, _ in played] == [
        "Got 5 oak log",
        refusal,
        "Got 2 oak logs",
        refusal,
        "Inventory: [oak log] (5) [oak logs] (2)",
    ]


def test_a_generic_ingredient_takes_any_mix_of_its_kinds_but_not_its_own_name() -> None:
    played = play(
        "crafting table",
        [
            "get 1 oak logs",
            "get 1 birch logs",
            "craft 4 oak planks using 1 oak logs",
            "craft 4 birch planks using 1 birch logs",
            "craft 1 crafting table using 4 planks",
            "craft 4 stick using 1 oak planks, 1 birch planks",
            "craft 1 crafting table using 3 oak planks, 1 birch planks",
        ],
    )
    assert played[4][0] == "Could not find enough items to craft minecraft:crafting_table"
    assert played[5][0] == "Crafted 4 minecraft:stick"
    assert played[6] == ("Crafted 1 minecraft:crafting_table", 1, True)


def test_a_game_refuses_calls_that_the_protocol_forbids() -> None:
    game = TextCraft()
    with pytest.raises(GameError, match="not been reset"):
        game.step("inventory")
    with pytest.raises(GameError, match="not been reset"):
        game.observation()
    for unknown in (-1, number_of_items()):
        with pytest.raises(GameError, match=f"item {unknown} is not valid"):
            game.reset(unknown)
    game.reset(item_with_goal("stick"))
    game.step("get 2 bamboo")
    assert game.step("craft 1 stick using 2 bamboo").done
    with pytest.raises(GameError, match="finished"):
        game.step("inventory")
    assert game.reset(0) == game.observation()


def test_the_book_has_no_circle_and_every_group_has_members_of_its_own() -> None:
    book = load_book()
    ready = {item for item in book.items if book.can_be_got(item)}
    pending = list(book.recipes)
    while pending:
        possible = [
            recipe
            for recipe in pending
            if all(
                name in ready or any(member in ready for member in book.groups.get(name, ()))
                for name, _ in recipe.inputs
            )
        ]
        assert possible, "these can never be made: " + ", ".join(r.output for r in pending)
        ready |= {recipe.output for recipe in possible}
        pending = [recipe for recipe in pending if recipe not in possible]
    assert len(book.recipes) >= 300
    assert not set(book.groups) & book.items
    for recipe in book.recipes:
        members = [m for name, _ in recipe.inputs for m in book.groups.get(name, [name])]
        assert len(members) == len(set(members)), f"ambiguous ingredients: {recipe.command}"


def test_there_are_many_tasks_of_graded_difficulty_that_show_the_commands_of_their_plan() -> None:
    assert number_of_items() >= 500
    sampled = [task(item) for item in range(0, number_of_items(), 7)]
    crafts = {sum(isinstance(move, Craft) for move in chosen.plan) for chosen in sampled}
    assert {1, 2, 3, 4, 5, 6} <= crafts
    for chosen in sampled:
        needed = {move.recipe.command for move in chosen.plan if isinstance(move, Craft)}
        assert needed < set(chosen.commands)
        assert len(set(chosen.commands)) == len(chosen.commands)


def test_train_and_test_share_no_goal() -> None:
    train, test = items("train"), items("test")
    assert sorted([*train, *test]) == list(range(number_of_items()))
    assert not {task(item).goal for item in train} & {task(item).goal for item in test}
    with pytest.raises(GameError, match="there are: train, test"):
        items("validation")


def test_the_oracle_wins_every_item_without_one_vain_action() -> None:
    for item in range(number_of_items()):
        game = TextCraft()
        observation = game.reset(item)
        policy = oracle(item)
        for _ in task(item).plan:
            move = policy(observation)
            step = game.step(move.action)
            assert step.observation.startswith(("Got", "Crafted")), (item, move, step)
            assert 10 < len(move.thought) < 300
            observation = step.observation
        assert step.done and step.reward == 1, item
