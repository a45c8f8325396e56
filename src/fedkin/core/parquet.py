"""Read Parquet files larger than memory in batches: once for least squares, else once per evaluation."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal, Unpack

import numpy as np

from fedkin._base import Array, Index, check_whole, in_file, listed, report_progress
from fedkin.cluster import running_engine
from fedkin.core.quadratics import Quadratics
from fedkin.core.sitedata import RowData, SiteData
from fedkin.core.summaries import Summaries
from fedkin.core.summarising import RunningSums
from fedkin.data import (
    Column,
    Federation,
    FileTable,
    InferredTable,
    Label,
    RawColumns,
    Roles,
    Schema,
    SchemaScan,
    TableOptions,
    complete_batches,
    infer_kind,
    no_site_column,
    open_files,
    parsed_numbers,
)
from fedkin.errors import DataError, ParameterError, argument
from fedkin.losses import Loss, loss_for, loss_kind, make_loss

#: Classes that a target may have.
_MOST_CLASSES = 50
#: How to handle missing cells; means are unknown before the pass ends.
_RULES = ("refuse", "drop")


@dataclass(frozen=True, eq=False)
class Streamed:
    """Result of one pass over a table."""

    summaries: Summaries  # of least squares, with an intercept first where there is one; in the user's units
    schema: Schema  # with the means of the features
    n_rows: int
    notes: tuple[str, ...] = ()  # as in `Federation`


@dataclass(frozen=True, eq=False)
class FileRows(SiteData):
    """Site data read from files on demand; `fedkin.find_kin` accepts it instead of a federation."""

    sites: tuple[Hashable, ...]
    counts: Index | Array  # (V,), rows of each site, or the sums of their weights
    loss: Loss
    feature_names: tuple[str, ...]  # an intercept first where there is one
    schema: Schema  # with the means of the features
    notes: tuple[str, ...]  # as in `Federation`
    roles: Roles
    column_sums: Array = field(repr=False)  # (V, q), over the rows of each site
    column_squares: Array = field(repr=False)  # (V, q)
    _table: FileTable = field(repr=False)

    @property
    def classes(self) -> tuple[Label, ...] | None:
        """Class labels of the target codes 0, 1, ...; None for a numeric target."""
        return self.schema.classes

    has_rows: ClassVar[Literal[True]] = True
    in_memory: ClassVar[Literal[False]] = False

    @property
    def intercept(self) -> bool:
        """Whether the first column is an intercept."""
        return self.feature_names != self.schema.names

    @property
    def n(self) -> Index | Array:
        return self.counts

    def take(self, order: Index) -> FileRows:
        """Return the data of the given sites, in that order."""
        sites, n = tuple(self.sites[u] for u in order.tolist()), self.counts[order]
        sums, squares = self.column_sums[order], self.column_squares[order]
        return replace(self, sites=sites, counts=n, column_sums=sums, column_squares=squares)

    def batches(self) -> Iterator[RowData]:
        """Yield prepared rows in batches; a batch holds some rows of some sites."""
        for table in complete_batches(self._table, self.schema, self.roles):
            X, y, sites = self.schema.encoded(table), self.schema.target_of(table), table[self.roles.site]
            offset, weight, names = self.schema.offset_of(table), _weight(table, self.roles), self.schema.names
            made = Federation.from_arrays(X, y, sites, offset=offset, weight=weight, feature_names=names)
            yield RowData(made.with_intercept() if self.intercept else made, self.loss)

    def expand(self, theta: Array, folds: int = 1, seed: int = 0) -> Quadratics:
        """Return sums around ``theta (V, p)`` in one pass; each site's rows are assigned to folds in turn."""
        sums, came = Quadratics.zeros(theta, 1 if folds == 1 else folds + 1), np.zeros(len(self.sites), dtype=np.int64)
        engine, pieces = running_engine(), self._table.pieces()
        if engine is None or len(pieces) == 1:
            self._add(sums, came, folds)
        else:
            found = engine.map(partial(_sums_of_piece, self, theta, folds), pieces)
            for done, (sites, more, rows) in enumerate(found, 1):
                sums.add(sites, more.rotated(came[sites] % folds) if folds > 1 else more)
                came[sites] += rows
                report_progress("reading files", done, len(pieces))
        if folds > 1:
            sums.single_rows_train(came == 1)
        return sums

    def _add(self, sums: Quadratics, came: Index, folds: int) -> None:
        """Add all rows to sums by site, and to the number of rows that ``came (V,)``, in place."""
        with np.errstate(over="ignore", invalid="ignore"):
            for part in self.batches():
                place, batch = np.array([self.index[site] for site in part.sites], dtype=np.int64), part.rows
                at, n = sums.at[place], batch.n_samples
                if folds == 1:
                    sums.add(place, part.expand(at))
                else:
                    turn = np.arange(len(batch.X)) - np.repeat(batch.starts[:-1] - came[place], n)
                    sums.add(place, part.expand_folds(at, turn % folds, folds))
                came[place] += n

    def summaries(self, at: Array, folds: int = 5, seed: int = 0) -> Summaries:
        """Return the site summaries at ``at (V, p)``, in one pass."""
        sums, names = self.expand(at, folds), self.feature_names
        return Summaries(self.sites, self.loss, names, seed, sums, self.column_sums, self.column_squares)


def _sums_of_piece(rows: FileRows, theta: Array, folds: int, table: FileTable) -> tuple[Index, Quadratics, Index]:
    sums, came = Quadratics.zeros(theta, 1 if folds == 1 else folds + 1), np.zeros(len(theta), dtype=np.int64)
    replace(rows, _table=table)._add(sums, came, folds)
    sites = np.flatnonzero(came)
    return sites, sums.take(sites), came[sites]


def summarise_files(
    path: str | os.PathLike[str],
    *,
    site: str | None = None,
    target: str,
    fit_intercept: bool = True,
    folds: int = 5,
    seed: int = 0,
    **others: Unpack[TableOptions],
) -> Streamed:
    """Summarise Parquet or CSV files for least squares without loading them into memory.

    Parameters
    ----------
    path : path
        A file, a directory, or a pattern such as ``rows/*.parquet``.
    site, target, features, offset, exposure, weight, categories, spline, drop
        As in `Federation.read`. The levels of text columns are found first, in a pass over those columns only.
    missing : "refuse" | "drop"
        As in `Federation.from_frame`; imputing means is not possible in one pass.
    fit_intercept : bool
        Whether to put a column of ones first.
    folds, seed : int
        Number of folds, to which each site's rows are assigned in turn, in file order; the seed is only stored.

    Returns
    -------
    Streamed
        `fit`, `find_kin` and `Problem` accept its ``summaries`` instead of a federation.

    Notes
    -----
    Memory use is one batch (at most 262,144 rows) plus ``8 (folds + 1) (q + 2)^2`` bytes per site. A column with mean m
    and standard deviation s loses about ``2 log10(m / s)`` of 16 digits, so centre columns that are far from 0.

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
    schema, sums, found = _first_pass(path, *_opened(path, Roles(site or "", target, **others)), "linear", folds)
    summaries = sums.summaries(schema.names, found.kept, intercept=fit_intercept, seed=seed)
    return Streamed(summaries, schema, found.n_rows, found.notes)


def rows_in_files(
    path: str | os.PathLike[str],
    *,
    site: str | None = None,
    target: str,
    loss: str | Loss = "auto",
    fit_intercept: bool = True,
    **others: Unpack[TableOptions],
) -> FileRows:
    """Open Parquet or CSV files as site data whose rows are reread whenever they are needed.

    Parameters
    ----------
    path, site, target, fit_intercept, features, offset, exposure, weight, missing, categories, spline, drop
        As in `summarise_files`.
    loss : str or Loss
        "auto" selects linear for numbers, and logistic or multinomial for labels.

    Returns
    -------
    FileRows

    Notes
    -----
    Memory use is one batch (at most 262,144 rows) plus ``8 p (p + 2)`` bytes per site. A kin fit reads the files about
    25 times, once per Newton step.

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
    table, roles = _opened(path, Roles(site or "", target, **others))
    if loss == "auto":
        loss = loss_for("class" if infer_target(table, target) == "labels" else "number").name
    schema, sums, found = _first_pass(path, table, roles, loss, 1)
    kind, classes = loss_kind(loss), schema.classes
    made = make_loss(loss) if classes is None or isinstance(loss, Loss) else kind.from_classes(len(classes))
    said = sums.summaries(schema.names, found.kept, intercept=fit_intercept)
    sizes = (said.column_sums, said.column_squares)
    rows = FileRows(said.sites, said.n, made, said.feature_names, schema, found.notes, roles, *sizes, table)
    if isinstance(loss, Loss) or classes is not None:
        return rows
    head = next(replace(rows, feature_names=schema.names).batches()).rows  # one batch determines the scale well enough
    y = np.asarray(head.y, dtype=np.float64)
    return replace(rows, loss=kind.from_rows(head.X, y, head.site_index, head.offset, head.weight))


def infer_target(table: FileTable, target: str | None) -> Literal["labels", "binary", "numbers"]:
    """Infer from the first rows of a table whether a target holds labels, only 0 and 1, or other numbers."""
    if target is None or target not in table.names:
        return "numbers"
    head = next(table.batches([target]), {target: np.empty(0)})[target]
    if head.dtype.kind == "b" or infer_kind(head).kind == "category":
        return "labels"
    return "binary" if head.dtype.kind in "iuf" and np.unique(head).tolist() == [0, 1] else "numbers"


def _opened(path: str | os.PathLike[str], roles: Roles) -> tuple[FileTable, Roles]:
    """Open the files of a path; return also the roles with the site column."""
    table, site = open_files(path, roles.site or None)
    if site is None:
        raise no_site_column(path, table.names)
    return table, replace(roles, site=site)


def _first_pass(
    path: str | os.PathLike[str], table: FileTable, roles: Roles, loss: str | Loss, folds: int
) -> tuple[Schema, RunningSums, InferredTable]:
    """Return the schema with the means of its columns, sums of ``[1, X, y]``, and what was inferred about the table."""
    if roles.missing not in _RULES:
        raise ParameterError(
            f"{argument('missing', roles.missing)} needs all rows in memory; for files, use 'refuse' or 'drop'"
        )
    if roles.time:
        raise ParameterError(f"{argument('time', roles.time)} needs all rows in memory: use Federation.read")
    classes = loss_kind(loss).target == "class"
    asked = replace(roles, categories=(*roles.categories, roles.target or "")) if classes else roles
    with in_file(path, DataError):
        scan = SchemaScan(table, asked, _RULES)
        schema = _with_target(scan.schema, roles.target or "", classes)
        sums, pieces, engine = RunningSums(len(schema.names), folds), table.pieces(), running_engine()
        if engine is None or len(pieces) == 1:
            _add_rows(scan, sums, schema, roles)
        else:
            scans = [scan.of_piece(piece) for piece in pieces]
            read = engine.map(partial(_sums_of_scan, schema=schema, roles=roles, folds=folds), scans)
            for done, (part, said) in enumerate(read, 1):
                scan.add(part)
                sums.merge(*said)
                report_progress("reading files", done, len(pieces))
        found = scan.result()
    means = sums.whole[0, 1:-1] / sums.whole[0, 0]
    schema = replace(found.schema, target=schema.target, fill=tuple(means[found.kept].tolist()))
    return schema, sums, found


def _add_rows(scan: SchemaScan, sums: RunningSums, schema: Schema, roles: Roles) -> None:
    for rows, _ in scan.rows():
        y, offset = schema.target_of(rows), schema.offset_of(rows)
        assert y is not None
        y = y if offset is None or schema.classes is not None else y - offset
        sums.add(rows[roles.site], schema.encoded(rows), y, _weight(rows, roles))


def _sums_of_scan(
    scan: SchemaScan, *, schema: Schema, roles: Roles, folds: int
) -> tuple[SchemaScan, tuple[tuple[Hashable, ...], Index, Array]]:
    """Return the scan of a piece of the table once its rows were read, and the sums by site."""
    sums = RunningSums(len(schema.names), folds)
    _add_rows(scan, sums, schema, roles)
    return scan, sums.parts()


def _with_target(schema: Schema, name: str, classes: bool) -> Schema:
    if not classes:
        if schema.classes not in (None, (False, True)):
            raise DataError(f"the target {name!r} holds labels, but the loss needs numbers: choose another loss")
        return replace(schema, target=Column(name))
    levels = schema.classes or ()
    if not 2 <= len(levels) <= _MOST_CLASSES:
        raise DataError(f"the target {name!r} has {len(levels)} classes, such as {listed(levels[:3])}: name another")
    return schema


def _weight(table: RawColumns, roles: Roles) -> Array | None:
    return None if roles.weight is None else parsed_numbers(table[roles.weight]).values
