"""The endpoint over plain HTTP: exact tokens, forks, keys, and requests that it refuses."""

import concurrent.futures
import dataclasses
import json
import logging
import re
import socket
import threading
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import requests
from chat_templates import QWEN3, QWEN25, tokenizer_with
from endpoints import LIMITS, serving_chat
from scripted_engine import says

from envs import bounded_connection
from manus_jax.config.settings import ChatSettings
from manus_jax.data.chat import ChatStream, Message
from manus_jax.engines.protocol import EngineError, Request
from manus_jax.rollout.endpoint.episode import EndpointEpisode

ASK = {"role": "user", "content": "Where is the goal?"}
MORE = {"role": "user", "content": "And now?"}
MOVE = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Moves.",
        "parameters": {"type": "object", "properties": {"direction": {"type": "string"}}},
    },
}


def new_episode(url: str) -> str:
    return requests.post(f"{url}/episodes", timeout=30).json()["api_key"]


def end(url: str, key: str) -> list[dict[str, Any]]:
    answer = requests.post(f"{url}/episodes/end", headers=bearer(key), timeout=30)
    return answer.json()["segments"]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def ask(url: str, key: str, messages: Any, **fields: Any) -> Any:
    body = {"model": "policy", "messages": messages, **fields}
    answer = requests.post(f"{url}/chat/completions", json=body, headers=bearer(key), timeout=30)
    return answer.json()


def reply(url: str, key: str, messages: Any, **fields: Any) -> dict[str, Any]:
    return ask(url, key, messages, **fields)["choices"][0]["message"]


def test_a_conversation_is_one_append_only_sequence_of_the_sampled_ids() -> None:
    with serving_chat(says(["Go left.", "Go up."])) as (url, engine):
        key = new_episode(url)
        first = reply(url, key, [ASK])
        reply(url, key, [ASK, first, MORE])
        [segment] = end(url, key)
        chat, [one, two] = ChatStream(engine.tokenizer), engine.generations
    start = chat.start([Message("user", ASK["content"])])
    added = chat.extend(one.token_ids, [Message("user", MORE["content"])])
    assert segment["token_ids"] == [*start, *one.token_ids, *added, *two.token_ids]
    mask = [0] * len(start) + [1] * len(one.token_ids)
    mask += [0] * len(added) + [1] * len(two.token_ids)
    assert segment["loss_mask"] == mask
    agent = np.array(mask, bool)
    assert np.array(segment["log_probs"])[agent].tolist() == [*one.log_probs, *two.log_probs]
    assert np.array(segment["versions"])[agent].tolist() == [*one.versions, *two.versions]
    assert set(np.array(segment["versions"])[~agent]) == {-1}
    turns = [0] * len(one.token_ids) + [1] * len(two.token_ids)
    assert np.array(segment["turn_ids"])[agent].tolist() == turns


def test_ids_that_the_tokenizer_would_not_produce_stay_as_they_were_sampled() -> None:
    with serving_chat(says("l"), stops=False) as (url, engine):
        key = new_episode(url)
        first = reply(url, key, [ASK], max_tokens=4)  # l four times; the tokenizer has ll
        reply(url, key, [ASK, first, MORE], max_tokens=3)
        [segment] = end(url, key)
        sampled = engine.generations[0].token_ids
        again = engine.tokenizer(first["content"], add_special_tokens=False)["input_ids"]
    ids = np.array(segment["token_ids"])
    assert ids[np.array(segment["turn_ids"]) == 0].tolist() == [*sampled] != again


def test_other_conversations_and_second_continuations_fork() -> None:
    with serving_chat(says("Go up.")) as (url, engine):
        key = new_episode(url)
        first = reply(url, key, [ASK])
        reply(url, key, [ASK, first, MORE])
        reply(url, key, [ASK, first, {"role": "user", "content": "Other."}])  # also after the first
        reply(url, key, [{"role": "user", "content": "New."}])
        segments = end(url, key)
        prompts = [request.prompt_ids for request in engine.requests]
        turns = [len(made.token_ids) for made in engine.generations]
    assert [sum(segment["loss_mask"]) for segment in segments] == [
        turns[0] + turns[1],
        turns[2],
        turns[3],
    ]
    shared = (*prompts[0], *engine.generations[0].token_ids)
    assert prompts[2][: len(shared)] == shared == tuple(segments[1]["token_ids"][: len(shared)])
    assert [sorted({*segment["turn_ids"]} - {-1}) for segment in segments] == [[0, 1], [2], [3]]


def test_interleaved_conversations_are_one_segment_each() -> None:
    with serving_chat(says("Go up.")) as (url, engine):
        key = new_episode(url)
        planner, worker = [ASK], [{"role": "system", "content": "Work."}, ASK]
        for _ in range(3):
            for chat in (planner, worker):
                chat.append(reply(url, key, chat))
                chat.append(MORE)
        segments = end(url, key)
        sessions = [request.session for request in engine.requests]
    assert [sorted({*segment["turn_ids"]} - {-1}) for segment in segments] == [[0, 1, 2], [3, 4, 5]]
    assert len(set(sessions)) == 2  # the engine reuses the keys and values of each
    assert engine.open_sessions == set()


def test_concurrent_requests_do_not_share_a_sequence() -> None:
    both = threading.Barrier(2)

    def script(request: Request, seen: str) -> str:
        if "now" in seen:
            both.wait(timeout=20)  # both continuations are in flight
        return "Go up."

    with serving_chat(script) as (url, engine):
        key = new_episode(url)
        first = reply(url, key, [ASK])
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda _: reply(url, key, [ASK, first, MORE]), range(2)))
        segments = end(url, key)
    assert len({request.session for request in engine.requests[1:]}) == 2
    assert sorted(len({*segment["turn_ids"]} - {-1}) for segment in segments) == [1, 2]


def test_several_choices_are_sampled_with_different_seeds_and_all_recorded() -> None:
    with serving_chat(says(["a", "b", "c", "d"])) as (url, engine):
        key = new_episode(url)
        choices = ask(url, key, [ASK], n=3, seed=5)["choices"]
        chosen = choices[1]["message"]
        reply(url, key, [ASK, chosen, MORE])
        segments = end(url, key)
    assert {choice["message"]["content"] for choice in choices} == {"a", "b", "c"}
    assert [request.seed for request in engine.requests[:3]] == [5, 6, 7]
    assert sorted(len({*segment["turn_ids"]} - {-1}) for segment in segments) == [1, 1, 2]


def test_a_stop_text_ends_the_reply_and_its_tokens_are_kept() -> None:
    with serving_chat(says("Go up. Observation: I see"), stops=False) as (url, engine):
        key = new_episode(url)
        answer = ask(url, key, [ASK], stop=["Observation:", "END"], max_tokens=20)
        reply(url, key, [ASK, answer["choices"][0]["message"], MORE], max_tokens=2)
        [segment] = end(url, key)
    assert answer["choices"][0]["message"]["content"] == "Go up. "
    assert engine.requests[0].sampling.stop_strings == ("Observation:", "END")
    # The turn was not ended by its token, so the template's follows, and is not trained on.
    sampled = engine.generations[0].token_ids
    at = len(engine.requests[0].prompt_ids) + len(sampled)
    assert segment["token_ids"][at] == engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert segment["loss_mask"][at - 1 : at + 1] == [1, 0]


@pytest.mark.parametrize("template", [QWEN25, QWEN3])
def test_tool_calls_are_read_and_their_results_extend_the_tokens(template: str) -> None:
    texts = [
        'I look.\n<tool_call>\n{"name": "move", "arguments": {"direction": "up"}}\n</tool_call>',
        "Done.",
    ]
    with serving_chat(says(texts), tokenizer_with(template), limits=LIMITS) as (url, engine):
        key = new_episode(url)
        answer = ask(url, key, [ASK], tools=[MOVE])["choices"][0]
        message = answer["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "wall"}
        last = reply(url, key, [ASK, message, result], tools=[MOVE])
        [segment] = end(url, key)
        text = engine.tokenizer.decode(engine.requests[1].prompt_ids)
    assert answer["finish_reason"] == "tool_calls"
    assert message["content"] == "I look."
    assert message["tool_calls"][0]["function"] == {
        "name": "move",
        "arguments": '{"direction": "up"}',
    }
    assert last["content"] == "Done." and "tool_calls" not in last
    assert '"name": "move"' in engine.tokenizer.decode(engine.requests[0].prompt_ids)
    assert "<tool_response>\nwall" in text
    first = (*engine.requests[0].prompt_ids, *engine.generations[0].token_ids)
    assert tuple(segment["token_ids"][: len(first)]) == first


def test_a_template_that_strips_thoughts_forks_if_it_is_to_be_followed() -> None:
    texts = ["<think>\nhm\n</think>\n\nGo up.", "<think>\n\n</think>\n\nDone."]
    for thinking, count in (("keep", 1), ("strip", 2)):
        chat = ChatSettings(thinking=thinking)
        with serving_chat(says(texts), tokenizer_with(QWEN3), chat=chat) as (url, engine):
            key = new_episode(url)
            first = reply(url, key, [ASK])
            reply(url, key, [ASK, first, MORE])
            segments = end(url, key)
            shown = engine.tokenizer.decode(engine.requests[1].prompt_ids)
        assert len(segments) == count
        assert ("hm" in shown) == (thinking == "keep")


def test_log_probs_and_usage_are_those_of_the_sampled_tokens() -> None:
    with serving_chat(says("Go up.")) as (url, engine):
        answer = ask(url, "none", [ASK], logprobs=True)
        prompt, made = engine.requests[0].prompt_ids, engine.generations[0]
    found = answer["choices"][0]["logprobs"]["content"]
    assert [token["logprob"] for token in found] == [*made.log_probs[:-1]]  # not the end of turn
    assert "".join(token["token"] for token in found) == "Go up."
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(made.token_ids),
        "total_tokens": len(prompt) + len(made.token_ids),
    }


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"messages": []}, "messages must be a list with at least one message"),
        ({"messages": [{"role": "alien", "content": ""}]}, "messages.0: unknown role 'alien'"),
        ({"messages": [ASK, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages.1"),
        ({"n": 0}, "n must be a whole number from 1 to 128"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"stop": [""]}, "stop must be"),
        ({"top_logprobs": 2}, "log-probs are those of the sampled tokens"),
        ({"tool_choice": "nope"}, "tool_choice must be none, auto, required or an object"),
        ({"stream_options": 3}, "stream_options must be of type dict"),
        ({"frequency_penalty": 0.5}, "frequency_penalty = 0.5 is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_token": 5}, "unknown field 'max_token'"),
        ({"tools": [MOVE]}, "does not show tools to the model; .* or requests without tools"),
        (
            {"messages": [{"role": "user", "content": "a " * 5000}]},
            "leave 0 of 2048 tokens .* maximum context length is 2048 tokens",
        ),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_name_and_not_recorded(
    fields: dict[str, Any], problem: str
) -> None:
    with serving_chat(says("Go up.")) as (url, engine):
        key = new_episode(url)
        body = {"model": "policy", "messages": [ASK], **fields}
        answer = requests.post(
            f"{url}/chat/completions", json=body, headers=bearer(key), timeout=30
        )
        assert end(url, key) == []
    assert answer.status_code == 400
    assert re.search(problem, answer.json()["error"]["message"])
    assert engine.generations == []


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "responses"), ("POST", "embeddings"), ("GET", "chat/completions")],
)
def test_another_api_is_refused_with_what_there_is(method: str, path: str) -> None:
    with serving_chat(says("Go up.")) as (url, _):
        answer = requests.request(method, f"{url}/{path}", json={}, timeout=30)
    assert answer.status_code in (404, 405)
    problem = f"there is no {method} /v1/{path}: the endpoint has chat completions only"
    assert answer.json()["error"]["message"].startswith(problem)


def test_the_key_of_an_ended_episode_is_refused() -> None:
    with serving_chat(says("Go up.")) as (url, _):
        key = new_episode(url)
        end(url, key)
        refused = ask(url, key, [ASK])
        assert refused["error"]["code"] == "episode_ended"
        browser = requests.post(f"{url}/episodes", headers={"Origin": "http://x"}, timeout=30)
        assert browser.status_code == 403
        broken = requests.post(f"{url}/chat/completions", data=b"{", timeout=30)
        assert "not valid JSON" in broken.text


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"messages": [%s], "model": "\\ud800"}', "not valid JSON"),
        ('{"messages": [%s], "\\ud800": 1}', "not valid JSON"),
        ('{"messages": [%s], "model": "\ud800"}', "not valid JSON"),
        ('{"messages": [%s], "top_p": NaN}', "not valid JSON"),
        ('{"messages": [%s], "tools": [' + "[" * 900 + "]" * 900 + "]}", "more than 64 levels"),
        ('{"messages": [%s], "tools": ' + "[" * 10**5, "not valid JSON"),
        ('{"messages": [{"role": "user", "content": "' + "a" * 10**7 + '"}]}', "leave 0 of 2048"),
    ],
)
def test_a_body_that_no_client_should_send_is_refused_at_once(body: str, problem: str) -> None:
    data = body.replace("%s", json.dumps(ASK)).encode("utf-8", "surrogatepass")
    with serving_chat(says("Go up.")) as (url, engine):
        answer = requests.post(f"{url}/chat/completions", data=data, timeout=10)
        assert requests.get(f"{url}/models", timeout=10).status_code == 200
    assert answer.status_code == 400 and problem in answer.text
    assert engine.generations == []


@pytest.mark.parametrize("start", [b"", b"{"])
def test_a_client_that_hangs_up_or_is_still_sending_leaves_no_traceback(
    start: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n"
    with serving_chat(says("Go up.")) as (url, _):
        parts = urlsplit(url)
        one, other = (socket.create_connection((parts.hostname, parts.port)) for _ in range(2))
        with other:
            with one:
                one.sendall(head + start)
                other.sendall(head + start)
                assert requests.get(f"{url}/models", timeout=10).status_code == 200
            assert requests.get(f"{url}/models", timeout=10).status_code == 200
    assert not caplog.records


def test_an_incomplete_request_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_connection, "REQUEST_SECONDS", 0.3)
    with serving_chat(says("Go up.")) as (url, _):
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname, parts.port), timeout=10) as slow:
            slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
            assert slow.recv(100) == b""


def test_requests_at_the_same_time_share_the_limit_of_turns() -> None:
    limits = dataclasses.replace(LIMITS, max_turns=2)
    both, go_on = threading.Barrier(3), threading.Event()

    def wait(*_: Any) -> str:
        both.wait(10)
        go_on.wait(10)
        return "Go up."

    with (
        serving_chat(wait, limits=limits) as (url, _),
        concurrent.futures.ThreadPoolExecutor() as threads,
    ):
        key = new_episode(url)
        waiting = [threads.submit(reply, url, key, [ASK]) for _ in range(2)]
        both.wait(10)
        refused = ask(url, key, [ASK])
        go_on.set()
        assert [each.result()["content"] for each in waiting] == ["Go up."] * 2
    assert refused["error"]["code"] == "turn_limit"


def test_replies_that_are_sampled_at_the_same_time_have_numbers_of_their_own() -> None:
    tokenizer: Any = None
    episode = EndpointEpisode("one", tokenizer, LIMITS, seed=lambda replies: replies)
    with episode.sampling(3):
        assert episode.check_turns(1) == 3
    assert episode.check_turns(1) == 0


def test_an_engine_error_is_a_server_error_after_which_the_conversation_can_continue() -> None:
    with serving_chat(says("Go up.")) as (url, engine):
        key = new_episode(url)
        first = reply(url, key, [ASK])
        submit = engine.submit

        def lost(request: Request) -> Any:
            engine.submit = submit
            raise EngineError("the server is down")

        engine.submit = lost
        body = json.dumps({"messages": [ASK, first, MORE]})
        answer = requests.post(
            f"{url}/chat/completions", data=body, headers=bearer(key), timeout=30
        )
        reply(url, key, [ASK, first, MORE])
        [segment] = end(url, key)
    assert answer.status_code == 503 and "the server is down" in answer.text
    assert sorted({*segment["turn_ids"]}) == [-1, 0, 1]
