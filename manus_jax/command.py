"""How commands end.

User errors exit with code 2 and one line on stderr; anything else is a bug and shows its traceback.
"""

import sys
from collections.abc import Callable

from manus_jax.errors import RESUMES, Stopped, UserError, report_error


def run(main: Callable[[list[str]], None], interrupted: str = RESUMES) -> None:
    """Runs a command on the program's arguments; `interrupted` is the message after Ctrl-C."""
    try:
        main(sys.argv[1:])
    except (UserError, Stopped, KeyboardInterrupt) as error:
        sys.exit(report_error(error, interrupted))
