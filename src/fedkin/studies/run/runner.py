"""Run a study: the cells that are not on disk yet, on all cores, each stored as soon as it is finished."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from fedkin._base import available_cores
from fedkin.errors import ParameterError
from fedkin.studies.config import Cell, Study, modules_beside
from fedkin.studies.rows import ROWS, Part, StudyError, environment, write_rows
from fedkin.studies.run.pool import WorkerError, map_in_processes
from fedkin.studies.run.progress import progress, say
from fedkin.studies.run.store import Store
from fedkin.studies.tasks import Replication, check_study, task_function


@dataclass(frozen=True)
class StudyRun:
    """What a run left behind.

    Attributes
    ----------
    study : Study
    folder : Path
    rows : list of dict
        All rows of the study, in the order of its cells.
    computed, cached : int
        Cells that were run now, and that were found finished.
    seconds : float
        Of this run.
    process_seconds : float
        That all cells took, summed, whenever they were computed.
    """

    study: Study
    folder: Path
    rows: list[dict[str, Any]]
    computed: int
    cached: int
    seconds: float
    process_seconds: float


@dataclass(frozen=True)
class Job:
    """A cell together with what a worker process needs to run it."""

    cell: Cell
    data: Path | None = None


def run_study(
    study: Study, out: Path, *, jobs: int | None = None, data: Path | None = None, fingerprint: str = ""
) -> StudyRun:
    """Run what is missing of a study and collect its rows.

    Parameters
    ----------
    study : Study
        What to run.
    out : Path
        The study's files go to ``out / study.directory``.
    jobs : int, optional
        Processes; by default one per core that this process may use.
    data, fingerprint
        Directory and digest of the data that the study reads, if any.

    Returns
    -------
    StudyRun

    Raises
    ------
    StudyError
        When a cell fails. Finished cells stay: the next run goes on from there, as after Ctrl-C or a kill.
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
    return StudyRun(study, store.folder, rows, len(missing), cached, perf_counter() - started, total)


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
        if store.has(cell):
            try:
                found[cell.key] = store.read(cell)
            except StudyError as error:
                say(f"{study.name}: {error}; this cell is computed again")
    return found
