"""Command lines of this package: a mistake is one line on stderr and exit code 2."""

import argparse
import sys
from typing import NoReturn


class CommandParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.fail(f"{message} (see --help)")

    def fail(self, message: str) -> NoReturn:
        command = self.prog.removeprefix("python -m ")
        print(f"{command}: {' '.join(message.split())}", file=sys.stderr)
        sys.exit(2)
