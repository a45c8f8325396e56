"""Tables larger than memory for losses that sums do not tell: Parquet files that are read anew for every evaluation."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import numpy as np

from fedkin._base import AnyArray, Array, Index, listed
from fedkin.core.quadratics import Quadratics
from fedkin.core.streaming import Stream, learned_features, opened_file, parquet_files, stream_of, telling_columns
from fedkin.core.summaries import Summaries
from fedkin.data import (
    INTERCEPT,
    Column,
    Federation,
    HasSites,
    Label,
    Roles,
    TableOptions,
    TableSchema,
    level_codes,
    look_at,
    parsed_numbers,
    site_ids,
)
from fedkin.errors import DataError
from fedkin.losses import Loss, loss_for, loss_kind, make_loss

#: Classes that a target may have.
_MOST_CLASSES = 50


@dataclass(frozen=True, eq=False)
class FileRows(HasSites):
    """Rows that stay in their files: what `fedkin.find_kin` takes in the place of a federation.

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
    """

    sites: tuple[Hashable, ...]
    n_samples: Index | Array
    loss: Loss
    schema: TableSchema
    classes: tuple[Label, ...] | None
    intercept: bool
    notes: tuple[str, ...]
    _stream: Stream = field(repr=False)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the columns, the intercept among them."""
        return (INTERCEPT, *self.schema.names) if self.intercept else self.schema.names

    @property
    def roles(self) -> Roles:
        """Which column is what."""
        return self._stream.roles

    def batches(self) -> Iterator[Federation]:
        """All rows, prepared, some at a time: each batch has some rows of some sites."""
        roles = self.roles
        for table, weight in self._stream.complete(self.schema):
            if not len(table[roles.site]):
                continue
            made = Federation.from_arrays(
                self.schema.encoded(table),
                _target(table[roles.target or ""], self.schema, self.classes),
                site_ids(table[roles.site]),
                offset=None if roles.offset is None else parsed_numbers(table[roles.offset]).values,
                weight=weight,
                feature_names=self.schema.names,
            )
            yield made.with_intercept() if self.intercept else made

    def summaries(self, at: Array, folds: int = 5, seed: int = 0) -> Summaries:
        """What sites would say about their rows at ``at (V, p)``, in one pass; rows go to folds as they come."""
        v, p, q = len(self.sites), at.shape[1], len(self.feature_names)
        sums = Quadratics(
            at,
            np.zeros((v, folds + 1)),  # weights add up as counts do
            np.zeros((v, folds + 1)),
            np.zeros((v, folds + 1, p)),
            np.zeros((v, folds + 1, p, p)),
        )
        columns, squares, came = np.zeros((v, q)), np.zeros((v, q)), np.zeros(v, dtype=np.int64)
        for batch in self.batches():
            place = np.array([self.index[site] for site in batch.sites], dtype=np.int64)
            turn = np.arange(len(batch.X)) - np.repeat(batch.starts[:-1], batch.n_samples)
            fold_of = (turn + np.repeat(came[place], batch.n_samples)) % folds
            came[place] += batch.n_samples
            part = Quadratics.from_rows(batch, [self.loss] * batch.n_sites, fold_of, folds, at[place])
            for name in ("count", "value", "gradient", "hessian"):
                getattr(sums, name)[place] += getattr(part, name)
            weighted = batch.X if batch.weight is None else batch.X * batch.weight[:, None]
            columns[place] += np.add.reduceat(weighted, batch.starts[:-1], axis=0)
            squares[place] += np.add.reduceat(weighted * batch.X, batch.starts[:-1], axis=0)
        single = came == 1  # a single row is in no fold: it trains
        for name in ("count", "value", "gradient", "hessian"):
            each = getattr(sums, name)
            each[single, -1], each[single, :-1] = each[single].sum(axis=1), 0.0
        return Summaries(self.sites, self.loss, self.feature_names, seed, sums, columns, squares)


def rows_in_files(
    path: str | os.PathLike[str],
    *,
    site: str,
    target: str,
    loss: str | Loss = "auto",
    fit_intercept: bool = True,
    **others: Unpack[TableOptions],
) -> FileRows:
    """Parquet files as rows that are read again whenever they are needed.

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
    stream = stream_of(path, Roles(site, target, **others))
    try:
        schema = learned_features(stream)
        if loss == "auto":
            loss = loss_for("class" if _is_text(stream, target) else "number").name
        classes, column, kind = None, Column(target), loss_kind(loss)
        if kind.target == "class":
            classes, column = _classes(stream, target)
        schema = replace(schema, target=column)
        counts, whole = _counted(stream, schema, classes)
        stream.refuse_gaps()
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    if not counts:
        raise DataError(f"{path}: no row is left")
    schema = replace(schema, fill=tuple((whole[0, 1:-1] / whole[0, 0]).tolist()))
    if stream.roles.features is None:
        schema, _ = telling_columns(whole, schema, stream)
    made = make_loss(loss) if classes is None or isinstance(loss, Loss) else kind.from_classes(len(classes))
    n = np.array(list(counts.values()))
    notes, again = tuple(stream.notes), replace(stream, notes=[], gaps={})
    rows = FileRows(tuple(counts), n, made, schema, classes, fit_intercept, notes, again)
    if isinstance(loss, Loss) or classes is not None:
        return rows
    head = next(replace(rows, intercept=False).batches())  # a batch tells the scale well enough
    y = np.asarray(head.y, dtype=np.float64)
    return replace(rows, loss=kind.from_rows(head.X, y, head.site_index, head.offset, head.weight))


def holds_labels(path: str | os.PathLike[str], target: str) -> bool:
    """Whether a column of Parquet files holds labels rather than numbers, by its first rows."""
    stream = Stream(parquet_files(path), Roles("", target))
    return _is_text(stream, target) if target in opened_file(stream.files[0]).schema_arrow.names else False


def holds_zeros_and_ones(path: str | os.PathLike[str], target: str) -> bool:
    """Whether the first rows of a column of Parquet files are 0 or 1, and both are there."""
    stream = Stream(parquet_files(path), Roles("", target))
    if target not in opened_file(stream.files[0]).schema_arrow.names:
        return False
    head = next(stream.batches([target]), {target: np.empty(0)})[target]
    return head.dtype.kind in "iuf" and np.unique(head).tolist() == [0, 1]


def _is_text(stream: Stream, target: str) -> bool:
    head = next(stream.batches([target]), {target: np.empty(0)})[target]
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


def _target(cells: AnyArray, schema: TableSchema, classes: tuple[Label, ...] | None) -> Array:
    if classes is None:
        return parsed_numbers(cells).values
    return np.asarray(level_codes(cells, classes), dtype=np.float64)


def _counted(
    stream: Stream, schema: TableSchema, classes: tuple[Label, ...] | None
) -> tuple[dict[Hashable, float], Array]:
    """Rows of each site in the order in which sites come, or sums of weights, and sums of all rows ``[1, X, y]``."""
    counts: Counter[Hashable] = Counter()
    whole = np.zeros((len(schema.names) + 2,) * 2)
    for table, weight in stream.complete(schema):
        ids, y = site_ids(table[stream.roles.site]), _target(table[stream.roles.target or ""], schema, classes)
        Z = np.column_stack([np.ones(len(y)), schema.encoded(table), y])
        whole += Z.T @ (Z if weight is None else Z * weight[:, None])
        if weight is None:
            counts.update(ids)
            continue
        for one, mass in zip(ids, weight.tolist(), strict=True):
            counts[one] += mass
    return dict(counts), whole
