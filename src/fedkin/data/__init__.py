"""Read tables, describe them by a `Schema`, and stack the rows of all sites in a `Federation`."""

from __future__ import annotations

from fedkin.data.cells import (
    DecimalMark,
    Finding,
    Label,
    infer_column,
    infer_kind,
    is_missing,
    is_missing_text,
    level_text,
    natural_basis,
    near_name,
    number_of,
    parsed_numbers,
    raise_findings,
)
from fedkin.data.columns import (
    CSV_SUFFIXES,
    PARQUET_SUFFIXES,
    RawColumns,
    columns_of,
    read_cells,
    read_columns,
    row_places,
    write_csv,
)
from fedkin.data.federation import INTERCEPT, Federation
from fedkin.data.files import (
    FileTable,
    files_of,
    in_batches,
    no_site_column,
    open_files,
    read_files,
    write_batches,
)
from fedkin.data.infer import InferredTable, SchemaScan, complete_batches, with_curves
from fedkin.data.rows import (
    HasSites,
    Rows,
    block_folds,
    deal_folds,
    grouped,
    refuse_dates,
    site_id,
    site_ids,
    stable_order,
)
from fedkin.data.schema import Column, Schema
from fedkin.data.tables import Roles, Spline, Table, TableInMemory, TableOptions

__all__ = [
    "CSV_SUFFIXES", "INTERCEPT", "PARQUET_SUFFIXES", "Column", "DecimalMark", "Federation", "FileTable", "Finding",
    "HasSites", "InferredTable", "Label", "RawColumns", "Roles", "Rows", "Schema", "SchemaScan", "Spline", "Table",
    "TableInMemory", "TableOptions", "block_folds", "columns_of", "complete_batches", "deal_folds", "files_of",
    "grouped", "in_batches", "infer_column", "infer_kind", "is_missing", "is_missing_text", "level_text",
    "natural_basis", "near_name", "no_site_column", "number_of", "open_files", "parsed_numbers", "raise_findings",
    "read_cells", "read_columns", "read_files", "refuse_dates", "row_places", "site_id", "site_ids", "stable_order",
    "with_curves", "write_batches", "write_csv",
]  # fmt: skip
