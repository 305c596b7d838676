"""How commands end.

User errors exit with code 2 and one line on stderr; anything else is a bug and shows its traceback.
"""

import sys
from collections.abc import Callable

from manus_jax.errors import Stopped, UserError


def run(
    main: Callable[[list[str]], None],
    interrupted: str = "the same command continues from the last checkpoint",
) -> None:
    """Runs a command on the program's arguments; `interrupted` is the message after Ctrl-C."""
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(stopped.code)
    except KeyboardInterrupt:
        print(f"interrupted; {interrupted}", file=sys.stderr)
        sys.exit(130)
