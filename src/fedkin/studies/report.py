"""From the rows of a study to its figures, tables and page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedkin.studies.checks import Check
from fedkin.studies.config import Study
from fedkin.studies.figures import draw
from fedkin.studies.page import replications, write_page
from fedkin.studies.store import ROWS, read_rows
from fedkin.studies.tables import Table, make_table
from fedkin.studies.tasks import find_function


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
    rows = read_rows(folder / ROWS)
    figures = []
    for spec in study.figures:
        draw(spec, rows, folder)
        figures.append((folder / f"{spec['name']}.svg", str(spec.get("caption", ""))))
    tables = [make_table(spec, rows) for spec in study.tables]
    for table in tables:
        table.write(folder)
    checks: list[Check] = find_function(study.checks, "checks")(rows) if study.checks else []
    if replications(study, rows) < study.full_replications:
        checks = [check.from_few_replications() for check in checks]
    page = write_page(study, rows, checks, figures, tables, notes, folder)
    return Report(page, tables, checks)
