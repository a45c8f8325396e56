"""Tables from files and data frames, as plain columns.

Whatever a table was (CSV, Parquet, pandas, polars, pyarrow, a dict of arrays), it becomes a
`Columns`: name -> array, where the array is

- float64 for numbers (missing cells are NaN),
- bool for truth values without missing cells,
- object for everything else (missing cells are None).

Integers that a float64 cannot hold exactly (beyond 2**53) can only be identifiers; they stay Python ints, in an
object array.
"""

from __future__ import annotations

import csv
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkin._base import AnyArray, replacing
from fedkin.data.ids import is_missing, unwrapped
from fedkin.data.tables.arrow import read_large_csv
from fedkin.data.tables.cells import LARGEST_EXACT_INTEGER, infer_column, read_cells
from fedkin.errors import DataError, missing_dependency

Columns = dict[str, AnyArray]

CSV_SUFFIXES = (".csv", ".tsv", ".txt")
PARQUET_SUFFIXES = (".parquet", ".pq")


# --- columns from frames --------------------------------------------------------------------------------------


def as_column(values: Iterable[object]) -> AnyArray:
    """One column of a `Columns` from any one-dimensional values.

    Parameters
    ----------
    values : iterable of length n, or array of shape (n,)
        Missing cells are None, NaN or pandas.NA.

    Returns
    -------
    array of shape (n,)
        float64, bool or object; see the head of this module.

    Examples
    --------
    >>> as_column([1, None, 3])
    array([ 1., nan,  3.])
    >>> as_column(["a", "b"])
    array(['a', 'b'], dtype=object)
    """
    if isinstance(values, np.ndarray):
        if values.ndim != 1:
            raise DataError(f"a column must be one-dimensional, got an array of shape {values.shape}")
        if values.dtype.kind == "b":
            return values
        if values.dtype.kind == "f" or (values.dtype.kind in "iu" and _exact_as_float(values)):
            return values.astype(np.float64)
        values = values.tolist() if values.dtype.kind in "iuUS" else list(values)
    cells = [None if is_missing(cell) else cell for cell in values]
    kinds = set(map(type, cells)) - {type(None)}
    if kinds and all(issubclass(kind, (bool, np.bool_)) for kind in kinds) and None not in cells:
        return np.array(cells, dtype=bool)
    if all(issubclass(kind, (int, float, np.integer, np.floating, bool, np.bool_)) for kind in kinds):
        numbers = np.array([math.nan if cell is None else cell for cell in cells], dtype=object)
        integers = [cell for cell in cells if isinstance(cell, (int, np.integer))]
        if all(abs(int(cell)) <= LARGEST_EXACT_INTEGER for cell in integers):
            return numbers.astype(np.float64)
    plain = (cell.item() if isinstance(cell, (np.str_, np.integer)) else cell for cell in cells)
    return np.fromiter(plain, dtype=object, count=len(cells))


def _exact_as_float(integers: AnyArray) -> bool:
    return integers.size == 0 or (
        int(integers.max()) <= LARGEST_EXACT_INTEGER and int(integers.min()) >= -LARGEST_EXACT_INTEGER
    )


def columns_of(frame: object) -> Columns:
    """The columns of a data frame.

    Parameters
    ----------
    frame : pandas, polars or pyarrow table, or mapping of name to one-dimensional values
        Anything that narwhals reads. All columns have n rows.

    Returns
    -------
    Columns
        Name -> array of shape (n,).

    Raises
    ------
    DataError
        If it is not a table, two columns have the same name, or lengths differ.

    Examples
    --------
    >>> columns_of({"site": ["a", "b"], "x": [1, 2]})
    {'site': array(['a', 'b'], dtype=object), 'x': array([1., 2.])}
    """
    if isinstance(frame, Mapping):
        pairs = [(str(name), _column_named(str(name), values)) for name, values in frame.items()]
    else:
        pairs = _columns_by_narwhals(frame)
    columns: Columns = {}
    for name, column in pairs:
        if name in columns:
            raise DataError(f"two columns of the table are called {name!r}: rename one of them")
        columns[name] = column
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"the columns of a table must have one length, got {lengths}")
    return columns


def _column_named(name: str, values: Any) -> AnyArray:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise DataError(f"column {name!r} is a single {type(values).__name__}, expected one value per row")
    try:
        return as_column(unwrapped(values))
    except DataError as error:
        raise DataError(f"column {name!r}: {error}") from None


def _columns_by_narwhals(frame: object) -> list[tuple[str, AnyArray]]:
    import narwhals.stable.v2 as nw
    from narwhals.exceptions import DuplicateError

    try:
        table = nw.from_native(frame)  # type: ignore[call-overload]
    except TypeError:
        raise DataError(
            f"cannot read a table from {type(frame).__name__}: give a pandas, polars or pyarrow table, "
            "or a dict of columns"
        ) from None
    except DuplicateError as error:
        raise DataError(
            f"two columns have the same name, rename one of them ({' '.join(str(error).split())})"
        ) from None
    if isinstance(table, nw.LazyFrame):
        table = table.collect()
    return [(str(name), _column_of_series(table[name])) for name in table.columns]


def _column_of_series(series: Any) -> AnyArray:
    if series.dtype.is_float():
        values: AnyArray = series.to_numpy()
        if values.dtype.kind == "f":
            return values.astype(np.float64)
    return as_column(_quick_integers(series))


def _quick_integers(series: Any) -> Any:
    """Integers without gaps need no walk through Python."""
    if series.dtype.is_integer() and series.null_count() == 0:
        return series.to_numpy()
    return [float(cell) if series.dtype.is_decimal() and cell is not None else cell for cell in series.to_list()]


# --- columns from files ---------------------------------------------------------------------------------------


def read_columns(path: str | os.PathLike[str]) -> Columns:
    """The columns of a CSV or Parquet file, by its suffix.

    Parameters
    ----------
    path : path
        ``.csv``, ``.tsv``, ``.txt`` (UTF-8; a header line; cells parted by commas, semicolons, tabs or bars), or
        ``.parquet``, ``.pq``.

    Returns
    -------
    Columns
        Name -> array of shape (n,).

    Raises
    ------
    DataError
        If the file is missing, empty, ragged, truncated or of another kind.

    Notes
    -----
    A CSV column is numeric when every cell is a plain number or missing (empty, ``NA``, ``nan``). Ids such as
    ``01`` keep their zero: a column with such cells is text.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "sites.csv")
    ...     _ = path.write_text("site,x\\n01,1.5\\n02,\\n")
    ...     read_columns(path)
    {'site': array(['01', '02'], dtype=object), 'x': array([1.5, nan])}
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix in PARQUET_SUFFIXES:
        return _read_parquet(path)
    if suffix not in CSV_SUFFIXES:
        raise DataError(
            f"{path}: cannot tell the format from the suffix {path.suffix!r}, "
            f"expected one of {', '.join(CSV_SUFFIXES + PARQUET_SUFFIXES)}"
        )
    quick = read_large_csv(path)
    if quick is not None:
        return quick
    header, columns = read_cells(path)
    return {name: infer_column(cells) for name, cells in zip(header, columns, strict=True)}


def _read_parquet(path: Path) -> Columns:
    if not path.is_file():
        raise DataError(f"there is no file {path}: check the path")
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing_dependency("pyarrow", f"reading {path.name}", extra="parquet") from None
    try:
        # One file, also where a parent folder looks like "key=value", which pyarrow would take for a partition.
        table = pyarrow.parquet.ParquetFile(path).read()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a whole Parquet file ({error}); write or copy it again") from None
    try:
        return columns_of(table)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


# --- writing --------------------------------------------------------------------------------------------------


def write_csv(path: str | os.PathLike[str], header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file (UTF-8, comma) in one piece: a reader never sees half of it.

    Parameters
    ----------
    path : path
        A file of that name is replaced.
    header : sequence of str, length c
        Names of the columns.
    rows : iterable of sequences of length c
        Floats are written so that they read back exactly.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "groups.csv")
    ...     write_csv(path, ["site", "group"], [("a", 0), ("b", 1)])
    ...     path.read_text()
    'site,group\\na,0\\nb,1\\n'
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise DataError(f"cannot write {path}: there is no directory {path.parent}")
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerows(itertools.chain([header], rows))
