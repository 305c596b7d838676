"""The client with imitations of unrecorded environments: episodes and known pitfalls."""

import pytest
from imitated_servers import Sheet, Todo, WebArena, academia, alfworld, searchqa
from scripted_servers import TRANSCRIPTS, serving

from envs.registry import ENVIRONMENTS as EMBEDDED
from manus_jax.agentgym.client import Session
from manus_jax.agentgym.connection import Connection
from manus_jax.agentgym.failures import EnvironmentFailure, FailureKind
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.agentgym.table import ENVIRONMENTS
from manus_jax.config.server_settings import EnvPoolSettings

SERVERS = {
    "alfworld": alfworld,
    "searchqa": searchqa,
    "webarena": lambda: WebArena().answer,
    "academia": academia,
    "todo": lambda: Todo().answer,
    "sheet": lambda: Sheet().answer,
}


def opened(name: str, url: str) -> Session:
    session = Session(ENVIRONMENTS[name], url)
    session.create()
    return session


def tool(name: str, parameters: str = "{}") -> str:
    return f"Thought: as it must be\n\nAction: {name} with Action Input: {parameters}"


def failure_of(session: Session, action: str) -> EnvironmentFailure:
    with pytest.raises(EnvironmentFailure) as caught:
        session.step(action)
    return caught.value


@pytest.mark.parametrize("name", SERVERS)
def test_each_server_passes_for_its_own_environment_and_for_no_other_family(name: str) -> None:
    with serving(SERVERS[name]()) as url:
        Connection(ENVIRONMENTS[name], url, EnvPoolSettings()).check_routes()
        if name != "webarena":  # which says nothing of the fields it takes
            stranger = "sqlgym" if name == "alfworld" else "textcraft"
            with pytest.raises(EnvironmentFailure, match="serves another environment"):
                Connection(ENVIRONMENTS[stranger], url, EnvPoolSettings()).check_routes()


@pytest.mark.parametrize("name", SERVERS)
def test_an_item_that_is_not_there_is_the_datasets_fault(name: str) -> None:
    with serving(SERVERS[name]()) as url:
        session = opened(name, url)
        with pytest.raises(EnvironmentFailure, match=r"item 999999 is outside 0\.\.") as caught:
            session.reset(999999)
        assert caught.value.kind is FailureKind.ITEM
        session.reset(3)


def test_alfworld_is_won_lost_and_played_again_on_one_session() -> None:
    with serving(alfworld()) as url:
        session = opened("alfworld", url)
        assert session.reset(7) == (
            "Game 7.\nYour task is to: get an apple.\nAVAILABLE ACTIONS: go to fridge 1,look"
        )
        first = session.step("go to fridge 1")
        assert first.observation == "On the fridge 1 is an apple 1."
        assert first.info["available_actions"] == ["take apple 1 from fridge 1", "look"]
        last = session.step("take apple 1 from fridge 1")
        assert (first.reward, last.reward, last.done, session.success) == (0.0, 1.0, True, True)
        with pytest.raises(RuntimeError, match="call reset"):
            session.step("look")
        session.reset(2619)
        results = [session.step("dance") for _ in range(50)]
        assert [result.done for result in results] == [False] * 49 + [True]
        assert (session.episode_reward, session.success) == (0.0, False)
        session.close()  # there is no such route, which is no failure


def test_alfworld_reports_failures_with_status_200() -> None:
    with serving(alfworld()) as url:
        session = opened("alfworld", url)
        session.reset(0)
        session.id = 99
        assert failure_of(session, "look").kind is FailureKind.ERROR_ANSWER


def test_searchqa_continues_after_a_wrong_answer_and_ends_with_the_right_one() -> None:
    with serving(searchqa()) as url:
        session = opened("searchqa", url)
        assert session.reset(51713).endswith("Question: capital of France (51713)?")
        texts = ["<think>?</think><search>France</search>", "<answer>Rome</answer>", "Paris!"]
        results = [session.step(text) for text in texts]
        assert results[0].observation.startswith("<information>")
        assert [(result.reward, result.done) for result in results] == [(0.0, False)] * 3
        end = session.step("<think>so</think>\n<answer> Paris </answer>")
        assert (end.reward, end.done, session.success) == (1.0, True, True)
        session.close()


def test_webarena_counts_no_reward_before_the_stop() -> None:
    server = WebArena()
    with serving(server.answer) as url:
        session = opened("webarena", url)
        assert "OBJECTIVE: objective 3" in session.reset(3)
        moved = session.step("I look further down. ```scroll [down]```")
        assert (moved.info["reward"], moved.reward, moved.done) == (1.0, 0.0, False)
        end = session.step("```stop [42]```")
        assert (end.reward, end.done, session.success) == (1.0, True, True)
        session.reset(811)
        end = session.step("```stop [41]```")
        assert (end.reward, end.done, session.success) == (0.0, True, False)
        session.close()
        assert server.live == {}


@pytest.mark.parametrize(
    ("text", "observation"),
    [
        ("I scroll down", "Cannot parse action from response I scroll down"),
        ("```dance [3]```", "Invalid action dance [3]"),
        ("``` ```", "list index out of range"),
        ("```type [3] [é]```", "'é'"),
    ],
)
def test_webarena_answers_the_agents_mistakes_with_observations(
    text: str, observation: str
) -> None:
    with serving(WebArena().answer) as url:
        session = opened("webarena", url)
        session.reset(3)
        result = session.step(text)
        assert (result.observation, result.reward, result.done) == (observation, 0.0, False)


def test_webarena_failures_that_look_like_observations_are_failures() -> None:
    server = WebArena()
    with serving(server.answer) as url:
        session = opened("webarena", url)
        session.reset(3)
        server.evaluator = False
        unjudged = failure_of(session, "```stop [42]```")
        assert (unjudged.kind, unjudged.retryable) == (FailureKind.BACKEND, True)
        server.dead = True
        assert failure_of(session, "```scroll [down]```").kind is FailureKind.BACKEND
        with pytest.raises(EnvironmentFailure, match="TimeoutError") as caught:
            session.reset(3)
        assert caught.value.kind is FailureKind.BACKEND


def test_a_page_with_an_exception_is_a_failure_of_webarena_not_another_server() -> None:
    with serving(WebArena().answer) as url:
        connection = Connection(ENVIRONMENTS["webarena"], url, EnvPoolSettings())
        with pytest.raises(EnvironmentFailure, match=r"HTTP 500: .*Server Error") as caught:
            connection.json("GET", "/observation?env_idx=77")
        assert caught.value.kind is FailureKind.STATUS
        assert not caught.value.kind.lost_contact


def test_academia_rewards_the_best_share_of_subgoals() -> None:
    with serving(academia()) as url:
        session = opened("academia", url)
        assert session.reset(19).startswith("Now new trial starts.\n")
        texts = [
            tool("loadPaperNet"),
            "no action at all",
            tool("paperNodeCheck"),  # without its parameter
            tool("fly"),
            tool("paperNodeCheck", '{"node": "A paper"}'),
            tool("paperNodeCheck", "{broken"),
            tool("finish", '{"answer": "2021"}'),
        ]
        results = [session.step(text) for text in texts]
        third = pytest.approx(1 / 3)
        assert [result.reward for result in results] == [third, 0, 0, 0, third, 0, third]
        assert [result.done for result in results] == [False] * 6 + [True]
        assert session.success


def test_todo_is_scored_at_the_end_only() -> None:
    server = Todo()
    with serving(server.answer) as url:
        session = opened("todo", url)
        session.reset(154)
        progress = session.step(tool("get_projects"))
        assert (progress.info["reward"], progress.reward) == (0.5, 0.0)
        end = session.step(tool("finish", '{"answer": "done"}'))
        assert (end.reward, end.done, session.success) == (0.0, True, False)
        session.reset(0)
        session.step(tool("complete_task", '{"task_id": "7"}'))
        end = session.step(tool("finish", '{"answer": "done"}'))
        assert (end.reward, end.done, session.success) == (1.0, True, True)
        session.close()


def test_todo_is_played_by_one_at_a_time_as_a_reset_clears_the_account_of_all() -> None:
    server = Todo()
    with serving(server.answer) as url:
        settings = EnvPoolSettings(patience=0.2, sessions_per_server=8)
        with EnvironmentPool({"todo": [url]}, settings) as pool:
            with pool.lease("todo") as session:
                session.reset(0)
                session.step(tool("complete_task", '{"task_id": "7"}'))
                with (
                    pytest.raises(EnvironmentFailure, match="1 of 1 sessions in use"),
                    pool.lease("todo"),
                ):
                    pass
                session.step(tool("finish", '{"answer": "done"}'))
                assert session.success
            with pool.lease("todo") as again:
                assert again is session


def test_the_score_of_sheet_includes_initial_matches_and_never_falls() -> None:
    with serving(Sheet().answer) as url:
        session = opened("sheet", url)
        session.reset(0)
        texts = [
            tool("get_all_values"),
            tool("open_sheet", '{"name": "Sheet1"}'),
            tool("update_cell", '{"position": "A2", "value": 5}'),
            tool("update_cell", '{"position": "A1", "value": "?"}'),
            tool("finish"),
        ]
        results = [session.step(text) for text in texts]
        assert results[1].observation.startswith("Observation: <Worksheet 'Sheet1'")
        assert [result.reward for result in results] == [0.0, 0.5, 0.5, 0.0, 0.0]
        assert session.success


@pytest.mark.parametrize(
    "words",
    [
        "ERROR | ConnectionError(HTTPSConnectionPool(host='api', port=443): Max retries exceeded)",
        "ERROR | ConnectionError(('Connection aborted.', RemoteDisconnected('closed')))",
        "ERROR | ReadTimeout(HTTPSConnectionPool(host='api', port=443): Read timed out.)",
        "TransportError('unavailable')",
        "APIError({'code': 429, 'message': 'Quota exceeded', 'status': 'RESOURCE_EXHAUSTED'})",
        "APIError: [503]: unavailable",
        "<!DOCTYPE html><html><body>502 Bad Gateway</body></html>",
    ],
)
@pytest.mark.parametrize("name", ["todo", "sheet"])
def test_a_web_service_that_fails_behind_a_tool_is_a_failure(name: str, words: str) -> None:
    server: Todo | Sheet = Todo() if name == "todo" else Sheet()
    with serving(server.answer) as url:
        session = opened(name, url)
        session.reset(0)
        session.step(tool("open_sheet", '{"name": "Sheet1"}'))
        server.down = words
        assert failure_of(session, tool("get_tasks")).kind is FailureKind.BACKEND


@pytest.mark.parametrize(
    "words",
    [
        "ERROR | KeyError('task_id')",
        "There is no task 8.",
        "APIError({'code': 400, 'message': 'Range exceeds grid limits'})",
        "[['429', 'ConnectionPool(', '<html>']]",
        "Error: neither rows nor columns",
    ],
)
def test_a_tool_that_refuses_the_agents_call_is_an_observation(words: str) -> None:
    server = Sheet()
    with serving(server.answer) as url:
        session = opened("sheet", url)
        session.reset(0)
        session.step(tool("open_sheet", '{"name": "Sheet1"}'))
        server.down = words
        assert words in session.step(tool("get_all_values")).observation


def test_a_todo_account_that_cannot_be_reached_fails_reset_and_verdict() -> None:
    server = Todo()
    with serving(server.answer) as url:
        session = opened("todo", url)
        session.reset(0)
        server.down = "ERROR | ConnectionError(HTTPSConnectionPool(host='api'))"
        assert failure_of(session, tool("finish", '{"answer": "done"}')).kind is FailureKind.STATUS
        with pytest.raises(EnvironmentFailure, match="HTTP 500") as caught:
            session.reset(0)
        assert caught.value.kind is FailureKind.STATUS


def test_every_environment_is_recorded_served_or_imitated() -> None:
    recorded = {path.stem for path in TRANSCRIPTS.iterdir()}
    assert set(ENVIRONMENTS) <= recorded | set(EMBEDDED) | set(SERVERS)
