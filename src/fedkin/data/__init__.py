"""Sites and their rows.

In: tables, data frames, arrays, files. Out: a `Federation`, the rows of all devices stacked in device order, checked.
Imports: `_base`, `errors`.
"""

from __future__ import annotations

from fedkin.data.checks import listed, shuffled_ranks
from fedkin.data.federation import INTERCEPT, Federation
from fedkin.data.rows import Rows
from fedkin.data.tables import (
    CSV_SUFFIXES,
    PARQUET_SUFFIXES,
    columns_of,
    device_id,
    device_ids,
    infer_column,
    read_cells,
    read_columns,
    replacing,
    write_csv,
)

__all__ = [
    "CSV_SUFFIXES",
    "INTERCEPT",
    "PARQUET_SUFFIXES",
    "Federation",
    "Rows",
    "columns_of",
    "device_id",
    "device_ids",
    "infer_column",
    "listed",
    "read_cells",
    "read_columns",
    "replacing",
    "shuffled_ranks",
    "write_csv",
]
