"""Read tables from data frames and files as plain columns, and write CSV files.

Whatever a table was (CSV, Parquet, pandas, polars, pyarrow, a dict of arrays), it becomes `RawColumns`: name -> array,
where the array is

- float64 for numbers (missing cells are NaN),
- bool for truth values without missing cells,
- object for everything else (missing cells are None). Integers beyond 2**53 can only be identifiers; they stay ints.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import itertools
import math
import os
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, get_args
from urllib.parse import unquote

import numpy as np

from fedkin._base import AnyArray, check_choice, count, in_file, listed, repeated, replacing
from fedkin.data.cells import (
    LARGEST_EXACT_INTEGER,
    DecimalMark,
    infer_column,
    infer_kind,
    is_gap,
    is_missing,
    unwrapped,
)
from fedkin.errors import DataError, TableWarning, argument, missing_dependency

RawColumns = dict[str, AnyArray]

#: Bytes that are read of the first lines of a CSV file.
HEAD_BYTES = 100_000

CSV_SUFFIXES = (".csv", ".tsv", ".txt")
PARQUET_SUFFIXES = (".parquet", ".pq")
EXCEL_SUFFIX = ".xlsx"
#: CSV files of more bytes are read by pyarrow, if it is there.
_LARGE = 2_000_000
#: Without pyarrow, files of more bytes take so long that a warning is due.
_SLOW = 50_000_000
#: Cells that a cast to float64 reads as `infer_column` does: no leading zeros, no integers beyond 2**53.
_ORDINARY = r"^(?:-?(?:0|[1-9][0-9]{0,14})(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)?$"
#: The column of file names, where each file is a site.
_FILE = "(file)"
#: The folder of rows without a value, as Hive and Spark write it.
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"


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
    import narwhals.stable.v2 as nw  # slow to load for those who have no frames
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
    if series.dtype.is_integer() and series.null_count() == 0:  # no walk through Python
        return as_column(series.to_numpy())
    decimal = series.dtype.is_decimal()
    return as_column([float(cell) if decimal and cell is not None else cell for cell in series.to_list()])


# --- columns from files ---------------------------------------------------------------------------------------


def split_name(path: Path) -> tuple[str, str]:
    """Return the name of a table's file without its suffix, and the suffix that tells the format: .csv of .csv.gz."""
    inner = Path(path.name[:-3]) if path.suffix.lower() == ".gz" else path
    return inner.stem, inner.suffix.lower()


def read_columns(path: str | os.PathLike[str], decimal: DecimalMark = ".") -> RawColumns:
    """Read the columns of a CSV file, which may be compressed (.csv.gz), of a Parquet or an Excel file, by suffix."""
    check_choice("decimal", decimal, get_args(DecimalMark))
    path = Path(path)
    suffix = split_name(path)[1]
    if suffix in PARQUET_SUFFIXES:
        table = _whole_parquet(path, open_parquet(path).read)
        with in_file(path, DataError):
            return columns_of(table)
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
    """Read the first sheet of an Excel file by openpyxl: its first row has the names, formulas have their values."""
    if not path.is_file():
        raise DataError(f"there is no file {path}: check the path")
    try:
        import openpyxl
    except ImportError:
        raise missing_dependency("openpyxl", f"reading {path.name}", extra="excel") from None
    try:
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
        first, n_sheets = book.worksheets[0], len(book.worksheets)
        rows = [[None if is_gap(cell) else cell for cell in row] for row in first.iter_rows(values_only=True)]
        book.close()
    except (OSError, KeyError, IndexError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not a whole Excel file ({error}); save or copy it again") from None
    if n_sheets > 1:
        text = f"{path.name} has {n_sheets} sheets, and the first one, {first.title!r}, is read"
        warnings.warn(text, TableWarning, stacklevel=2)
    while rows and not any(cell is not None for cell in rows[-1]):
        rows.pop()
    if not rows:
        raise DataError(f"{path} is empty: expected a row of names and at least one row")
    header = ["" if name is None else str(name).strip() for name in rows[0]]
    columns = list(zip(*rows[1:], strict=True)) or [()] * len(header)
    # cells that once held something make columns without name and content
    kept = [k for k, name in enumerate(header) if name or any(cell is not None for cell in columns[k])]
    _check_header(path, [header[k] for k in kept])
    return {header[k]: as_column(columns[k]) for k in kept}


def open_parquet(path: Path) -> Any:
    """Open a Parquet file by pyarrow, which reads its footer alone."""
    if not path.is_file():
        raise DataError(f"there is no file {path}: check the path")
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing_dependency("pyarrow", f"reading {path.name}", extra="parquet") from None
    # One file, also where a parent folder looks like "key=value", which pyarrow would take for a partition.
    return _whole_parquet(path, lambda: pyarrow.parquet.ParquetFile(path, pre_buffer=False))


def _whole_parquet(path: Path, read: Callable[[], Any]) -> Any:
    import pyarrow

    try:
        return read()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a whole Parquet file ({error}); write or copy it again") from None


def read_cells(path: str | os.PathLike[str], decimal: DecimalMark = ".") -> tuple[list[str], list[list[str]]]:
    """Read header and columns of a CSV file as text, without any inference."""
    path = Path(path)
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
    """Return the first of comma, semicolon, tab and bar that is in the header; the comma last where it is decimal."""
    first_line = text.lstrip("\r\n").partition("\n")[0]
    return next((mark for mark in (",;\t|" if decimal == "." else ";\t|,") if mark in first_line), ",")


def _decoded(path: Path) -> str:
    """Read the text of a file, without a byte order mark."""
    try:
        with _opened(path) as file:
            content = file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}); write or copy it again") from None
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


def _opened(path: Path) -> BinaryIO:
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]


def _read_large_csv(path: Path, decimal: DecimalMark = ".") -> RawColumns | None:
    """Read a CSV file by pyarrow, many times faster; None where the standard library must, or says what is wrong."""
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
    _, header, delimiter = csv_head(path, decimal)
    names = [name.strip() for name in header]
    parse = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    kinds = dict.fromkeys(header, pyarrow.string())
    convert = pyarrow.csv.ConvertOptions(
        column_types=kinds, strings_can_be_null=False, quoted_strings_can_be_null=False
    )
    try:
        table = pyarrow.csv.read_csv(path, parse_options=parse, convert_options=convert)
    except pyarrow.ArrowException:
        return None
    if table.column_names != header:  # a line break within the header, or something else that is rare
        return None
    return {name: _column_of_text(table.column(k), decimal) for k, name in enumerate(names)}


def csv_head(path: Path, decimal: DecimalMark = ".") -> tuple[str, list[str], str]:
    """Return the first lines of a CSV file, the cells of its header, and the delimiter."""
    with _opened(path) as file:
        head = file.read(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").decode("utf-8", errors="replace")
    delimiter = _delimiter(head, decimal)
    header = next(csv.reader([head.lstrip("\r\n").partition("\n")[0]], delimiter=delimiter), [])
    _check_header(path, [name.strip() for name in header])
    return head, header, delimiter


def _column_of_text(cells: Any, decimal: DecimalMark) -> AnyArray:
    """Return one column from pyarrow's text, as `infer_column` would."""
    import pyarrow
    import pyarrow.compute as pc

    if decimal == "." and pc.all(pc.match_substring_regex(cells, _ORDINARY)).as_py():
        empty = pc.equal(cells, "")
        known = pc.if_else(empty, None, cells) if pc.any(empty).as_py() else cells
        numbers: AnyArray = pc.cast(known, pyarrow.float64()).to_numpy()
        return numbers.astype(np.float64)
    encoded = cells.combine_chunks().dictionary_encode()  # inference needs distinct cells only
    distinct = infer_column(encoded.dictionary.to_pylist(), decimal)
    return np.asarray(distinct[encoded.indices.to_numpy()])


# --- where rows came from -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowPlaces:
    """Name rows of files that were read one after the other, ``counts`` of each, by file and line."""

    files: tuple[Path, ...]
    counts: Sequence[int]

    def __call__(self, row: int) -> str:
        ends = np.cumsum(self.counts)
        k = int(np.searchsorted(ends, row, side="right"))
        within = row - int(ends[k] - self.counts[k])
        file = self.files[k]
        name = f"{file.name}, " if len(self.files) > 1 else ""
        if split_name(file)[1] in (*PARQUET_SUFFIXES, EXCEL_SUFFIX):
            return f"{name}row {within + 1 + (split_name(file)[1] == EXCEL_SUFFIX)}"
        return f"{name}line {_line_of(file, within)}"


def row_places(path: Path, columns: Mapping[str, Sized]) -> RowPlaces:
    """Return what names the rows of a file that was read as ``columns``."""
    return RowPlaces((Path(path),), (len(next(iter(columns.values()), ())),))


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


# --- several files as one table --------------------------------------------------------------------------------


def files_of(path: str | os.PathLike[str]) -> list[Path]:
    """Return the files that a path stands for: itself, those of a directory, or those of a pattern.

    Of a directory without files of its own, those of its partitions, folders such as ``clinic=north``.
    """
    place = Path(path)
    if place.is_dir():
        suffixes = (*CSV_SUFFIXES, *PARQUET_SUFFIXES, EXCEL_SUFFIX)
        for pattern in ("*", "*=*/**/*"):
            inside = (file for file in place.glob(pattern) if file.is_file() and not file.name.startswith((".", "_")))
            if files := sorted(file for file in inside if split_name(file)[1] in suffixes):
                return files
        raise DataError(f"the directory {place} has no file that ends in {', '.join(suffixes)}")
    if not place.exists() and glob.has_magic(str(path)):
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207
        if not found:
            raise DataError(f"no file is called like {path}: check the pattern")
        return found
    return [place]


def partitions(path: str | os.PathLike[str], files: Sequence[Path]) -> RawColumns:
    """Return the columns that folders such as ``clinic=north`` below a path stand for, one value for each file."""
    root = Path(path)
    while glob.has_magic(str(root)):
        root = root.parent
    folders = [file.relative_to(root).parts[:-1] if file.is_relative_to(root) else () for file in files]
    keys = [dict(part.split("=", 1) for part in parts if "=" in part) for parts in folders]
    for file, own in zip(files, keys, strict=True):
        if own.keys() != keys[0].keys():
            raise DataError(f"{file}: its folders name {listed(own) or 'nothing'}, but others name {listed(keys[0])}")
    values = {name: [unquote(own[name]) for own in keys] for name in keys[0]}
    return {
        name: infer_column(["" if text == _NO_PARTITION else text for text in texts]) for name, texts in values.items()
    }


def read_files(
    path: str | os.PathLike[str],
    site: str | None,
    wanted: Iterable[str] | None = None,
    decimal: DecimalMark = ".",
) -> tuple[RawColumns, str, RowPlaces]:
    """Read all files as one table; return its columns, the name of the site column, and where rows came from.

    Of several files, all columns are read, or those ``wanted``; without a site column, each file is a site.
    """
    files = files_of(path)
    if len(files) == 1 and not Path(path).is_dir():
        columns = read_columns(files[0], decimal)
        if not site:
            text = f"say which column holds the sites, {argument('site')}; it has {listed(columns, 20)}"
            raise DataError(f"{path}: {text}")
        return columns, site, row_places(files[0], columns)
    tables = [read_columns(file, decimal) for file in files]
    counts = [len(next(iter(table.values()), ())) for table in tables]
    folders = partitions(path, files)
    for k, (table, rows) in enumerate(zip(tables, counts, strict=True)):
        table |= {name: column[k : k + 1].repeat(rows) for name, column in folders.items()}
    if site is None and len(folders) == 1:
        (site,) = folders
    needed = set(tables[0]) if wanted is None else {*wanted, *([] if site is None else [site])}
    problems = []
    for file, table in zip(files, tables, strict=True):
        missing, extra = needed - set(table), set(table) - needed if wanted is None else set()
        if missing:
            problems.append(f"{file}: there is no column {listed(sorted(missing))}")
        if extra:
            problems.append(f"{file}: there is a column {listed(sorted(extra))} that {files[0].name} does not have")
    stems = [split_name(file)[0] for file in files]
    for file, stem, rows in zip(files, stems, counts, strict=True):
        if site is None and stems.count(stem) > 1:
            problems.append(f"{file}: another file of the directory also stands for site {stem!r}")
        if site is None and rows == 0:
            problems.append(f"{file}: site {stem!r} has no rows; remove the file or give it data")
    if problems:
        raise DataError("\n".join(problems))
    stacked = {name: _stacked_column(name, files, tables) for name in tables[0] if name in needed}
    places = RowPlaces(tuple(files), counts)
    if site is not None:
        return stacked, site, places
    return {_FILE: np.repeat(np.array(stems, dtype=object), counts), **stacked}, _FILE, places


def _stacked_column(name: str, files: Sequence[Path], tables: Sequence[Mapping[str, AnyArray]]) -> AnyArray:
    parts = [table[name] for table in tables]
    if len({part.dtype.kind == "O" for part in parts}) == 1:
        return np.concatenate(parts)
    other = next(k for k, part in enumerate(parts) if part.dtype.kind == "O")
    kind = infer_kind(parts[other])
    for k, (file, part) in enumerate(zip(files, parts, strict=True)):
        if part.dtype.kind == "O":
            continue
        # an empty column has no type of its own; a word among numbers is found with all other mistakes
        if kind.kind == "number" or (part.dtype.kind == "f" and np.isnan(part).all()):
            parts[k] = np.array([None if cell != cell else cell for cell in part.tolist()], dtype=object)
        elif split_name(file)[1] in CSV_SUFFIXES and all(level[:1].isdigit() for level in kind.levels):
            header, cells = read_cells(file)  # ids such as 007, which another file has without zeros
            parts[k] = np.array([cell.strip() or None for cell in cells[header.index(name)]], dtype=object)
        else:
            raise DataError(f"{file}: column {name!r} is numeric, but text in {files[other].name}: write it in one way")
    return np.concatenate(parts)


# --- writing --------------------------------------------------------------------------------------------------


def write_csv(path: str | os.PathLike[str], header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file (UTF-8, comma) in one piece: a reader never sees half of it."""
    path = Path(path)
    if not path.parent.is_dir():
        raise DataError(f"cannot write {path}: there is no directory {path.parent}")
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerows(itertools.chain([header], rows))
