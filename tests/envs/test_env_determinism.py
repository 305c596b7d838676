"""The same item is the same task in another process with another hash seed."""

import hashlib
import json
import os
import subprocess
import sys

from envs.registry import load

NAMES = ["textcraft", "maze", "wordle"]


def fingerprint(name: str) -> str:
    """A digest over splits, first observations and whole oracle episodes of 50 items."""
    spec = load(name)
    assert spec.oracle is not None
    items = {split: list(spec.items(split)) for split in ("train", "test")}
    episodes = []
    for item in (items["train"][::37] + items["test"][::7])[:50]:
        game, policy = spec.new_game(), spec.oracle(item)
        texts = [game.reset(item)]
        done = False
        while not done:
            step = game.step(policy(texts[-1]).action)
            texts.append(step.observation)
            done = step.done
        episodes.append(texts)
    assert len(episodes) >= 45
    return hashlib.sha256(json.dumps([items, episodes]).encode()).hexdigest()


def test_items_are_the_same_in_another_process() -> None:
    here = {name: fingerprint(name) for name in NAMES}
    other = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(other.stdout) == here


if __name__ == "__main__":
    print(json.dumps({name: fingerprint(name) for name in NAMES}))
