"""`TableSchema`: what the columns of one table turned out to be, learned from its rows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fedkin._base import AnyArray, Array
from fedkin.data.schema.column import Column
from fedkin.data.schema.findings import FILL_IN, Finding, Gaps, RowWords
from fedkin.data.schema.schema import Schema
from fedkin.errors import TableWarning

#: Rules for missing cells that put a number in their place.
FILLING = ("mean", "indicator")


@dataclass(frozen=True)
class TableSchema(Schema):
    """A schema that was learned from the rows of a table, where nobody has agreed on one before.

    Parameters
    ----------
    features, target, offset
        As in `Schema`.
    missing : "refuse" | "drop" | "mean" | "indicator"
        Missing cells refuse the table; or rows that have any do not train; or the mean of the training rows stands in
        for them; or it does, and a column for each feature in ``indicators`` says where. Rows to predict with missing
        cells are refused unless these are filled.
    indicators : tuple of str
        Features that have such a column, called ``age missing``.
    fill : tuple of float
        Means of the q encoded columns over the training rows. They also stand in for levels that did not train.

    Examples
    --------
    >>> from fedkin.data import Column
    >>> from fedkin.data.schema.learned import TableSchema
    >>> schema = TableSchema((Column("age"),), missing="indicator", indicators=("age",), fill=(50.0, 0.1))
    >>> schema.encode({"age": [40, None]})
    array([[40.,  0.],
           [50.,  1.]])
    """

    indicators: tuple[str, ...] = ()
    fill: tuple[float, ...] = ()

    _RULES: ClassVar[tuple[str, ...]] = ("refuse", "drop", *FILLING)
    _MAY_BE_EMPTY: ClassVar[bool] = True

    def _encoded_names(self) -> tuple[str, ...]:
        return (*super()._encoded_names(), *(f"{name} missing" for name in self.indicators))

    def _findings(self, column: Column, cells: AnyArray, training: bool, at: RowWords) -> list[Finding]:
        fills = self.missing in FILLING and column in self.features
        gaps: Gaps = "fill" if fills else "drop" if training and self.missing == "drop" else "refuse"
        found = column.findings(cells, gaps, at, open_ended=bool(self.fill))
        if training or column not in self.features:
            return found
        cure = 'fill them in, leave these rows out, or fit with missing="mean": such a model fills them in itself'
        return [replace(one, words=one.words.replace(FILL_IN, cure)) for one in found]

    def encode(self, columns: Mapping[str, object]) -> Array:
        """As `Schema.encode`; gaps are filled as in training, and a `TableWarning` names levels that did not train."""
        X = super().encode(columns)
        unseen = [one for one in self.check(columns, target=False, offset=False) if "unknown level" in one.words]
        if unseen:
            warnings.warn("; ".join(map(str, unseen)), TableWarning, stacklevel=2)
        return self.filled(X)

    def encoded(self, table: Mapping[str, AnyArray]) -> Array:
        """Encoded columns ``(n, q)``, NaN where a cell is missing or its level did not train."""
        X = super().encoded(table)
        known = {column.name: column for column in self.features}
        tell = [known[name].gaps(table[name]).astype(np.float64) for name in self.indicators]
        return np.column_stack([X, *tell]) if tell else X

    def filled(self, X: Array) -> Array:
        """Encoded columns with the means of training in the place of NaN."""
        return np.where(np.isnan(X), self.fill, X) if self.fill and np.isnan(X).any() else X

    def trained(self, X: Array, weight: Array | None = None) -> TableSchema:
        """The schema with the means of these encoded rows ``(n, q)``; 0 for a column without any number."""
        there = ~np.isnan(X)
        counted = there if weight is None else there * weight[:, None]
        total = np.where(there, X, 0.0)
        total = total if weight is None else total * weight[:, None]
        means = total.sum(axis=0) / np.maximum(counted.sum(axis=0), 1e-300)
        return replace(self, fill=tuple(means.tolist()))
