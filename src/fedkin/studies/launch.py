"""Behind ``fedkin study``: which studies to run, and what to print when they are done."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from fedkin._base import count
from fedkin.errors import ParameterError, missing_dependency
from fedkin.studies.config import BUILT_IN, Study, load_study, modules_beside
from fedkin.studies.present import Report, write_report
from fedkin.studies.rows import ROWS, read_rows
from fedkin.studies.run import StudyRun, duration, run_study, say
from fedkin.studies.tasks import check_study


def launch(
    name: str | None,
    *,
    out: Path,
    quick: bool = False,
    config: Path | None = None,
    jobs: int | None = None,
    data: Path | None = None,
    redraw: bool = False,
) -> list[Report]:
    """Run a study (or all of them), write its report and say where it is; arguments as on the command line."""
    if (name is None) == (config is None):
        raise ParameterError(f"name a study ({', '.join(BUILT_IN)}, all) or give --config FILE.toml, one of the two")
    if name == "all":
        studies = [load_study(one, quick=quick) for one in BUILT_IN]
        if redraw:
            studies = [one for one in studies if (out / one.directory / ROWS).is_file()] or studies
        elif data is None:
            studies = [one for one in studies if one.data is None]
            say("election: left out, since it needs --data DIR (docs/election.md says where the files come from)")
    else:
        assert config is not None or name is not None
        studies = [load_study(config if config is not None else str(name), quick=quick)]
    if find_spec("matplotlib") is None:
        raise missing_dependency("matplotlib", "drawing figures", "report")
    if redraw:
        return [_redraw(one, out, data) for one in studies]
    for one in studies:
        check_study(one)
        check_out(out, out / one.directory)
    digests = [check_data(one, data) for one in studies]
    return [_run(one, out, jobs, data, digest) for one, digest in zip(studies, digests, strict=True)]


def check_out(out: Path, folder: Path) -> None:
    """Raise `ParameterError`, naming ``--out``, when a study cannot write to its directory; nothing is created."""
    for place in (folder, out, *out.absolute().parents):
        if not place.exists():
            continue
        if not place.is_dir():
            raise ParameterError(f"--out {out}: {place} is a file, not a directory; choose another --out")
        if not os.access(place, os.W_OK | os.X_OK):
            raise ParameterError(f"--out {out}: no permission to write in {place}; choose another --out")
        return


def check_data(study: Study, data: Path | None) -> str:
    """The digest of the data that a study reads ("" if none); raises before anything runs when they cannot be used."""
    if study.data is None:
        return ""
    if study.data != "election":
        raise ParameterError(f'study {study.name!r}: data = {study.data!r} is not known; "election" is')
    from fedkin.datasets import counties

    if data is None:
        files = "\n".join(f"  {file}: from {source}" for file, source in counties.SOURCES.items())
        raise ParameterError(f"study {study.name!r} needs --data DIR, a directory with\n{files}")
    allow = study.options.get("allow_incomplete", False)
    if not isinstance(allow, bool):
        raise ParameterError(f"{study.source}, [options]: allow_incomplete must be true or false, got {allow!r}")
    counties.check_data(data, study.options.get("more_than", 50), allow_incomplete=allow)
    return counties.fingerprint(data)


def _prepare(study: Study, out: Path, data: Path | None) -> None:
    if study.data == "election" and data is not None:
        from fedkin.datasets.counties import write_outlines

        write_outlines(data, out / study.directory)


def _redraw(study: Study, out: Path, data: Path | None) -> Report:
    """Figures, tables and page from the rows of an earlier run; nothing is computed, no other file of it is needed."""
    folder = out / study.directory
    rows = folder / ROWS
    if not rows.is_file():
        raise ParameterError(f"--redraw: there is no {rows}; run the study first, without --redraw, or mend --out")
    check_out(out, folder)
    _prepare(study, out, data)
    seconds = read_rows(rows).seconds
    took = "" if seconds is None else f"; its cells took {duration(seconds)} in total (each in one process)"
    return _show(study, folder, f"Drawn from the rows of an earlier run{took}.")


def _run(study: Study, out: Path, jobs: int | None, data: Path | None, fingerprint: str) -> Report:
    run = run_study(study, out, jobs=jobs, data=data, fingerprint=fingerprint)
    _prepare(study, out, data)
    return _show(study, run.folder, notes_on(run))


def _show(study: Study, folder: Path, notes: str) -> Report:
    with modules_beside(study.folder):
        report = write_report(study, folder, notes)
    for check in report.checks:
        verdict = check.verdict.upper() if check.holds is False else check.verdict
        say(f"{study.name}: {verdict}: {check.claim} ({check.observed})")
    say(f"{study.name}: {notes}")
    print(report.page)  # noqa: T201  (the one line on stdout: where to look)
    return report


def notes_on(run: StudyRun) -> str:
    """What a run did, in a sentence."""
    parts = [f"{count(run.computed, 'cell')} computed in {duration(run.seconds)}"] if run.computed else []
    if run.cached:
        parts.append(f"{run.cached} cells found finished")
    parts.append(f"all {run.computed + run.cached} took {duration(run.process_seconds)} in total (each in one process)")
    return f"{', '.join(parts)}."
