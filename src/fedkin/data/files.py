"""Tables that stay in their files, read in batches: Parquet files, or one CSV file."""

from __future__ import annotations

import csv
import io
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedkin._base import AnyArray, T, listed, replacing, report_progress
from fedkin.data.cells import MISSING, infer_column
from fedkin.data.columns import (
    CSV_SUFFIXES,
    HEAD_BYTES,
    PARQUET_SUFFIXES,
    RawColumns,
    RowPlaces,
    columns_of,
    csv_head,
    files_of,
    open_parquet,
    partitions,
    split_name,
    write_csv,
)
from fedkin.data.schema import Table
from fedkin.errors import DataError, missing_dependency

#: Cells, and rows, of a batch at most.
_BATCH_CELLS, _BATCH_ROWS = 4_000_000, 262_144
#: Bytes of a CSV file that are read at a time; how much longer a compressed one is, about.
_BLOCK_BYTES, _COMPRESSION = 1 << 24, 4


def open_files(path: str | os.PathLike[str]) -> ParquetTable | CsvTable:
    """Open the files that a path stands for, to be read in batches: Parquet files, or one CSV file."""
    files = files_of(path)
    if len(files) == 1 and files[0].is_file() and split_name(files[0])[1] in CSV_SUFFIXES:
        return CsvTable.open(files[0])
    for file in (file for file in files if file.suffix.lower() not in PARQUET_SUFFIXES):
        raise DataError(f"{file} is not a Parquet file, and only those, or one CSV file, are read in batches")
    return ParquetTable(tuple(files), partitions(path, files))


def _read_ahead(batches: Iterator[T]) -> Iterator[T]:
    """Yield batches while a thread reads the next one."""
    with ThreadPoolExecutor(1) as reader:
        upcoming = reader.submit(next, batches, None)
        while (found := upcoming.result()) is not None:
            upcoming = reader.submit(next, batches, None)
            yield found


def write_batches(path: Path, batches: Iterable[Mapping[str, Sequence[object]]]) -> None:
    """Write columns, batch after batch, to a CSV file, or to a Parquet file, by the suffix; whole or not at all."""
    turn = iter(batches)
    first = next(turn)
    every = itertools.chain([first], turn)
    if path.suffix.lower() not in PARQUET_SUFFIXES:
        write_csv(path, list(first), itertools.chain.from_iterable(zip(*one.values(), strict=True) for one in every))
        return
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing_dependency("pyarrow", f"writing {path.name}", extra="parquet") from None
    with replacing(path) as temporary:
        schema = pyarrow.table(dict(first)).schema
        with pyarrow.parquet.ParquetWriter(temporary, schema) as writer:
            for one in every:
                writer.write_table(pyarrow.table(dict(one), schema=schema))


def head_of(table: Table, name: str) -> AnyArray:
    """Return the first batch of a column."""
    return next(table.batches([name]), {name: np.empty(0)})[name]


@dataclass(frozen=True)
class ParquetTable:
    """Parquet files with the same columns as a `fedkin.data.Table`, read in batches."""

    files: tuple[Path, ...]
    folders: RawColumns = field(default_factory=dict)  # columns that folders stand for, one value for each file

    @property
    def names(self) -> Sequence[str]:
        """Names of the columns of the first file, and of its folders."""
        names: list[str] = open_parquet(self.files[0]).schema_arrow.names
        return [*(name for name in names if name not in self.folders), *self.folders]

    def batches(self, names: Sequence[str]) -> Iterator[RawColumns]:
        """Yield some columns of all files, batch after batch."""
        inside = [name for name in names if name not in self.folders]
        n = max(1024, min(_BATCH_ROWS, _BATCH_CELLS // max(len(names), 1)))
        done, total = 0, sum(self.places().counts)
        for k, file in enumerate(self.files):
            opened = open_parquet(file)
            absent = [name for name in inside if name not in opened.schema_arrow.names]
            if absent:
                raise DataError(f"{file.name} has no column {listed(absent)}")
            folders = {name: self.folders[name][k : k + 1] for name in names if name in self.folders}
            for batch in _read_ahead(opened.iter_batches(n, columns=inside)):
                found = {name: _column_of_arrow(name, batch.column(name)) for name in inside}
                yield found | {name: value.repeat(batch.num_rows) for name, value in folders.items()}
                done += batch.num_rows
                report_progress("reading rows", done, total)

    def pieces(self) -> list[ParquetTable]:
        """Return a table for each file."""
        folders = [{name: values[k : k + 1] for name, values in self.folders.items()} for k in range(len(self.files))]
        return [ParquetTable((file,), folder) for file, folder in zip(self.files, folders, strict=True)]

    @property
    def n_rows(self) -> int:
        """Number of rows, from the footers of the files."""
        return sum(self.places().counts)

    def places(self) -> RowPlaces:
        """Return what names the rows of all files."""
        return RowPlaces(self.files, [open_parquet(file).metadata.num_rows for file in self.files])


@dataclass(frozen=True)
class CsvTable:
    """A CSV file as a `fedkin.data.Table`, read in batches by pyarrow; its first lines tell what columns are."""

    file: Path
    names: Sequence[str]
    n_rows: int  # about, by the length of the first lines

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
        """Return the table as it is: one file is read from its first line on."""
        return [self]

    def _kinds(self) -> dict[str, str]:
        """Return the kind of numpy type of each column, by the first lines."""
        head, header, delimiter = csv_head(self.file)
        whole = head.rpartition("\n")[0] if len(head) >= HEAD_BYTES // 4 else head
        rows = [row for row in csv.reader(io.StringIO(whole, newline=""), delimiter=delimiter) if row][1:]
        rows = [row for row in rows if len(row) == len(header)]
        return {name: infer_column([row[k] for row in rows]).dtype.kind for k, name in enumerate(self.names)}

    def batches(self, names: Sequence[str]) -> Iterator[RawColumns]:
        """Yield some columns, batch after batch."""
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
            for batch in _read_ahead(iter(pyarrow.csv.open_csv(self.file, **how))):
                cells = {name: batch.column(raw[name]) for name in names}
                yield {
                    name: column.to_numpy(zero_copy_only=False)
                    if kinds[name] == "f"
                    else _column_of_words(column, kinds[name] == "b")
                    for name, column in cells.items()
                }
                done += batch.num_rows
                report_progress("reading rows", min(done, self.n_rows), self.n_rows)
        except pyarrow.ArrowException as error:
            raise DataError(f"{self.file}: {' '.join(str(error).split())}; correct this row") from None
        report_progress("reading rows", self.n_rows, self.n_rows)

    def places(self) -> RowPlaces:
        """Return what names the rows."""
        return RowPlaces((self.file,), [sys.maxsize])


#: A table that stays in its files.
FileTable = ParquetTable | CsvTable


def _column_of_words(cells: Any, truth: bool) -> AnyArray:
    """Return one column from pyarrow's text, as text or, where it fits, as truth values."""
    encoded = cells.dictionary_encode()
    words = encoded.dictionary.to_pylist()
    distinct = infer_column(words) if truth else np.array([word.strip() or None for word in words], dtype=object)
    return np.asarray(distinct[encoded.indices.to_numpy()])


def _column_of_arrow(name: str, cells: Any) -> AnyArray:
    """Return one column from a batch of pyarrow; of text, Python looks at distinct cells only."""
    import pyarrow

    kind = cells.type.value_type if isinstance(cells, pyarrow.DictionaryArray) else cells.type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)) or cells.null_count == len(cells):
        return columns_of(pyarrow.table({name: cells}))[name]
    encoded = cells if isinstance(cells, pyarrow.DictionaryArray) else cells.dictionary_encode()
    distinct = np.array([*encoded.dictionary.to_pylist(), None], dtype=object)
    return np.asarray(distinct[encoded.indices.fill_null(len(distinct) - 1).to_numpy()])
