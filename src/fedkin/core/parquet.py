"""Tables larger than memory: Parquet files that are read in batches, once for least squares, or once per evaluation."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from fedkin._base import AnyArray, Array, Index, check_whole, count, listed
from fedkin.core.columns import parameter_names
from fedkin.core.quadratics import Quadratics, RowData
from fedkin.core.summaries import Summaries
from fedkin.core.summarising import RunningSums
from fedkin.data import (
    INTERCEPT,
    PARQUET_SUFFIXES,
    Column,
    Federation,
    Finding,
    HasSites,
    Label,
    Roles,
    TableOptions,
    TableSchema,
    columns_of,
    dependent_columns,
    files_of,
    is_row_number,
    level_codes,
    look_at,
    parsed_numbers,
    raise_findings,
    site_ids,
    too_many_levels,
)
from fedkin.errors import DataError, ParameterError, missing_dependency
from fedkin.losses import Loss, loss_for, loss_kind, make_loss

#: Rows that are in memory at once.
BATCH = 65_536
#: Classes that a target may have.
_MOST_CLASSES = 50
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


@dataclass(frozen=True, eq=False)
class FileRows(HasSites):
    """Rows that stay in their files, as `SiteData`: `fedkin.find_kin` takes them in the place of a federation.

    Attributes
    ----------
    sites : tuple of V ids
    n_samples : array (V,)
        Rows of each site, or the sums of their weights.
    loss : Loss
    schema : TableSchema
        What the columns are, with the means of the features.
    classes : tuple or None
        Labels of the target's codes 0, 1, ...
    intercept : bool
        Whether a column of ones comes first.
    notes : tuple of str
        As in `Federation`.
    column_sums, column_squares : array (V, q)
        Sums over the rows of each site of the columns and of their squares.
    """

    sites: tuple[Hashable, ...]
    n_samples: Index | Array
    loss: Loss
    schema: TableSchema
    classes: tuple[Label, ...] | None
    intercept: bool
    notes: tuple[str, ...]
    column_sums: Array = field(repr=False)
    column_squares: Array = field(repr=False)
    _stream: Stream = field(repr=False)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the columns, the intercept among them."""
        return (INTERCEPT, *self.schema.names) if self.intercept else self.schema.names

    @property
    def roles(self) -> Roles:
        """Which column is what."""
        return self._stream.roles

    @property
    def n(self) -> Array:
        return self.n_samples.astype(np.float64)

    @property
    def names(self) -> tuple[str, ...]:
        q = len(self.feature_names)
        return parameter_names(self.feature_names, self.loss.n_params(q) // q)

    def batches(self) -> Iterator[Federation]:
        """All rows, prepared, some at a time: each batch has some rows of some sites."""
        roles = self.roles
        for table, weight in self._stream.complete(self.schema):
            if not len(table[roles.site]):
                continue
            made = Federation.from_arrays(
                self.schema.encoded(table),
                _target(table[roles.target or ""], self.classes),
                site_ids(table[roles.site]),
                offset=None if roles.offset is None else parsed_numbers(table[roles.offset]).values,
                weight=weight,
                feature_names=self.schema.names,
            )
            yield made.with_intercept() if self.intercept else made

    def expand(self, theta: Array, folds: int = 1) -> Quadratics:
        """Sums around ``theta (V, p)``, in one pass; a site's rows go to folds in turn, in the order of the files."""
        sums = Quadratics.zeros(theta, 1 if folds == 1 else folds + 1)
        came = np.zeros(len(self.sites), dtype=np.int64)
        with np.errstate(over="ignore", invalid="ignore"):
            for batch in self.batches():
                place = np.array([self.index[site] for site in batch.sites], dtype=np.int64)
                if folds == 1:
                    sums.add(place, RowData(batch, self.loss).expand(theta[place]))
                    continue
                turn = np.arange(len(batch.X)) - np.repeat(batch.starts[:-1] - came[place], batch.n_samples)
                came[place] += batch.n_samples
                losses = [self.loss] * batch.n_sites
                sums.add(place, Quadratics.from_rows(batch, losses, turn % folds, folds, theta[place]))
        if folds > 1:
            sums.single_rows_train(came == 1)
        return sums

    def summaries(self, at: Array, folds: int = 5, seed: int = 0) -> Summaries:
        """What sites would say about their rows at ``at (V, p)``, in one pass."""
        sums, names = self.expand(at, folds), self.feature_names
        return Summaries(self.sites, self.loss, names, seed, sums, self.column_sums, self.column_squares)


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
    opened = [_opened(file) for file in _parquet_files(path)]
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
    stream = Stream.checked(path, Roles(site, target, **others))
    schema, _, sums, keep = _first_pass(path, stream, "linear", folds)
    summaries = sums.summaries(schema.names, keep, intercept=fit_intercept, seed=seed)
    return Streamed(summaries, schema, stream.n_rows, tuple(stream.notes))


def rows_in_files(
    path: str | os.PathLike[str],
    *,
    site: str,
    target: str,
    loss: str | Loss = "auto",
    fit_intercept: bool = True,
    **others: Unpack[TableOptions],
) -> FileRows:
    """Open Parquet files as rows that are read again whenever they are needed.

    Parameters
    ----------
    path, site, target, fit_intercept
        As in `summarise_files`.
    loss : str or Loss
        "auto" takes linear for numbers, and logistic or multinomial for labels.

    Other Parameters
    ----------------
    features, offset, weight, missing, categories
        As in `summarise_files`.

    Returns
    -------
    FileRows

    Notes
    -----
    Memory is that of one batch of 65,536 rows and of ``8 p (p + 2)`` bytes per site. A fit by kin reads the files some
    25 times: once for each Newton step.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> import pyarrow, pyarrow.parquet
    >>> import fedkin
    >>> from fedkin.core import rows_in_files
    >>> table = {"site": ["a", "a", "b", "b"], "x": [0.0, 1.0, 0.0, 2.0], "y": ["no", "yes", "no", "no"]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pyarrow.parquet.write_table(pyarrow.table(table), pathlib.Path(folder, "a.parquet"))
    ...     rows = rows_in_files(pathlib.Path(folder, "*.parquet"), site="site", target="y")
    >>> rows.loss.name, rows.classes, rows.n_samples.tolist()
    ('logistic', ('no', 'yes'), [2, 2])
    """
    stream = Stream.checked(path, Roles(site, target, **others))
    if loss == "auto":
        loss = loss_for("class" if _is_text(stream, target) else "number").name
    schema, classes, sums, keep = _first_pass(path, stream, loss, 1)
    kind = loss_kind(loss)
    made = make_loss(loss) if classes is None or isinstance(loss, Loss) else kind.from_classes(len(classes))
    said = sums.summaries(schema.names, keep, intercept=fit_intercept)
    notes, again = tuple(stream.notes), replace(stream, notes=[], gaps={})
    sizes = (said.column_sums, said.column_squares)
    rows = FileRows(said.sites, said.n_samples, made, schema, classes, fit_intercept, notes, *sizes, again)
    if isinstance(loss, Loss) or classes is not None:
        return rows
    head = next(replace(rows, intercept=False).batches())  # a batch tells the scale well enough
    y = np.asarray(head.y, dtype=np.float64)
    return replace(rows, loss=kind.from_rows(head.X, y, head.site_index, head.offset, head.weight))


def holds_labels(path: str | os.PathLike[str], target: str) -> bool:
    """Whether a column of Parquet files holds labels rather than numbers, by its first rows."""
    stream = Stream(_parquet_files(path), Roles("", target))
    return _is_text(stream, target) if target in _opened(stream.files[0]).schema_arrow.names else False


def holds_zeros_and_ones(path: str | os.PathLike[str], target: str) -> bool:
    """Whether the first rows of a column of Parquet files are 0 or 1, and both are there."""
    stream = Stream(_parquet_files(path), Roles("", target))
    if target not in _opened(stream.files[0]).schema_arrow.names:
        return False
    head = stream.head(target)
    return head.dtype.kind in "iuf" and np.unique(head).tolist() == [0, 1]


# --- reading ------------------------------------------------------------------------------------------------------


def _parquet_files(path: str | os.PathLike[str]) -> list[Path]:
    files = files_of(path)
    other = [file for file in files if file.suffix.lower() not in PARQUET_SUFFIXES]
    if other:
        raise DataError(f"{other[0]} is no Parquet file, and only those are read in one pass")
    return files


def _opened(file: Path) -> Any:
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
    """Parquet files as batches of columns, with what was found in passing."""

    files: Sequence[Path]
    roles: Roles
    n_rows: int = 0
    gaps: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def checked(cls, path: str | os.PathLike[str], roles: Roles) -> Stream:
        """The stream, if what was said about the table can be done without all of it in memory."""
        if roles.missing not in ("refuse", "drop"):
            raise ParameterError(
                f"missing={roles.missing!r} needs all rows in memory; of files rows are dropped or refused"
            )
        for name in ("time", "drop"):
            if getattr(roles, name):
                raise ParameterError(f"{name}={getattr(roles, name)!r} needs all rows in memory: use Federation.read")
        return cls(_parquet_files(path), roles)

    def batches(self, names: Sequence[str]) -> Iterator[dict[str, AnyArray]]:
        """The columns ``names`` of all files, batch after batch."""
        import pyarrow

        for file in self.files:
            opened = _opened(file)
            absent = [name for name in names if name not in opened.schema_arrow.names]
            if absent:
                raise DataError(f"{file.name} has no column {listed(absent)}")
            for batch in opened.iter_batches(BATCH, columns=list(names)):
                yield columns_of(pyarrow.Table.from_batches([batch]))

    def head(self, name: str) -> AnyArray:
        """The first batch of a column."""
        return next(self.batches([name]), {name: np.empty(0)})[name]

    def complete(self, schema: TableSchema) -> Iterator[tuple[dict[str, AnyArray], Array | None]]:
        """The complete rows of each batch, with their weights."""
        roles = self.roles
        used = [*roles.taken, *(column.name for column in schema.features)]
        known = {column.name: column for column in schema.columns}
        for table in self.batches(used):
            self.n_rows += len(table[roles.site])
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


def _first_pass(
    path: str | os.PathLike[str], stream: Stream, loss: str | Loss, folds: int
) -> tuple[TableSchema, tuple[Label, ...] | None, RunningSums, Index]:
    """The columns, the classes of the target if it has any, sums of ``[1, X, y]``, and which columns of X are used."""
    roles, classes = stream.roles, None
    try:
        schema = _learned_features(stream)
        if loss_kind(loss).target == "class":
            classes, column = _classes(stream, roles.target or "")
            schema = replace(schema, target=column)
        sums = RunningSums(len(schema.names), folds)
        for table, weight in stream.complete(schema):
            y = _target(table[roles.target or ""], classes)
            if roles.offset is not None and classes is None:
                y = y - parsed_numbers(table[roles.offset]).values
            sums.add(site_ids(table[roles.site]), schema.encoded(table), y, weight)
        stream.refuse_gaps()
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    if not sums.sites:
        raise DataError(f"{path}: no row is left")
    whole = sums.whole
    schema, keep = replace(schema, fill=tuple((whole[0, 1:-1] / whole[0, 0]).tolist())), np.arange(len(schema.names))
    if roles.features is None:
        schema, keep = _telling_columns(whole, schema, stream)
    return schema, classes, sums, keep


def _is_text(stream: Stream, target: str) -> bool:
    head = stream.head(target)
    return head.dtype.kind == "b" or look_at(head).kind == "category"


def _classes(stream: Stream, target: str) -> tuple[tuple[Label, ...], Column]:
    """The labels of the target, found in a pass over it alone."""
    seen: set[Any] = set()
    for table in stream.batches([target]):
        seen.update(table[target].tolist())
        if len(seen) > 20 * _MOST_CLASSES:
            break
    cells = np.array(sorted(seen, key=str), dtype=object)
    levels: tuple[Label, ...] = look_at(cells, category=True).levels
    if len(levels) < 2 or len(levels) > _MOST_CLASSES:
        raise DataError(f"the target {target!r} has {len(levels)} classes, such as {listed(levels[:3])}: name another")
    if all(isinstance(cell, float) for cell in seen if cell is not None):
        levels = tuple(int(level) for level in levels)
    elif all(isinstance(cell, bool) for cell in seen if cell is not None):
        levels = (False, True)
    return levels, Column(target, "category", levels=levels)


def _target(cells: AnyArray, classes: tuple[Label, ...] | None) -> Array:
    if classes is None:
        return parsed_numbers(cells).values
    return np.asarray(level_codes(cells, classes), dtype=np.float64)


def _learned_features(stream: Stream) -> TableSchema:
    """The features, with the levels of those that are text, found in a pass over these alone."""
    roles, present = stream.roles, _opened(stream.files[0]).schema_arrow.names
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
    rows = sum(_opened(file).metadata.num_rows for file in stream.files)
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


def _telling_columns(whole: Array, schema: TableSchema, stream: Stream) -> tuple[TableSchema, Index]:
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
