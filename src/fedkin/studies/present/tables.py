"""Tables from rows, as Markdown and CSV.

::

    [[table]]
    name = "estimation"
    value = "error"                 # the column that is averaged
    columns = "estimator"           # a column of the table per value
    rows = ["varrho", "n_samples"]  # a line of the table per combination
    at = {column = "round", values = [10, 100]}   # keep only these values of a column, or those next below; optional
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from fedkin.studies.config import find_function
from fedkin.studies.present.labels import column_label, label_of
from fedkin.studies.present.summary import Summary, chosen_rows, distinct, summarize
from fedkin.studies.rows import Row


@dataclass(frozen=True)
class Table:
    """A table for people (``text``, rounded, with errors) and for machines (``exact``).

    Attributes
    ----------
    name : str
    head : list of str
    text : list of list of str
    exact_head : list of str
    exact : list of list
    caption : str
    """

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

    def write(self, folder: Path) -> list[Path]:
        """Write ``name.md`` and ``name.csv``."""
        paths = [folder / f"{self.name}.md", folder / f"{self.name}.csv"]
        paths[0].write_text(self.markdown(), encoding="utf-8")
        out = StringIO()
        csv.writer(out, lineterminator="\n").writerows([self.exact_head, *self.exact])
        paths[1].write_text(out.getvalue(), encoding="utf-8")
        return paths


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


def mean_and_error(summary: Summary | None) -> str:
    """``0.124 (0.003)``: three digits of the mean, and its standard error to the same place (powers of ten if tiny).

    Examples
    --------
    >>> mean_and_error(Summary(0.12413, 0.03, 100)), mean_and_error(Summary(0.12413, float("nan"), 1))
    ('0.124 (0.003)', '0.124')
    """
    if summary is None:
        return ""
    size = abs(summary.mean)
    if 0 < size < 1e-3:
        return f"{summary.mean:.2e} ({summary.error:.0e})" if summary.n > 1 else f"{summary.mean:.2e}"
    digits = 3 if size >= 0.1 or size == 0 else 4 if size >= 0.01 else 5
    error = f" ({summary.error:.{digits}f})" if summary.n > 1 else ""
    return f"{summary.mean:.{digits}f}{error}"
