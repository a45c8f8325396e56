"""From a table to a federation: columns read, looked at, encoded and stacked."""

from __future__ import annotations

import glob
import os
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedkin._base import AnyArray, Array, listed
from fedkin.data.checks import grouped, times_of
from fedkin.data.federation import Federation
from fedkin.data.learning.columns import Roles, data_files, stacked_files, without_dropped
from fedkin.data.learning.learning import learn_table
from fedkin.data.rows import Rows
from fedkin.data.schema import RowWords, TableSchema, parsed_numbers
from fedkin.data.tables import Columns, RowPlaces, columns_of, frame_row, read_columns
from fedkin.errors import DataError, TableWarning


def federation_of_frame(frame: object, roles: Roles) -> Federation:
    """A federation from a data frame or a mapping of columns."""
    return _federation(columns_of(frame), roles, frame_row)


def federation_of_files(path: str | os.PathLike[str], roles: Roles) -> Federation:
    """A federation from a file, a pattern of files or a directory, where each file is a site if no column says so."""
    try:
        columns, site, source = read_table(path, roles)
        return _federation(columns, replace(roles, site=site), source)
    except DataError as error:
        message = str(error)
        raise DataError(message if str(path) in message else f"{path}: {message}") from None


def files_of(path: str | os.PathLike[str]) -> list[Path]:
    """The files that a path stands for: itself, those of a directory, or those of a pattern such as rows/*.parquet."""
    place = Path(path)
    if place.is_dir():
        return data_files(place)
    if not place.exists() and glob.has_magic(str(path)):
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207
        if not found:
            raise DataError(f"no file is called like {path}: check the pattern")
        return found
    return [place]


def read_table(path: str | os.PathLike[str], roles: Roles) -> tuple[Columns, str, RowPlaces]:
    """The columns of all files, the name of the one with the sites, and where rows came from."""
    files = files_of(path)
    if len(files) > 1 or Path(path).is_dir():
        wanted = None
        if roles.features is not None:
            wanted = [*(name for name in roles.taken if name), *roles.features, *roles.categories]
        return stacked_files(files, roles.site or None, wanted)
    columns = read_columns(files[0])
    if not roles.site:
        raise DataError(f"say which column holds the sites, site=...; it has {listed(columns, 20)}")
    return columns, roles.site, RowPlaces((files[0],), (len(next(iter(columns.values()), ())),))


def _federation(columns: Columns, roles: Roles, at: RowWords) -> Federation:
    columns = without_dropped(columns, roles)
    learned = learn_table(columns, roles, at)
    for words in learned.notes:
        warnings.warn(words, TableWarning, stacklevel=5)
    rows, schema = learned.rows, learned.schema
    used = {*roles.taken, *(column.name for column in schema.features)}
    table = {name: columns[name] if len(rows) == len(columns[name]) else columns[name][rows] for name in used}
    sites, codes = grouped(table[roles.site])
    stacked = Rows(
        schema.encoded(table),
        None if roles.target is None else _target(table[roles.target], schema),
        _numbers(table, roles.offset),
        _numbers(table, roles.weight),
    )
    time = None if roles.time is None else times_of(table[roles.time], len(rows))
    notes = (*learned.notes, *learned.done)
    names = {"feature_names": schema.names, "target_name": roles.target}
    made = Federation._stacked(sites, codes, stacked, time, **names, schema=schema, notes=notes)
    if len(rows) == len(columns[roles.site]):
        return made
    return made._like(made.sites, made.n_samples, made.rows, rows[made.row_order])


def _numbers(table: Columns, name: str | None) -> Array | None:
    return None if name is None else parsed_numbers(table[name]).values


def _target(cells: AnyArray, schema: TableSchema) -> AnyArray:
    if cells.dtype.kind in "fb":
        return cells
    if schema.target is not None and schema.target.kind == "number":
        return parsed_numbers(cells).values
    return np.array([cell.strip() if isinstance(cell, str) else cell for cell in cells.tolist()], dtype=object)
