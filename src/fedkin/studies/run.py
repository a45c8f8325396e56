"""Run a study: compute missing cells, store each when it is finished, and write the report."""

from __future__ import annotations

import base64
import os
import platform
import sys
import traceback
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from joblib import Parallel, delayed, parallel_config
from joblib.externals.loky import get_reusable_executor
from joblib.externals.loky.process_executor import TerminatedWorkerError

import fedkin
from fedkin import datasets
from fedkin._base import available_cores, count, lock, one_blas_thread, replacing, tracked, write_file
from fedkin._progress import progress
from fedkin.errors import DataError, FedkinError, GraphError, MissingDependencyError, ParameterError, missing_dependency
from fedkin.report import render
from fedkin.solvers import load_kernels
from fedkin.studies.claims import Check
from fedkin.studies.config import BUILT_IN, FIGURES, Cell, Study, check_study, load_study, task_function
from fedkin.studies.figures import ResultTable, draw, make_table
from fedkin.studies.replications import Replication, Row

#: The file with all rows of a finished run.
ROWS = "rows.parquet"
#: Columns that say where a row was computed.
ENVIRONMENT = ("fedkin", "python", "numpy", "scipy", "scikit_learn", "numba", "platform", "cpu")
_SECONDS, _KEY = b"fedkin_seconds", b"fedkin_cell"  # entries of a file's metadata


class StudyError(FedkinError, RuntimeError):
    """Error that stops a study: a failed cell, a directory in use, or unreadable rows."""


# --- rows in files ----------------------------------------------------------------------------------------------------


class CellRows(NamedTuple):
    """Content of a file: rows, the seconds to compute them, and the key of their cell."""

    rows: list[dict[str, Any]]
    seconds: float | None = None
    key: str | None = None


def write_rows(path: Path, rows: Sequence[Row], seconds: float | None = None, key: str | None = None) -> None:
    """Write rows to a Parquet file atomically; ``seconds`` and ``key`` go into its metadata."""
    pyarrow, parquet = _pyarrow()
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    notes = {_SECONDS: None if seconds is None else repr(float(seconds)), _KEY: key}
    table = table.replace_schema_metadata({name: note for name, note in notes.items() if note is not None})
    with replacing(path, durable=True) as temporary:  # a loss of power leaves the whole file or none
        parquet.write_table(table, temporary, write_page_checksum=True)


def read_rows(path: Path) -> CellRows:
    """Read rows and metadata of a Parquet file."""
    _, parquet = _pyarrow()
    try:
        table = parquet.read_table(path, page_checksum_verification=True)
        notes = table.schema.metadata or {}
        seconds = float(notes[_SECONDS]) if _SECONDS in notes else None
        return CellRows(table.to_pylist(), seconds, notes[_KEY].decode() if _KEY in notes else None)
    except Exception as error:
        words = " ".join(str(error).split())
        raise StudyError(f"{path} cannot be read ({words}): remove it and run the study again") from error


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise missing_dependency("pyarrow", "running a study", "report") from None
    return pyarrow, parquet


def environment() -> dict[str, str]:
    """Return versions and CPU: the `ENVIRONMENT` columns of rows computed here."""
    packages = [version(name) for name in ("numpy", "scipy", "scikit-learn", "numba")]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    machine = (f"{sys.platform} {platform.machine()}", cpu)
    return dict(zip(ENVIRONMENT, (fedkin.__version__, platform.python_version(), *packages, *machine), strict=True))


class ResultStore:
    """Directory of one study, with a Parquet file per finished cell in ``cells/``."""

    def __init__(self, folder: Path) -> None:
        _pyarrow()  # say now that it is missing, not after the first cell
        self.folder, self.cells = folder, folder / "cells"
        try:
            self.cells.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            words = f"the directory {self.cells} cannot be made ({error.strerror}); choose another --out"
            raise StudyError(f"--out: {words}") from None

    def part(self, cell: Cell) -> Path:
        """Return the path for the rows of a cell."""
        return self.cells / f"{cell.key}.parquet"

    def read(self, cell: Cell) -> CellRows:
        """Read a finished cell; raise `StudyError` if its file is damaged or holds another cell's rows."""
        part = read_rows(self.part(cell))
        if part.key != cell.key:
            raise StudyError(f"{self.part(cell)} holds the rows of another cell")
        return part

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Prevent a second run in this directory; the lock ends with the process, however that ends."""
        held = lock(self.folder / ".lock", str(os.getpid()))
        if held is None:
            raise StudyError(f"another run is writing to {self.folder}: wait for it, end it, or choose another --out")
        try:
            for leftover in self.cells.glob(".*.parquet"):  # of a run that was killed while it wrote
                leftover.unlink()
            yield
        finally:
            os.close(held)


# --- cells ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StudyRun:
    """Result of a run; ``process_seconds`` is the total over all cells, whenever they were computed."""

    folder: Path
    rows: list[dict[str, Any]]
    computed: int
    cached: int
    seconds: float
    process_seconds: float


#: A computed cell: its rows and the seconds that they took, or why it failed.
Outcome = tuple[Cell, list[dict[str, Any]], float, str | None]


def run_study(
    study: Study, out: Path, *, jobs: int | None = None, data: Path | None = None, fingerprint: str = ""
) -> StudyRun:
    """Compute the missing cells of a study in ``out / study.directory``, and collect all rows in cell order.

    By default, ``jobs`` is one process per core. A failed cell raises `StudyError`. Finished cells are kept, and the
    next run continues from there, also after Ctrl-C or a kill.
    """
    jobs = available_cores() if jobs is None else jobs
    if jobs < 1:
        raise ParameterError(f"--jobs must be at least 1, got {jobs}")
    started = perf_counter()
    check_study(study)
    cells = study.cells(fingerprint)
    store = ResultStore(out / study.directory)
    with store.lock():
        parts = _finished(study, store, cells)
        missing = [cell for cell in cells if cell.key not in parts]
        print_line(f"{study.name}: {len(cells)} cells" + (f", {len(parts)} found finished" if parts else ""))
        with progress(study.name), closing(_computed(missing, jobs, data, study.folder)) as work:
            for _ in tracked(missing, "cells"):
                cell, rows, seconds, error = next(work)
                if error is not None:
                    numbers = cell.replications
                    raise StudyError(
                        f"study {study.name!r} stopped at {cell.point or 'its only point'}, replications "
                        f"{numbers[0]} to {numbers[-1]} (finished cells are kept): {error}"
                    )
                write_rows(store.part(cell), rows, seconds, cell.key)
        # read from disk, like those found finished: the same rows whenever they were computed
        parts |= {cell.key: store.read(cell) for cell in missing}
        rows = [row for cell in cells for row in parts[cell.key].rows]
        total = sum(part.seconds or 0.0 for part in parts.values())
        write_rows(store.folder / ROWS, rows, total)
    return StudyRun(store.folder, rows, len(missing), len(cells) - len(missing), perf_counter() - started, total)


def _computed(
    cells: Sequence[Cell], jobs: int, data: Path | None, folder: Path | None
) -> Generator[Outcome, None, None]:
    """Compute cells in processes with one thread each, in the order in which they are finished."""
    with parallel_config(backend="loky", n_jobs=jobs, inner_max_num_threads=1 if jobs > 1 else None):
        # workers that nobody feeds any more end soon, also when this process was killed
        parallel = Parallel(return_as="generator_unordered", batch_size=1, idle_worker_timeout=10)
    try:
        yield from parallel(delayed(run_cell)(cell, data, folder) for cell in cells)
    except TerminatedWorkerError:
        raise StudyError(
            "a worker process was killed, often because memory ran out (finished cells are kept): use fewer --jobs"
        ) from None
    finally:
        if jobs > 1:
            get_reusable_executor().shutdown(wait=True, kill_workers=True)


def run_cell(cell: Cell, data: Path | None = None, folder: Path | None = None) -> Outcome:
    """Compute the rows of a cell, each with seed, versions and CPU."""
    started, where, rows = perf_counter(), environment(), []
    try:
        load_kernels()
        task = task_function(cell.task, folder)
        for number, seed in zip(cell.replications, cell.seeds, strict=True):
            with warnings.catch_warnings(record=True) as caught, one_blas_thread():
                warnings.simplefilter("always")
                found = list(task(Replication(cell.params, cell.options, number, seed, data, folder)))
            # kept with the rows, not printed from some process in the middle of the progress bar
            notes = "; ".join(sorted({str(warning.message) for warning in caught}))
            head = {"study": cell.study, **cell.params, "replication": number, "seed": seed}
            rows += [{**head, **row, "warnings": notes, **where} for row in found]
    except (ParameterError, DataError, GraphError, MissingDependencyError) as error:
        return cell, [], 0.0, str(error)  # wrong input: where in the code it was noticed does not matter
    except Exception:
        return cell, [], 0.0, f"\n{traceback.format_exc()}"
    return cell, rows, perf_counter() - started, None


def _finished(study: Study, store: ResultStore, cells: Sequence[Cell]) -> dict[str, CellRows]:
    """Read the cells that are on disk, by key. A file that differs from what its cell wrote is reported and ignored."""
    found = {}
    for cell in cells:
        if store.part(cell).is_file():
            try:
                found[cell.key] = store.read(cell)
            except StudyError as error:
                print_line(f"{study.name}: {error}; this cell is computed again")
    return found


def print_line(text: str) -> None:
    """Print a line on standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


# --- figures, tables, page --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """Written report and its sources."""

    study: Study
    page: Path
    tables: list[ResultTable]
    checks: list[Check]
    notes: str  # how the rows were made
    replications: str  # of a grid point: "20", or "10 to 20" where some lack replications
    places: list[tuple[str, ...]]  # the columns `ENVIRONMENT`, one line per machine and set of versions
    seconds: float  # that all cells took


def write_study_report(study: Study, folder: Path, notes: str = "") -> Report:
    """Write figures, tables and page from ``folder/rows.parquet`` alone; ``notes`` describe how the rows were made."""
    rows, seconds, _ = read_rows(folder / ROWS)
    for spec in study.figures:
        kind = spec.get("kind", "lines")
        draw(spec, rows, folder, FIGURES.get(kind) or study.function(kind, f"[[figure]] {spec['name']!r}: kind"))
    tables: list[ResultTable] = []
    for spec in study.tables:
        make = study.function(spec["kind"], f"[[table]] {spec['name']!r}: kind") if "kind" in spec else make_table
        tables.append(make(spec, rows))
        tables[-1].write(folder)
    checks: list[Check] = study.function(study.checks, "[study]: checks")(rows) if study.checks else []
    names = list(dict.fromkeys(name for point in study.points for name in point))
    replications: dict[tuple[Any, ...], set[Any]] = {}  # of each grid point: rows put together may lack some
    for row in rows:
        replications.setdefault(tuple(row.get(name) for name in names), set()).add(row.get("replication"))
    counts = [len(numbers) for numbers in replications.values()]
    least, most = min(counts, default=0), max(counts, default=0)
    if most < study.full_replications:
        checks = [check.from_few_replications() for check in checks]
    places = list(dict.fromkeys(tuple(str(row.get(name) or "") for name in ENVIRONMENT) for row in rows))
    done = str(most) if least == most else f"{least} to {most}"
    page = render(
        "study.html",
        title=study.title or study.name,
        study=study,
        checks=checks,
        figures=[_figure(spec, folder) for spec in study.figures],
        tables=tables,
        notes=notes,
        rows=rows,
        n_settings=len(counts),
        replications=done,
        most=most,
        warned=sum(bool(row.get("warnings")) for row in rows),
        environment=ENVIRONMENT,
        places=places,
    )
    write_file(folder / "index.html", page)
    return Report(study, folder / "index.html", tables, checks, notes, done, places, seconds or 0.0)


def _figure(spec: Mapping[str, Any], folder: Path) -> dict[str, str]:
    image = base64.b64encode((folder / f"{spec['name']}.svg").read_bytes()).decode()
    return {"name": spec["name"], "caption": str(spec.get("caption", "")).strip(), "image": image}


# --- the page of the paper --------------------------------------------------------------------------------------------

#: Studies of the paper: its figures and its table, then its theorems.
PAPER = ("convergence", "estimation", "sensitivity", "election", "selection", "rate", "availability")


def write_paper(reports: Sequence[Report], folder: Path, took: str = "", left_out: str = "") -> Path:
    """Write one page of several studies, as HTML and as Markdown, with copies of their figures (SVG) and tables (CSV).

    ``took`` states how long the run took, ``left_out`` what is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for report in reports:
        here = report.page.parent
        names = [f"{spec['name']}.svg" for spec in report.study.figures] + [f"{one.name}.csv" for one in report.tables]
        for name in names:
            write_file(folder / name, (here / name).read_bytes())
    judged = [check for report in reports for check in report.checks if check.left_open or check.holds is not None]
    held, failed = (sum(check.holds is side for check in judged) for side in (True, False))
    lead = f"Of {count(len(judged), 'claim')}, {held} hold and {failed} do not"
    lead += f"; {len(judged) - held - failed} would need more replications." if held + failed < len(judged) else "."
    total = sum(report.seconds for report in reports)
    made = f"Drawn on {datetime.now(UTC):%Y-%m-%d}. All cells took {duration(total)}, each in one process.{took}"
    head = ["study", "replications", "asked for", "seed", "seconds", *ENVIRONMENT]
    lines = []
    for one in reports:
        asked, seed = str(one.study.full_replications), str(one.study.seed)
        lines += [[one.study.name, one.replications, asked, seed, f"{one.seconds:.0f}", *place] for place in one.places]
    title = "The paper's figures, tables and claims"
    page = render(
        "paper.html",
        title=title,
        lead=lead,
        made=made,
        left_out=left_out,
        head=head,
        lines=lines,
        reports=reports,
    )
    write_file(folder / "index.html", page)
    parts = [
        f"# {title}",
        lead,
        f"{made} {left_out}".strip(),
        ResultTable("runs", head, list(lines)).markdown(),
    ]
    for report in reports:
        parts += [f"## {report.study.title}", " ".join(report.study.about.split())]
        claims = [
            [one.claim, one.observed, one.verdict + f": {one.reason}" * bool(one.reason)] for one in report.checks
        ]
        parts.append(ResultTable("claims", ["claim", "observed", "verdict"], list(claims)).markdown())
        for spec in report.study.figures:
            caption = " ".join(spec.get("caption", "").split())
            parts.append(f"![{spec['name']}]({spec['name']}.svg)\n\n*{caption}*")
        for table in report.tables:
            summary = f"<summary>Table: {table.name}</summary>"
            parts.append(
                f'<details markdown="1">\n{summary}\n\n{table.markdown()}\n[CSV]({table.name}.csv)\n</details>'
            )
        parts.append(report.notes)
    write_file(folder / "index.md", "\n\n".join(part.strip() for part in parts) + "\n")
    return folder / "index.html"


# --- the command ------------------------------------------------------------------------------------------------------


def launch(
    name: str | None,
    *,
    out: Path,
    quick: bool = False,
    config: Path | None = None,
    jobs: int | None = None,
    data: Path | None = None,
    redraw: bool = False,
    replications: int | None = None,
) -> list[Report]:
    """Run a study (or all of them), write its report and print its path; arguments as on the command line."""
    if (name is None) == (config is None):
        known = f"{', '.join(BUILT_IN)}, paper, all"
        raise ParameterError(f"name a study ({known}) or give --config FILE.toml, one of the two")
    left_out = ""
    if name in ("all", "paper"):
        studies = [load_study(one, quick=quick) for one in (BUILT_IN if name == "all" else PAPER)]
        if redraw:
            studies = [one for one in studies if (out / one.directory / ROWS).is_file()] or studies
        elif data is None:
            studies = [one for one in studies if one.data is None]
            left_out = "election: left out, since it needs --data DIR (docs/election.md says where the files come from)"
            print_line(left_out)
    else:
        studies = [load_study(str(name) if config is None else config, quick=quick)]
    if replications is not None:
        if replications < 1:
            raise ParameterError(f"--replications must be at least 1, got {replications}")
        studies = [replace(one, replications=min(replications, one.full_replications)) for one in studies]
    started = perf_counter()
    if find_spec("matplotlib") is None:
        raise missing_dependency("matplotlib", "drawing figures", "report")
    for one in studies:
        place = out / one.directory / ROWS
        if redraw and not place.is_file():
            raise ParameterError(f"--redraw: there is no {place}; run the study first, without --redraw, or fix --out")
        if not redraw:
            check_study(one)
        _check_out(out, out / one.directory)
    digests = ["" if redraw else _check_data(one, data) for one in studies]
    reports = []
    for one, digest in zip(studies, digests, strict=True):
        folder = out / one.directory
        if redraw:
            seconds = read_rows(folder / ROWS).seconds
            took = "" if seconds is None else f"; its cells took {duration(seconds)} in total (each in one process)"
            notes = f"Drawn from the rows of an earlier run{took}."
        else:
            run = run_study(one, out, jobs=jobs, data=data, fingerprint=digest)
            parts = [f"{count(run.computed, 'cell')} computed in {duration(run.seconds)}"] if run.computed else []
            parts += [f"{run.cached} cells found finished"] if run.cached else []
            total = f"all {run.computed + run.cached} took {duration(run.process_seconds)} in total"
            notes = f"{', '.join([*parts, total])} (each in one process)."
        report = write_study_report(one, folder, notes)
        for check in report.checks:
            print_line(f"{one.name}: {check}")
        print_line(f"{one.name}: {notes}")
        sys.stdout.write(f"{report.page}\n")  # nothing else goes to standard output
        reports.append(report)
    if name == "paper":
        took = "" if redraw else f" This run took {duration(perf_counter() - started)}."
        sys.stdout.write(f"{write_paper(reports, out / ('paper-quick' if quick else 'paper'), took, left_out)}\n")
    return reports


def duration(seconds: float) -> str:
    """Format seconds: ``75 -> "1 min 15 s"``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def _check_out(out: Path, folder: Path) -> None:
    """Raise `ParameterError`, naming ``--out``, when a study cannot write to its directory; nothing is created."""
    place = next(place for place in (folder, out, *out.absolute().parents) if place.exists())
    if not place.is_dir():
        raise ParameterError(f"--out {out}: {place} is a file, not a directory; choose another --out")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ParameterError(f"--out {out}: no permission to write in {place}; choose another --out")


def _check_data(study: Study, data: Path | None) -> str:
    """Return the digest of the data that a study reads ("" if none); raise when they cannot be used."""
    if study.data is None:
        return ""
    if study.data != "election":
        raise ParameterError(f'study {study.name!r}: data = {study.data!r} is not known; use "election"')
    if data is None:
        files = "\n".join(f"  {file}: from {source}" for file, source in datasets.ELECTION.items())
        raise ParameterError(f"study {study.name!r} needs --data DIR, a directory with\n{files}")
    allow = study.options.get("allow_incomplete", False)
    if not isinstance(allow, bool):
        raise ParameterError(f"{study.source}, [options]: allow_incomplete must be true or false, got {allow!r}")
    datasets.check_election(data, study.options.get("more_than", 50), allow_incomplete=allow)
    return datasets.election_digest(data)
