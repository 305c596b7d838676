"""The tokenizer that all episodes share."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from chat_templates import QWEN3, tokenizer_with

from manus_jax.data.chat import Message
from manus_jax.rollout.llm_player import ChatTokenizer

MESSAGES = [Message("user", f"observation {i}: " + "a door, a key. " * i) for i in range(8)]


def test_episodes_do_not_wait_for_each_others_tokenizer_calls(monkeypatch: Any) -> None:
    """Every call waits until all threads have started one."""
    chat = ChatTokenizer(tokenizer_with(QWEN3))
    expected = [chat.extend((), message) for message in MESSAGES]
    together = threading.Barrier(len(MESSAGES), timeout=20)
    backend = chat._chat._backend

    class Waiting:
        truncation = padding = None

        def encode(self, *args: Any, **kwargs: Any) -> Any:
            together.wait()
            return backend.encode(*args, **kwargs)

    monkeypatch.setattr(chat._chat, "_backend", Waiting())
    with ThreadPoolExecutor(len(MESSAGES)) as threads:
        assert list(threads.map(lambda m: chat.extend((), m), MESSAGES)) == expected


def test_threads_get_the_tokens_of_their_own_texts() -> None:
    chat = ChatTokenizer(tokenizer_with(QWEN3))
    texts = [m.content for m in MESSAGES] * 20

    def use(text: str) -> tuple[Any, ...]:
        ids = chat.extend((), Message("user", text))
        return ids, chat.decode(ids), chat.shortened(text, 12), chat.start([Message("user", text)])

    expected = [use(text) for text in texts]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(use, texts)) == expected


def test_calls_of_a_tokenizer_that_is_not_thread_safe_do_not_overlap(monkeypatch: Any) -> None:
    tokenizer = tokenizer_with(QWEN3)
    tokenizer.split_special_tokens = True  # such a tokenizer is called as a whole
    chat = ChatTokenizer(tokenizer)
    monkeypatch.setattr(chat._chat, "_tokenize", lambda texts: [[chat._lock.locked()]])
    assert chat.extend((), MESSAGES[0]) == [True]
