"""Sites and their rows.

In: tables, data frames, arrays, files. Out: a `Federation`, the rows of all devices stacked in device order, checked;
or, by a `Schema`, the prepared rows of one site, and `Finding`s in words. Imports: `_base`, `errors`.

A user's table: `reading` leads from a file to a federation. `tables` reads files and data frames into columns
(`cells`; `arrow` where they are large; `source` knows the lines), `columns` finds device and target, `kinds` guesses
what the others hold, and `learning` decides what to use, refuse or remark on: the result is a `TableSchema`
(`learned`). A check on users' tables goes into `learning`; `redundant` finds columns that tell nothing.
A contract's table: `schema` and `column` say what columns must be, `findings` (with `labels`, `units`) what is wrong.
Both: `rows` is the only container of rows, `federation` stacks those of all devices, `checks` and `ids` are for arrays
and names that Python users give, `cuts` makes splits and folds.
"""

from __future__ import annotations

from fedkin.data.cells import infer_column, read_cells
from fedkin.data.column import Column
from fedkin.data.columns import Roles, near_name, read_directory
from fedkin.data.cuts import block_folds, deal_folds
from fedkin.data.federation import INTERCEPT, Federation
from fedkin.data.findings import Finding, raise_findings
from fedkin.data.ids import HasDevices, device_id, device_ids
from fedkin.data.kinds import is_row_number, look_at, too_many_levels
from fedkin.data.labels import Label, level_text, looks_like_date, parsed_numbers
from fedkin.data.learned import TableSchema
from fedkin.data.reading import files_of
from fedkin.data.redundant import dependent_columns
from fedkin.data.rows import Rows
from fedkin.data.schema import Schema
from fedkin.data.tables import CSV_SUFFIXES, PARQUET_SUFFIXES, columns_of, read_columns, write_csv

__all__ = [
    "CSV_SUFFIXES",
    "INTERCEPT",
    "PARQUET_SUFFIXES",
    "Column",
    "Federation",
    "Finding",
    "HasDevices",
    "Label",
    "Roles",
    "Rows",
    "Schema",
    "TableSchema",
    "block_folds",
    "columns_of",
    "deal_folds",
    "dependent_columns",
    "device_id",
    "device_ids",
    "files_of",
    "infer_column",
    "is_row_number",
    "level_text",
    "look_at",
    "looks_like_date",
    "near_name",
    "parsed_numbers",
    "raise_findings",
    "read_cells",
    "read_columns",
    "read_directory",
    "too_many_levels",
    "write_csv",
]
