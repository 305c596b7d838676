"""The tokenizer that all episodes share."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from chat_templates import QWEN3, tokenizer_with

from manus_jax.data.chat import Message
from manus_jax.rollout.llm_player import ChatTokenizer

MESSAGES = [Message("user", f"observation {i}: " + "a door, a key. " * i) for i in range(8)]


def test_episodes_do_not_wait_for_each_others_tokenizer_calls() -> None:
    """Every call waits until all threads have started one."""
    tokenizer = tokenizer_with(QWEN3)
    expected = [ChatTokenizer(tokenizer).extend((), message) for message in MESSAGES]
    together = threading.Barrier(len(MESSAGES), timeout=20)

    class Waiting:
        def __init__(self, backend: Any) -> None:
            self._backend = backend

        def __getattr__(self, name: str) -> Any:
            return getattr(self._backend, name)

        def encode(self, *args: Any, **kwargs: Any) -> Any:
            together.wait()
            return self._backend.encode(*args, **kwargs)

    class Watched(type(tokenizer)):  # type: ignore[misc]
        backend_tokenizer = property(lambda self: Waiting(super().backend_tokenizer))

    tokenizer.__class__ = Watched
    chat = ChatTokenizer(tokenizer)
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


def test_calls_of_a_tokenizer_that_is_not_thread_safe_do_not_overlap() -> None:
    tokenizer = tokenizer_with(QWEN3)
    expected = [ChatTokenizer(tokenizer).extend((), message) for message in MESSAGES]
    calling = threading.Lock()

    class Alone(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            assert calling.acquire(blocking=False), "two calls at the same time"
            try:
                return super().__call__(*args, **kwargs)
            finally:
                calling.release()

    tokenizer.__class__ = Alone
    chat = ChatTokenizer(tokenizer)
    with ThreadPoolExecutor(len(MESSAGES)) as threads:
        assert list(threads.map(lambda m: chat.extend((), m), MESSAGES * 20)) == expected * 20
