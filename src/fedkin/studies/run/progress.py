"""How far a study is and how long it will still take, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(name: str, total: int, done: int) -> Iterator[Callable[[], None]]:
    """A bar with the time left on a terminal; elsewhere a line at the beginning, and silence.

    Parameters
    ----------
    name : str
        Of the study.
    total, done : int
        Cells, and those found finished.

    Yields
    ------
    callable
        To be called whenever one more cell is finished.
    """
    if not sys.stderr.isatty():
        say(f"{name}: {total} cells" + (f", {done} found finished" if done else ""))
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("cells,"),
        TimeElapsedColumn(),
        TextColumn("so far,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    # cells come round by round over the grid: the mean of all is a better guess than that of the last half minute
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=float("inf")) as bar:
        task = bar.add_task(name, total=total, completed=done)
        yield lambda: bar.advance(task)


def say(text: str) -> None:
    """A line on stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def duration(seconds: float) -> str:
    """Seconds in words: ``75 -> "1 min 15 s"``.

    Examples
    --------
    >>> duration(4.2), duration(75), duration(7300)
    ('4 s', '1 min 15 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
