"""`python -m envs.items NAME --out DIR`: an environment's splits as DIR/train.json and test.json.

Servers given by address, like AgentGym's, have no splits, so training and evaluation on them read
their tasks from files. Items are in the order of `evaluation_order`. Existing files with other
content are not overwritten.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from envs.command import CommandParser
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
    parser = CommandParser(prog="python -m envs.items", description=__doc__)
    parser.add_argument("name", help="the environment, e.g. textcraft, or my_env:SPEC")
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    options = parser.parse_args(arguments)
    try:
        spec = load(options.name)
        options.out.mkdir(parents=True, exist_ok=True)
        for split in ("train", "test"):
            tasks = [f"{spec.name}_{n}" for n in evaluation_order(spec.name, spec.items(split))]
            _write(options.out / f"{split}.json", json.dumps(tasks) + "\n")
    except (UnknownEnvironment, OSError, ValueError) as error:
        parser.fail(str(error))


def _write(file: Path, text: str) -> None:
    if file.exists():
        if not file.is_file() or file.read_bytes() != text.encode():
            raise FileExistsError(f"{file} exists with other content; choose another --out")
        return
    work = file.with_name(f".{file.name}.tmp-{os.getpid()}")
    work.write_text(text, encoding="utf-8")
    work.replace(file)


if __name__ == "__main__":
    main()
