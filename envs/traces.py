"""`python -m envs.traces NAME --n N --out F.parquet`: oracle episodes in OpenManus-RL's schema.

The one idea: a trace is the conversation a perfect agent would have had. The oracle plays the game
in process; the instruction, the acknowledgement, the observations and the turns become rows
that the supervised warm-up and the task reader take, column for column those of OpenManus-RL.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from envs.game import EnvironmentSpec, GameError
from envs.registry import UnknownEnvironment, load

SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("item_id", pa.string()),
        (
            "conversations",
            pa.list_(
                pa.field(
                    "element",
                    pa.struct(
                        [("from", pa.string()), ("loss", pa.bool_()), ("value", pa.string())]
                    ),
                )
            ),
        ),
        (
            "prompt",
            pa.list_(
                pa.field("element", pa.struct([("content", pa.string()), ("role", pa.string())]))
            ),
        ),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        (
            "extra_info",
            pa.struct(
                [("conversations", pa.string()), ("index", pa.int64()), ("split", pa.string())]
            ),
        ),
    ]
)
MAX_TURNS = 200


class TraceError(Exception):
    """No traces can be made as asked; the message says why."""


def shuffled_items(spec: EnvironmentSpec, split: str, seed: int) -> list[int]:
    """The items of a split in an order that depends on nothing but the seed."""
    rng = random.Random(seed)
    return [item for _, item in sorted((rng.random(), item) for item in spec.items(split))]


def play(spec: EnvironmentSpec, item: int) -> tuple[list[dict[str, Any]], bool]:
    """The conversation of the oracle's episode, and whether it was won."""
    if spec.oracle is None:
        raise TraceError(f"{spec.name} has no oracle, so no traces can be made of it")
    conversation = [_human(spec.instruction), _agent(spec.acknowledgement, loss=False)]
    game = spec.new_game()
    try:
        policy = spec.oracle(item)
        observation = game.reset(item)
        for _ in range(MAX_TURNS):
            move = policy(observation)
            conversation += [_human(observation), _agent(spec.turn(move), loss=True)]
            step = game.step(move.action)
            if step.done:
                return conversation, spec.won(step)
            observation = step.observation
        return conversation, False
    finally:
        game.close()


def row(spec: EnvironmentSpec, item: int, index: int, split: str) -> dict[str, Any] | None:
    """One row of the table, or None when the oracle does not win the item."""
    conversation, won = play(spec, item)
    if not won:
        return None
    recorded = json.dumps(conversation, ensure_ascii=False)
    return {
        "data_source": spec.name,
        "item_id": f"{spec.name}_{item}",
        "conversations": conversation,
        "prompt": [{"content": spec.instruction, "role": "user"}],
        "ability": "agent-reasoning",
        "reward_model": {"ground_truth": recorded, "style": "rule"},
        "extra_info": {"conversations": recorded, "index": index, "split": split},
    }


def rows(spec: EnvironmentSpec, split: str, n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows of different items; an item that the oracle does not win is passed over."""
    made: list[dict[str, Any]] = []
    for item in shuffled_items(spec, split, seed):
        if len(made) == n:
            break
        won = row(spec, item, len(made), split)
        if won is not None:
            made.append(won)
    if len(made) < n:
        raise TraceError(f"{spec.name} has {len(made)} winnable items in {split}: lower --n {n}")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m envs.traces", description=__doc__)
    parser.add_argument("name", help="the environment, e.g. textcraft")
    parser.add_argument("--n", type=int, required=True, help="how many episodes")
    parser.add_argument("--out", type=Path, required=True, help="the parquet file to write")
    parser.add_argument("--split", default="train")
    parser.add_argument("--seed", type=int, default=0, help="which items, and in which order")
    options = parser.parse_args(arguments)
    try:
        if options.n < 1:
            raise TraceError(f"--n must be at least 1, not {options.n}")
        spec = load(options.name)
        missing = spec.requirements()
        if missing is not None:
            raise TraceError(missing)
        made = rows(spec, options.split, options.n, options.seed)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(made, schema=SCHEMA), options.out)
    except (UnknownEnvironment, GameError, TraceError, OSError) as error:
        print(f"envs.traces: {error}", file=sys.stderr)
        return 2
    print(f"wrote {len(made)} episodes of {spec.name} to {options.out}")
    return 0


def _human(value: str) -> dict[str, Any]:
    return {"from": "human", "loss": None, "value": value}


def _agent(value: str, loss: bool) -> dict[str, Any]:
    return {"from": "gpt", "loss": loss, "value": value}


if __name__ == "__main__":
    sys.exit(main())
