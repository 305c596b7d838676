"""The table of invalid actions is that of `evaluate`, for each format that an environment reads."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from chat_servers import chatting

SCRIPT = Path(__file__).parents[2] / "scripts" / "invalid_actions.py"
SHORT = ["--gin_param=evaluate.tasks_per_env = 2", "--gin_param=rollout.max_turns = 2"]


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("invalid_actions", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_table_has_a_column_per_format_and_no_share_where_it_is_not_read(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replies = lambda messages: "<act>move up</act>" if len(messages) > 4 else "I go up."
    with chatting(replies) as url:
        words = ["--envs", "maze", "weather", "--formats", "act", "auto", *SHORT]
        script.main([f"openai:model@{url}", "--out", str(tmp_path), *words])
    assert capsys.readouterr().out.endswith(
        "| environment | `act` | `auto` |\n| --- | --- | --- |\n"
        "| maze | 50% | 100% |\n| weather | – | 100% |\n"
    )
