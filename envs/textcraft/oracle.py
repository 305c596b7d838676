"""The TextCraft oracle: plays the plan of a task and explains each move."""

from collections.abc import Iterator

from envs.game import GameError, Move, Policy
from envs.textcraft.tasks import Craft, Get, Plan, task


def oracle(item: int) -> Policy:
    """A policy that follows the plan of `item`, whatever the observations."""
    chosen = task(item)
    moves = _moves(chosen.goal, chosen.plan)

    def policy(_: str) -> Move:
        move = next(moves, None)
        if move is None:
            raise GameError(f"The plan of item {item} has already been played to its end.")
        return move

    return policy


def _moves(goal: str, plan: Plan) -> Iterator[Move]:
    made: set[str] = set()
    for index, move in enumerate(plan):
        if isinstance(move, Get):
            user = _first_user(plan[index:], move.item)
            thought = (
                f"I need {move.amount} {move.item} to craft {user}. "
                f"No command makes {move.item}, so I get it."
            )
            if index == 0 and user != goal:
                thought = f"The goal is {goal}. First {thought}"
            yield Move(thought, f"get {move.amount} {move.item}")
            continue
        output = move.recipe.output
        ingredients = ", ".join(f"{amount} {name}" for name, amount in move.used)
        if output == goal:
            thought = f"I have {ingredients}: everything for the goal. I craft {goal}."
        elif output in made:
            thought = f"I need more {output}, so I craft it again from {ingredients}."
        else:
            user = _first_user(plan[index:], output)
            thought = f"I have {ingredients}. Now I craft {output}, which {user} needs."
        made.add(output)
        yield Move(thought, f"craft {move.recipe.count} {output} using {ingredients}")


def _first_user(rest: Plan, item: str) -> str:
    """The output of the next craft that uses `item`."""
    return next(
        move.recipe.output for move in rest if isinstance(move, Craft) and item in dict(move.used)
    )
