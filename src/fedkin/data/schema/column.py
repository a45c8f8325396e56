"""What one column of a table must be, and how its cells become numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from fedkin._base import AnyArray, Array, Mask, count, listed
from fedkin.data.schema.findings import Finding, Gaps, RowWords, check_category, check_number, sheet_row
from fedkin.data.schema.labels import Label, level_codes, level_text, parsed_numbers
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
        if len({type(level) for level in self.levels}) > 1:
            raise ParameterError(f"column {self.name!r} has levels of several types: put quotes around all of them")
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

    def findings(
        self, column: AnyArray, gaps: Gaps = "refuse", at: RowWords = sheet_row, *, open_ended: bool = False
    ) -> list[Finding]:
        """What is wrong with the cells of this column; unknown levels refuse unless a category is ``open_ended``."""
        if self.kind == "category":
            return check_category(self.name, column, self.levels, gaps, at, open_ended=open_ended)
        plausible = (self.low, self.high)
        return check_number(self.name, column, self.unit, plausible, gaps, at, whole=self.kind == "count")

    def gaps(self, column: AnyArray) -> Mask:
        """Which cells are missing."""
        return level_codes(column, self.levels) == -1 if self.kind == "category" else parsed_numbers(column).missing

    def encode(self, column: AnyArray) -> Array:
        """The numeric columns ``(n, k)`` of cells without findings, in the user's units; NaN where there is nothing."""
        if self.kind != "category":
            return parsed_numbers(column).values[:, None]
        codes = level_codes(column, self.levels)
        encoded = np.asarray(codes[:, None] == np.arange(1, len(self.levels)), dtype=np.float64)
        encoded[codes < 0] = np.nan
        return encoded
