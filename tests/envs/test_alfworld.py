"""ALFWorld: AgentGym's texts, the rules of the package alfworld, generated games and an oracle."""

import json
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from env_servers import Client

from envs.alfworld import SPEC, games
from envs.alfworld.game import AlfWorld
from envs.alfworld.games import TEST, TRAIN, items, missing, number_of_items, problem
from envs.alfworld.problem import parse_problem, read_game
from envs.alfworld.world import World
from envs.game import GameError
from envs.server import build_app

HOUSEHOLD = Path(games.__file__).with_name("household.toml")
RECORDED = Path(__file__).parents[1] / "support" / "alfworld_walks.jsonl"

# A kitchen with a mug in a closed cabinet and two things at the sink, which share a location.
KITCHEN = """
(define (problem plan_1) (:domain alfred)
 (:objects agent1 - agent  Mug Apple - object MugType AppleType - otype
  CabinetType SinkBasinType FridgeType - rtype
  Mug_bar__plus_01_dot_00 Apple_bar__minus_02_dot_00 - object
  Cabinet_bar__plus_00_dot_10 Fridge_bar__plus_00_dot_20 - receptacle
  Sink_bar__plus_00_dot_30_bar_SinkBasin - receptacle
  loc_1 loc_2 loc_3 loc_start - location)
 (:init (= (total-cost) 0)
  (atLocation agent1 loc_start)  ; a comment
  (receptacleAtLocation Cabinet_bar__plus_00_dot_10 loc_1)
  (receptacleAtLocation Fridge_bar__plus_00_dot_20 loc_2)
  (receptacleAtLocation Sink_bar__plus_00_dot_30_bar_SinkBasin loc_3)
  (receptacleType Cabinet_bar__plus_00_dot_10 CabinetType)
  (receptacleType Fridge_bar__plus_00_dot_20 FridgeType)
  (receptacleType Sink_bar__plus_00_dot_30_bar_SinkBasin SinkBasinType)
  (openable Cabinet_bar__plus_00_dot_10) (openable Fridge_bar__plus_00_dot_20)
  (canContain FridgeType AppleType) (canContain FridgeType MugType)
  (canContain SinkBasinType AppleType) (canContain SinkBasinType MugType)
  (objectType Mug_bar__plus_01_dot_00 MugType) (objectType Apple_bar__minus_02_dot_00 AppleType)
  (pickupable Mug_bar__plus_01_dot_00) (pickupable Apple_bar__minus_02_dot_00)
  (cleanable Mug_bar__plus_01_dot_00) (coolable Mug_bar__plus_01_dot_00)
  (inReceptacle Mug_bar__plus_01_dot_00 Cabinet_bar__plus_00_dot_10)
  (objectAtLocation Mug_bar__plus_01_dot_00 loc_1)
  (inReceptacle Apple_bar__minus_02_dot_00 Sink_bar__plus_00_dot_30_bar_SinkBasin)
  (objectAtLocation Apple_bar__minus_02_dot_00 loc_3))
 (:goal (and (exists (?r - receptacle) (exists (?o - object)
   (and (cleanable ?o) (objectType ?o MugType) (receptacleType ?r FridgeType)
        (isClean ?o) (inReceptacle ?o ?r)))))))
"""


def kitchen() -> World:
    return World(parse_problem("kitchen", "put a clean mug in fridge", KITCHEN))


def test_a_problem_is_played_with_agentgyms_words() -> None:
    world = kitchen()
    assert world.start() == (
        "You are in the middle of a room. Looking quickly around you, you see a cabinet 1, "
        "a fridge 1, and a sinkbasin 1.\nYour task is to: put a clean mug in fridge."
    )
    replies = {
        "go to cabinet 1": "You arrive at cabinet 1. The cabinet 1 is closed.",
        "open cabinet 1": "You open the cabinet 1. The cabinet 1 is open. In it, you see a mug 1.",
        "take mug 1 from cabinet 1": "You pick up the mug 1 from the cabinet 1.",
        "inventory": "You are carrying: a mug 1.",
        "put mug 1 in/on cabinet 1": "Nothing happens.",  # cabinets cannot contain mugs here
        "close cabinet 1": "You close the cabinet 1.",
        "go to sinkbasin 1": "You arrive at sinkbasin 1. On the sinkbasin 1, you see a apple 1.",
        "take apple 1 from sinkbasin 1": "Nothing happens.",  # one thing at a time
        "clean mug 1 with sinkbasin 1": "You clean the mug 1 using the sinkbasin 1.",
        "examine mug 1": "This is a clean mug 1.",
        "look": "You are facing the sinkbasin 1. Next to it, you see nothing.",
        "go to fridge 1": "You arrive at fridge 1. The fridge 1 is closed.",
        "put mug 1 in/on fridge 1": "Nothing happens.",
        "cool mug 1 with fridge 1": "You cool the mug 1 using the fridge 1.",
        " examine mug 1 ": "This is a cool and clean mug 1.",
        "open fridge 1": "You open the fridge 1. The fridge 1 is open. In it, you see nothing.",
    }
    for command, reply in replies.items():
        assert world.step(command) == reply, command
        assert not world.won()
    assert world.step("put mug 1 in/on fridge 1") == "You put the mug 1 in/on the fridge 1."
    assert world.won()


def test_commands_are_those_that_have_an_effect() -> None:
    world = kitchen()
    elsewhere = ["go to cabinet 1", "go to fridge 1", "inventory", "look"]
    world.step("go to sinkbasin 1")
    assert list(world.commands()) == [
        "examine sinkbasin 1",
        *elsewhere,
        "take apple 1 from sinkbasin 1",
    ]
    for command in world.commands():
        other = kitchen()
        other.step("go to sinkbasin 1")
        assert other.step(command) != "Nothing happens."


def test_the_walks_recorded_with_the_package_alfworld_are_reproduced() -> None:
    walks = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    household = tomllib.loads(HOUSEHOLD.read_text(encoding="utf-8"))
    assert {walk["task_type"] for walk in walks} == set(household["tasks"])
    for walk in walks:
        world = World(problem(walk["item"]))
        assert world.start() == walk["start"]
        for step in walk["steps"]:
            observation = world.step(step["command"])
            assert (observation, world.won()) == (step["observation"], step["won"]), step
            assert list(world.commands()) == step["commands"]


def test_splits_are_disjoint_and_games_do_not_depend_on_the_order_of_play() -> None:
    assert (items("train"), items("test")) == (TRAIN, TEST) and number_of_items() == 500
    first = [problem(item) for item in (3, 407)]
    problem.cache_clear()
    assert [problem(item) for item in (407, 3)][::-1] == first
    kinds = Counter(problem(item).name.partition("-")[0] for item in TRAIN)
    assert len(kinds) == 6 and min(kinds.values()) == 66
    with pytest.raises(GameError, match=r"there is no game 500; games are 0 to 499"):
        problem(500)
    with pytest.raises(GameError, match="unknown split 'val'"):
        items("val")


@pytest.mark.parametrize("item", range(0, 500, 7))
def test_the_oracle_wins(item: int) -> None:
    game, seen = AlfWorld(), ""
    game.reset(item)
    assert SPEC.oracle is not None
    policy = SPEC.oracle(item)
    for turn in range(20):
        step = game.step(policy(seen).action)
        assert step.observation != "Nothing happens."
        if step.done:
            assert step.reward == 1.0 and turn >= 2
            return
    raise AssertionError("the oracle did not win")


def test_a_step_before_the_start_or_after_the_end_is_an_error() -> None:
    game = AlfWorld()
    with pytest.raises(GameError, match="has not been reset"):
        game.step("look")
    game.reset(0)
    policy = SPEC.oracle and SPEC.oracle(0)
    while not game.step(policy("").action).done:
        pass
    with pytest.raises(GameError, match="The game is over"):
        game.step("look")


def write_data_set(root: Path) -> None:
    """A directory like ALFWorld's, with two solvable games and others that are left out."""
    grammar = 'grammar :: """{"task": [{"rhs": "Your task is to: put a clean mug in fridge."}]}"""'
    game = {"solvable": True, "pddl_domain": "", "grammar": grammar, "pddl_problem": KITCHEN}
    for folder, data in {
        "train/pick_clean-Mug-None-Fridge-1/trial_T1": game,
        "train/pick_clean-Mug-None-Fridge-1/trial_T2": {**game, "solvable": False},
        "train/pick_and_place_with_movable_recep-Mug/trial_T3": game,
        "valid_seen/pick_clean-Mug-None-Fridge-2/trial_T4": game,
    }.items():
        path = root / "json_2.1.1" / folder
        path.mkdir(parents=True)
        (path / "game.tw-pddl").write_text(json.dumps(data))


def test_the_data_set_is_played_if_its_directory_is_given(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "empty"))
    assert "has no solvable game.tw-pddl files" in str(missing())
    write_data_set(tmp_path / "data")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "data"))
    problem.cache_clear()
    assert missing() is None
    assert (list(items("train")), list(items("test")), number_of_items()) == ([0], [1], 2)
    game = AlfWorld()
    assert game.reset(1).endswith("Your task is to: put a clean mug in fridge.")
    assert game.world.problem.name == "pick_clean-Mug-None-Fridge-2/trial_T4"
    policy = SPEC.oracle and SPEC.oracle(1)
    steps = [game.step(policy("").action) for _ in range(8)]
    assert steps[-1].done and steps[-1].reward == 1.0
    problem.cache_clear()


def test_agentgyms_lists_select_the_games_and_their_numbers(tmp_path, monkeypatch) -> None:
    write_data_set(tmp_path)
    trials = {
        "train": [("pick_cool-Egg", "trial_gone"), ("pick_clean-Mug-None-Fridge-1", "trial_T1")],
        "test": [("pick_clean-Mug-None-Fridge-3", "trial_T5")],
    }
    # AgentGym's test games are in valid_train, which the data set has as well.
    (tmp_path / "json_2.1.1/valid_seen").rename(tmp_path / "json_2.1.1/valid_train")
    old = tmp_path / "json_2.1.1/valid_train/pick_clean-Mug-None-Fridge-2/trial_T4"
    new = tmp_path / "json_2.1.1/valid_train/pick_clean-Mug-None-Fridge-3"
    new.mkdir()
    old.rename(new / "trial_T5")
    for split, games_of_split in trials.items():
        rows = [{"item_id": 0, "task_type": x, "task_id": y} for x, y in games_of_split]
        (tmp_path / f"mappings_{split}.json").write_text(json.dumps(rows))
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    problem.cache_clear()
    assert missing() is None
    assert (list(items("train")), list(items("test")), number_of_items()) == ([1], [2], 3)
    assert problem(1).name == "pick_clean-Mug-None-Fridge-1/trial_T1"
    assert problem(2).name == "pick_clean-Mug-None-Fridge-3/trial_T5"
    with pytest.raises(GameError, match="has no game 0, of 0 to 2"):
        problem(0)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "mappings_train.json").write_text("[]")
    (damaged / "mappings_test.json").write_text('["x"]')
    monkeypatch.setenv("ALFWORLD_DATA", str(damaged))
    assert "mappings_test.json is not one of AgentGym's lists: TypeError" in str(missing())
    problem.cache_clear()


def office() -> str:
    """The problem of the game that AgentGym's server was recorded with, from what it showed."""
    places = ["cabinet", "countertop", "desk", "diningtable", "fridge", "microwave", "sinkbasin"]
    things = {"alarmclock": "cabinet", "mug": "cabinet", "plate": "countertop"}
    name = {place: f"{place}_bar_1" for place in places} | {"sinkbasin": "sink_bar_1_bar_sinkbasin"}
    facts = ["(atLocation agent1 loc_start)"]
    for place in places:
        facts += [f"(receptacleAtLocation {name[place]} loc_{place})"]
        facts += [f"(receptacleType {name[place]} {place}type)"]
        facts += [f"(canContain {place}type {thing}type)" for thing in things]
    facts += [f"(openable {name[place]})" for place in ("cabinet", "fridge", "microwave")]
    for thing, place in things.items():
        facts += [f"(objectType {thing}_bar_1 {thing}type)", f"(pickupable {thing}_bar_1)"]
        facts += [f"(inReceptacle {thing}_bar_1 {name[place]})"]
        facts += [f"(objectAtLocation {thing}_bar_1 loc_{place})"]
    objects = " ".join(f"{thing}_bar_1" for thing in things)
    locations = " ".join(f"loc_{place}" for place in places)
    goal = "(inReceptacle ?o ?r) (objectType ?o alarmclocktype) (receptacleType ?r desktype)"
    return f"""(define (problem p) (:domain alfred) (:objects agent1 - agent
        {objects} - object {" ".join(name.values())} - receptacle {locations} loc_start - location)
        (:init {" ".join(facts)})
        (:goal (exists (?r - receptacle ?o - object) (and {goal}))))"""


@pytest.mark.usefixtures("counted_ids")
def test_the_server_answers_as_agentgyms_did(serve_app, tmp_path, monkeypatch) -> None:
    lines = (RECORDED.parent / "transcripts/alfworld.jsonl").read_text().splitlines()
    exchanges = [json.loads(line) for line in lines]
    started = next(x for x in exchanges if x["request"]["path"] == "/reset")
    task_type, trial = json.loads(started["response_text"])["task_type"].split("/")
    # The numbers of games are those of AgentGym's lists, in which this one has number 196.
    rows = [{"task_type": "pick-Gone", "task_id": f"trial_{n}"} for n in range(196)]
    rows.append({"task_type": task_type, "task_id": trial})
    (tmp_path / "mappings_train.json").write_text(json.dumps(rows))
    (tmp_path / "mappings_test.json").write_text("[]")
    folder = tmp_path / "json_2.1.1/train" / task_type / trial
    folder.mkdir(parents=True)
    grammar = 'Your task is to: put a alarmclock in desk."'
    game = {"grammar": grammar, "pddl_problem": office()}
    (folder / "game.tw-pddl").write_text(json.dumps(game))
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    problem.cache_clear()
    client = Client(serve_app(build_app(SPEC)))
    answered = 0
    for exchange in exchanges:
        request = exchange["request"]
        if request["path"] == "/close":  # AgentGym's has none
            continue
        method = client.get if request["method"] == "GET" else client.post
        body = [] if request["method"] == "GET" else [request["body"]]
        expected = exchange["status"], json.loads(exchange["response_text"])
        assert method(request["path"], *body) == expected, request
        answered += 1
    assert answered == len(exchanges) - 2
    problem.cache_clear()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read: JSONDecodeError"),
        ("[]", "cannot be read: TypeError"),
        ('{"grammar": "", "pddl_problem": ""}', "the grammar contains no task"),
        ('{"grammar": "Your task is to: x.\\"", "pddl_problem": "(define"}', "not a PDDL problem"),
    ],
)
def test_a_broken_game_file_is_named(tmp_path, text: str, message: str) -> None:
    file = tmp_path / "game.tw-pddl"
    file.write_text(text)
    with pytest.raises(GameError, match=message):
        read_game(file, "broken")
