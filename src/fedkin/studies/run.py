"""Run a study: compute missing cells, store each when it is finished, and write the report."""

from __future__ import annotations

import base64
import platform
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import closing
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
from fedkin._base import available_cores, count, one_blas_thread, replacing, tracked, write_file
from fedkin._progress import progress
from fedkin.errors import DataError, FedkinError, GraphError, MissingDependencyError, ParameterError, missing_dependency
from fedkin.report import render
from fedkin.solvers import load_kernels
from fedkin.studies.claims import Check
from fedkin.studies.config import BUILT_IN, Cell, Study, check_study, load_study, task_function
from fedkin.studies.figures import ResultTable, draw, line_panels, make_table
from fedkin.studies.replications import Row

#: The file with all rows of a finished run.
ROWS = "rows.parquet"
#: Columns that say where a row was computed.
ENVIRONMENT = ("fedkin", "python", "numpy", "scipy", "scikit_learn", "numba", "platform", "cpu")
_SECONDS = b"fedkin_seconds"  # entry of a file's metadata


class StudyError(FedkinError, RuntimeError):
    """Error that stops a study: a failed cell, or unreadable rows."""


# --- rows in files ----------------------------------------------------------------------------------------------------


class CellRows(NamedTuple):
    """Content of a file: rows, and the seconds to compute them."""

    rows: list[dict[str, Any]]
    seconds: float


def write_rows(path: Path, rows: Sequence[Row], seconds: float = 0.0) -> None:
    """Write rows to a Parquet file atomically; its metadata store ``seconds``."""
    pyarrow, parquet = _pyarrow()
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    with replacing(path, durable=True) as temporary:  # a loss of power leaves the whole file or none
        metadata = {_SECONDS: repr(float(seconds))}
        parquet.write_table(table.replace_schema_metadata(metadata), temporary, write_page_checksum=True)


def read_rows(path: Path) -> CellRows:
    """Read rows and metadata of a Parquet file."""
    _, parquet = _pyarrow()
    try:
        table = parquet.read_table(path, page_checksum_verification=True)
        return CellRows(table.to_pylist(), float((table.schema.metadata or {}).get(_SECONDS, 0.0)))
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
    machine = (f"{sys.platform} {platform.machine()}", processor())
    return dict(zip(ENVIRONMENT, (fedkin.__version__, platform.python_version(), *packages, *machine), strict=True))


def processor() -> str:
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


# --- cells ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StudyRun:
    """Result of a run: its rows, and how they were made."""

    folder: Path
    rows: list[dict[str, Any]]
    notes: str  # how many cells were computed or found finished, and how long they took


def run_study(
    study: Study, out: Path, *, jobs: int | None = None, data: Path | None = None, fingerprint: str = ""
) -> StudyRun:
    """Compute the missing cells of a study in ``out / study.directory``, and collect all rows in cell order.

    A cell is done once its file, named by its key, is there and whole: the next run continues from there, also after
    Ctrl-C or a kill. By default, ``jobs`` is one process per core. A failed cell raises `StudyError`.
    """
    jobs = available_cores() if jobs is None else jobs
    if jobs < 1:
        raise ParameterError(f"--jobs must be at least 1, got {jobs}")
    started, folder = perf_counter(), out / study.directory
    check_study(study)
    _pyarrow()  # say now that it is missing, not after the first cell
    try:
        (folder / "cells").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParameterError(f"--out {out}: {folder} cannot be made ({error.strerror}); choose another --out") from None
    cells = study.cells(data, fingerprint)
    files = [folder / "cells" / f"{cell.key}.parquet" for cell in cells]
    missing = [k for k, file in enumerate(files) if not _is_whole(study, file)]
    print_line(f"{study.name}: {len(cells)} cells, {len(cells) - len(missing)} found finished")
    with parallel_config(backend="loky", n_jobs=jobs, inner_max_num_threads=1 if jobs > 1 else None):
        # workers that nobody feeds any more end soon, also when this process was killed
        parallel = Parallel(return_as="generator_unordered", batch_size=1, idle_worker_timeout=10)
    try:
        with progress(study.name), closing(parallel(delayed(run_cell)(cells[k], files[k]) for k in missing)) as work:
            for _ in tracked(missing, "cells"):
                if failure := next(work):
                    raise StudyError(f"study {study.name!r} stopped (finished cells are kept) at {failure}")
    except TerminatedWorkerError:
        raise StudyError(
            "a worker process was killed, often because memory ran out (finished cells are kept): use fewer --jobs"
        ) from None
    finally:
        if jobs > 1:
            get_reusable_executor().shutdown(wait=True, kill_workers=True)
    parts = [read_rows(file) for file in files]
    rows, total = [row for part in parts for row in part.rows], sum(part.seconds for part in parts)
    write_rows(folder / ROWS, rows, total)
    done = [f"{count(len(missing), 'cell')} computed in {duration(perf_counter() - started)}"] if missing else []
    done += [f"{len(cells) - len(missing)} cells found finished"] if len(missing) < len(cells) else []
    done += [f"all {len(cells)} took {duration(total)} in total"]
    notes = f"{', '.join(done)} (each in one process)."
    return StudyRun(folder, rows, notes)


def run_cell(cell: Cell, file: Path) -> str:
    """Compute and store the rows of a cell, each with seed, versions and CPU; return why it failed, or ""."""
    started, where, rows = perf_counter(), environment(), []
    try:
        load_kernels()
        for one in cell.replications:
            with warnings.catch_warnings(record=True) as caught, one_blas_thread():
                warnings.simplefilter("always")
                found = list(task_function(cell.task, one.folder)(one))
            # kept with the rows, not printed from some process in the middle of the progress bar
            notes = "; ".join(sorted({str(warning.message) for warning in caught}))
            head = {"study": cell.study, **one.params, "replication": one.number, "seed": one.seed}
            rows += [{**head, **row, "warnings": notes, **where} for row in found]
        write_rows(file, rows, perf_counter() - started)
    except (ParameterError, DataError, GraphError, MissingDependencyError) as error:
        return f"{cell}: {error}"  # wrong input: where in the code it was noticed does not matter
    except Exception:
        return f"{cell}:\n{traceback.format_exc()}"
    return ""


def _is_whole(study: Study, file: Path) -> bool:
    """Return whether a finished cell can be read; a damaged file is reported."""
    try:
        return file.is_file() and bool(read_rows(file))
    except StudyError as error:
        print_line(f"{study.name}: {error}; this cell is computed again")
        return False


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
    rows, seconds = read_rows(folder / ROWS)
    for spec in study.figures:
        kind = spec["kind"]
        drawer = study.function(kind, f"[[figure]] {spec['name']!r}: kind") if kind else line_panels
        draw(spec, rows, folder, drawer)
    tables: list[ResultTable] = []
    for spec in study.tables:
        kind = spec["kind"]
        make = study.function(kind, f"[[table]] {spec['name']!r}: kind") if kind else make_table
        tables.append(make(spec, rows))
        tables[-1].write(folder)
    checks: list[Check] = study.function(study.checks, "[study]: checks")(rows) if study.checks else []
    names = list(dict.fromkeys(name for point in study.points for name in point))
    replications: dict[tuple[Any, ...], set[Any]] = {}  # of each grid point: rows put together may lack some
    for row in rows:
        replications.setdefault(tuple(row.get(name) for name in names), set()).add(row.get("replication"))
    counts = [len(numbers) for numbers in replications.values()] or [0]
    least, most = min(counts), max(counts)
    if most < study.full_replications:
        checks = [check.from_few_replications() for check in checks]
    places = list(dict.fromkeys(tuple(str(row.get(name) or "") for name in ENVIRONMENT) for row in rows))
    done = str(most) if least == most else f"{least} to {most}"
    images = [base64.b64encode((folder / f"{spec['name']}.svg").read_bytes()).decode() for spec in study.figures]
    page = render(
        "study.html",
        title=study.title or study.name,
        study=study,
        checks=checks,
        figures=[{**spec, "image": image} for spec, image in zip(study.figures, images, strict=True)],
        tables=tables,
        notes=notes,
        rows=rows,
        n_settings=len(replications),
        replications=done,
        most=most,
        warned=sum(bool(row.get("warnings")) for row in rows),
        environment=ENVIRONMENT,
        places=places,
    )
    write_file(folder / "index.html", page)
    return Report(study, folder / "index.html", tables, checks, notes, done, places, seconds)


# --- the page of the paper --------------------------------------------------------------------------------------------

#: Studies of the paper: its figures and its table, then its theorems.
PAPER = ("convergence", "estimation", "sensitivity", "election", "selection", "rate", "availability")


def write_paper(reports: Sequence[Report], folder: Path, took: str = "", left_out: str = "") -> Path:
    """Write one page of several studies, as HTML and as Markdown, with copies of their figures (SVG) and tables (CSV).

    ``took`` states how long the run took, ``left_out`` what is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for report in reports:
        names = [f"{spec['name']}.svg" for spec in report.study.figures] + [f"{one.name}.csv" for one in report.tables]
        for name in names:
            write_file(folder / name, (report.page.parent / name).read_bytes())
    judged = [check for report in reports for check in report.checks if check.left_open or check.holds is not None]
    held, failed = (sum(check.holds is side for check in judged) for side in (True, False))
    lead = f"Of {count(len(judged), 'claim')}, {held} hold and {failed} do not"
    lead += f"; {len(judged) - held - failed} would need more replications." if held + failed < len(judged) else "."
    total = duration(sum(report.seconds for report in reports))
    head = ["study", "replications", "asked for", "seed", "seconds", *ENVIRONMENT]
    lines: list[list[Any]] = []
    for one in reports:
        asked, seed = str(one.study.full_replications), str(one.study.seed)
        lines += [[one.study.name, one.replications, asked, seed, f"{one.seconds:.0f}", *place] for place in one.places]
    about = {
        "title": "The paper's figures, tables and claims",
        "lead": lead,
        "made": f"Drawn on {datetime.now(UTC):%Y-%m-%d}. All cells took {total}, each in one process.{took}",
        "left_out": left_out,
        "reports": reports,
    }
    write_file(folder / "index.html", render("paper.html", **about, head=head, lines=lines))
    claims = [
        [[one.claim, one.observed, f"{one.verdict}: {one.reason}".removesuffix(": ")] for one in report.checks]
        for report in reports
    ]
    shown = [ResultTable("claims", ["claim", "observed", "verdict"], cells).markdown() for cells in claims]
    runs = ResultTable("runs", head, lines).markdown()
    write_file(folder / "index.md", render("paper.md", **about, runs=runs, claims=shown))
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
    digests = ["" if redraw else _check_data(one, data) for one in studies]
    reports = []
    for one, digest in zip(studies, digests, strict=True):
        folder = out / one.directory
        if redraw:
            took = duration(read_rows(folder / ROWS).seconds)
            notes = f"Drawn from the rows of an earlier run; its cells took {took} in total (each in one process)."
        else:
            notes = run_study(one, out, jobs=jobs, data=data, fingerprint=digest).notes
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
