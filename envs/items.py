"""`python -m envs.items NAME --out DIR`: an environment's splits as DIR/train.json and test.json.

For training and evaluation on servers that are given by address: those of AgentGym have no splits,
so what is to be played on them is named in files. The order is that of the panels, in which the
first tasks of a file are those that an evaluation of so many tasks would take.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from envs.registry import UnknownEnvironment, load
from manus_jax.evaluation.eval_sets import select


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m envs.items", description=__doc__)
    parser.add_argument("name", help="the environment, e.g. textcraft, or a place: my_env:SPEC")
    parser.add_argument("--out", type=Path, required=True, help="a directory")
    options = parser.parse_args(arguments)
    try:
        spec = load(options.name)
        options.out.mkdir(parents=True, exist_ok=True)
        for split in ("train", "test"):
            items = spec.items(split)
            tasks = [task.item_id for task in select(spec.name, items, len(items))]
            file = options.out / f"{split}.json"
            file.write_text(json.dumps(tasks) + "\n", encoding="utf-8")
    except (UnknownEnvironment, OSError) as error:
        print(f"envs.items: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
