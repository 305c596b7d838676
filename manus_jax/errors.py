"""The base class of errors that a user can fix.

Commands print a `UserError` as one line and exit with code 2 (`manus_jax.command`). Any other
exception is a bug and shows its traceback.
"""


class UserError(Exception):
    """A mistake in the input or the setup; the message says what is wrong and what to do."""


class Stopped(Exception):
    """The run stopped on request with everything saved. `code` is the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
