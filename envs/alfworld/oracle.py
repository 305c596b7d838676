"""A policy that wins: it knows where everything is, and fetches, changes and places it.

The plan is made in a copy of the game, from the atoms of the goal, so it works for generated games
and for those of the data set.
"""

from collections.abc import Iterator
from typing import Any

from envs.alfworld.games import problem
from envs.alfworld.world import World
from envs.game import GameError, Move, Policy

_APPLIANCES = {"isclean": ("clean", "sinkbasin"), "ishot": ("heat", "microwave")}
_APPLIANCES["iscool"] = ("cool", "fridge")


def oracle(item: int) -> Policy:
    """A policy that plays a plan made at its first call."""
    world = World(problem(item))
    moves = _plan(world, list(_atoms(world.problem.goal)))

    def policy(_: str) -> Move:
        move = next(moves, None)
        if move is None:
            raise GameError("the plan is finished")
        return move

    return policy


def _atoms(formula: list[Any]) -> Iterator[list[str]]:
    """The predicates of a goal that have to hold, outside of negations."""
    operator, *arguments = formula
    if operator in ("and", "or"):
        for part in arguments:
            yield from _atoms(part)
    elif operator in ("exists", "forall"):
        yield from _atoms(arguments[1])
    elif operator not in ("not", "="):
        yield formula


def _plan(world: World, goal: list[list[str]]) -> Iterator[Move]:
    kinds = {atom[1]: atom[2] for atom in goal if atom[0] in ("objecttype", "receptacletype")}
    wanted = [variable for variable, kind in kinds.items() if ["toggleable", variable] not in goal]
    things = [variable for variable in wanted if _is_object(variable, goal)]
    lamps = [atom[1] for atom in goal if atom[0] == "istoggled"]
    used: list[str] = []
    for variable in things:
        thing = next(o for o in world.objects if world.kind(o) == kinds[variable] and o not in used)
        used.append(thing)
        name = world.names[thing]
        start = next(r for r in world.receptacles if thing in world.contains(r))
        yield from _go(world, start, f"I need {name}.")
        yield _do(world, f"take {name} from {world.names[start]}", f"Here is {name}.")
        for state, (verb, kind) in _APPLIANCES.items():
            if [state, variable] in goal:
                appliance = _first(world, f"{kind}type")
                yield from _go(world, appliance, f"I have to {verb} {name}.", opened=False)
                command = f"{verb} {name} with {world.names[appliance]}"
                yield _do(world, command, f"Now I {verb} it.")
        for lamp in lamps:
            light = next(o for o in world.objects if world.kind(o) == kinds[lamp])
            place = next(r for r in world.receptacles if light in world.contains(r))
            yield from _go(world, place, f"The light is on {world.names[place]}.")
            yield _do(world, f"use {world.names[light]}", f"I look at {name} in the light.")
        for atom in goal:
            if atom[:2] == ["inreceptacle", variable]:
                # Everything goes to the same place, because a goal may ask for two things in it.
                target = _first(world, kinds[atom[2]])
                yield from _go(world, target, f"{name} belongs there.")
                yield _do(world, f"put {name} in/on {world.names[target]}", "I put it down.")


def _is_object(variable: str, goal: list[list[str]]) -> bool:
    return any(atom[0] == "objecttype" and atom[1] == variable for atom in goal)


def _first(world: World, kind: str) -> str:
    return next(r for r in world.receptacles if world.kind(r) == kind)


def _go(world: World, receptacle: str, thought: str, opened: bool = True) -> Iterator[Move]:
    name = world.names[receptacle]
    if receptacle not in world.here:
        yield _do(world, f"go to {name}", thought)
    if opened and not world.accessible(receptacle):
        yield _do(world, f"open {name}", f"{name} is closed.")


def _do(world: World, command: str, thought: str) -> Move:
    world.step(command)
    return Move(thought, command)
