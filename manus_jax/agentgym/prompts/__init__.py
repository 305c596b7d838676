"""Environment prompts: the instructions that precede the first observation.

Each environment has a file `<name>.toml` in this folder with the rules of the game, its actions,
its tools (`manus_jax.agentgym.tools`) and an example turn. How an answer must be written depends on
the parser, so that text belongs to the action format (`manus_jax.rollout.action_formats`).
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from manus_jax.agentgym.tools import Tool, read_tools


@dataclass(frozen=True)
class Example:
    """An example turn."""

    observation: str
    thought: str
    action: str


@dataclass(frozen=True)
class TurnTemplates:
    """The prompts of turns that do not continue a conversation, as format strings.

    `first` is for the first turn. Fields: instruction, first_observation, task_description,
    current_observation, admissible_actions; in `later` also step_count, history_length,
    action_history and current_step.
    """

    first: str
    later: str


@dataclass(frozen=True)
class EnvironmentPrompt:
    """The instructions for one environment."""

    instruction: str
    actions: tuple[str, ...]
    examples: tuple[Example, ...]
    tools: tuple[Tool, ...] = ()
    """The actions as functions, for models that call tools; empty: one tool, `act`."""
    turns: TurnTemplates | None = None
    """For `rollout.prompt_source = "per_turn"`; None: the general ones."""


def read_prompt(path: Path) -> EnvironmentPrompt:
    """Reads a TOML file with `instruction`, `actions`, `[[examples]]`, tools and `[turns]`."""
    fields = tomllib.loads(path.read_text(encoding="utf-8"))
    return EnvironmentPrompt(
        fields["instruction"],
        tuple(fields["actions"]),
        tuple(Example(**example) for example in fields["examples"]),
        read_tools(fields),
        TurnTemplates(**fields["turns"]) if "turns" in fields else None,
    )


PROMPTS: dict[str, EnvironmentPrompt] = {
    path.stem: read_prompt(path) for path in sorted(Path(__file__).parent.glob("*.toml"))
}
