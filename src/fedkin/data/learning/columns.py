"""Which columns of a table are what: site, target, offset, weight, time and features; tables with a file per site."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np

from fedkin._base import AnyArray, listed
from fedkin.data.learning.kinds import look_at
from fedkin.data.schema import Missing
from fedkin.data.tables import CSV_SUFFIXES, PARQUET_SUFFIXES, Columns, RowPlaces, read_cells, read_columns
from fedkin.errors import DataError


class TableOptions(TypedDict, total=False):
    """What may be said about a table beside its columns of sites and targets; `Federation.from_frame` explains it."""

    features: Sequence[str] | None
    offset: str | None
    weight: str | None
    time: str | None
    missing: Missing
    categories: Sequence[str]
    drop: Sequence[str]


@dataclass(frozen=True)
class Roles:
    """Which columns of a table are what, and what to do with gaps: `TableOptions`, site and target."""

    site: str
    target: str | None = None
    features: Sequence[str] | None = None
    offset: str | None = None
    weight: str | None = None
    time: str | None = None
    missing: Missing = "refuse"
    categories: Sequence[str] = ()
    drop: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("features", "categories", "drop"):  # a word alone is a list of one
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))

    @property
    def named(self) -> list[tuple[str, str]]:
        """Columns that are no features, and what each is."""
        roles = [("site", self.site), ("target", self.target), ("offset", self.offset), ("weight", self.weight)]
        return [(name, role) for role, name in [*roles, ("time", self.time)] if name is not None]

    @property
    def taken(self) -> dict[str, str]:
        """{column: its role}."""
        return dict(self.named)

    def check(self, columns: Columns) -> None:
        """Raise one `DataError` with all columns that are named and not there, or named for two things."""
        named = [(name, f"the {role}") for name, role in self.named]
        named += [(name, "the features") for name in self.features or ()]
        named += [(name, "the categories") for name in self.categories]
        absent = [(name, role) for name, role in named if name not in columns]
        if absent:
            words = " and ".join(f"no column {name!r} for {role}{near_name(name, columns)}" for name, role in absent)
            raise DataError(f"there is {words}; the table has {listed(columns, most=20)}")
        seen: dict[str, str] = {}
        for name, role in named[: len(named) - len(self.categories)]:
            role = "a feature" if role == "the features" else role.removeprefix("the ")
            if name in seen:
                both = f"feature {name!r} is given twice" if seen[name] == role == "a feature" else ""
                raise DataError(both or f"column {name!r} cannot be both {seen[name]} and {role}")
            seen[name] = role


def without_dropped(columns: Columns, roles: Roles) -> Columns:
    """The table without the columns to drop, which must be there and be named for nothing else."""
    used = dict.fromkeys([*(roles.features or ()), *roles.categories], "a feature")
    used |= {name: f"the {role}" for name, role in roles.named}
    for name in roles.drop:
        if name not in columns:
            has = listed(columns, most=20)
            raise DataError(f"there is no column {name!r} to drop{near_name(name, columns)}; the table has {has}")
        if name in used:
            raise DataError(f"column {name!r} cannot be both {used[name]} and dropped")
    return {name: cells for name, cells in columns.items() if name not in roles.drop}


def near_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A guess at what was meant by a name, to follow it in a message; "" when nothing is alike.

    Examples
    --------
    >>> near_name("Scor", ["site", "score"])
    " (did you mean 'score'?)"
    """
    by_lower = {word.lower(): word for word in known}
    alike = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=cutoff)
    return f" (did you mean {' or '.join(repr(by_lower[word]) for word in alike)}?)" if alike else ""


def data_files(folder: Path) -> list[Path]:
    """The tables of a directory, by name."""
    suffixes = CSV_SUFFIXES + PARQUET_SUFFIXES
    files = sorted(
        file
        for file in folder.iterdir()
        if file.is_file() and file.suffix.lower() in suffixes and not file.name.startswith(".")
    )
    if not files:
        raise DataError(f"the directory {folder} has no file that ends in {', '.join(suffixes)}")
    return files


def stacked_files(
    files: Sequence[Path], site: str | None, wanted: Iterable[str] | None
) -> tuple[Columns, str, RowPlaces]:
    """Files with the same columns as one table, the name of its site column, and where its rows came from.

    ``wanted`` are the columns to read, by default all; without a ``site`` each file is one, called like the file.
    """
    tables = [read_columns(file) for file in files]
    needed = set(tables[0]) if wanted is None else {*wanted, *([] if site is None else [site])}
    for file, table in zip(files, tables, strict=True):
        different = needed.symmetric_difference(table) if wanted is None else needed.difference(table)
        if different:
            missing = [name for name in different if name not in table]
            extra = [name for name in different if name in table]
            parts = (
                f"there is no column {listed(missing)}" if missing else "",
                f"there is a column {listed(extra)} that {files[0].name} does not have" if extra else "",
            )
            raise DataError(f"{file}: {'; '.join(part for part in parts if part)}")
    counts = [len(next(iter(table.values()), ())) for table in tables]
    source = RowPlaces(tuple(files), counts)
    stacked = {name: _stacked_column(name, files, tables) for name in tables[0] if name in needed}
    if site is not None:
        return stacked, site, source
    stems = [file.stem for file in files]
    for file, rows in zip(files, counts, strict=True):
        if stems.count(file.stem) > 1:
            raise DataError(f"{file}: another file of the directory also stands for site {file.stem!r}")
        if rows == 0:
            raise DataError(f"{file}: site {file.stem!r} has no rows; remove the file or give it data")
    name = "(file)"
    return {name: np.repeat(np.array(stems, dtype=object), counts), **stacked}, name, source


def read_directory(folder: Path, site: str | None, names: Sequence[str]) -> tuple[Columns, str, RowPlaces]:
    """Some columns of a directory's files as one table, its site column (or that of file names), and its places."""
    return stacked_files(data_files(folder), site, names)


def _stacked_column(name: str, files: Sequence[Path], tables: Sequence[Columns]) -> AnyArray:
    parts = [table[name] for table in tables]
    if len({part.dtype.kind == "O" for part in parts}) > 1:
        other = next(k for k, part in enumerate(parts) if part.dtype.kind == "O")
        looked = look_at(parts[other])
        for k, (file, part) in enumerate(zip(files, parts, strict=True)):
            if part.dtype.kind == "O":
                continue
            # an empty column has no type of its own; a word among numbers is found with all other mistakes
            if looked.kind == "number" or (part.dtype.kind == "f" and np.isnan(part).all()):
                parts[k] = np.array([None if cell != cell else cell for cell in part.tolist()], dtype=object)
            elif file.suffix.lower() in CSV_SUFFIXES and all(level[:1].isdigit() for level in looked.levels):
                header, cells = read_cells(file)  # ids such as 007, which another file has without zeros
                parts[k] = np.array([cell.strip() or None for cell in cells[header.index(name)]], dtype=object)
            else:
                raise DataError(
                    f"{file}: column {name!r} is numeric, but text in {files[other].name}: write it in one way"
                )
    return np.concatenate(parts)
