"""Which columns of a table are device, target, offset and features; tables with one file per device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedkin._base import AnyArray, listed
from fedkin.data.cells import misread_number
from fedkin.data.tables import CSV_SUFFIXES, PARQUET_SUFFIXES, Columns, read_columns
from fedkin.errors import DataError


def chosen_features(
    columns: Columns, device: str, target: str | None, features: Sequence[str] | None, offset: str | None
) -> list[str]:
    roles = {"device": device, "target": target, "offset": offset}
    taken: dict[str, str] = {}
    for role, name in roles.items():
        if name is None:
            continue
        check_present(columns, name, role)
        if name in taken:
            raise DataError(f"column {name!r} cannot be both {taken[name]} and {role}")
        taken[name] = role
    if features is None:
        rest = [name for name in columns if name not in taken]
        text = [name for name in rest if columns[name].dtype.kind == "O"]
        for name in text:
            check_numbers(columns[name], f"feature {name!r}")
        if text:
            raise DataError(
                f"not numeric: {listed(text)}; say which columns to use with features=, or encode them as numbers"
            )
        if "" in rest:
            raise DataError(
                "a column has no name (row numbers that were written along?): remove it, or say which columns to use "
                "with features="
            )
        if not rest:
            raise DataError(f"no column is left for the features beside {listed(taken)}")
        return rest
    chosen = [features] if isinstance(features, str) else list(features)
    for name in chosen:
        check_present(columns, name, "feature")
        if name in taken:
            raise DataError(f"column {name!r} cannot be both {taken[name]} and a feature")
        if chosen.count(name) > 1:
            raise DataError(f"feature {name!r} is given twice")
    return chosen


def check_columns(columns: Columns, device: str, target: str | None, features: Sequence[str]) -> None:
    """Raise `DataError` for a text among the numbers of a feature or target, and for a row without a device."""
    for name in features:
        if columns[name].dtype.kind not in "fb":
            check_numbers(columns[name], f"feature {name!r}")
            cell = next((cell for cell in columns[name] if cell is not None), None)
            raise DataError(
                f"feature {name!r} is not numeric (it has {cell!r}): encode it as numbers, for example as 0/1 columns"
            )
    for row, cell in enumerate(columns[device]):
        if cell is None or cell != cell:
            raise DataError(f"row {row}: column {device!r} is empty, so the row has no device; fill it or drop the row")
    if target is not None and columns[target].dtype.kind == "O":
        check_numbers(columns[target], f"target {target!r}", "; if these are classes, give each name a letter (c1, c2)")


def check_numbers(column: AnyArray, what: str, otherwise: str = "") -> None:
    """Raise `DataError` with the first cell that is not a number, in a column that likely was meant to hold numbers."""
    misread = misread_number(column)
    if misread is not None:
        row, advice = misread
        raise DataError(f"row {row}: the {what} is {column[row]!r}, which is not a number; {advice}{otherwise}")


def check_present(columns: Columns, name: str, role: str) -> None:
    if name not in columns:
        raise DataError(f"there is no column {name!r} for the {role}; the table has {listed(columns, most=20)}")


def directory_columns(
    folder: Path, device: str | None, target: str | None, features: Sequence[str] | None, offset: str | None
) -> tuple[Columns, str]:
    """The files of a directory as one table, and the name of its device column."""
    suffixes = CSV_SUFFIXES + PARQUET_SUFFIXES
    files = sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and file.suffix.lower() in suffixes and not file.name.startswith(".")
    )
    if not files:
        raise DataError(f"the directory {folder} has no file that ends in {', '.join(suffixes)}")
    tables = [read_columns(file) for file in files]
    wanted = set(tables[0]) if features is None else {device, target, offset, *features} - {None}
    for file, table in zip(files, tables, strict=True):
        different = wanted.symmetric_difference(table) if features is None else wanted.difference(table)
        if different:
            missing = [name for name in different if name not in table]
            extra = [name for name in different if name in table]
            raise DataError(
                f"{file}: "
                + "; ".join(
                    part
                    for part in (
                        f"there is no column {listed(missing)}" if missing else "",
                        f"there is a column {listed(extra)} that {files[0].name} does not have" if extra else "",
                    )
                    if part
                )
            )
    stacked = {name: stacked_column(name, files, tables) for name in tables[0] if name in wanted}
    if device is not None:
        return stacked, device
    stems = [file.stem for file in files]
    for file, table in zip(files, tables, strict=True):
        if stems.count(file.stem) > 1:
            raise DataError(f"{file}: another file of the directory also stands for device {file.stem!r}")
        if all(len(column) == 0 for column in table.values()):
            raise DataError(f"{file}: device {file.stem!r} has no rows; remove the file or give it data")
    lengths = [len(next(iter(table.values()))) for table in tables]
    ids = np.repeat(np.array(stems, dtype=object), lengths)
    name = "(file)"
    return {name: ids, **stacked}, name


def read_directory(folder: Path, device: str | None, names: Sequence[str]) -> tuple[Columns, str]:
    """Some columns of a directory's files as one table, and its device column: the given one, or that of file names."""
    return directory_columns(folder, device, None, names, None)


def stacked_column(name: str, files: list[Path], tables: list[Columns]) -> AnyArray:
    parts = [table[name] for table in tables]
    if any(part.dtype.kind == "O" for part in parts):
        for k, (file, part) in enumerate(zip(files, parts, strict=True)):
            if part.dtype.kind == "O":
                continue
            if part.dtype.kind == "f" and np.isnan(part).all():  # an empty column has no type of its own
                parts[k] = np.full(len(part), None, dtype=object)
                continue
            other, text = next((f, p) for f, p in zip(files, parts, strict=True) if p.dtype.kind == "O")
            misread = misread_number(text)
            if misread is not None:
                row, advice = misread
                raise DataError(
                    f"{other}: row {row} (from 0): column {name!r} is {text[row]!r}, which is not a number; {advice}"
                )
            raise DataError(f"{file}: column {name!r} is numeric, but text in {other.name}: write it in one way")
    return np.concatenate(parts)
