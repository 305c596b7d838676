"""The base class of errors that a user can fix.

Commands print a `UserError` as one line and exit with code 2 (`manus_jax.command`). Any other
exception is a bug and shows its traceback.
"""

import errno
import sys
import traceback

_DISK_ERRORS = {
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO),
}
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


class Interrupted(KeyboardInterrupt):
    """A signal as an exception, which stops servers on its way out; this class is Ctrl-C's."""


class Terminated(Interrupted):
    """SIGTERM, handled like Ctrl-C."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or, in JAX's words, a device has no memory left."""
    return isinstance(error, MemoryError) or str(error).startswith("RESOURCE_EXHAUSTED")


def is_disk_error(error: BaseException) -> bool:
    """Whether a file is missing or cannot be read or written."""
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS


def is_expected(error: BaseException) -> bool:
    """Whether the error is reported in one line; others are bugs and show their traceback."""
    expected = isinstance(error, UserError | Stopped | KeyboardInterrupt)
    return expected or is_out_of_memory(error) or is_disk_error(error)


def exit_code(error: BaseException) -> int:
    """The exit code of a command that ends with `error`."""
    if isinstance(error, UserError) or is_out_of_memory(error) or is_disk_error(error):
        return 2
    if isinstance(error, KeyboardInterrupt):
        return 143 if isinstance(error, Terminated) else 130
    return error.code if isinstance(error, Stopped) else 1


def report_error(error: BaseException, interrupted: str = "") -> int:
    """Prints how a command ended and returns its exit code.

    An expected error is one line; anything else is a traceback.
    """
    if isinstance(error, UserError) or is_disk_error(error):
        print(f"error: {_one_line(error, 1000)}", file=sys.stderr)
    elif is_out_of_memory(error):
        print(
            "error: out of memory; lower data.rows, data.max_length, engine.slots or the size of "
            f"the model (python -m manus_jax.plan estimates what fits). {_one_line(error, 300)}",
            file=sys.stderr,
        )
    elif isinstance(error, Stopped):
        print(error, file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        what = "terminated" if isinstance(error, Terminated) else "interrupted"
        print(f"{what}; {interrupted or RESUMES}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    return exit_code(error)


def _one_line(error: BaseException, longest: int) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= longest else f"{text[:longest]}…"
