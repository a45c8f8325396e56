"""The command line, ``fedkin COMMAND``: it reads what was typed, calls the rooms below, and prints.

In: the arguments of the process. Out: results on standard output; progress, notes and errors in one line on standard
error; an exit code. Modules by command, `options` for what they take, `console` and `tables` for how they print.
Imports: everything below; nothing imports the command line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default those of the process.

    Returns
    -------
    int
        0 when all went well, 1 when a solver failed or did not converge, 2 for wrong input, 130 after Ctrl-C.

    Examples
    --------
    >>> main(["--version"])
    fedkin 0.1.0
    0
    """
    try:
        from fedkin.cli.console import guarded, interrupts_later
    except KeyboardInterrupt:
        return 130  # there is nothing to say it with yet
    words = list(sys.argv[1:] if arguments is None else arguments)

    def run() -> None:
        with interrupts_later():
            from fedkin.cli.app import make_app

            app = make_app(words)
        app(args=words, prog_name="fedkin", obj=words)

    return guarded(run)
