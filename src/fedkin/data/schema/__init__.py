"""What the columns of a table must be, and rows prepared accordingly.

In: a table as plain columns. Out: by a `Schema` (agreed in a contract, or a `TableSchema` learned from a table) the
rows of a site or a `Federation`, and `Finding`s: what does not fit, in words.
`column` is one column, `labels` what cells say as numbers and levels, `findings` the words, `units` what is often
mistaken for what.
To add a check on a contract's tables: `findings`. To add a key of a column: `column`, and docs/contract.md.
Imports: `data.tables`, `data.federation`.
"""

from __future__ import annotations

from fedkin.data.schema.column import Column
from fedkin.data.schema.findings import LEAVE_EMPTY, Finding, RowWords, raise_findings
from fedkin.data.schema.labels import Label, level_codes, level_text, looks_like_date, parsed_numbers
from fedkin.data.schema.learned import FILLING, TableSchema
from fedkin.data.schema.schema import Missing, Schema

__all__ = [
    "FILLING",
    "LEAVE_EMPTY",
    "Column",
    "Finding",
    "Label",
    "Missing",
    "RowWords",
    "Schema",
    "TableSchema",
    "level_codes",
    "level_text",
    "looks_like_date",
    "parsed_numbers",
    "raise_findings",
]
