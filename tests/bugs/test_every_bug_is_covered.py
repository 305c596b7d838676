"""Bugs of OpenManus-RL, each with at least one test here that would fail if it were reintroduced.

Most of them were silent: training appeared to run and learned nothing. A test that covers a bug has
the marker `@pytest.mark.bug("B1")`; `pytest -m bug` runs them all.
"""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]

BUGS = {
    "B1": "The dataset reader changed and its caller did not, so no run starts.",
    "B2": "The environments' base class lost methods that the agent calls.",
    "B3": "Rewards are read from a field that environments never set, so all are 0, and whitening "
    "turns the remaining noise into advantages.",
    "B4": "The task that is played is the row's position in the batch, not the row's item.",
    "B5": "Groups have one member, or copies of one episode, so the group baseline is meaningless.",
    "B6": "A reward function can be selected, but nothing calls it.",
    "B7": "PPO has a KL coefficient but no reference policy.",
    "B8": "Lambda is set under one name and read under another.",
    "B9": "Validation is configured and never runs.",
    "B10": "Prompt, parser and environment expect three different answer formats; unparsable "
    "answers are sent as empty actions and counted as valid.",
    "B11": "Reordering a batch does not reorder its per-row values, such as group ids.",
    "B12": "The KL penalty is written through a mask used as indices, so only two rows change.",
    "B13": "Discounted rewards sum to the episode reward times the number of turns.",
    "B14": "Parameters and moments are bfloat16, in which small updates round to zero.",
    "B15": "Only a window at the end of the conversation is trained; earlier rewards are lost.",
    "B16": "Log-probs are computed for labels other than the sampled tokens.",
    "B17": "Prompt tokens are trained as if the agent had produced them.",
    "B18": "Advantages propagate through observation tokens; the critic uses a different, shifted "
    "mask.",
    "B19": "Text is decoded and encoded again, so the trained ids differ from the sampled ones and "
    "lack the end of turn.",
    "B20": "Batches are padded with copies of real rows, which are trained twice.",
    "B21": "Warm-up covers nearly the whole run; truncated sampling is trained as if it were "
    "sampling from the full distribution.",
    "B22": "Epochs, shuffling and schedules are settings that nothing reads; micro-batches of "
    "different sizes have equal weight; a metric covers only the last micro-batch.",
    "B23": "The padding of one turn's answer becomes part of the next prompt.",
    "B24": "Observations are shown without a chat template and without instructions on how to "
    "answer.",
    "B25": "Episodes generate one at a time, redundantly on every device.",
    "B26": "Two episodes share one environment session and reset each other.",
    "B27": "Threads call the generating workers in an order that differs between workers.",
    "B28": "An episode that fails for infrastructure reasons counts as reward 0 in its group.",
    "B29": "A dead server is skipped silently; length limits are ignored, and a row of exactly the "
    "maximum length breaks the batch.",
    "B30": "Masks are derived from the padding id, which can equal the end-of-turn id.",
    "B31": "Sessions are never closed, until the server is full.",
    "B32": "Validation rows are training rows; environment names are misspelt; a batch may be "
    "larger than the dataset.",
    "B33": "Launch scripts start nothing, leave servers behind, connect to 0.0.0.0, and return the "
    "exit code of another program.",
    "B34": "Checkpoints contain only weights, so nothing resumes; runs end one step early.",
    "B35": "Normalising an answer deletes its spaces; tests import modules that no longer exist.",
    "B36": "A score is written under one name and read under another; more devices are requested "
    "than exist.",
}


def marked_numbers() -> set[str]:
    """The arguments of all `@pytest.mark.bug(...)` decorators of test functions."""
    return {
        argument.value
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.bug"
        for argument in decorator.args
    }


def test_every_bug_has_a_test_and_every_mark_is_a_known_bug():
    assert [*BUGS] == [f"B{number}" for number in range(1, 37)]
    assert marked_numbers() == set(BUGS)
