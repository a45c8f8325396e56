"""The command line, ``fedkin COMMAND``: it reads what was typed, calls the rooms below, and prints.

In: the arguments of the process. Out: results on standard output; progress, notes and errors in one line on standard
error; an exit code. Imports: everything below; nothing imports the command line.

`app` is the table of commands: those about models are in `models`, those of federations in `sites`, and ``study`` is in
`fedkin.studies`; `shared` has what they take and how they print, `examples` what their help ends with. `site_run`,
`run_errands` and `mpi_rank` are programs, which commands start for sites and ranks.
To add a command: a module in `models` or `sites`, an entry in `app`, and an example in `examples`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

#: New objects between two searches for garbage. Python's 700 has it search all that was imported again and again.
_OBJECTS = 100_000


#: Options by the names that they once had.
_RENAMED = {"--site": "--site", "--site-column": "--site", "--sites": "--sites"}


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
    own_process = arguments is None
    words = list(sys.argv[1:] if arguments is None else arguments)
    if own_process:
        gc.set_threshold(_OBJECTS, 20, 20)

    def run() -> None:
        with interrupts_later():
            from fedkin.cli.app import make_app

            _check_names(words)
            app = make_app(words)
        app(args=words, prog_name="fedkin", obj=words)

    code = guarded(run)
    if own_process:
        gc.freeze()  # the end of the process is no time to search for garbage
    return code


def _check_names(words: Sequence[str]) -> None:
    for word in words:
        old = word.split("=")[0]
        if old in _RENAMED:
            from fedkin.errors import ParameterError

            raise ParameterError(f"there is no option {old}: it is called {_RENAMED[old]}")
