"""Sites and their rows.

In: tables, data frames, arrays, files. Out: a `Federation`, the rows of all sites stacked in their order, checked;
or, by a `Schema`, the prepared rows of one site, and `Finding`s in words. Imports: `_base`, `errors`.

| where | what it does |
|---|---|
| `tables` | files and data frames as plain columns |
| `learning` | a user's table: what its columns are, which can be used, and what to say about the rest |
| `schema` | a contract's table: what columns must be, rows prepared accordingly, what is wrong in words |
| `rows`, `stacked`, `federation` | the only container of rows; those of all sites; how they are made and cut |

To add a check: on users' tables in `learning`, on a contract's in `schema`. To add a file format: `tables`.
`Federation.read` calls `learning.reading`, which calls back to make the `Federation`.
`checks` and `ids` are for arrays and names that Python users give; `cuts` makes splits and folds.
"""

from __future__ import annotations

from fedkin.data.cuts import block_folds, deal_folds
from fedkin.data.federation import INTERCEPT, Federation
from fedkin.data.ids import HasSites, is_missing, site_id, site_ids
from fedkin.data.learning import (
    Roles,
    TableOptions,
    dependent_columns,
    files_of,
    is_row_number,
    look_at,
    near_name,
    read_directory,
    too_many_levels,
)
from fedkin.data.rows import Rows
from fedkin.data.schema import (
    Column,
    Finding,
    Label,
    Schema,
    TableSchema,
    level_codes,
    level_text,
    looks_like_date,
    parsed_numbers,
    raise_findings,
)
from fedkin.data.tables import (
    CSV_SUFFIXES,
    PARQUET_SUFFIXES,
    columns_of,
    infer_column,
    is_missing_text,
    number_of,
    read_cells,
    read_columns,
    row_places,
    write_csv,
)

__all__ = [
    "CSV_SUFFIXES",
    "INTERCEPT",
    "PARQUET_SUFFIXES",
    "Column",
    "Federation",
    "Finding",
    "HasSites",
    "Label",
    "Roles",
    "Rows",
    "Schema",
    "TableOptions",
    "TableSchema",
    "block_folds",
    "columns_of",
    "deal_folds",
    "dependent_columns",
    "files_of",
    "infer_column",
    "is_missing",
    "is_missing_text",
    "is_row_number",
    "level_codes",
    "level_text",
    "look_at",
    "looks_like_date",
    "near_name",
    "number_of",
    "parsed_numbers",
    "raise_findings",
    "read_cells",
    "read_columns",
    "read_directory",
    "row_places",
    "site_id",
    "site_ids",
    "too_many_levels",
    "write_csv",
]
