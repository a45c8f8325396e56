"""Read tables from data frames and files as plain columns, and write CSV files.

Every table (CSV, Parquet, pandas, polars, pyarrow, a dict of arrays) becomes `RawColumns`, a mapping of names to arrays
of

- float64 for numbers (missing cells are NaN),
- bool for truth values without missing cells,
- object for everything else (missing cells are None). Integers beyond 2**53 can only be identifiers; they stay ints.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import math
import os
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, get_args

import narwhals.stable.v2 as nw
import numpy as np
from narwhals.exceptions import DuplicateError

from fedkin._base import AnyArray, check_choice, count, in_file, listed, repeated, replacing
from fedkin._storage import Remote, file_system, place_of
from fedkin.data.cells import (
    LARGEST_EXACT_INTEGER,
    MISSING,
    DecimalMark,
    infer_column,
    is_gap,
    is_missing,
    unwrapped,
)
from fedkin.errors import DataError, TableWarning, missing_dependency

RawColumns = dict[str, AnyArray]

#: Number of bytes read to inspect the first lines of a CSV file.
HEAD_BYTES = 100_000

CSV_SUFFIXES = (".csv", ".tsv", ".txt")
PARQUET_SUFFIXES = (".parquet", ".pq")
EXCEL_SUFFIX = ".xlsx"
#: Larger CSV files (in bytes) are read by pyarrow, if it is installed.
_LARGE = 2_000_000
#: Without pyarrow, larger files (in bytes) cause a warning that reading is slow.
_SLOW = 50_000_000
#: Cells that a cast to float64 parses like `infer_column`: no leading zeros, no integers beyond 2**53.
_ORDINARY = r"^(?:-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)?$"


# --- columns from frames --------------------------------------------------------------------------------------


def as_column(values: Iterable[object]) -> AnyArray:
    """Return one-dimensional values as a column of `RawColumns`."""
    if isinstance(values, np.ndarray):
        if values.ndim != 1:
            raise DataError(f"a column must be one-dimensional, got an array of shape {values.shape}")
        if values.dtype.kind == "b":
            return values
        exact = values.dtype.kind in "iu" and all(
            abs(int(end)) <= LARGEST_EXACT_INTEGER for end in (values.min(initial=0), values.max(initial=0))
        )
        if values.dtype.kind == "f" or exact:
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


def columns_of(frame: object) -> RawColumns:
    """Return the columns of a data frame."""
    if isinstance(frame, Mapping):
        pairs = [(str(name), _column_named(str(name), values)) for name, values in frame.items()]
    else:
        pairs = _columns_by_narwhals(frame)
    columns: RawColumns = {}
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
    with in_file(f"column {name!r}", DataError):
        return as_column(unwrapped(values))


def _columns_by_narwhals(frame: object) -> list[tuple[str, AnyArray]]:
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


def columns_of_batch(names: Sequence[str], batch: Any) -> RawColumns:
    """Return some columns of a pyarrow batch; of text, only the distinct cells are converted in Python."""
    return {name: _column_of_arrow(name, batch.column(name)) for name in names}


def _column_of_arrow(name: str, cells: Any) -> AnyArray:
    import pyarrow

    if pyarrow.types.is_floating(cells.type):
        numbers: AnyArray = cells.to_numpy(zero_copy_only=False)
        return numbers.astype(np.float64, copy=False)
    kind = cells.type.value_type if isinstance(cells, pyarrow.DictionaryArray) else cells.type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)) or cells.null_count == len(cells):
        return columns_of(pyarrow.table({name: cells}))[name]
    return by_distinct_cells(cells, lambda words: np.array([*words, None], dtype=object))


def by_distinct_cells(cells: Any, convert: Callable[[list[Any]], AnyArray]) -> AnyArray:
    """Convert a column of pyarrow's text by its distinct cells; a missing cell becomes the last that is returned."""
    encoded = cells if hasattr(cells, "dictionary") else cells.dictionary_encode()
    return np.asarray(convert(encoded.dictionary.to_pylist())[encoded.indices.fill_null(-1).to_numpy()])


def _column_of_series(series: Any) -> AnyArray:
    if series.dtype.is_float():
        values: AnyArray = series.to_numpy()
        if values.dtype.kind == "f":
            return values.astype(np.float64)
    if series.dtype.is_integer() and series.null_count() == 0:  # without a loop in Python
        return as_column(series.to_numpy())
    decimal = series.dtype.is_decimal()
    return as_column([float(cell) if decimal and cell is not None else cell for cell in series.to_list()])


# --- columns from files ---------------------------------------------------------------------------------------


def split_name(path: Path) -> tuple[str, str]:
    """Return a file name without its suffix, and the suffix of its format: .csv for .csv.gz."""
    inner = Path(path.name[:-3]) if path.suffix.lower() == ".gz" else path
    return inner.stem, inner.suffix.lower()


def read_columns(path: str | os.PathLike[str], decimal: DecimalMark = ".") -> RawColumns:
    """Read the columns of a CSV file, which may be compressed (.csv.gz), of a Parquet or an Excel file, by suffix."""
    check_choice("decimal", decimal, get_args(DecimalMark))
    path = place_of(path)
    suffix = split_name(path)[1]
    if suffix in PARQUET_SUFFIXES:
        table = _whole_parquet(path, open_parquet(path).read)
        with in_file(path, DataError):
            found: RawColumns = _whole_parquet(path, lambda: columns_of(table))
        return found
    if suffix == EXCEL_SUFFIX:
        return _read_sheet(path)
    if suffix not in CSV_SUFFIXES:
        raise DataError(
            f"{path}: cannot tell the format from the suffix {path.suffix!r}, "
            f"expected one of {', '.join((*CSV_SUFFIXES, *PARQUET_SUFFIXES, EXCEL_SUFFIX))}, .csv.gz"
        )
    quick = _read_large_csv(path, decimal) if path.is_file() and path.stat().st_size >= _LARGE else None
    if quick is not None:
        return quick
    header, columns = read_cells(path, decimal)
    return {name: infer_column(cells, decimal) for name, cells in zip(header, columns, strict=True)}


def _read_sheet(path: Path) -> RawColumns:
    """Read the first sheet of an Excel file with openpyxl: names in the first row, formulas as their values."""
    if not path.is_file():
        raise DataError(f"there is no file {path}: check the path")
    try:
        import openpyxl
    except ImportError:
        raise missing_dependency("openpyxl", f"reading {path.name}", extra="excel") from None
    try:
        with path.open("rb") as file:
            book = openpyxl.load_workbook(file, read_only=True, data_only=True)
            first, n_sheets = book.worksheets[0], len(book.worksheets)
            rows = [[None if is_gap(cell) else cell for cell in row] for row in first.iter_rows(values_only=True)]
            book.close()
    except (OSError, KeyError, IndexError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not a complete Excel file ({error}); save or copy it again") from None
    if n_sheets > 1:
        text = f"{path.name} has {n_sheets} sheets; only the first one, {first.title!r}, is read"
        warnings.warn(text, TableWarning, stacklevel=2)
    while rows and not any(cell is not None for cell in rows[-1]):
        rows.pop()
    if not rows:
        raise DataError(f"{path} is empty: expected a row of names and at least one row")
    header = ["" if name is None else str(name).strip() for name in rows[0]]
    columns = list(zip(*rows[1:], strict=True)) or [()] * len(header)
    # cleared cells leave columns without name and content
    kept = [k for k, name in enumerate(header) if name or any(cell is not None for cell in columns[k])]
    _check_header(path, [header[k] for k in kept])
    return {header[k]: as_column(columns[k]) for k in kept}


def open_parquet(path: Path) -> Any:
    """Open a Parquet file with pyarrow, which reads only its footer."""
    if not path.is_file():
        raise DataError(f"there is no file {path}: check the path")
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing_dependency("pyarrow", f"reading {path.name}", extra="parquet") from None
    # One file, even if a parent folder such as "key=value" looks like a partition to pyarrow.
    system, place = file_system(path)
    return _whole_parquet(path, lambda: pyarrow.parquet.ParquetFile(place, pre_buffer=False, filesystem=system))


def _whole_parquet(path: Path, read: Callable[[], Any]) -> Any:
    import pyarrow

    try:
        return read()
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise DataError(f"{path} is not a complete Parquet file ({error}); write or copy it again") from None


def read_cells(path: str | os.PathLike[str], decimal: DecimalMark = ".") -> tuple[list[str], list[list[str]]]:
    """Read header and columns of a CSV file as text, without any inference."""
    path = place_of(path)
    text = _decoded(path)
    rows: list[list[str]] = []
    header: list[str] | None = None
    line = 0
    try:
        for line, row in _csv_rows(text, decimal):
            if header is None:
                header = [name.strip() for name in row]
            elif len(row) != len(header):
                commas = len(row) > len(header) and _delimiter(text, decimal) == ","
                points = ", or write decimal points, not commas, and none between thousands" if commas else ""
                raise DataError(
                    f"{path}, line {line}: {count(len(row), 'cell')}, but the header has {len(header)}; "
                    f"add or remove cells, or put quotes around a cell that contains the separator{points}"
                )
            else:
                rows.append(row)
    except csv.Error as error:
        raise DataError(f"{path}, line {line + 1}: {error}; check the quotes around this cell") from None
    if header is None:
        raise DataError(f"{path} is empty: expected a header line and at least one row")
    _check_header(path, header)
    columns = [list(cells) for cells in zip(*rows, strict=True)] if rows else [[] for _ in header]
    return header, columns


def _check_header(path: Path, header: Sequence[str]) -> None:
    if twice := repeated(header):
        raise DataError(f"{path}, line 1: several columns are called {listed(twice, 10)}; rename or remove all but one")


def _csv_rows(text: str, decimal: DecimalMark = ".") -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV file, the header first, each with the line on which it ends; no blank lines."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text, decimal), strict=True)
    for row in reader:
        if row:
            yield reader.line_num, row


def _delimiter(text: str, decimal: DecimalMark) -> str:
    """Return the first of comma, semicolon, tab and bar in the header; a decimal comma comes last."""
    first_line = text.lstrip("\r\n").partition("\n")[0]
    return next((mark for mark in (",;\t|" if decimal == "." else ";\t|,") if mark in first_line), ",")


def _decoded(path: Path) -> str:
    """Read the text of a file, without a byte order mark."""
    try:
        with _opened(path) as file:
            content = file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a complete gzip file ({error}); write or copy it again") from None
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


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    with path.open("rb") as file:
        yield gzip.GzipFile(fileobj=file) if path.suffix.lower() == ".gz" else file  # type: ignore[misc]


def _read_large_csv(path: Path, decimal: DecimalMark = ".") -> RawColumns | None:
    """Read a CSV file with pyarrow, which is faster; None if the standard library must read it or report errors."""
    try:
        import pyarrow.csv
    except ImportError:
        if path.stat().st_size > _SLOW:
            text = f"reading {path.name} takes a while; with pyarrow it is about ten times faster"
            warnings.warn(f"{text}: pip install 'fedkin[parquet]'", TableWarning, stacklevel=2)
        return None
    _, header, delimiter = csv_head(path, decimal)
    try:
        table = arrow_csv(pyarrow.csv.read_csv, path, delimiter, dict.fromkeys(header, "string"))
    except pyarrow.ArrowException:
        return None
    if table.column_names != header:  # a line break within the header, or another rare case
        return None
    return {name.strip(): _column_of_text(table.column(k), decimal) for k, name in enumerate(header)}


def arrow_csv(read: Callable[..., Any], path: Path, delimiter: str, types: Mapping[str, str], **options: Any) -> Any:
    """Read a CSV file with a function of pyarrow; ``types`` are those of the columns to read."""
    import pyarrow.csv

    convert = pyarrow.csv.ConvertOptions(
        column_types={name: pyarrow.type_for_alias(kind) for name, kind in types.items()},
        include_columns=list(types),
        null_values=list(MISSING),
        strings_can_be_null=False,
    )
    parse = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    system, place = file_system(path)
    stream = system.open_input_stream(place)  # it decompresses by the suffix
    how = pyarrow.csv.ReadOptions(**options)
    return read(stream, read_options=how, parse_options=parse, convert_options=convert)


def csv_head(path: Path, decimal: DecimalMark = ".") -> tuple[str, list[str], str]:
    """Return the first lines of a CSV file, the cells of its header, and the delimiter."""
    with _opened(path) as file:
        head = file.read(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").decode("utf-8", errors="replace")
    delimiter = _delimiter(head, decimal)
    header = next(csv.reader([head.lstrip("\r\n").partition("\n")[0]], delimiter=delimiter), [])
    _check_header(path, [name.strip() for name in header])
    return head, header, delimiter


def csv_kinds(path: Path) -> dict[str, str]:
    """Return the kind of NumPy type of each column of a CSV file, from its first lines."""
    head, header, delimiter = csv_head(path)
    whole = head.rpartition("\n")[0] if len(head) >= HEAD_BYTES // 4 else head
    rows = [row for row in csv.reader(io.StringIO(whole, newline=""), delimiter=delimiter) if row][1:]
    rows = [row for row in rows if len(row) == len(header)]
    return {name.strip(): infer_column([row[k] for row in rows]).dtype.kind for k, name in enumerate(header)}


def _column_of_text(cells: Any, decimal: DecimalMark) -> AnyArray:
    """Return one column from pyarrow's text, as `infer_column` would."""
    import pyarrow.compute as pc

    if decimal == "." and pc.all(pc.match_substring_regex(cells, _ORDINARY)).as_py():
        empty = pc.equal(cells, "")
        known = pc.if_else(empty, None, cells) if pc.any(empty).as_py() else cells
        numbers: AnyArray = pc.cast(known, "float64").to_numpy()
        return numbers.astype(np.float64)
    return by_distinct_cells(cells.combine_chunks(), lambda words: infer_column(words, decimal))


# --- where rows came from -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowPlaces:
    """Name the rows of files by file and line; ``counts`` are their rows, sys.maxsize in a file not yet read."""

    files: tuple[Path, ...]
    counts: list[int]
    first: int = 0  # rows of the first file that come before
    named: bool = False  # whether to give the names of files

    def __call__(self, row: int) -> str:
        row += self.first
        for file, n in zip(self.files, self.counts, strict=True):  # noqa: B007
            if row < n:
                break
            row -= n
        suffix, name = split_name(file)[1], f"{file.name}, " if self.named else ""
        if suffix in (*PARQUET_SUFFIXES, EXCEL_SUFFIX):
            return f"{name}row {row + 1 + (suffix == EXCEL_SUFFIX)}"
        return f"{name}line {_line_of(file, row)}"


def row_places(path: Path, columns: Mapping[str, Sized]) -> RowPlaces:
    """Return the function that names the rows of a file read as ``columns``."""
    return RowPlaces((path,), [len(next(iter(columns.values()), ()))])


def _line_of(path: Path, row: int) -> int:
    """Return the line of a CSV file on which a row begins, counting blank lines and quoted line breaks."""
    delimiter = csv_head(path)[2]
    with _opened(path) as file, io.TextIOWrapper(file, "utf-8-sig", "replace", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            for number, cells in enumerate(filter(None, reader)):
                if number == row + 1:  # the header is the first
                    return reader.line_num - sum(cell.count("\n") for cell in cells)
        except csv.Error:
            pass
    return row + 2


# --- writing --------------------------------------------------------------------------------------------------


def write_csv(path: str | os.PathLike[str], header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file (UTF-8, comma) atomically: readers never see an incomplete file."""
    path = place_of(path)
    if not isinstance(path, Remote) and not path.parent.is_dir():
        raise DataError(f"cannot write {path}: there is no directory {path.parent}")
    with (
        replacing(path) as temporary,
        temporary.open("wb") as file,
        io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True) as stream,
    ):
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerows(itertools.chain([header], rows))
