"""Say which columns of a table are what, and find and read the files that a path stands for."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict
from urllib.parse import unquote

import numpy as np

from fedkin._base import AnyArray, listed
from fedkin.data.cells import DecimalMark, infer_column, infer_kind, near_name
from fedkin.data.columns import (
    CSV_SUFFIXES,
    PARQUET_SUFFIXES,
    RawColumns,
    RowPlaces,
    read_cells,
    read_columns,
    split_name,
)
from fedkin.data.schema import Missing
from fedkin.errors import DataError, argument

#: The column of file names, where each file is a site.
_FILE = "(file)"
#: The folder of rows without a value, as Hive and Spark write it.
_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"


class Table(Protocol):
    """A table that is read in batches, as often as needed."""

    @property
    def names(self) -> Sequence[str]:
        """Names of all columns."""

    def batches(self, names: Sequence[str]) -> Iterator[RawColumns]:
        """Yield some columns of the rows, batch after batch, always in the same order."""


@dataclass(frozen=True)
class TableInMemory:
    """Columns in memory as a `Table` of one batch."""

    columns: RawColumns

    @property
    def names(self) -> Sequence[str]:
        return list(self.columns)

    def batches(self, names: Sequence[str]) -> Iterator[RawColumns]:
        yield {name: self.columns[name] for name in names}


class TableOptions(TypedDict, total=False):
    """What may be said about a table apart from its site and target columns; `Federation.from_frame` explains it."""

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
        """Columns that are not features, and what each is."""
        roles = ("site", "target", "offset", "weight", "time")
        return [(getattr(self, role), role) for role in roles if getattr(self, role) is not None]

    @property
    def taken(self) -> dict[str, str]:
        """{column: its role}."""
        return dict(self.named)

    def check(self, columns: Iterable[str]) -> None:
        """Raise one `DataError` with all columns that are named and not there; or named for two things."""
        present = dict.fromkeys(columns)
        roles = [(name, f"the {role}") for name, role in self.named]
        roles += [(name, "the features") for name in self.features or ()]
        named = [*roles, *((name, "the categories") for name in self.categories)]
        wanted = [*((name, f"for {role}") for name, role in named), *((name, "to drop") for name in self.drop)]
        absent = [(name, use) for name, use in wanted if name not in present]
        if absent:
            text = " and ".join(f"no column {name!r} {use}{near_name(name, present)}" for name, use in absent)
            raise DataError(f"there is {text}; the table has {listed(present, most=20)}")
        seen: dict[str, str] = {}
        for name, role in roles:
            if name in seen:
                if seen[name] == role == "the features":
                    raise DataError(f"feature {name!r} is given twice")
                raise DataError(f"column {name!r} cannot be both {_singular(seen[name])} and {_singular(role)}")
            seen[name] = role
        seen = dict.fromkeys(self.categories, "the features") | seen
        for name in self.drop:
            if name in seen:
                use = "a feature" if seen[name] == "the features" else seen[name]
                raise DataError(f"column {name!r} cannot be both {use} and dropped")


def _singular(role: str) -> str:
    return "a feature" if role == "the features" else role.removeprefix("the ")


# --- files ----------------------------------------------------------------------------------------------------


def files_of(path: str | os.PathLike[str]) -> list[Path]:
    """Return the files that a path stands for: itself, those of a directory, or those of a pattern.

    Of a directory without files of its own, those of its partitions, folders such as ``clinic=north``.
    """
    place = Path(path)
    if place.is_dir():
        suffixes = CSV_SUFFIXES + PARQUET_SUFFIXES
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


def read_table(
    path: str | os.PathLike[str], roles: Roles, decimal: DecimalMark = "."
) -> tuple[RawColumns, str, RowPlaces]:
    """Read the columns of all files; return them with the name of the site column, and where rows came from."""
    files = files_of(path)
    if len(files) > 1 or Path(path).is_dir():
        wanted = None
        if roles.features is not None:
            wanted = [*(name for name in roles.taken if name), *roles.features, *roles.categories]
        return read_files(path, roles.site or None, wanted, decimal)
    columns = read_columns(files[0], decimal)
    if not roles.site:
        raise DataError(f"{path}: say which column holds the sites, {argument('site')}; it has {listed(columns, 20)}")
    return columns, roles.site, RowPlaces((files[0],), (len(next(iter(columns.values()), ())),))


def read_files(
    path: str | os.PathLike[str],
    site: str | None,
    wanted: Iterable[str] | None = None,
    decimal: DecimalMark = ".",
) -> tuple[RawColumns, str, RowPlaces]:
    """Read files with the same columns as one table, as `read_table` does."""
    files = files_of(path)
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
            raise DataError(
                f"{file}: column {name!r} is numeric, but text in {files[other].name}: write it in one way"
            )
    return np.concatenate(parts)
