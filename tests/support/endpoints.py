"""Endpoints over scripted engines, and the text of what they recorded."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from scripted_engine import Script, ScriptedEngine, small_tokenizer

from manus_jax.config.settings import ChatSettings
from manus_jax.rollout.endpoint.episode import Limits
from manus_jax.rollout.endpoint.standalone import StandaloneEndpoint
from manus_jax.rollout.llm_player import ChatTokenizer

LIMITS = Limits(
    max_total_tokens=2048,
    max_tokens=2048,
    min_tokens=1,
    max_turns=None,
    timeout=60.0,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    fixed=False,
)

_small = functools.cache(small_tokenizer)


@contextlib.contextmanager
def serving_chat(
    script: Script,
    tokenizer: Any = None,
    limits: Limits = LIMITS,
    chat: ChatSettings | None = None,
    **options: Any,
) -> Iterator[tuple[str, ScriptedEngine]]:
    """The URL of a standalone endpoint, and its engine."""
    engine = ScriptedEngine(tokenizer or _small(), script, **options)
    endpoint = StandaloneEndpoint(engine, ChatTokenizer(engine.tokenizer, chat), limits)
    try:
        yield endpoint.url, engine
    finally:
        endpoint.close()
        engine.close()
