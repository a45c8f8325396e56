"""The command line: ``fedkin fit``, ``fedkin predict``, ``fedkin inspect`` and ``fedkin demo``."""

from __future__ import annotations

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
        0 when all went well, 1 when a solver failed, 2 for wrong input, 130 after Ctrl-C.

    Examples
    --------
    >>> main(["--version"])
    fedkin 0.1.0
    0
    """
    from fedkin.cli.console import guarded

    def run() -> None:
        from fedkin.cli.app import app

        app(args=None if arguments is None else list(arguments), prog_name="fedkin")

    return guarded(run)
