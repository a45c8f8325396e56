"""Large CSV files by pyarrow: the same columns as `fedkin.data.tables.cells` gives, many times faster."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from fedkin._base import AnyArray
from fedkin.data.tables.cells import check_header, delimiter_of, infer_column
from fedkin.errors import TableWarning

#: Files of fewer bytes are read before pyarrow is imported.
WORTHWHILE = 2_000_000
#: Without pyarrow, files of more bytes take so long that it is worth a word.
_SLOW = 50_000_000
#: Cells that a cast to float64 reads as `infer_column` does: no leading zeros, no integers beyond 2**53.
_ORDINARY = r"^(?:-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)?$"


def read_large_csv(path: Path, least: int = WORTHWHILE) -> dict[str, AnyArray] | None:
    """The columns of a large CSV file; None where the standard library shall read it, or say what is wrong with it.

    Files of fewer than ``least`` bytes are left to it.
    """
    if not path.is_file() or path.stat().st_size < least:
        return None
    try:
        import pyarrow
        import pyarrow.csv
    except ImportError:
        if path.stat().st_size > _SLOW:
            warnings.warn(
                f"reading {path.name} takes a while; with pyarrow it is about ten times faster: "
                "pip install 'fedkin[parquet]'",
                TableWarning,
                stacklevel=2,
            )
        return None
    with path.open("rb") as file:
        head = file.read(100_000).removeprefix(b"\xef\xbb\xbf").decode("utf-8", errors="replace")
    delimiter = delimiter_of(head)
    header = next(csv.reader([head.lstrip("\r\n").partition("\n")[0]], delimiter=delimiter))
    names = [name.strip() for name in header]
    check_header(path, names)
    try:
        table = pyarrow.csv.read_csv(
            path,
            pyarrow.csv.ReadOptions(use_threads=True),
            pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(header, pyarrow.string()),
                strings_can_be_null=False,
                quoted_strings_can_be_null=False,
            ),
        )
    except pyarrow.ArrowException:
        return None
    if table.column_names != header:  # a line break within the header, or something else that is rare
        return None
    return {name: _column(table.column(k)) for k, name in enumerate(names)}


def _column(cells: Any) -> AnyArray:
    """One column from its text, as `infer_column` sees it."""
    import pyarrow
    import pyarrow.compute as pc

    if pc.all(pc.match_substring_regex(cells, _ORDINARY)).as_py():
        empty = pc.equal(cells, "")
        known = pc.if_else(empty, None, cells) if pc.any(empty).as_py() else cells
        numbers: AnyArray = pc.cast(known, pyarrow.float64()).to_numpy()
        return numbers.astype(np.float64)
    # inference looks at distinct cells only
    encoded = cells.combine_chunks().dictionary_encode()
    distinct = infer_column(encoded.dictionary.to_pylist())
    return np.asarray(distinct[encoded.indices.to_numpy()])
