"""Where a row came from: the file and line, as a person counts them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedkin.data.tables.cells import csv_rows, decoded


@dataclass(frozen=True)
class RowPlaces:
    """Names rows of files that were read one after the other, ``counts`` of each.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "sites.csv")
    ...     _ = path.write_text("site,x\\n\\na,1\\nb,2\\n")
    ...     RowPlaces((path,), (2,))(1)
    'line 4'
    """

    files: tuple[Path, ...]
    counts: Sequence[int]

    def __call__(self, row: int) -> str:
        ends = np.cumsum(self.counts)
        k = int(np.searchsorted(ends, row, side="right"))
        within = row - int(ends[k] - self.counts[k])
        file = self.files[k]
        name = f"{file.name}, " if len(self.files) > 1 else ""
        if file.suffix.lower() in (".parquet", ".pq"):
            return f"{name}row {within + 1}"
        return f"{name}line {_line_of(file, within)}"


def row_places(path: Path, columns: Mapping[str, Sized]) -> RowPlaces:
    """Names the rows of a file that was read as ``columns``."""
    return RowPlaces((Path(path),), (len(next(iter(columns.values()), ())),))


def frame_row(row: int) -> str:
    """A row of a data frame or of arrays, as Python counts it."""
    return f"row {row} (from 0)"


def _line_of(path: Path, row: int) -> int:
    """The line of a CSV file on which a row of data begins: blank lines and quoted line breaks are counted."""
    try:
        for number, (last, cells) in enumerate(csv_rows(decoded(path))):
            if number == row + 1:  # the header is the first
                return last - sum(cell.count("\n") for cell in cells)
    except csv.Error:
        pass
    return row + 2
