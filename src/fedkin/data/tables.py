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
import io
import itertools
import math
import os
import re
import secrets
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedkin.errors import DataError, missing_dependency

Columns = dict[str, npt.NDArray[Any]]
FloatArray = npt.NDArray[np.float64]

CSV_SUFFIXES = (".csv", ".tsv", ".txt")
PARQUET_SUFFIXES = (".parquet", ".pq")

_LARGEST_EXACT_INTEGER = 2**53
_MISSING = frozenset({"", "NA", "nan", "NaN", "NAN"})
_NUMBER_CHARACTERS = frozenset("0123456789+-.eE")
_INFINITIES = frozenset({"inf", "-inf", "+inf", "Inf", "-Inf", "Infinity", "-Infinity"})
_NUMBER_TEXT = _NUMBER_CHARACTERS | {"\n"}
_SPECIAL_NUMBER = re.compile(r"^[+-]?(?:0[0-9]+|[0-9]{16,})$", re.MULTILINE)  # a leading zero, or maybe beyond 2**53
_INTEGER = re.compile(r"[+-]?[0-9]+")
_LEADING_ZERO = re.compile(r"[+-]?0[0-9]+")
_TRUTH = {"True": True, "False": False, "true": True, "false": False, "TRUE": True, "FALSE": False}


# --- device ids -----------------------------------------------------------------------------------------------


def device_id(value: object) -> Hashable:
    """A device id as a plain Python value.

    Parameters
    ----------
    value : hashable
        numpy scalars become Python scalars; whole floats become ints, as a column of ids with a gap is read as floats.

    Raises
    ------
    DataError
        If the value is missing (None, NaN) or cannot be hashed.

    Examples
    --------
    >>> import numpy as np
    >>> device_id(np.float64(3.0)), device_id(np.str_("ward 7")), device_id((0, 1))
    (3, 'ward 7', (0, 1))
    """
    if isinstance(value, np.generic) and not isinstance(value, (np.datetime64, np.timedelta64)):
        value = value.item()
    if _is_missing(value):
        raise DataError(f"a device id is missing ({value!r}): give every row and every edge a device")
    if isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        hash(value)
    except TypeError:
        raise DataError(
            f"device id {value!r} of type {type(value).__name__} cannot be hashed: use a text, a number or a tuple"
        ) from None
    return value


def device_ids(values: Iterable[object]) -> list[Hashable]:
    """`device_id` of every value; fast for arrays and for lists of plain ints and strings.

    Examples
    --------
    >>> import numpy as np
    >>> device_ids(np.array([1.0, 2.0]))
    [1, 2]
    """
    if isinstance(values, range):
        return list(values)
    values = unwrapped(values)
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "biufUS":
        values = values.tolist()
    listed = list(values)
    if set(map(type, listed)) <= {int, str, bool}:
        return listed
    return [device_id(value) for value in listed]


def unwrapped(values: Any) -> Any:
    """A pandas or polars series as an array, a pyarrow array as a list; anything else as it is."""
    if hasattr(values, "to_pylist"):
        return values.to_pylist()
    return values.to_numpy() if hasattr(values, "to_numpy") else values


def _is_missing(value: object) -> bool:
    if value is None:
        return True
    try:
        return bool(value != value)  # NaN and NaT
    except (TypeError, ValueError):  # pandas.NA has no truth value, neither have arrays
        return type(value).__name__ == "NAType"


# --- columns from frames --------------------------------------------------------------------------------------


def as_column(values: Iterable[object]) -> npt.NDArray[Any]:
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
    cells = [None if _is_missing(cell) else cell for cell in values]
    kinds = set(map(type, cells)) - {type(None)}
    if kinds and all(issubclass(kind, (bool, np.bool_)) for kind in kinds) and None not in cells:
        return np.array(cells, dtype=bool)
    if all(issubclass(kind, (int, float, np.integer, np.floating, bool, np.bool_)) for kind in kinds):
        numbers = np.array([math.nan if cell is None else cell for cell in cells], dtype=object)
        integers = [cell for cell in cells if isinstance(cell, (int, np.integer))]
        if all(abs(int(cell)) <= _LARGEST_EXACT_INTEGER for cell in integers):
            return numbers.astype(np.float64)
    plain = (cell.item() if isinstance(cell, (np.str_, np.integer)) else cell for cell in cells)
    return np.fromiter(plain, dtype=object, count=len(cells))


def _exact_as_float(integers: npt.NDArray[Any]) -> bool:
    return integers.size == 0 or (
        int(integers.max()) <= _LARGEST_EXACT_INTEGER and int(integers.min()) >= -_LARGEST_EXACT_INTEGER
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


def _column_named(name: str, values: Any) -> npt.NDArray[Any]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise DataError(f"column {name!r} is a single {type(values).__name__}, expected one value per row")
    try:
        return as_column(unwrapped(values))
    except DataError as error:
        raise DataError(f"column {name!r}: {error}") from None


def _columns_by_narwhals(frame: object) -> list[tuple[str, npt.NDArray[Any]]]:
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


def _column_of_series(series: Any) -> npt.NDArray[Any]:
    if series.dtype.is_float():
        values: npt.NDArray[Any] = series.to_numpy()
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
        ``.csv``, ``.tsv``, ``.txt`` (UTF-8; a header line; cells parted by commas, semicolons or tabs), or
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
    header, columns = read_cells(path)
    return {name: infer_column(cells) for name, cells in zip(header, columns, strict=True)}


def read_cells(path: str | os.PathLike[str]) -> tuple[list[str], list[list[str]]]:
    """Header and columns of a CSV file as text, without any inference.

    Returns
    -------
    header : list of str, length c
    columns : list of c lists of str
    """
    path = Path(path)
    text = _decoded(path)
    first_line = text.lstrip("\r\n").partition("\n")[0]
    delimiter = next((mark for mark in ",;\t" if mark in first_line), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows: list[list[str]] = []
    header: list[str] | None = None
    try:
        for row in reader:
            if not row:  # a blank line
                continue
            if header is None:
                header = [name.strip() for name in row]
            elif len(row) != len(header):
                raise DataError(
                    f"{path}, line {reader.line_num}: {len(row)} cells, but the header has {len(header)}; "
                    "add or remove cells, or put quotes around a cell that contains the separator"
                )
            else:
                rows.append(row)
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}; check the quotes around this cell") from None
    if header is None:
        raise DataError(f"{path} is empty: expected a header line and at least one row")
    for name in header:
        if header.count(name) > 1:
            raise DataError(f"{path}, line 1: two columns are called {name!r}; rename one of them")
    columns = [list(cells) for cells in zip(*rows, strict=True)] if rows else [[] for _ in header]
    return header, columns


def infer_column(cells: Sequence[str]) -> npt.NDArray[Any]:
    """A column from its text: numbers, truth values or text.

    Examples
    --------
    >>> infer_column(["1", "", "2.5"]), infer_column(["007", "12"])
    (array([1. , nan, 2.5]), array(['007', '12'], dtype=object))
    """
    stripped = [cell.strip() for cell in cells]
    quick = _quick_numbers(stripped)
    if quick is not None:
        return quick
    distinct = set(stripped)
    values = distinct - _MISSING
    if distinct and distinct <= _TRUTH.keys():
        return np.array([_TRUTH[cell] for cell in stripped], dtype=bool)
    if all(_is_number(cell) for cell in values) and (values or distinct <= {""}):
        numbers = {cell: math.nan if cell in _MISSING else float(cell) for cell in distinct}
        if not any(_too_large(cell) for cell in values):
            return np.array([numbers[cell] for cell in stripped], dtype=np.float64)
        if all(_INTEGER.fullmatch(cell) for cell in values):
            identifiers = (None if cell in _MISSING else int(cell) for cell in stripped)
            return np.fromiter(identifiers, dtype=object, count=len(stripped))
        return np.array([numbers[cell] for cell in stripped], dtype=np.float64)
    return np.fromiter((cell if cell else None for cell in stripped), dtype=object, count=len(stripped))


def _quick_numbers(cells: list[str]) -> FloatArray | None:
    """The column if all its cells are ordinary numbers or empty, looking at the whole text at once; else None."""
    text = "\n".join(cells)
    if not _NUMBER_TEXT.issuperset(text) or _SPECIAL_NUMBER.search(text):
        return None
    try:
        return np.array([float(cell) if cell else math.nan for cell in cells], dtype=np.float64)
    except ValueError:
        return None


def _is_number(cell: str) -> bool:
    if cell in _INFINITIES:
        return True
    # The characters first: float() would also take "1_000" and digits of other scripts.
    if not _NUMBER_CHARACTERS.issuperset(cell) or _LEADING_ZERO.fullmatch(cell):
        return False
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _too_large(cell: str) -> bool:
    return len(cell) > 15 and _INTEGER.fullmatch(cell) is not None and abs(int(cell)) > _LARGEST_EXACT_INTEGER


def _decoded(path: Path) -> str:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"there is no file {path}: check the path") from None
    except IsADirectoryError:
        raise DataError(f"{path} is a directory, expected a file") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: the byte {content[error.start]:#04x} is not UTF-8; save the file as UTF-8"
        ) from None


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


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path in the same directory that takes the place of `path` when the block ends well.

    A reader sees the old file or the new one, never half of it.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise DataError(f"cannot write {path}: there is no directory {path.parent}")
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerows(itertools.chain([header], rows))
