"""The command line, ``fedkin COMMAND``: reads arguments, calls the packages below, and prints.

Results go to standard output; progress, notes and errors to standard error. To add a command: a function in a
module here, and a line in `console.COMMANDS`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedkin.cli.console import guarded, interrupts_later


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)

    def run() -> None:
        with interrupts_later():
            from fedkin.cli.console import make_app

            app = make_app(words)
        app(args=words, prog_name="fedkin", obj=words)

    return guarded(run)
