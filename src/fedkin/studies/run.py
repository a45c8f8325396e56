"""Run a study: the cells that are not on disk yet, on all cores, each stored as soon as it is finished."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from fedkin._base import available_cores, lock
from fedkin.errors import ParameterError
from fedkin.studies.config import Cell, Study, modules_beside
from fedkin.studies.pool import WorkerError, map_in_processes
from fedkin.studies.rows import ROWS, Part, Row, StudyError, environment, load_pyarrow, read_part, write_rows
from fedkin.studies.tasks import Replication, check_study, task_function


@contextmanager
def progress(name: str, total: int, done: int) -> Iterator[Callable[[], None]]:
    """A bar with the time left on a terminal; elsewhere a line at the beginning, and silence.

    Yields what is to be called whenever one more of the ``total`` cells is finished, ``done`` of which already are.
    """
    if not sys.stderr.isatty():
        say(f"{name}: {total} cells" + (f", {done} found finished" if done else ""))
        yield lambda: None
        return
    from rich import progress as bars
    from rich.console import Console

    columns: list[str | bars.ProgressColumn] = [bars.TextColumn("{task.description}", markup=False), bars.BarColumn()]
    columns += [bars.MofNCompleteColumn(), "cells,", bars.TimeElapsedColumn(), "so far,", bars.TimeRemainingColumn()]
    # cells come round by round over the grid: the mean of all is a better guess than that of the last half minute
    with bars.Progress(*columns, "left", console=Console(stderr=True), speed_estimate_period=float("inf")) as bar:
        task = bar.add_task(name, total=total, completed=done)
        yield lambda: bar.advance(task)


def say(text: str) -> None:
    """A line on stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def duration(seconds: float) -> str:
    """Seconds in words: ``75 -> "1 min 15 s"``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Store:
    """The directory of one study: a Parquet file per finished cell in ``cells/``."""

    def __init__(self, folder: Path) -> None:
        load_pyarrow()  # say now that it is missing, not after the first cell
        self.folder = folder
        self.cells = folder / "cells"
        try:
            self.cells.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StudyError(
                f"--out: the directory {self.cells} cannot be made ({error.strerror}); choose another --out"
            ) from None

    def part(self, cell: Cell) -> Path:
        """Where the rows of a cell belong."""
        return self.cells / f"{cell.key}.parquet"

    def write(self, cell: Cell, rows: Sequence[Row], seconds: float) -> None:
        """Store a finished cell and the time that it took; a kill leaves the whole file or none."""
        write_rows(self.part(cell), rows, seconds, cell.key)

    def read(self, cell: Cell) -> Part:
        """A finished cell; raises `StudyError` when its file is damaged or holds another cell's rows."""
        path = self.part(cell)
        part = read_part(path)
        if part.key != cell.key:
            raise StudyError(f"{path} holds the rows of another cell")
        return part

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep a second run out of this directory; the lock goes away with the process, however it ends."""
        held = lock(self.folder / ".lock", str(os.getpid()))
        if held is None:
            raise StudyError(f"another run is writing to {self.folder}: wait for it, end it, or choose another --out")
        try:
            for leftover in self.cells.glob(".*.parquet"):  # of a run that was killed while it wrote
                leftover.unlink()
            yield
        finally:
            os.close(held)


@dataclass(frozen=True)
class StudyRun:
    """What a run left behind."""

    folder: Path
    rows: list[dict[str, Any]]
    computed: int
    cached: int
    seconds: float
    #: that all cells took, summed, whenever they were computed
    process_seconds: float


@dataclass(frozen=True)
class Job:
    """A cell together with what a worker process needs to run it."""

    cell: Cell
    data: Path | None = None


def run_study(
    study: Study, out: Path, *, jobs: int | None = None, data: Path | None = None, fingerprint: str = ""
) -> StudyRun:
    """Run what is missing of a study into ``out / study.directory``, and collect its rows in the order of its cells.

    By default ``jobs`` is one process per core. A cell that fails raises `StudyError`; finished cells stay, and the
    next run goes on from there, as after Ctrl-C or a kill.
    """
    jobs = available_cores() if jobs is None else jobs
    if jobs < 1:
        raise ParameterError(f"jobs must be at least 1, got {jobs}")
    started = perf_counter()
    check_study(study)
    cells = study.cells(fingerprint)
    store = Store(out / study.directory)
    with store.lock(), modules_beside(study.folder):
        parts = _finished(study, store, cells)
        missing = [cell for cell in cells if cell.key not in parts]
        with progress(study.name, len(cells), len(parts)) as advance:
            try:
                work = map_in_processes(run_job, [Job(cell, data) for cell in missing], jobs)
                with closing(work):  # ends the processes, whatever happens here
                    for job, (rows, seconds) in work:
                        store.write(job.cell, rows, seconds)
                        advance()
            except WorkerError as error:
                cell = error.item.cell
                raise StudyError(
                    f"study {study.name!r} stopped at {cell.point or 'its only point'}, replications "
                    f"{cell.replications[0]} to {cell.replications[-1]} (finished cells are kept):"
                    + (f" {error}" if error.wrong_input else f"\n{error}")
                ) from error
        # read from disk, like those found finished: the same rows whenever they were computed
        parts |= {cell.key: store.read(cell) for cell in missing}
        rows = [row for cell in cells for row in parts[cell.key].rows]
        total = sum(part.seconds or 0.0 for part in parts.values())
        write_rows(store.folder / ROWS, rows, total)
    cached = len(cells) - len(missing)
    return StudyRun(store.folder, rows, len(missing), cached, perf_counter() - started, total)


def run_job(job: Job) -> tuple[list[dict[str, Any]], float]:
    """The rows of a cell, each with seed, versions and CPU, and the seconds that it took."""
    started, where, cell = perf_counter(), environment(), job.cell
    task = task_function(cell.task)
    rows = []
    for number, seed in zip(cell.replications, cell.seeds, strict=True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = list(task(Replication(cell.params, cell.options, number, seed, job.data)))
        # kept with the rows, not printed from some process in the middle of the progress bar
        notes = "; ".join(sorted({str(warning.message) for warning in caught}))
        head = {"study": cell.study, **cell.params, "replication": number, "seed": seed}
        rows += [{**head, **row, "warnings": notes, **where} for row in found]
    return rows, perf_counter() - started


def _finished(study: Study, store: Store, cells: Sequence[Cell]) -> dict[str, Part]:
    """The cells that are on disk, by key. A file that is not what its cell left is named and counts as none."""
    found = {}
    for cell in cells:
        if store.part(cell).is_file():
            try:
                found[cell.key] = store.read(cell)
            except StudyError as error:
                say(f"{study.name}: {error}; this cell is computed again")
    return found
