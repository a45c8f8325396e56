"""Tables as plain columns, from files and data frames.

In: a CSV or Parquet file, or a data frame. Out: ``{name: array}``, and back to a file (`write_csv`). `tables` leads;
`cells` reads CSV files by the standard library, `arrow` large ones; `source` knows on which line a row stands.
To add a file format: `tables.read_columns`.
Imports: `data.ids`.
"""

from __future__ import annotations

from fedkin.data.tables.cells import (
    COMMA_NUMBER,
    LEADING_ZERO,
    NUMBERS_PER_WORD,
    THOUSANDS,
    UNIT_NUMBER,
    infer_column,
    is_missing_text,
    number_of,
    read_cells,
)
from fedkin.data.tables.source import RowPlaces, frame_row, row_places
from fedkin.data.tables.tables import (
    CSV_SUFFIXES,
    PARQUET_SUFFIXES,
    Columns,
    as_column,
    columns_of,
    read_columns,
    write_csv,
)

__all__ = [
    "COMMA_NUMBER",
    "CSV_SUFFIXES",
    "LEADING_ZERO",
    "NUMBERS_PER_WORD",
    "PARQUET_SUFFIXES",
    "THOUSANDS",
    "UNIT_NUMBER",
    "Columns",
    "RowPlaces",
    "as_column",
    "columns_of",
    "frame_row",
    "infer_column",
    "is_missing_text",
    "number_of",
    "read_cells",
    "read_columns",
    "row_places",
    "write_csv",
]
