"""Run a study: the cells that are not on disk yet, on all cores, each stored as soon as it is finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from fedkin._base import available_cores
from fedkin.errors import ParameterError
from fedkin.studies.config import Cell, Study
from fedkin.studies.pool import WorkerError, map_in_processes
from fedkin.studies.preflight import check_study
from fedkin.studies.progress import Progress, TimeLeft, say
from fedkin.studies.store import ROWS, Store, StudyError, write_rows
from fedkin.studies.tasks import Job, run_job


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
    untimed : int
        Cells of which it is not known.
    """

    study: Study
    folder: Path
    rows: list[dict[str, Any]]
    computed: int
    cached: int
    seconds: float
    process_seconds: float = 0.0
    untimed: int = 0


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
    with store.lock():
        finished = _finished(study, store, cells)
        missing = [cell for cell in cells if cell.key not in finished]
        cached = len(finished)
        left = TimeLeft(missing, jobs)
        work = [Job(cell, study.folder, data) for cell in missing]
        with Progress(study.name, len(cells), cached) as progress:
            try:
                for job, (rows, seconds) in map_in_processes(run_job, work, jobs):
                    store.write(job.cell, rows, seconds)
                    progress.advance(left.finished(job.cell, seconds))
            except WorkerError as error:
                cell = error.item.cell
                raise StudyError(
                    f"study {study.name!r} stopped at {cell.point or 'its only point'}, replications "
                    f"{cell.replications[0]} to {cell.replications[-1]} (finished cells are kept):"
                    + (f" {error}" if error.wrong_input else f"\n{error}")
                ) from error
        # read from disk, like those found finished: the same rows whenever they were computed
        finished |= {cell.key: store.read(cell) for cell in missing}
        rows = [row for cell in cells for row in finished[cell.key]]
        total, untimed = store.seconds(cells)
        write_rows(store.folder / ROWS, rows, None if untimed else total)
    return StudyRun(study, store.folder, rows, len(missing), cached, perf_counter() - started, total, untimed)


def _finished(study: Study, store: Store, cells: Sequence[Cell]) -> dict[str, list[dict[str, Any]]]:
    """Rows of the cells that are on disk, by key. A file that is not what its cell left is named and counts as none."""
    found = {}
    for cell in cells:
        if store.has(cell):
            try:
                found[cell.key] = store.read(cell)
            except StudyError as error:
                say(f"{study.name}: {error}; this cell is computed again")
    return found
