"""Programs that play the maze through the endpoint, in all the ways that go right and wrong."""

import asyncio
import contextlib
import threading
import time
from typing import Any

import requests

KEYS: list[str] = []
CALLS: list[str] = []


def complete(
    task: Any, messages: list[Any], key: str | None = None, timeout: float = 30.0, **fields: Any
) -> Any:
    answer = requests.post(
        f"{task.base_url}/chat/completions",
        json={"model": "policy", "messages": messages, **fields},
        headers={"Authorization": f"Bearer {key or task.api_key}"},
        timeout=timeout,
    )
    if answer.status_code != 200:
        raise RuntimeError(answer.json()["error"]["message"])
    return answer.json()["choices"][0]["message"]


def plays(task: Any) -> None:
    messages = [{"role": "user", "content": task.reset()}]
    done = False
    while not done:
        messages.append(complete(task, messages))
        result = task.step(messages[-1]["content"])
        messages.append({"role": "user", "content": result.observation})
        done = result.done


async def plays_asynchronously(task: Any) -> None:
    await asyncio.to_thread(plays, task)


def scores_itself(task: Any) -> dict[str, float]:
    return {"reward": float(complete(task, [{"role": "user", "content": "Rate."}])["content"])}


def gives_up(task: Any) -> None:
    complete(task, [{"role": "user", "content": task.reset()}])


def never_calls(task: Any) -> float:
    return 1.0


def never_plays(task: Any) -> None:
    complete(task, [{"role": "user", "content": "hello"}])


def raises(task: Any) -> None:
    CALLS.append(task.item_id)
    complete(task, [{"role": "user", "content": task.reset()}])
    raise OSError("the disk is full")


def asks_too_much(task: Any) -> None:
    complete(task, [{"role": "user", "content": "a " * 20_000}])


def asks_for_many(task: Any) -> None:
    complete(task, [{"role": "user", "content": "hello"}], n=31)


def ignores_errors(task: Any, **fields: Any) -> float:
    try:
        complete(task, [{"role": "user", "content": task.reset()}], **fields)
    except RuntimeError:
        return 0.0
    return 1.0


def misspells(task: Any) -> float:
    return ignores_errors(task, max_token=5)


def asks_twice_at_once(task: Any) -> None:
    complete(task, [{"role": "user", "content": task.reset()}])
    waiting = threading.Thread(target=ignores_a_slow_reply, args=[task])
    waiting.start()
    while not CALLS:  # until the model has that request
        time.sleep(0.01)
    try:
        complete(task, [{"role": "user", "content": "refused"}])
    finally:
        waiting.join()
        requests.get(f"{task.base_url}/models", timeout=30)  # the other connection is closed now


def ignores_a_slow_reply(task: Any) -> None:
    with contextlib.suppress(requests.Timeout):
        complete(task, [{"role": "user", "content": "slow"}], timeout=1.0)


def uses_the_first_key(task: Any) -> None:
    KEYS.append(task.api_key)
    while len(KEYS) < 2:
        time.sleep(0.01)
    complete(task, [{"role": "user", "content": task.reset()}], KEYS[0])
    while len(CALLS) < 1 and task.api_key == KEYS[0]:  # until the other one has used this key
        time.sleep(0.01)


def hangs(task: Any) -> None:
    complete(task, [{"role": "user", "content": task.reset()}])
    time.sleep(1)
    try:
        complete(task, [{"role": "user", "content": "late"}])
    except RuntimeError as error:
        CALLS.append(str(error))
    try:
        task.step("move up")
    except RuntimeError as error:
        CALLS.append(str(error))
