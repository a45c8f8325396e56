"""The command line, ``fedkin COMMAND``: it reads what was typed, calls the rooms below, and prints.

In: the arguments of the process. Out: results on standard output; progress, notes and errors in one line on standard
error; an exit code. Imports: everything below; nothing imports the command line.

`app` is the table of commands: those about models are in `models`, those of federations in `sites`, and ``study`` is in
`fedkin.studies`; `shared` has what they take and how they print, `examples` what their help ends with. `site_run` and
`run_errands` are programs, which commands start for sites.
To add a command: a module in `models` or `sites`, an entry in `app`, and an example in `examples`.
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
        from fedkin.cli.shared.console import guarded, interrupts_later
    except KeyboardInterrupt:
        return 130  # there is nothing to say it with yet
    words = list(sys.argv[1:] if arguments is None else arguments)

    def run() -> None:
        with interrupts_later():
            from fedkin.cli.app import make_app

            app = make_app(words)
        app(args=words, prog_name="fedkin", obj=words)

    return guarded(run)
