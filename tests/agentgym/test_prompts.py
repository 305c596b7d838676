import json
import re

import pytest
from scripted_servers import TRANSCRIPTS

from manus_jax.agentgym.prompts import PROMPTS
from manus_jax.agentgym.table import ENVIRONMENTS


def test_every_environment_of_the_table_has_its_prompt() -> None:
    assert set(PROMPTS) == set(ENVIRONMENTS)
    assert all(
        prompt.instruction and prompt.actions and prompt.examples for prompt in PROMPTS.values()
    )


@pytest.mark.parametrize("name", ["textcraft", "babyai"])
def test_examples_of_plain_actions_have_no_characters_that_are_dropped(name: str) -> None:
    for example in PROMPTS[name].examples:
        assert re.fullmatch("[A-Za-z0-9, ]+", example.action)


@pytest.mark.parametrize("name", ["weather", "movie"])
def test_every_tool_that_the_real_server_names_is_described(name: str) -> None:
    lines = (TRANSCRIPTS / f"{name}.jsonl").read_text().splitlines()
    answers = [json.loads(line)["response_text"] for line in lines]
    [listing] = [answer for answer in answers if "following valid actions" in answer]
    tools = re.findall(r"'(\w+)'", listing)
    assert len(tools) > 10
    described = " ".join(PROMPTS[name].actions)
    assert [tool for tool in tools if not re.search(rf"\b{tool}\b", described)] == []


@pytest.mark.parametrize("name", [name for name, row in ENVIRONMENTS.items() if row.sends_text])
def test_examples_of_text_environments_parse_as_their_server_does(name: str) -> None:
    patterns = {
        "tool_call": r"\w+ with Action Input: \{.*\}",
        "search_tags": r"<(search|answer)>.*</\1>",
        "fenced": r"```.*```",
    }
    for example in PROMPTS[name].examples:
        assert re.fullmatch(patterns[ENVIRONMENTS[name].action], example.action)
