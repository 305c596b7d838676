"""The base class of errors that a user can fix.

Commands print a `UserError` as one line and exit with code 2 (`manus_jax.command`). Any other
exception is a bug and shows its traceback.
"""

import sys
import traceback

RESUMES = "the same command continues from the last checkpoint"


class UserError(Exception):
    """A mistake in the input or the setup; the message says what is wrong and what to do."""


class Stopped(Exception):
    """The run stopped on request with everything saved. `code` is the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    @classmethod
    def after(cls, step: int, total_steps: int, code: int) -> "Stopped":
        return cls(f"stopped after step {step} of {total_steps}, which is saved; {RESUMES}", code)


def exit_code(error: BaseException) -> int:
    """The exit code of a command that ends with `error`."""
    if isinstance(error, UserError):
        return 2
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.code if isinstance(error, Stopped) else 1


def report_error(error: BaseException, interrupted: str = "") -> int:
    """Prints how a command ended and returns its exit code.

    A user error, a requested stop and Ctrl-C are one line; anything else is a traceback.
    """
    if isinstance(error, UserError):
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    elif isinstance(error, Stopped):
        print(error, file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print(f"interrupted; {interrupted or RESUMES}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    return exit_code(error)
