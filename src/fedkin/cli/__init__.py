"""Command line, ``fedkin COMMAND``: parse arguments, call the other packages, and print results.

Results go to standard output; progress, notes and errors to standard error. To add a command, write a function in a
module here and add a line to `console.COMMANDS`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedkin.cli.console import HELP_ALL, guarded, interrupts_later, make_app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)

    def run() -> None:
        with interrupts_later():
            app = make_app(words)
        app(args=["--help" if word == HELP_ALL else word for word in words], prog_name="fedkin", obj=words)

    return guarded(run)
