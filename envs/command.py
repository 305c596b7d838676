"""Command lines of this package: a mistake is one line on stderr and exit code 2."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """A parser that takes no abbreviated and no repeated flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_args(self, args: Sequence[str] | None = None) -> argparse.Namespace:  # type: ignore[override]
        words = sys.argv[1:] if args is None else args
        if lone := next((word for word in words if word.endswith("=--")), None):
            self.error(f"{lone} has no value")  # argparse would remove the --
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        for flag in flags:
            if flags.count(flag) > 1:
                self.error(f"{flag} is given twice")
        return super().parse_args(words)

    def error(self, message: str) -> NoReturn:
        self.fail(f"{message} (see --help)")

    def fail(self, message: str) -> NoReturn:
        command = self.prog.removeprefix("python -m ")
        print(f"{command}: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)
