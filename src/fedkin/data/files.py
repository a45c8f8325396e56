"""Read several files as one table: at once, or in batches (`FileTable`)."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from glob import has_magic
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import unquote

import numpy as np

from fedkin._base import AnyArray, Index, T, listed, replacing, report_progress, some_of
from fedkin._storage import place_of
from fedkin.data.cells import DecimalMark, infer_column, infer_kind
from fedkin.data.columns import (
    CSV_SUFFIXES,
    EXCEL_SUFFIX,
    PARQUET_SUFFIXES,
    RawColumns,
    RowPlaces,
    arrow_csv,
    by_distinct_cells,
    columns_of_batch,
    csv_head,
    csv_kinds,
    open_parquet,
    read_cells,
    read_columns,
    split_name,
    write_csv,
)
from fedkin.data.tables import TableInMemory
from fedkin.errors import DataError, argument, missing_dependency

#: Most cells, and most rows, of a batch.
_BATCH_CELLS, _BATCH_ROWS = 4_000_000, 262_144
#: Rows of a Parquet file from which its row groups are read in several pieces.
_PIECE_ROWS = 1 << 22
#: Smaller CSV files (in bytes, together) are always read at once.
_LARGE_CSV = 10_000_000
#: Bytes of a CSV file read at a time, and the approximate compression ratio of compressed ones.
_BLOCK_BYTES, _COMPRESSION = 1 << 24, 4
#: The column of file names, if each file is a site.
_FILE = "(file)"
#: The folder of rows with a missing value, as written by Hive and Spark.
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"


# --- which files --------------------------------------------------------------------------------------------------


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


def _files_with_sites(
    path: str | os.PathLike[str], site: str | None
) -> tuple[tuple[Path, ...], RawColumns, str | None]:
    """Return the files of a path, the columns with one value per file, and the site column.

    Folders such as ``clinic=north`` are columns. Without a site column, a single such column has the sites; else each
    file of a directory or pattern is a site. A single file has None.
    """
    files, root = tuple(files_of(path)), _root(place_of(path))
    parts = [file.relative_to(root).parts[:-1] if file.is_relative_to(root) else () for file in files]
    keys = [dict(part.split("=", 1) for part in folders if "=" in part) for folders in parts]
    for file, own in zip(files, keys, strict=True):
        if own.keys() != keys[0].keys():
            raise DataError(f"{file}: its folders name {listed(own) or 'nothing'}, but others name {listed(keys[0])}")
    values = {name: [unquote(own[name]) for own in keys] for name in keys[0]}
    folders: RawColumns = {
        name: infer_column(["" if text == _NO_PARTITION else text for text in texts]) for name, texts in values.items()
    }
    if site is None and len(folders) == 1:
        (site,) = folders
    if site is not None or (len(files) == 1 and not place_of(path).is_dir()):
        return files, folders, site
    stems = [split_name(file)[0] for file in files]
    for k, (file, stem) in enumerate(zip(files, stems, strict=True)):
        if stem in stems[:k]:
            raise DataError(f"{file}: another file of the directory also stands for site {stem!r}")
    return files, {_FILE: np.array(stems, dtype=object), **folders}, _FILE


# --- in batches ---------------------------------------------------------------------------------------------------


def in_batches(path: Path, decimal: DecimalMark = ".") -> bool:
    """Return whether files can be read in batches: all are Parquet files, or large CSV files."""
    files = files_of(path)
    if all(split_name(file)[1] in PARQUET_SUFFIXES for file in files):
        return True
    large = all(split_name(file)[1] in CSV_SUFFIXES and file.is_file() for file in files) and decimal == "."
    return large and sum(file.stat().st_size for file in files) >= _LARGE_CSV


def open_files(path: str | os.PathLike[str], site: str | None = None) -> tuple[FileTable, str | None]:
    """Open files for reading in batches; return the table and its site column, as `read_files` does."""
    files, folders, found = _files_with_sites(path, site)
    suffixes = {split_name(file)[1]: file for file in files}
    csv_files = suffixes.keys() <= {*CSV_SUFFIXES} and all(file.is_file() for file in files)
    for file in () if csv_files else [file for suffix, file in suffixes.items() if suffix not in PARQUET_SUFFIXES]:
        raise DataError(f"{file} is not a Parquet file: batches need files that are all Parquet, or all CSV")
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise missing_dependency("pyarrow", f"reading {files[0].name} in batches", extra="parquet") from None
    return FileTable(files, folders, _common_kinds(files) if csv_files else None), found


def no_site_column(path: str | os.PathLike[str], columns: Iterable[str]) -> DataError:
    """Return the error about a table without a site column."""
    return DataError(
        f"no site column given for {path}: add {argument('site', 'COL')}; it has {some_of([*columns], 20)}"
    )


def _common_kinds(files: Sequence[Path]) -> dict[str, str]:
    """Return the kinds of the columns of CSV files: text where files differ."""
    each = [csv_kinds(file) for file in files]
    kinds = {name: {one.get(name) for one in each} for name in each[0]}
    return {name: str(found.pop()) if len(found) == 1 else "O" for name, found in kinds.items()}


@dataclass(frozen=True)
class FileTable:
    """A `fedkin.data.Table` of Parquet or CSV files with the same columns, read in batches."""

    files: tuple[Path, ...]
    folders: RawColumns = field(default_factory=dict)  # columns with one value per file
    kinds: Mapping[str, str] | None = None  # kinds of NumPy types of the columns of CSV files; None for Parquet
    groups: Sequence[int] | None = None  # row groups of the only file; by default all
    place: RowPlaces | None = None  # of a piece

    @property
    def names(self) -> Sequence[str]:
        """Names of the columns of the first file, and those with one value per file."""
        own = open_parquet(self.files[0]).schema_arrow.names if self.kinds is None else self.kinds
        return [*(name for name in own if name not in self.folders), *self.folders]

    def batches(self, names: Sequence[str]) -> Iterator[RawColumns]:
        """Yield batches of some columns of all files."""
        inside, outside = ([name for name in names if (name in self.folders) == out] for out in (False, True))
        size = max(1024, min(_BATCH_ROWS, _BATCH_CELLS // max(len(names), 1)))
        done, total = 0, self.n_rows
        for k, file in enumerate(self.files):
            read = self._of_csv(file, inside) if self.kinds is not None else self._of_parquet(file, inside, size)
            before, n = done, 0
            for n, batch in read:
                yield batch | {name: self.folders[name][k : k + 1].repeat(n) for name in outside}
                done += n
                report_progress("reading rows", min(done, total), total)
            if self.kinds is not None:
                self.at.counts[k] = done - before
        if self.kinds is not None:  # their number was a guess
            report_progress("reading rows", total, total)

    def _of_parquet(self, file: Path, names: list[str], size: int) -> Iterator[tuple[int, RawColumns]]:
        opened = open_parquet(file)
        _check_columns(file, names, opened.schema_arrow.names)
        for batch in _read_ahead(opened.iter_batches(size, self.groups, names)):
            yield batch.num_rows, columns_of_batch(names, batch)

    def _of_csv(self, file: Path, names: list[str]) -> Iterator[tuple[int, RawColumns]]:
        import pyarrow.csv

        assert self.kinds is not None
        kinds, (_, header, delimiter) = self.kinds, csv_head(file)
        raw = {name.strip(): name for name in header}
        _check_columns(file, names, raw)
        read = names or list(raw)[:1]  # rows are counted by some column
        types = {raw[name]: "double" if kinds[name] == "f" else "string" for name in read}
        try:
            opened = arrow_csv(pyarrow.csv.open_csv, file, delimiter, types, block_size=_BLOCK_BYTES)
            for batch in _read_ahead(iter(opened)):
                yield batch.num_rows, {name: _csv_column(batch.column(raw[name]), kinds[name]) for name in names}
        except pyarrow.ArrowException as error:
            raise DataError(f"{file}: {' '.join(str(error).split())}; correct this row") from None

    def pieces(self) -> list[FileTable]:
        """Return tables of single files; those of a large Parquet file are consecutive row groups."""
        if self.place is not None:
            return [self]
        pieces = []
        for k, file in enumerate(self.files):
            folders = {name: values[k : k + 1] for name, values in self.folders.items()}
            place = RowPlaces((file,), [sys.maxsize], named=len(self.files) > 1)
            if self.kinds is not None:
                pieces.append(FileTable((file,), folders, self.kinds, place=place))
                continue
            sizes = _group_sizes(file)
            before = np.cumsum(sizes) - sizes
            for groups in np.split(np.arange(before.size), np.flatnonzero(np.diff(before // _PIECE_ROWS)) + 1):
                first = int(before[groups[0]]) if groups.size else 0
                at = replace(place, first=first)
                pieces.append(FileTable((file,), folders, None, groups.tolist(), at))
        return pieces

    @cached_property
    def n_rows(self) -> int:
        """Number of rows: of Parquet files from their footers, of CSV files roughly, from their first lines."""
        if self.kinds is None:
            return sum(int(_group_sizes(file)[self.groups or slice(None)].sum()) for file in self.files)
        n = 0.0
        for file in self.files:
            head = csv_head(file)[0]
            size = file.stat().st_size * (_COMPRESSION if file.suffix == ".gz" else 1)
            n += size * max(head.count("\n"), 1) / max(len(head), 1)
        return int(n)

    @cached_property
    def at(self) -> RowPlaces:
        """Function that names rows; the rows of CSV files are counted as they are read."""
        if self.place is not None:
            return self.place
        counts = [sys.maxsize if self.kinds is not None else int(_group_sizes(file).sum()) for file in self.files]
        return RowPlaces(self.files, counts, named=len(self.files) > 1)


def _check_columns(file: Path, names: Sequence[str], present: Iterable[str]) -> None:
    if absent := [name for name in names if name not in present]:
        raise DataError(f"{file.name} has no column {listed(absent)}")


def _group_sizes(file: Path) -> Index:
    """Return the number of rows of each row group of a Parquet file."""
    known = open_parquet(file).metadata
    return np.array([known.row_group(k).num_rows for k in range(known.num_row_groups)], dtype=np.int64)


def _csv_column(cells: Any, kind: str) -> AnyArray:
    """Return one column as numbers, as truth values where it fits, or as text."""
    if kind == "f":
        return np.asarray(cells.to_numpy(zero_copy_only=False))
    strip = lambda words: np.array([word.strip() or None for word in words], dtype=object)  # noqa: E731
    return by_distinct_cells(cells, infer_column if kind == "b" else strip)


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


# --- at once ------------------------------------------------------------------------------------------------------


def read_files(
    path: str | os.PathLike[str],
    site: str | None,
    wanted: Iterable[str] | None = None,
    decimal: DecimalMark = ".",
) -> tuple[TableInMemory, str | None]:
    """Read all files as one table; return it with its site column.

    Of several files, read all columns, or those ``wanted``. Without a site column, each file of a directory is a site;
    for a single file, the result has None.
    """
    files, folders, found = _files_with_sites(path, site)
    if len(files) == 1 and not folders:
        columns = read_columns(files[0], decimal)
        return TableInMemory(columns, RowPlaces(files, [len(next(iter(columns.values()), ()))])), found
    tables = [read_columns(file, decimal) for file in files]
    counts = [len(next(iter(table.values()), ())) for table in tables]
    for k, (table, rows) in enumerate(zip(tables, counts, strict=True)):
        table |= {name: column[k : k + 1].repeat(rows) for name, column in folders.items()}
    needed = set(tables[0]) if wanted is None else {*wanted, *([] if found is None else [found])}
    problems = []
    for file, table, rows in zip(files, tables, counts, strict=True):
        missing, extra = needed - set(table), set(table) - needed if wanted is None else set()
        if missing:
            problems.append(f"{file}: there is no column {listed(sorted(missing))}")
        if extra:
            problems.append(f"{file}: there is a column {listed(sorted(extra))} that {files[0].name} does not have")
        if found == _FILE and rows == 0:
            problems.append(f"{file}: site {split_name(file)[0]!r} has no rows; remove the file or give it data")
    if problems:
        raise DataError("\n".join(problems))
    stacked = {name: _stacked_column(name, files, tables) for name in tables[0] if name in needed}
    return TableInMemory(stacked, RowPlaces(files, counts, named=len(files) > 1)), found


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
