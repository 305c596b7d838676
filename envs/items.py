"""`python -m envs.items NAME --out DIR`: an environment's splits as DIR/train.json and test.json.

Servers given by address, like AgentGym's, have no splits, so training and evaluation on them read
their tasks from files. Items are in the order of `evaluation_order`.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from envs.registry import UnknownEnvironment, load


def evaluation_order(env: str, items: Sequence[int]) -> list[int]:
    """Items sorted by a hash of their names.

    The order is the same everywhere and unrelated to difficulty, by which items are often sorted,
    so the first n items are a fair sample for an evaluation.
    """

    def key(item: int) -> bytes:
        return hashlib.sha256(f"{env}_{item}".encode()).digest()

    return sorted(items, key=key)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m envs.items", description=__doc__)
    parser.add_argument("name", help="the environment, e.g. textcraft, or my_env:SPEC")
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    options = parser.parse_args(arguments)
    try:
        spec = load(options.name)
        options.out.mkdir(parents=True, exist_ok=True)
        for split in ("train", "test"):
            tasks = [f"{spec.name}_{n}" for n in evaluation_order(spec.name, spec.items(split))]
            file = options.out / f"{split}.json"
            file.write_text(json.dumps(tasks) + "\n", encoding="utf-8")
    except (UnknownEnvironment, OSError) as error:
        print(f"envs.items: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
