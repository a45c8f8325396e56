"""How far a study is, and how long it will still take, on stderr."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from threading import Event, Thread
from time import monotonic
from typing import Any, TextIO

from fedkin.studies.config import Cell


class TimeLeft:
    """Time that the remaining cells will take, from what finished cells of the same grid points took.

    It is not known (None) before as many cells are finished as there are processes: the first to finish are the short
    ones.

    Examples
    --------
    >>> from fedkin.studies.config import Cell
    >>> cells = [Cell("s", "t", {"n": n}, {}, (r,), (0,), f"{n}{r}") for r in (0, 1) for n in (1, 2)]
    >>> left = TimeLeft(cells, jobs=2)
    >>> left.finished(cells[0], 10.0), left.finished(cells[1], 20.0)
    (None, 15.0)
    """

    def __init__(self, cells: Sequence[Cell], jobs: int) -> None:
        self._todo = {cell.key: cell for cell in cells}
        self._spent: dict[str, list[float]] = defaultdict(list)
        self._jobs = jobs
        self._needed = min(jobs, len(cells))

    def finished(self, cell: Cell, seconds: float) -> float | None:
        """Note a finished cell; the seconds left."""
        self._todo.pop(cell.key, None)
        self._needed -= 1
        self._spent[cell.point].append(seconds / len(cell.replications))
        if self._needed > 0:
            return None
        means = {point: sum(values) / len(values) for point, values in self._spent.items()}
        overall = sum(means.values()) / len(means)
        work = sum(means.get(one.point, overall) * len(one.replications) for one in self._todo.values())
        return work / min(self._jobs, max(len(self._todo), 1))


class Progress:
    """A bar on a terminal; elsewhere a line every few seconds, whether or not a cell has ended.

    Parameters
    ----------
    name : str
    total, done : int
        Cells, and those found finished.
    stream : text stream
        stderr by default.
    every : float
        Seconds between lines where there is no terminal.
    """

    def __init__(self, name: str, total: int, done: int, stream: TextIO | None = None, every: float = 10.0) -> None:
        self.name, self.total, self.done = name, total, done
        self._stream = sys.stderr if stream is None else stream
        self._every = every
        self._left: float | None = None
        self._asked = monotonic()
        self._bar: Any = None
        self._ended = Event()
        self._clock = Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Progress:
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("cells"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=Console(file=self._stream),
            )
            self._bar.start()
            self._task = self._bar.add_task(self.name, total=self.total, completed=self.done, left="")
        else:
            found = f", {self.done} found finished" if self.done else ""
            self._line(f"{self.total} cells{found}")
            self._clock.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        else:
            self._ended.set()
            self._clock.join()

    def advance(self, seconds_left: float | None) -> None:
        """One more cell is finished; None when the time left is not known yet."""
        self.done += 1
        self._left, self._asked = seconds_left, monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, left=self._remaining())
        elif self.done == self.total:
            self._ended.set()
            self._line(f"{self.done} of {self.total} cells, done")

    def _tick(self) -> None:
        while not self._ended.wait(self._every):
            text = self._remaining()
            self._line(f"{self.done} of {self.total} cells{text and ', '}{text}")

    def _remaining(self) -> str:
        if self.done == self.total:
            return "done"
        if self._left is None:
            return ""
        # time has passed since the last cell ended
        return f"{duration(max(self._left - (monotonic() - self._asked), 0.0))} left"

    def _line(self, text: str) -> None:
        # one write, so that lines of two threads do not mix
        self._stream.write(f"{self.name}: {text}\n")
        self._stream.flush()


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
