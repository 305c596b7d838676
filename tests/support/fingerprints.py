"""A digest of what an environment shows, to compare between processes with different hash seeds."""

import hashlib
import json
import os
import subprocess
import sys

from envs.registry import load


def fingerprint(name: str, items: list[int]) -> str:
    """A digest over the splits and the whole oracle episodes of some items."""
    spec = load(name)
    assert spec.oracle is not None
    episodes = []
    for item in items:
        game, policy = spec.new_game(), spec.oracle(item)
        texts, done = [game.reset(item)], False
        while not done:
            step = game.step(policy(texts[-1]).action)
            texts.append(f"{step.observation} {step.reward}")
            done = step.done
        episodes.append(texts)
    splits = [list(spec.items(split)) for split in ("train", "test")]
    return hashlib.sha256(json.dumps([splits, episodes]).encode()).hexdigest()


def fingerprint_elsewhere(name: str, items: list[int]) -> str:
    """The same digest, made by another process whose strings hash differently."""
    made = subprocess.run(
        [sys.executable, __file__, name, *map(str, items)],
        env={**os.environ, "PYTHONHASHSEED": "4711"},
        capture_output=True,
        text=True,
        check=True,
    )
    return made.stdout.strip()


if __name__ == "__main__":
    print(fingerprint(sys.argv[1], [int(item) for item in sys.argv[2:]]))
