"""Environment prompts: the instructions that precede the first observation.

Each environment has a file `<name>.toml` in this folder with the rules of the game, its actions and
an example turn. How an answer must be written depends on the parser, so that text belongs to the
action format (`manus_jax.rollout.action_formats`).
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Example:
    """An example turn."""

    observation: str
    thought: str
    action: str


@dataclass(frozen=True)
class EnvironmentPrompt:
    """The instructions for one environment."""

    instruction: str
    actions: tuple[str, ...]
    examples: tuple[Example, ...]


def read_prompt(path: Path) -> EnvironmentPrompt:
    """Reads a TOML file with `instruction`, `actions` and `[[examples]]`."""
    fields = tomllib.loads(path.read_text(encoding="utf-8"))
    return EnvironmentPrompt(
        fields["instruction"],
        tuple(fields["actions"]),
        tuple(Example(**example) for example in fields["examples"]),
    )


PROMPTS: dict[str, EnvironmentPrompt] = {
    path.stem: read_prompt(path) for path in sorted(Path(__file__).parent.glob("*.toml"))
}
