"""Tables larger than memory: one pass over Parquet files, of which only sums are kept."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from fedkin._base import AnyArray, Array, Index, check_whole, count, listed
from fedkin.core.running import RunningSums
from fedkin.core.summaries import Summaries
from fedkin.data import (
    PARQUET_SUFFIXES,
    Column,
    Finding,
    Roles,
    TableOptions,
    TableSchema,
    columns_of,
    dependent_columns,
    files_of,
    is_row_number,
    look_at,
    parsed_numbers,
    raise_findings,
    site_ids,
    too_many_levels,
)
from fedkin.errors import DataError, ParameterError, missing_dependency

#: Rows that are in memory at once.
BATCH = 65_536
#: A variance below this share of the mean square is rounding, and so is what a column has of its own.
_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class Streamed:
    """What is left of a table after one pass.

    Attributes
    ----------
    summaries : Summaries
        Of least squares, with an intercept first where there is one; in the user's units.
    schema : TableSchema
        What the columns are, with the means of the features.
    n_rows : int
    notes : tuple of str
        As in `Federation`.
    """

    summaries: Summaries
    schema: TableSchema
    n_rows: int
    notes: tuple[str, ...] = ()


def table_size(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Rows and columns of Parquet files, from their footers alone.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import pyarrow, pyarrow.parquet
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pyarrow.parquet.write_table(pyarrow.table({"x": [1.0, 2.0]}), pathlib.Path(folder, "a.parquet"))
    ...     table_size(pathlib.Path(folder, "*.parquet"))
    (2, 1)
    """
    opened = [opened_file(file) for file in parquet_files(path)]
    return sum(file.metadata.num_rows for file in opened), opened[0].metadata.num_columns


def summarise_files(
    path: str | os.PathLike[str],
    *,
    site: str,
    target: str,
    fit_intercept: bool = True,
    folds: int = 5,
    seed: int = 0,
    **others: Unpack[TableOptions],
) -> Streamed:
    """Sum up Parquet files for least squares without loading them.

    Parameters
    ----------
    path : path
        A file, a directory, or a pattern such as ``rows/*.parquet``.
    site, target : str
        Columns of sites and targets.
    fit_intercept : bool
        Whether to put a column of ones first.
    folds : int
        Number of folds; a site's rows go to them in turn, in the order of the files.
    seed : int
        Kept with the folds; nothing is drawn.

    Other Parameters
    ----------------
    features, offset, weight, categories
        Columns, as in `Federation.from_frame`. The levels of text are found first, in a pass over those columns alone.
    missing : "refuse" | "drop"
        As in `Federation.from_frame`; means are not known before the pass ends.

    Returns
    -------
    Streamed
        Its ``summaries`` take the place of a federation in `fit_summaries`, `find_kin` and `Problem`.

    Notes
    -----
    Memory is that of one batch of 65,536 rows and of ``8 (folds + 1) (q + 2)^2`` bytes per site. Of a column with mean
    m and standard deviation s, about ``2 log10(m / s)`` of 16 digits are lost: centre columns that are far from 0.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import pyarrow, pyarrow.parquet
    >>> import fedkin
    >>> table = {"site": ["a", "a", "b", "b"], "x": [0.0, 1.0, 0.0, 2.0], "y": [1.0, 3.0, 0.0, 4.0]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pyarrow.parquet.write_table(pyarrow.table(table), pathlib.Path(folder, "a.parquet"))
    ...     streamed = fedkin.summarise_files(pathlib.Path(folder, "*.parquet"), site="site", target="y")
    >>> streamed.summaries.n_samples.tolist(), streamed.schema.names
    ([2, 2], ('x',))
    """
    check_whole("folds", folds, least=2)
    stream = stream_of(path, Roles(site, target, **others))
    try:
        schema = learned_features(stream)
        sums = RunningSums(len(schema.names), folds)
        for rows in stream.rows(schema):
            sums.add(*rows)
        stream.refuse_gaps()
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    if not sums.sites:
        raise DataError(f"{path}: no row is left")
    return _streamed(sums, schema, stream, fit_intercept, seed)


# --- reading ----------------------------------------------------------------------------------------------------


def stream_of(path: str | os.PathLike[str], roles: Roles) -> Stream:
    """Parquet files as a stream of rows, if what was said about the table can be done without all of it in memory."""
    if roles.missing not in ("refuse", "drop"):
        raise ParameterError(
            f"missing={roles.missing!r} needs all rows in memory; of files rows are dropped or refused"
        )
    for name in ("time", "drop"):
        if getattr(roles, name):
            raise ParameterError(f"{name}={getattr(roles, name)!r} needs all rows in memory: use Federation.read")
    return Stream(parquet_files(path), roles)


def parquet_files(path: str | os.PathLike[str]) -> list[Path]:
    files = files_of(path)
    other = [file for file in files if file.suffix.lower() not in PARQUET_SUFFIXES]
    if other:
        raise DataError(f"{other[0]} is no Parquet file, and only those are read in one pass")
    return files


def opened_file(file: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing_dependency("pyarrow", f"reading {file.name}", extra="parquet") from None
    try:
        return pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} is not a whole Parquet file ({error}); write or copy it again") from None


@dataclass(eq=False)
class Stream:
    files: Sequence[Path]
    roles: Roles
    n_rows: int = 0
    gaps: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def batches(self, names: Sequence[str]) -> Iterator[dict[str, AnyArray]]:
        """The columns ``names`` of all files, batch after batch."""
        import pyarrow

        for file in self.files:
            opened = opened_file(file)
            absent = [name for name in names if name not in opened.schema_arrow.names]
            if absent:
                raise DataError(f"{file.name} has no column {listed(absent)}")
            for batch in opened.iter_batches(BATCH, columns=list(names)):
                yield columns_of(pyarrow.Table.from_batches([batch]))

    def rows(self, schema: TableSchema) -> Iterator[tuple[list[Hashable], Array, Array, Array | None]]:
        """Sites, ``X``, ``y`` less its offset, and weights of the complete rows of each batch."""
        roles = self.roles
        for table, weight in self.complete(schema):
            y = parsed_numbers(table[roles.target or ""]).values
            if roles.offset is not None:
                y = y - parsed_numbers(table[roles.offset]).values
            yield site_ids(table[roles.site]), schema.encoded(table), y, weight

    def complete(self, schema: TableSchema) -> Iterator[tuple[dict[str, AnyArray], Array | None]]:
        """The complete rows of each batch, with their weights."""
        roles = self.roles
        used = [*roles.taken, *(column.name for column in schema.features)]
        known = {column.name: column for column in schema.columns}
        for table in self.batches(used):
            n = len(table[roles.site])
            self.n_rows += n
            found = {name: known.get(name, Column(name)).gaps(table[name]) for name in used[1:]}
            found[roles.site] = np.array([cell is None or cell != cell for cell in table[roles.site]], dtype=bool)
            for name, gaps in found.items():
                self.gaps[name] = self.gaps.get(name, 0) + int(gaps.sum())
            kept = ~np.any(list(found.values()), axis=0)
            weight = None if roles.weight is None else parsed_numbers(table[roles.weight]).values
            if weight is not None:
                if (weight < 0).any():
                    raise DataError(f"the weight {roles.weight!r} is below 0 in some rows")
                kept &= weight > 0
            if not kept.all():
                table = {name: cells[kept] for name, cells in table.items()}
                weight = None if weight is None else weight[kept]
            checked = (one for name in used[1:] for one in known.get(name, Column(name)).findings(table[name], "fill"))
            raise_findings(one for one in checked if one.refuses)
            yield table, weight

    def refuse_gaps(self) -> None:
        """Raise when cells are missing and their rows are not to be dropped."""
        empty = {name: n for name, n in self.gaps.items() if n}
        if not empty:
            return
        words = ", ".join(f"{name!r} in {n}" for name, n in sorted(empty.items(), key=lambda one: -one[1])[:10])
        if self.roles.missing == "drop":
            self.notes.append(f"rows with missing cells left out: {words} of {count(self.n_rows, 'row')}")
            return
        raise DataError(
            f'cells are missing: {words}, of {count(self.n_rows, "row")}. Say what to do: missing="drop" leaves out '
            "rows with a gap (means need all rows in memory)"
        )


def learned_features(stream: Stream) -> TableSchema:
    """The features, with the levels of those that are text, found in a pass over these alone."""
    first = opened_file(stream.files[0])
    roles, present = stream.roles, first.schema_arrow.names
    features, categories = roles.features, roles.categories
    roles.check(dict.fromkeys(present, np.empty(0)))
    chosen = [name for name in present if name not in roles.taken] if features is None else list(features)
    head = next(stream.batches(chosen), {name: np.empty(0) for name in chosen})
    if features is None:
        index = [name for name in chosen if is_row_number(name, head[name])]
        stream.notes += [f"column {name!r} counts the rows: left out" for name in index]
        chosen = [name for name in chosen if name not in index]
    text = [name for name in chosen if head[name].dtype.kind == "O" or name in categories]
    distinct: dict[str, set[Hashable]] = {name: set() for name in text}
    for table in stream.batches(text) if text else ():
        for name, cells in table.items():
            distinct[name].update(cells.tolist())
    rows = sum(opened_file(file).metadata.num_rows for file in stream.files)
    columns, findings = [], []
    for name in chosen:
        if name not in distinct:
            columns.append(Column(name))
            continue
        cells = np.fromiter(distinct[name], dtype=object, count=len(distinct[name]))
        looked = look_at(cells, category=name in categories)
        if looked.kind == "number":
            columns.append(Column(name))
        elif looked.kind == "date":
            findings.append(Finding(name, "these are dates: turn them into numbers, such as days since a start"))
        elif too_many_levels(len(looked.levels), rows) and name not in categories:
            words = f"text with {len(looked.levels)} different values: a name or an id? Leave it out with features="
            findings.append(Finding(name, words))
        elif len(looked.levels) > 1:
            columns.append(Column(name, "category", levels=looked.levels))
        else:
            stream.notes.append(f"column {name!r} is the same in every row: left out")
    raise_findings(findings)
    if not columns:
        raise DataError(f"no column is left for the features beside {listed(roles.taken)}")
    return TableSchema(tuple(columns), Column(roles.target or ""), roles.offset, roles.missing)


# --- sums -------------------------------------------------------------------------------------------------------


def _streamed(sums: RunningSums, schema: TableSchema, stream: Stream, intercept: bool, seed: int) -> Streamed:
    whole = sums.whole
    schema = replace(schema, fill=tuple((whole[0, 1:-1] / whole[0, 0]).tolist()))
    keep = np.arange(len(schema.names))
    if stream.roles.features is None:
        schema, keep = telling_columns(whole, schema, stream)
    summaries = sums.summaries(schema.names, keep, intercept=intercept, seed=seed)
    return Streamed(summaries, schema, stream.n_rows, tuple(stream.notes))


def telling_columns(whole: Array, schema: TableSchema, stream: Stream) -> tuple[TableSchema, Index]:
    """The schema without columns that are constant or follow from others, and which encoded ones stay."""
    n, mean = whole[0, 0], whole[0, 1:] / whole[0, 0]
    scatter = whole[1:, 1:] / n - np.outer(mean, mean)
    square, variance = np.diag(whole)[1:] / n, np.diag(scatter)
    numbers = {column.name for column in schema.features if column.kind == "number"}
    place = {name: k for k, name in enumerate(schema.names)}
    for name in numbers:
        apart = square[place[name]] - 2 * whole[1 + place[name], -1] / n + square[-1]
        if apart <= _ROUNDING * square[-1] and variance[-1] > 0:
            raise DataError(
                f"column {name!r} is the target {stream.roles.target!r} under another name: leave it out with features="
            )
    flat = [name for name in place if name in numbers and variance[place[name]] <= _ROUNDING * square[place[name]]]
    rest = [name for name in place if name in numbers and name not in flat]
    at = np.array([place[name] for name in rest], dtype=np.int64)
    size = np.sqrt(variance[at])
    made = [rest[k] for k in dependent_columns(scatter[np.ix_(at, at)] / np.outer(size, size), _ROUNDING)]
    for names, words in ((flat, "the same in every row"), (made, "made of the columns before")):
        if names:
            stream.notes.append(f"{listed(names, 10)}: {words}, left out")
    gone = {*flat, *made}
    if len(gone) == len(schema.features):
        return schema, np.arange(len(schema.names))
    kept = tuple(column for column in schema.features if column.name not in gone)
    stay = np.array([k for name, k in place.items() if name not in gone], dtype=np.int64)
    return replace(schema, features=kept, fill=tuple(schema.fill[k] for k in stay.tolist())), stay
