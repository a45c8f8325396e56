"""What the columns of a table must be: kind, unit, plausible range or levels; and rows prepared accordingly.

A schema is agreed on before anybody looks at rows, so it says everything that preparation needs: how levels become
columns of 0 and 1, and by which numbers features are centred and scaled. Whoever has the schema prepares the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from fedkin._base import AnyArray, Array, count, frozen, listed
from fedkin.data.findings import Finding, check_category, check_number, missing_column, raise_findings
from fedkin.data.labels import Label, level_codes, level_text, parsed_numbers
from fedkin.data.rows import Rows
from fedkin.data.tables import columns_of
from fedkin.errors import ParameterError

ColumnKind = Literal["number", "category", "count"]


@dataclass(frozen=True)
class Column:
    """What one column of a table must be.

    Parameters
    ----------
    name : str
        As in the header of the table.
    kind : "number" | "category" | "count"
        A count is a whole number of at least 0.
    unit : str
        For people and for messages; "" when there is none.
    low, high : float, optional
        The plausible range; values outside are refused.
    levels : tuple of str, int or bool
        Of a category, the reference first.
    mean, scale : float, optional
        Centre and scale in preparation. By default middle and half width of the plausible range, or 0 and 1.

    Examples
    --------
    >>> from fedkin.data import Column
    >>> Column("weight", unit="kg", low=30, high=250).centre_and_scale
    (140.0, 110.0)
    >>> Column("ward", "category", levels=("A", "B", "C")).encoded
    ('ward=B', 'ward=C')
    """

    name: str
    kind: ColumnKind = "number"
    unit: str = ""
    low: float | None = None
    high: float | None = None
    levels: tuple[Label, ...] = ()
    mean: float | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ParameterError("a column has no name")
        if self.kind not in get_args(ColumnKind):
            raise ParameterError(
                f"column {self.name!r} has the kind {self.kind!r}, expected {', '.join(get_args(ColumnKind))}"
            )
        if self.kind == "category":
            self._check_category()
        else:
            self._check_number()

    def _check_category(self) -> None:
        given = [key for key in ("low", "high", "mean", "scale") if getattr(self, key) is not None]
        if given:
            raise ParameterError(f"column {self.name!r} is a category, so it has no {' and no '.join(given)}")
        texts = [level_text(level) for level in self.levels]
        if len(texts) < 2:
            raise ParameterError(
                f"column {self.name!r} is a category with {count(len(texts), 'level')}: name at least two, the "
                'reference first, for example levels = ["no", "yes"]'
            )
        for text in texts:
            if texts.count(text) > 1:
                raise ParameterError(f"column {self.name!r} has the level {text!r} twice")

    def _check_number(self) -> None:
        if self.levels:
            raise ParameterError(f'column {self.name!r} has levels, so its kind must be "category", not {self.kind!r}')
        for key in ("low", "high", "mean", "scale"):
            value = getattr(self, key)
            if value is not None and not math.isfinite(value):
                raise ParameterError(f"column {self.name!r}: {key} is {value}, expected a finite number")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ParameterError(f"column {self.name!r}: low ({self.low:g}) must be less than high ({self.high:g})")
        if self.scale is not None and not self.scale > 0:
            raise ParameterError(f"column {self.name!r}: scale must be greater than 0, got {self.scale:g}")

    @property
    def encoded(self) -> tuple[str, ...]:
        """Names of the numeric columns that it becomes: itself, or one for each level but the first."""
        if self.kind != "category":
            return (self.name,)
        return tuple(f"{self.name}={level_text(level)}" for level in self.levels[1:])

    @property
    def centre_and_scale(self) -> tuple[float, float]:
        """By what preparation centres and scales each of the encoded columns."""
        if self.kind == "category":
            return 0.0, 1.0
        centre, scale = 0.0, 1.0
        if self.low is not None and self.high is not None:
            centre, scale = (self.low + self.high) / 2, (self.high - self.low) / 2
        return centre if self.mean is None else self.mean, scale if self.scale is None else self.scale

    @property
    def words(self) -> str:
        """The column in words: "number in kg from 30 to 250", "one of 'A', 'B'"."""
        if self.kind == "category":
            return f"one of {listed(map(level_text, self.levels), 12)}"
        parts = ["whole number" if self.kind == "count" else "number", f"in {self.unit}" if self.unit else ""]
        if self.low is not None or self.high is not None:
            parts.append("" if self.low is None else f"from {self.low:g}")
            parts.append("" if self.high is None else f"to {self.high:g}")
        return " ".join(part for part in parts if part)

    def findings(self, column: AnyArray) -> list[Finding]:
        """What is wrong with the cells of this column."""
        if self.kind == "category":
            return check_category(self.name, column, self.levels)
        return check_number(self.name, column, self.unit, (self.low, self.high), whole=self.kind == "count")

    def encode(self, column: AnyArray) -> Array:
        """The numeric columns ``(n, k)`` of cells without findings, in the user's units."""
        if self.kind != "category":
            return parsed_numbers(column).values[:, None]
        codes = level_codes(column, self.levels)
        return np.asarray(codes[:, None] == np.arange(1, len(self.levels)), dtype=np.float64)


@dataclass(frozen=True)
class Schema:
    """Features, target and offset of a table.

    Parameters
    ----------
    features : tuple of Column
    target : Column, optional
        A number, a count, or a category whose levels are the classes; None for the mean loss.
    offset : str, optional
        Column that is added to the linear predictor as it is.

    Examples
    --------
    >>> from fedkin.data import Column, Schema
    >>> ward = Column("ward", "category", levels=("A", "B"))
    >>> schema = Schema((Column("age", unit="years", low=20, high=100), ward), Column("days"))
    >>> schema.names
    ('age', 'ward=B')
    >>> schema.rows({"age": [60, 80], "ward": ["A", "B"], "days": [3, 4]}, intercept=True).X
    array([[1. , 0. , 0. ],
           [1. , 0.5, 1. ]])
    >>> print(schema.check({"age": [60, 8], "ward": ["A", "C"], "days": [3, 4]})[0])
    age: 1 of 2 values is below 20 years, the lowest plausible value: 8 in row 3
    """

    features: tuple[Column, ...]
    target: Column | None = None
    offset: str | None = None

    def __post_init__(self) -> None:
        if not self.features:
            raise ParameterError("a schema needs at least one feature")
        columns = [column.name for column in self.columns]
        if self.offset is not None:
            columns.append(self.offset)
        for name in columns:
            if columns.count(name) > 1:
                raise ParameterError(f"the column {name!r} is named twice among features, target and offset")
        for name in self.names:
            if self.names.count(name) > 1:
                raise ParameterError(f"two encoded columns would be called {name!r}: rename a feature or a level")
        for column in self.features:
            if column.kind == "count":
                raise ParameterError(f'column {column.name!r} is a feature: its kind is "number" or "category"')

    @property
    def columns(self) -> tuple[Column, ...]:
        """Features, then the target if there is one."""
        return self.features if self.target is None else (*self.features, self.target)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the encoded columns, q in number, without the intercept."""
        return tuple(name for column in self.features for name in column.encoded)

    @property
    def classes(self) -> tuple[Label, ...] | None:
        """Labels of the target's codes 0, 1, ...; None when it is no category."""
        return self.target.levels if self.target is not None and self.target.kind == "category" else None

    @cached_property
    def mean(self) -> Array:
        """By what the encoded columns are centred, ``(q,)``; with an intercept only."""
        return self._per_encoded(0)

    @cached_property
    def scale(self) -> Array:
        """By what the encoded columns are divided, ``(q,)``."""
        return self._per_encoded(1)

    def _per_encoded(self, which: int) -> Array:
        values = [column.centre_and_scale[which] for column in self.features for _ in column.encoded]
        return frozen(np.array(values, dtype=np.float64))

    # --- tables -----------------------------------------------------------------------------------------------

    def check(self, columns: Mapping[str, object], *, target: bool = True) -> list[Finding]:
        """Everything that is wrong with a table, in words.

        Parameters
        ----------
        columns : mapping of name to one value per row, or any table that `fedkin.data.columns_of` reads
            It may have other columns, too.
        target : bool
            Whether the target must be there: not for rows to predict.

        Returns
        -------
        list of Finding
            In the order of the columns; [] when all is well. Those with ``refuses`` must be mended.
        """
        table = _as_columns(columns)
        findings = []
        for column in self.columns if target else self.features:
            if column.name in table:
                findings += column.findings(table[column.name])
            else:
                findings.append(missing_column(column.name, list(table), [one.name for one in self.columns]))
        if self.offset is not None:
            if self.offset in table:
                found = check_number(self.offset, table[self.offset], "", (None, None))
                findings += [finding for finding in found if finding.refuses]  # it may well be constant
            else:
                findings.append(missing_column(self.offset, list(table), [one.name for one in self.columns]))
        if len(next(iter(table.values()), ())) == 0:
            findings.append(Finding("", "the table has no rows", refuses=True))
        return findings

    def encode(self, columns: Mapping[str, object]) -> Array:
        """The features ``(n, q)`` of a table, levels expanded, in the user's units: as a model takes them.

        Raises one `DataError` with all that does not fit; a target is not needed.
        """
        table = _as_columns(columns)
        raise_findings(self.check(table, target=False))
        return self._encoded(table)

    def _encoded(self, table: Mapping[str, AnyArray]) -> Array:
        return np.concatenate([column.encode(table[column.name]) for column in self.features], axis=1)

    def offset_of(self, columns: Mapping[str, object]) -> Array | None:
        """The offset of each row, if the schema has one."""
        return None if self.offset is None else parsed_numbers(_as_columns(columns)[self.offset]).values

    def rows(self, columns: Mapping[str, object], intercept: bool) -> Rows:
        """Rows as solvers take them: levels expanded, centred and scaled, classes numbered from 0.

        Parameters
        ----------
        columns : mapping of name to one value per row, or any table
            As in `check`.
        intercept : bool
            Whether to put a column of ones first. Without it features are scaled but not centred, since a shift would
            make another model.

        Raises
        ------
        DataError
            With everything that `check` finds.
        """
        table = _as_columns(columns)
        raise_findings(self.check(table))
        X = self._encoded(table)
        X = np.column_stack([np.ones(len(X)), (X - self.mean) / self.scale]) if intercept else X / self.scale
        y: Array | None = None
        if self.target is not None:
            cells = table[self.target.name]
            if self.target.kind == "category":
                y = level_codes(cells, self.target.levels).astype(np.float64)
            else:
                y = parsed_numbers(cells).values
        return Rows(np.ascontiguousarray(X), y, self.offset_of(table))


def _as_columns(columns: object) -> dict[str, AnyArray]:
    if isinstance(columns, dict) and all(isinstance(one, np.ndarray) for one in columns.values()):
        return columns
    return columns_of(columns)
