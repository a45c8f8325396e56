"""A user's table as it is: from a file or a data frame to a `Federation`, with remarks.

In: a path or a data frame, and which columns are what (`Roles`). Out: a `Federation` with its `TableSchema`
and notes. `reading` leads; `columns` finds site and target, `kinds` guesses what the others hold, `learning` decides
what to use, refuse or remark on, and `redundant` finds columns that follow from others.
To add a check on users' tables: `learning`.
Imports: `data.schema`, `data.federation`, `data.tables`.
"""

from __future__ import annotations

from fedkin.data.learning.columns import Roles, TableOptions, near_name, read_directory
from fedkin.data.learning.kinds import is_row_number, look_at, too_many_levels
from fedkin.data.learning.reading import federation_of_files, federation_of_frame, files_of
from fedkin.data.learning.redundant import dependent_columns

__all__ = [
    "Roles",
    "TableOptions",
    "dependent_columns",
    "federation_of_files",
    "federation_of_frame",
    "files_of",
    "is_row_number",
    "look_at",
    "near_name",
    "read_directory",
    "too_many_levels",
]
