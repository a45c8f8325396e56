"""From the rows of a study to its figures, tables and page."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkin.report import render
from fedkin.studies.config import Study, find_function
from fedkin.studies.present.claims import Check
from fedkin.studies.present.figures import draw
from fedkin.studies.present.tables import Table, make_table
from fedkin.studies.rows import ENVIRONMENT, ROWS, Row, read_rows


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes
    ----------
    page : Path
    tables : list of Table
    checks : list of Check
    """

    page: Path
    tables: list[Table]
    checks: list[Check]


def write_report(study: Study, folder: Path, notes: str = "") -> Report:
    """Write figures, tables and page from ``folder/rows.parquet`` alone.

    Parameters
    ----------
    study : Study
        What was run.
    folder : Path
        The study's directory.
    notes : str
        A sentence for the page about how the rows were made.
    """
    rows = read_rows(folder / ROWS).rows
    for spec in study.figures:
        draw(spec, rows, folder)
    tables = [make_table(spec, rows) for spec in study.tables]
    for table in tables:
        table.write(folder)
    checks: list[Check] = []
    if study.checks:
        checks = find_function(study.checks, f"{study.source}, [study]: checks = {study.checks!r}")(rows)
    if max(_replications(study, rows), default=0) < study.full_replications:
        checks = [check.from_few_replications() for check in checks]
    page = folder / "index.html"
    page.write_text(study_page(study, rows, checks, tables, notes, folder), encoding="utf-8")
    return Report(page, tables, checks)


def study_page(
    study: Study, rows: Sequence[Row], checks: Sequence[Check], tables: Sequence[Table], notes: str, folder: Path
) -> str:
    """The page, with the figures that were drawn in ``folder`` inside."""
    counts = _replications(study, rows)
    figures = [
        {
            "name": spec["name"],
            "caption": str(spec.get("caption", "")).strip(),
            "image": base64.b64encode((folder / f"{spec['name']}.svg").read_bytes()).decode(),
        }
        for spec in study.figures
    ]
    return render(
        "study.html",
        title=study.title or study.name,
        study=study,
        checks=checks,
        figures=figures,
        tables=tables,
        notes=notes,
        rows=rows,
        n_settings=len(counts),
        least=min(counts, default=0),
        most=max(counts, default=0),
        warned=sum(bool(row.get("warnings")) for row in rows),
        environment=ENVIRONMENT,
        places=list(dict.fromkeys(tuple(str(row.get(name) or "") for name in ENVIRONMENT) for row in rows)),
    )


def _replications(study: Study, rows: Sequence[Row]) -> list[int]:
    """Replications that the rows have at each grid point: a run has as many at all, rows put together may lack some."""
    names = list(dict.fromkeys(name for point in study.points for name in point))
    found: dict[tuple[Any, ...], set[Any]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name) for name in names), set()).add(row.get("replication"))
    return [len(numbers) for numbers in found.values()]
