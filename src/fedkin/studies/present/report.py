"""From the rows of a study to its figures, its tables (Markdown and CSV) and its page.

::

    [[table]]
    name = "estimation"
    value = "error"                 # the column that is averaged
    columns = "estimator"           # a column of the table per value
    rows = ["varrho", "n_samples"]  # a line of the table per combination
    at = {column = "round", values = [10, 100]}   # keep only these values of a column, or those next below; optional
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkin._base import write_file
from fedkin.data import write_csv
from fedkin.report import render
from fedkin.studies.config import Study, find_function
from fedkin.studies.present.claims import Check
from fedkin.studies.present.figures import draw
from fedkin.studies.present.summary import Sample, chosen_rows, column_label, distinct, label_of, summarize
from fedkin.studies.rows import ENVIRONMENT, ROWS, Row, read_rows


@dataclass(frozen=True)
class Table:
    """A table for people (``text``, rounded, with errors) and for machines (``exact``)."""

    name: str
    head: list[str]
    text: list[list[str]]
    exact_head: list[str]
    exact: list[list[Any]]
    caption: str = ""

    def markdown(self) -> str:
        """The table in Markdown."""
        lines = [self.head, ["---"] * len(self.head), *self.text]
        body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"{body}\n\n{self.caption}\n" if self.caption else f"{body}\n"

    def write(self, folder: Path) -> None:
        """Write ``name.md`` and ``name.csv``."""
        write_file(folder / f"{self.name}.md", self.markdown())
        write_csv(folder / f"{self.name}.csv", self.exact_head, self.exact)


def make_table(spec: Mapping[str, Any], rows: Sequence[Row]) -> Table:
    """The table that an entry of ``[[table]]`` asks for."""
    if "kind" in spec:
        table: Table = find_function(spec["kind"], f"table {spec['name']!r}, kind = {spec['kind']!r}")(spec, rows)
        return table
    asked = {name: spec[name] for name in ("value", "columns")}
    asked |= {f"rows[{k}]": name for k, name in enumerate(spec["rows"])}
    asked |= {"at": spec["at"]["column"]} if "at" in spec else {}
    rows = chosen_rows(f"table {spec['name']!r}", rows, asked, spec.get("where", {}), numbers=("value",))
    names, across, value = list(spec["rows"]), spec["columns"], spec["value"]
    columns = distinct(rows, across)
    if "at" in spec:
        # of a long column (rounds), only the values at or next below some marks
        name, marks = spec["at"]["column"], spec["at"]["values"]
        known = distinct(rows, name)
        wanted = {max((value for value in known if value <= mark), default=known[0]) for mark in marks}
        rows = [row for row in rows if row[name] in wanted]
    table_of = summarize(rows, [*names, across], value)
    points = sorted({key[:-1] for key in table_of}, key=lambda key: [(isinstance(one, str), one) for one in key])
    head = [column_label(name) for name in names] + [label_of(column) for column in columns]
    text = [
        [label_of(one) for one in point] + [mean_and_error(table_of.get((*point, column))) for column in columns]
        for point in points
    ]
    exact = [
        [*point, column, summary.mean, summary.sd, summary.error, summary.n]
        for point in points
        for column in columns
        if (summary := table_of.get((*point, column))) is not None
    ]
    caption = spec.get("caption", f"Mean {value} over the replications, with its standard error in brackets.")
    return Table(spec["name"], head, text, [*names, across, "mean", "sd", "standard_error", "n"], exact, caption)


def mean_and_error(summary: Sample | None) -> str:
    """``0.124 (0.003)``: three digits of the mean, and its standard error to the same place (powers of ten if tiny)."""
    if summary is None:
        return ""
    size = abs(summary.mean)
    if 0 < size < 1e-3:
        return f"{summary.mean:.2e} ({summary.error:.0e})" if summary.n > 1 else f"{summary.mean:.2e}"
    digits = 3 if size >= 0.1 or size == 0 else 4 if size >= 0.01 else 5
    error = f" ({summary.error:.{digits}f})" if summary.n > 1 else ""
    return f"{summary.mean:.{digits}f}{error}"


@dataclass(frozen=True)
class Report:
    """What was written."""

    page: Path
    tables: list[Table]
    checks: list[Check]


def write_report(study: Study, folder: Path, notes: str = "") -> Report:
    """Write figures, tables and page from ``folder/rows.parquet`` alone; ``notes`` say how the rows were made."""
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
    write_file(page, study_page(study, rows, checks, tables, notes, folder))
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
