"""manus_jax: reinforcement learning of LLM agents, native to JAX."""

import os
import sys
from types import TracebackType

# transformers advises on every import that it found no torch, which is as it should be here.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def _report_interrupt(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted before anything was started", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.argv[:1] == ["-m"]:  # a command, whose imports take seconds: Ctrl-C is one line there, too
    sys.excepthook = _report_interrupt
