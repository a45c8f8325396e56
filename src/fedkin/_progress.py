"""Show the progress of loops: bars on terminals and in notebooks, lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from rich import progress as rich
from rich.console import Console

from fedkin._base import Say, listening

#: Seconds between two lines where there is no terminal.
EVERY = 5.0
#: Turns of a loop from which on it says how many it does in a second: rows, not folds.
_MANY = 100_000


@contextmanager
def progress(words: str = "working", *, console: Console | None = None, every: float = EVERY) -> Iterator[Say]:
    """Show the progress of loops and the estimated time left, for example over splits, folds or levels.

    Terminals and notebooks show a bar; elsewhere a line is printed to standard error every few seconds. The logger
    ``fedkin`` reports the same to programs: ``logging.basicConfig(level=logging.INFO)``.

    Parameters
    ----------
    words : str
        Description of the task, until a step updates it.
    console : rich.console.Console, optional
        Where to show it; by default standard error, or the notebook.
    every : float
        Seconds between two lines where there is neither a terminal nor a notebook.

    Yields
    ------
    callable
        ``say(words)`` updates the description.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> from fedkin.fitting import compare
    >>> with fedkin.progress():
    ...     found = compare(paper_design(n_sites=6, n_samples=30, n_features=3, n_clusters=1).federation)
    """
    place = console or Console(stderr=True, markup=False, highlight=False, emoji=False)
    with _bar(words, place) if place.is_terminal or place.is_jupyter else _lines(words, every, place.file) as say:
        yield say


@contextmanager
def _bar(words: str, console: Console) -> Iterator[Say]:
    before, after = (rich.TextColumn(f"{{task.{what}}}", markup=False) for what in ("description", "fields[left]"))
    columns = (rich.SpinnerColumn(), before, rich.BarColumn(bar_width=24), rich.TimeElapsedColumn(), after)
    with rich.Progress(*columns, console=console, transient=True) as bars:
        top = bars.add_task(words, total=None, left="")
        tasks: dict[str, tuple[rich.TaskID, float]] = {}

        def hear(loop: str, done: int, total: int) -> None:
            now = time.monotonic()
            if loop not in tasks:
                tasks[loop] = (bars.add_task(loop, total=total, left=""), now)
            task, began = tasks[loop]
            bars.update(task, completed=done, left=time_left(began, now, done, total))
            if done == total:
                bars.remove_task(tasks.pop(loop)[0])

        with listening(hear):
            yield lambda said: bars.update(top, description=said)


@contextmanager
def _lines(words: str, every: float, file: IO[str] | None = None) -> Iterator[Say]:
    now, loops, over = [words], dict[str, tuple[int, int, float, float]](), threading.Event()

    def say(said: str) -> None:
        now[0] = said

    def hear(loop: str, done: int, total: int) -> None:
        last = time.monotonic()
        loops[loop] = (done, total, loops[loop][2] if loop in loops else last, last)
        if done == total:
            del loops[loop]

    def tell() -> None:
        start = time.monotonic()
        while not over.wait(every):
            parts = [now[0]]
            for loop, (done, total, began, last) in list(loops.items()):
                left = time_left(began, last, done, total)
                parts.append(f"{loop}, {done} of {total}" + (f" ({left})" if left else ""))
            line = f"[{time.monotonic() - start:.0f} s] {'; '.join(parts)}"
            print(line, file=file or sys.stderr, flush=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        with listening(hear):
            yield say
    finally:
        over.set()
        teller.join()


def time_left(began: float, last: float, done: int, total: int) -> str:
    """Format the time left for a loop, given when its ``last`` turn was done; "" before the first."""
    if not 0 < done < total:
        return ""
    # less the time since the last turn, so that it never grows while a turn is under way
    seconds = max((last - began) / done * (total - done) - (time.monotonic() - last), 1.0)
    left = f"about {seconds:.0f} s left" if seconds < 100 else f"about {seconds / 60:.0f} min left"
    return f"{done / max(last - began, 1e-3):,.0f} a second, {left}" if total >= _MANY else left
