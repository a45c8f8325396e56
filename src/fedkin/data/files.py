"""Read tables from their files in batches: Parquet files, or one CSV file."""

from __future__ import annotations

import csv
import io
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from glob import has_magic
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import unquote

import numpy as np

from fedkin._base import AnyArray, Index, T, listed, replacing, report_progress
from fedkin._storage import place_of
from fedkin.data.cells import MISSING, DecimalMark, infer_column, infer_kind
from fedkin.data.columns import (
    CSV_SUFFIXES,
    EXCEL_SUFFIX,
    HEAD_BYTES,
    PARQUET_SUFFIXES,
    RawColumns,
    RowPlaces,
    columns_of,
    csv_head,
    open_parquet,
    open_stream,
    read_cells,
    read_columns,
    row_places,
    split_name,
    write_csv,
)
from fedkin.data.schema import Column, Schema, Table
from fedkin.errors import DataError, argument, missing_dependency

#: Most cells, and most rows, of a batch.
_BATCH_CELLS, _BATCH_ROWS = 4_000_000, 262_144
#: Rows of a Parquet file from which its row groups are read in several pieces.
_PIECE_ROWS = 1 << 22
#: Smaller CSV files (in bytes) are always read at once.
_LARGE_CSV = 10_000_000
#: Bytes of a CSV file read at a time, and the approximate compression ratio of compressed ones.
_BLOCK_BYTES, _COMPRESSION = 1 << 24, 4
#: The column of file names, if each file is a site.
_FILE = "(file)"
#: The folder of rows with a missing value, as written by Hive and Spark.
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"


def open_files(path: str | os.PathLike[str]) -> ParquetTable | CsvTable:
    """Open the files of a path for reading in batches: Parquet files, or one CSV file."""
    files = files_of(path)
    if len(files) == 1 and files[0].is_file() and split_name(files[0])[1] in CSV_SUFFIXES:
        return CsvTable.open(files[0])
    for file in (file for file in files if file.suffix.lower() not in PARQUET_SUFFIXES):
        raise DataError(f"{file} is not a Parquet file: batches need Parquet files, or one CSV file")
    return ParquetTable(tuple(files), partitions(path, files))


def _read_ahead(batches: Iterator[T]) -> Iterator[T]:
    """Yield batches while a thread reads the next one."""
    with ThreadPoolExecutor(1) as reader:
        upcoming = reader.submit(next, batches, None)
        while (found := upcoming.result()) is not None:
            upcoming = reader.submit(next, batches, None)
            yield found


def write_batches(path: Path, batches: Iterable[Mapping[str, AnyArray]]) -> int:
    """Write batches of columns to a CSV or a Parquet file, by the suffix, completely or not at all; count the rows."""
    turn, n = iter(batches), 0
    first = next(turn)

    def every() -> Iterator[Mapping[str, AnyArray]]:
        nonlocal n
        for one in itertools.chain([first], turn):
            n += len(next(iter(one.values())))
            yield one

    if path.suffix.lower() not in PARQUET_SUFFIXES:
        lines = (zip(*(column.tolist() for column in one.values()), strict=True) for one in every())
        write_csv(path, list(first), itertools.chain.from_iterable(lines))
        return n
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing_dependency("pyarrow", f"writing {path.name}", extra="parquet") from None
    with replacing(path) as temporary:
        schema = pyarrow.table(dict(first)).schema
        with temporary.open("wb") as stream, pyarrow.parquet.ParquetWriter(stream, schema) as writer:
            for one in every():
                writer.write_table(pyarrow.table(dict(one), schema=schema))
    return n


# --- tables with a known schema ---------------------------------------------------------------------------------------


def read_by_schema(
    path: Path, site: str | None, schema: Schema, needed: Sequence[Column], decimal: DecimalMark = "."
) -> tuple[RawColumns, str | None, RowPlaces]:
    """Read a table by its schema: return the columns, the name of the site column, and the positions of rows."""
    if not path.is_dir():
        columns = read_columns(path, decimal)
        return columns, site, row_places(path, columns)
    offset = [schema.offset] if schema.offset else []
    return read_files(path, site, [*(column.name for column in needed), *offset], decimal)


def table_pieces(
    path: Path, names: Sequence[str], decimal: DecimalMark = "."
) -> tuple[list[tuple[FileTable, int]], RowPlaces | None]:
    """Return the pieces of a table that is read in batches, each with its first row, and the positions of rows.

    There are none if the table is read at once, or lacks one of the columns.
    """
    if not in_batches(path, decimal):
        return [], None
    table = open_files(path)
    if not set(names) <= set(table.names) or not table.n_rows:
        return [], None
    pieces = table.pieces()
    firsts = itertools.accumulate((piece.n_rows for piece in pieces[:-1]), initial=0)
    return list(zip(pieces, firsts, strict=True)), table.places()


def in_batches(path: Path, decimal: DecimalMark = ".") -> bool:
    """Return whether to read files in batches: Parquet, or one large CSV file."""
    files = files_of(path)
    if len(files) > 1 or files[0].suffix.lower() in PARQUET_SUFFIXES:
        return all(file.suffix.lower() in PARQUET_SUFFIXES for file in files)
    return files[0].is_file() and files[0].stat().st_size >= _LARGE_CSV and decimal == "."


def head_of(table: Table, name: str) -> AnyArray:
    """Return the first batch of a column."""
    return next(table.batches([name]), {name: np.empty(0)})[name]


@dataclass(frozen=True)
class ParquetTable:
    """A `fedkin.data.Table` of Parquet files with the same columns, read in batches."""

    files: tuple[Path, ...]
    folders: RawColumns = field(default_factory=dict)  # columns defined by folders, one value per file
    groups: Sequence[int] | None = None  # row groups of the only file; by default all

    @property
    def names(self) -> Sequence[str]:
        """Names of the columns of the first file, and of its folders."""
        names: list[str] = open_parquet(self.files[0]).schema_arrow.names
        return [*(name for name in names if name not in self.folders), *self.folders]

    def batches(self, names: Sequence[str]) -> Iterator[RawColumns]:
        """Yield batches of some columns of all files."""
        inside = [name for name in names if name not in self.folders]
        n = max(1024, min(_BATCH_ROWS, _BATCH_CELLS // max(len(names), 1)))
        done, total = 0, self.n_rows
        for piece in self.pieces():
            opened = open_parquet(piece.files[0])
            absent = [name for name in inside if name not in opened.schema_arrow.names]
            if absent:
                raise DataError(f"{piece.files[0].name} has no column {listed(absent)}")
            folders = {name: piece.folders[name] for name in names if name in piece.folders}
            for batch in _read_ahead(opened.iter_batches(n, piece.groups, inside)):
                found = {name: _column_of_arrow(name, batch.column(name)) for name in inside}
                yield found | {name: value.repeat(batch.num_rows) for name, value in folders.items()}
                done += batch.num_rows
                report_progress("reading rows", done, total)

    def pieces(self) -> list[ParquetTable]:
        """Return tables of consecutive row groups, each of one file."""
        if self.groups is not None:
            return [self]
        pieces = []
        for k, file in enumerate(self.files):
            folder = {name: values[k : k + 1] for name, values in self.folders.items()}
            sizes = _group_sizes(file)
            before = (np.cumsum(sizes) - sizes) // _PIECE_ROWS
            some = np.split(np.arange(before.size), np.flatnonzero(np.diff(before)) + 1)
            pieces += [ParquetTable((file,), folder, groups.tolist()) for groups in some]
        return pieces

    @property
    def n_rows(self) -> int:
        """Number of rows, from the footers of the files."""
        if self.groups is None:
            return sum(self.places().counts)
        return int(_group_sizes(self.files[0])[self.groups].sum())

    def places(self) -> RowPlaces:
        """Return the function that names the rows of all files."""
        return RowPlaces(self.files, [open_parquet(file).metadata.num_rows for file in self.files])


def _group_sizes(file: Path) -> Index:
    """Return the number of rows of each row group of a Parquet file."""
    known = open_parquet(file).metadata
    return np.array([known.row_group(k).num_rows for k in range(known.num_row_groups)], dtype=np.int64)


@dataclass(frozen=True)
class CsvTable:
    """A `fedkin.data.Table` of a CSV file, read in batches by pyarrow; its first lines determine kinds of columns."""

    file: Path
    names: Sequence[str]
    n_rows: int  # approximately, from the length of the first lines

    @classmethod
    def open(cls, file: Path) -> CsvTable:
        """Open a CSV file, which may be compressed."""
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise missing_dependency("pyarrow", f"reading {file.name} in batches", extra="parquet") from None
        head, header, _ = csv_head(file)
        lines, size = max(head.count("\n"), 1), file.stat().st_size * (_COMPRESSION if file.suffix == ".gz" else 1)
        return cls(file, [name.strip() for name in header], int(size * lines / max(len(head), 1)))

    def pieces(self) -> list[CsvTable]:
        """Return the table unchanged: one file is read from its first line."""
        return [self]

    def _kinds(self) -> dict[str, str]:
        """Return the kind of NumPy type of each column, from the first lines."""
        head, header, delimiter = csv_head(self.file)
        whole = head.rpartition("\n")[0] if len(head) >= HEAD_BYTES // 4 else head
        rows = [row for row in csv.reader(io.StringIO(whole, newline=""), delimiter=delimiter) if row][1:]
        rows = [row for row in rows if len(row) == len(header)]
        return {name: infer_column([row[k] for row in rows]).dtype.kind for k, name in enumerate(self.names)}

    def batches(self, names: Sequence[str]) -> Iterator[RawColumns]:
        """Yield batches of some columns."""
        import pyarrow
        import pyarrow.csv

        _, header, delimiter = csv_head(self.file)
        raw, kinds, done = dict(zip(self.names, header, strict=True)), self._kinds(), 0
        types = {raw[name]: pyarrow.float64() if kinds[name] == "f" else pyarrow.string() for name in names}
        how = {
            "read_options": pyarrow.csv.ReadOptions(block_size=_BLOCK_BYTES),
            "parse_options": pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            "convert_options": pyarrow.csv.ConvertOptions(
                column_types=types, include_columns=list(types), null_values=list(MISSING), strings_can_be_null=False
            ),
        }
        try:
            for batch in _read_ahead(iter(pyarrow.csv.open_csv(open_stream(self.file), **how))):
                cells = {name: batch.column(raw[name]) for name in names}
                yield {
                    name: column.to_numpy(zero_copy_only=False)
                    if kinds[name] == "f"
                    else _text_column(column, kinds[name] == "b")
                    for name, column in cells.items()
                }
                done += batch.num_rows
                report_progress("reading rows", min(done, self.n_rows), self.n_rows)
        except pyarrow.ArrowException as error:
            raise DataError(f"{self.file}: {' '.join(str(error).split())}; correct this row") from None
        report_progress("reading rows", self.n_rows, self.n_rows)

    def places(self) -> RowPlaces:
        """Return the function that names the rows."""
        return RowPlaces((self.file,), [sys.maxsize])


#: A table read from its files in batches.
FileTable = ParquetTable | CsvTable


def _text_column(cells: Any, truth: bool) -> AnyArray:
    """Return one column from pyarrow's text, as text or, where it fits, as truth values."""
    encoded = cells.dictionary_encode()
    words = encoded.dictionary.to_pylist()
    distinct = infer_column(words) if truth else np.array([word.strip() or None for word in words], dtype=object)
    return np.asarray(distinct[encoded.indices.to_numpy()])


def _column_of_arrow(name: str, cells: Any) -> AnyArray:
    """Return one column from a pyarrow batch; for text, only distinct cells are converted in Python."""
    import pyarrow

    if pyarrow.types.is_floating(cells.type):
        numbers: AnyArray = cells.to_numpy(zero_copy_only=False)
        return numbers.astype(np.float64, copy=False)
    kind = cells.type.value_type if isinstance(cells, pyarrow.DictionaryArray) else cells.type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)) or cells.null_count == len(cells):
        return columns_of(pyarrow.table({name: cells}))[name]
    encoded = cells if isinstance(cells, pyarrow.DictionaryArray) else cells.dictionary_encode()
    distinct = np.array([*encoded.dictionary.to_pylist(), None], dtype=object)
    return np.asarray(distinct[encoded.indices.fill_null(len(distinct) - 1).to_numpy()])


# --- several files as one table --------------------------------------------------------------------------------


def files_of(path: str | os.PathLike[str]) -> list[Path]:
    """Return the files of a path: a file, the files of a directory, or the matches of a pattern.

    For a directory without files, return the files of its partitions, folders such as ``clinic=north``.
    """
    place = place_of(path)
    if place.is_dir():
        suffixes = (*CSV_SUFFIXES, *PARQUET_SUFFIXES, EXCEL_SUFFIX)
        for pattern in ("*", "*=*/**/*"):
            if files := sorted(f for f in place.glob(pattern) if split_name(f)[1] in suffixes and _is_shown(f)):
                return files
        raise DataError(f"the directory {place} has no file that ends in {', '.join(suffixes)}")
    if not has_magic(str(place)) or place.exists():
        return [place]
    root = _root(place)
    if found := sorted(file for file in root.glob(str(PurePath(*place.parts[len(root.parts) :]))) if _is_shown(file)):
        return found
    raise DataError(f"no file matches {path}: check the pattern")


def _root(place: Path) -> Path:
    """Return the folder before the first wildcard."""
    return next(one for one in (place, *place.parents) if not has_magic(str(one)))


def _is_shown(file: Path) -> bool:
    return not file.name.startswith((".", "_")) and file.is_file()


def partitions(path: str | os.PathLike[str], files: Sequence[Path]) -> RawColumns:
    """Return the columns defined by folders such as ``clinic=north`` below a path, one value per file."""
    root = _root(place_of(path))
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
    """Read all files as one table; return its columns, the name of the site column, and a function that names rows.

    Read all columns, or those ``wanted``; without a site column, each file is a site.
    """
    files = files_of(path)
    if len(files) == 1 and not place_of(path).is_dir():
        columns = read_columns(files[0], decimal)
        if not site:
            text = f"no site column given: pass {argument('site')}; the table has {listed(columns, 20)}"
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
        # an empty column has no type; words among numbers are reported later with other mistakes
        if kind.kind == "number" or (part.dtype.kind == "f" and np.isnan(part).all()):
            parts[k] = np.array([None if cell != cell else cell for cell in part.tolist()], dtype=object)
        elif split_name(file)[1] in CSV_SUFFIXES and all(level[:1].isdigit() for level in kind.levels):
            header, cells = read_cells(file)  # ids such as 007, without zeros in another file
            parts[k] = np.array([cell.strip() or None for cell in cells[header.index(name)]], dtype=object)
        else:
            raise DataError(f"{file}: column {name!r} is numeric, but text in {files[other].name}: use one type")
    return np.concatenate(parts)
