"""Describe the columns of a table, check tables against the description, and prepare rows accordingly.

A schema is set in a contract before anyone sees rows, or inferred from a table (`fedkin.data.SchemaScan`). It
determines preparation: the encoding of levels as columns of 0 and 1, centring and scaling, and the treatment of missing
cells. All sites with the same schema prepare rows in the same way.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from fedkin._base import AnyArray, Array, Mask, check_choice, count, frozen, listed, repeated
from fedkin.data.cells import (
    COMMA_NUMBER,
    NUMBERS_PER_WORD,
    Finding,
    Gaps,
    Hints,
    Label,
    RowName,
    basis_range,
    level_codes,
    level_text,
    missing_column,
    natural_basis,
    near_names,
    number_hint,
    parsed_numbers,
    raise_findings,
    sheet_row,
)
from fedkin.data.rows import Rows
from fedkin.data.tables import FILLING, Missing, as_columns
from fedkin.errors import DataError, ParameterError, TableWarning, argument

#: Numbers commonly used as codes of missing values.
_MISSING_CODES = frozenset({-1.0, -9.0, -99.0, -999.0, -9999.0, 9.0, 99.0, 999.0, 9999.0, 99999.0})
#: Largest allowed number; squares up to it, and their sums, are finite.
_LARGEST = 1e100
#: Most knots of a curve, and the least distance between them, relative to the largest and absolute.
_MOST_KNOTS, _NEAREST, _LEAST = 100, 1e-10, 1e-50
#: Number of cells and levels in a finding.
_SHOWN = 3


@dataclass(frozen=True)
class Column:
    """The specification of one column of a table."""

    name: str  # as in the header of the table
    kind: Literal["number", "category", "count"] = "number"  # a count is a whole number of at least 0
    unit: str = ""  # for people and for messages
    low: float | None = None  # bounds of the plausible range; values outside are refused
    high: float | None = None
    levels: tuple[Label, ...] = ()  # of a category, the reference first
    mean: float | None = None  # centre in preparation; by default the middle of the plausible range, or 0
    scale: float | None = None  # by default half the width of the plausible range, or 1
    knots: tuple[float, ...] = ()  # knots of a natural cubic spline, for a nonlinear effect

    def __post_init__(self) -> None:
        if not self.name:
            raise ParameterError("a column has no name")
        name = f"column {self.name!r}"
        if self.kind not in ("number", "category", "count"):
            raise ParameterError(f"{name} has the kind {self.kind!r}, expected number, category, count")
        given = {key: getattr(self, key) for key in ("low", "high", "mean", "scale") if getattr(self, key) is not None}
        if self.kind == "category":
            self._check_levels(name)
            given |= {"knots": self.knots} if self.knots else {}
            if given:
                raise ParameterError(f"{name} is a category, so it has no {' and no '.join(given)}")
            return
        if self.levels:
            raise ParameterError(f'{name} has levels, so its kind must be "category", not {self.kind!r}')
        for key, value in given.items():
            if not math.isfinite(value):
                raise ParameterError(f"{name}: {key} is {value}, expected a finite number")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ParameterError(f"{name}: low ({self.low:g}) must be less than high ({self.high:g})")
        if self.scale is not None and not self.scale > 0:
            raise ParameterError(f"{name}: scale must be greater than 0, got {self.scale:g}")
        if self.knots:
            self._check_knots(name)

    def _check_levels(self, name: str) -> None:
        texts = [level_text(level) for level in self.levels]
        if len(texts) < 2:
            raise ParameterError(
                f"{name} is a category with {count(len(texts), 'level')}: name at least two, the reference first, "
                'for example levels = ["no", "yes"]'
            )
        if len({type(level) for level in self.levels}) > 1:
            raise ParameterError(f"{name} has levels of several types: put quotes around all of them")
        if twice := repeated(texts):
            raise ParameterError(f"{name} has the level {twice[0]!r} twice")

    def _check_knots(self, name: str) -> None:
        finite, rising = all(map(math.isfinite, self.knots)), all(a < b for a, b in pairwise(self.knots))
        if self.kind != "number" or len(self.knots) < 3 or not (finite and rising):
            raise ParameterError(f"{name} has knots {listed(self.knots)}: expected at least 3 ascending numbers")
        if len(self.knots) > _MOST_KNOTS:
            raise ParameterError(f"{name} has {len(self.knots)} knots, expected {_MOST_KNOTS} at most: leave some out")
        largest, nearest = max(map(abs, self.knots)), min(b - a for a, b in pairwise(self.knots))
        if largest > _LARGEST or nearest < max(_NEAREST * largest, _LEAST):
            words = f"too large, or closer together than {_NEAREST:g} of the largest"
            raise ParameterError(f"{name} has knots {listed(self.knots)}, {words}: give knots among its values")
        if self.mean is not None or self.scale is not None:
            raise ParameterError(f"{name} has knots, so it has no mean and no scale: its columns are about 0 to 1")

    @property
    def encoded(self) -> tuple[str, ...]:
        """Names of its encoded columns: its own name, or one for each level or knot but the first."""
        if self.knots:
            return tuple(f"{self.name} at {knot:.12g}" for knot in self.knots[1:])
        if self.kind != "category":
            return (self.name,)
        return tuple(f"{self.name}={level_text(level)}" for level in self.levels[1:])

    @property
    def centre_and_scale(self) -> tuple[float, float]:
        """Centre and scale of each encoded column in preparation."""
        centre, scale = 0.0, 1.0
        if self.low is not None and self.high is not None and not self.knots:
            centre, scale = (self.low + self.high) / 2, (self.high - self.low) / 2
        return centre if self.mean is None else self.mean, scale if self.scale is None else self.scale

    @property
    def ranges(self) -> tuple[Array, Array]:
        """Smallest and largest values of the encoded columns, infinite without a plausible range."""
        k = len(self.encoded)
        if self.kind == "category":
            return np.zeros(k), np.ones(k)
        if self.knots and self.low is not None and self.high is not None:
            return basis_range(self.knots, self.low, self.high)
        low, high = (-np.inf, np.inf) if self.knots else (self.low, self.high)
        return np.full(k, -np.inf if low is None else low), np.full(k, np.inf if high is None else high)

    @property
    def description(self) -> str:
        """A description of the column: "number in kg from 30 to 250", "one of 'A', 'B'"."""
        if self.kind == "category":
            return f"one of {listed(map(level_text, self.levels), 12)}"
        parts = ["whole number" if self.kind == "count" else "number"]
        parts += [f"in {self.unit}"] if self.unit else []
        parts += [] if self.low is None else [f"from {self.low:g}"]
        parts += [] if self.high is None else [f"to {self.high:g}"]
        parts += [f"as a curve with knots {listed(f'{knot:g}' for knot in self.knots)}"] if self.knots else []
        return " ".join(parts)

    def findings(
        self,
        column: AnyArray,
        gaps: Gaps = "refuse",
        at: RowName = sheet_row,
        hints: Hints = Hints(),  # noqa: B008
        *,
        open_ended: bool = False,
    ) -> list[Finding]:
        """Check the cells of this column; unknown levels are errors unless a category is ``open_ended``."""
        category = self.kind == "category"
        missing = self.gaps(column)
        rows, findings = np.flatnonzero(missing), list[Finding]()
        if rows.size == len(missing) > 1 and gaps != "fill":
            findings.append(Finding(self.name, "is missing in every row", "missing"))
        elif rows.size and gaps != "fill":
            hint = "these rows are left out" if gaps == "drop" else hints.fill
            text = f"is missing in {rows.size} of {count(len(missing), 'row')}, first in {at(int(rows[0]))}; {hint}"
            findings.append(Finding(self.name, text, "missing", refuses=gaps != "drop"))
        return findings + (self._wrong_levels(column, at, open_ended) if category else self._wrong(column, at, hints))

    def _wrong_levels(self, column: AnyArray, at: RowName, open_ended: bool) -> list[Finding]:
        """Find unknown levels, and a constant column."""
        codes = level_codes(column, self.levels)
        unknown, found = np.flatnonzero(codes == -2), np.unique(codes[codes >= 0])
        if unknown.size:
            seen = Counter(level_text(column[row]) for row in unknown)
            known = [level_text(level) for level in self.levels]
            shown = ", ".join(f"{text!r} ({count(n, 'row')})" for text, n in seen.most_common(_SHOWN))
            more = f" and {len(seen) - _SHOWN} more" if len(seen) > _SHOWN else ""
            where = f"first in {at(int(unknown[0]))}; the known ones are {listed(known, 12)}"
            text, first = f"unknown level {shown}{more}, {where}", seen.most_common(1)[0][0]
            for near in near_names(first, known, cutoff=0.7):
                text += f"; is {first!r} meant to be {near!r}?"
            text += "; these rows are predicted as an average over the known ones" if open_ended else ""
            return [Finding(self.name, text, "unknown_level", refuses=not open_ended)]
        if found.size == 1 and len(column) > 1:
            level = level_text(self.levels[int(found[0])])
            return [Finding(self.name, f"is {level!r} in every row", "constant", refuses=False)]
        return []

    def _fits(self, values: Array) -> bool:
        """Return whether all numbers are present, differ and lie in the plausible range, in two quick passes."""
        low, high = -_LARGEST if self.low is None else self.low, _LARGEST if self.high is None else self.high
        return bool(max(low, -_LARGEST) <= values.min() < values.max() <= min(high, _LARGEST))

    def _wrong(self, column: AnyArray, at: RowName, hints: Hints) -> list[Finding]:
        """Find text, values out of range, fractions among counts, and a constant column."""
        numbers, findings, counts = parsed_numbers(column), list[Finding](), self.kind == "count"
        if self.kind == "number" and len(column) and self._fits(numbers.values):
            return findings

        def find(code: str, text: str) -> None:
            findings.append(Finding(self.name, text + hints.more, code))

        correct = "correct the cell, or leave it empty" + (f" and add {hints.empty}" if hints.empty else "")
        if numbers.wrong:
            cells, n = [cell for _, cell in numbers.wrong], len(numbers.wrong)
            named = [repr(cell) if isinstance(cell, (str, float)) else str(cell) for cell in cells[:_SHOWN]]
            shown = ", ".join(f"{cell} in {at(row)}" for cell, (row, _) in zip(named, numbers.wrong, strict=False))
            more, hint = f" and {n - _SHOWN} more" if n > _SHOWN else "", number_hint(cells) or correct
            commas = all(COMMA_NUMBER.fullmatch(str(cell).strip()) for cell in cells)
            hint += hints.names if NUMBERS_PER_WORD * n > len(column) and not commas else ""
            wrong = "is not a number" if n == 1 else "are not numbers"
            find("not_number", f"{n} of {len(column)} cells {wrong}: {shown}{more}; {hint}")
        usable = np.flatnonzero(np.isfinite(numbers.values))
        values, total = numbers.values[usable], usable.size

        def first(which: Mask) -> str:
            at_first = int(np.flatnonzero(which)[0])
            return f"{values[at_first]:g} in {at(int(usable[at_first]))}"

        def some(which: Mask, what: str) -> str:
            n = int(which.sum())
            return f"{n} of {total} values {'is' if n == 1 else 'are'} {what}: {first(which)}"

        large = np.abs(values) > _LARGEST
        if large.any():
            find("too_large", f"{some(large, 'too large to compute with')}; {correct}")
            return findings
        fractions = values != np.floor(values)
        if counts and fractions.any():
            find("not_whole", some(fractions, "not whole, but counts are"))
        low = 0.0 if counts and self.low is None else self.low
        sides = [
            (values < (-np.inf if low is None else low), "below", low, "lowest"),
            (values > (np.inf if self.high is None else self.high), "above", self.high, "highest"),
        ]
        outside = sides[0][0] | sides[1][0]
        unit = f" {self.unit}" if self.unit else ""
        if 2 * outside.sum() > total:
            which, side, limit, _ = max(sides, key=lambda each: int(each[0].sum()))
            share = f"{which.sum() / total:.0%} of values are {side} {limit:g}{unit}"
            example = f"first {first(outside)}" if outside.sum() > 1 else first(outside)
            find("out_of_range", f"{share}; {example}: check unit and contract")
        elif outside.any():
            parts = [
                some(which, f"{side} {limit:g}{unit}, the {extreme} plausible value")
                for which, side, limit, extreme in sides
                if which.any()
            ]
            common, times = Counter(values[outside].tolist()).most_common(1)[0]
            if common in _MISSING_CODES and times > 1:
                parts.append(f"{common:g} occurs {times} times: if it stands for a missing value, leave the cell empty")
            find("out_of_range", "; ".join(parts))
        elif total > 1 and values.min() == values.max():
            findings.append(Finding(self.name, f"is {values[0]:g} in every row", "constant", refuses=False))
        return findings

    def gaps(self, column: AnyArray) -> Mask:
        """Return which cells are missing."""
        return level_codes(column, self.levels) == -1 if self.kind == "category" else parsed_numbers(column).missing

    def encode(self, column: AnyArray) -> Array:
        """Return the numeric columns ``(n, k)`` in the user's units; NaN for missing or unknown cells."""
        if self.kind != "category":
            values = parsed_numbers(column).values
            return natural_basis(values, self.knots) if self.knots else values[:, None]
        codes = level_codes(column, self.levels)
        encoded = np.asarray(codes[:, None] == np.arange(1, len(self.levels)), dtype=np.float64)
        encoded[codes < 0] = np.nan
        return encoded


@dataclass(frozen=True)
class Schema:
    """The specification of the features, target and offset of a table.

    ``missing`` is the treatment of missing cells: refuse the table, leave out incomplete training rows, fill in the
    mean of the training rows, or fill in the mean and add an indicator column for each feature in ``indicators``. Rows
    to predict are never left out. A schema in a contract has one of the first two rules.
    """

    features: tuple[Column, ...]
    target: Column | None = None  # a category whose levels are the classes, a number or a count; None for the mean loss
    offset: str | None = None  # column added to the linear predictor with coefficient 1
    missing: Missing = "refuse"
    agreed: bool = True  # in a contract, before anyone saw rows; otherwise inferred from a table
    indicators: tuple[str, ...] = ()  # features with a column such as ``age missing``
    fill: tuple[float, ...] = ()  # means of the encoded columns over the training rows; also for unknown levels
    log_offset: bool = False  # `offset` is a column of exposures: its logarithm is added
    event: str | None = None  # column with 1 for an event at the time in the target, 0 for a censored time

    def __post_init__(self) -> None:
        check_choice("missing", self.missing, ("refuse", "drop") if self.agreed else get_args(Missing))
        if self.agreed and not self.features:
            raise ParameterError("a schema needs at least one feature")
        columns = [column.name for column in self.columns] + ([] if self.offset is None else [self.offset])
        if twice := repeated(columns):
            raise ParameterError(f"the column {twice[0]!r} is named twice among features, target, event and offset")
        if twice := repeated(self.names):
            raise ParameterError(f"two encoded columns would have the name {twice[0]!r}: rename a feature or a level")
        for column in self.features:
            if column.kind == "count":
                raise ParameterError(f'column {column.name!r} is a feature: its kind is "number" or "category"')

    @property
    def columns(self) -> tuple[Column, ...]:
        """Features, then the target and the event column, if any."""
        event = () if self.event is None else (event_column(self.event),)
        return (*self.features, *(() if self.target is None else (self.target,)), *event)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the encoded columns, q in number, without the intercept."""
        encoded = (name for column in self.features for name in column.encoded)
        return (*encoded, *(f"{name} missing" for name in self.indicators))

    @property
    def classes(self) -> tuple[Label, ...] | None:
        """Labels of the target's codes 0, 1, ...; None if it is not a category."""
        return self.target.levels if self.target is not None and self.target.kind == "category" else None

    @cached_property
    def mean(self) -> Array:
        """Centres of the encoded columns, ``(q,)``; used only with an intercept."""
        centres = [column.centre_and_scale[0] for column in self.features for _ in column.encoded]
        return frozen(np.array(centres + [0.0] * len(self.indicators)))

    @cached_property
    def scale(self) -> Array:
        """Scales of the encoded columns, ``(q,)``."""
        scales = [column.centre_and_scale[1] for column in self.features for _ in column.encoded]
        return frozen(np.array(scales + [1.0] * len(self.indicators)))

    # --- tables -----------------------------------------------------------------------------------------------

    def check(
        self, columns: Mapping[str, object], *, target: bool = True, offset: bool = True, at: RowName = sheet_row
    ) -> list[Finding]:
        """Return all findings about a table."""
        table = as_columns(columns)
        used = self._used(target=target, offset=offset)
        findings = []
        for column in used:
            if column.name in table:
                findings += self._findings(column, table[column.name], target, at)
            else:
                findings.append(missing_column(column.name, list(table), [one.name for one in used]))
        if offset and self.log_offset and self.offset in table:
            findings += positive_findings(self.offset, "an exposure", table[self.offset], at)
        if target and self.event is not None and self.target is not None and self.target.name in table:
            findings += positive_findings(self.target.name, "a time", table[self.target.name], at)
        if len(next(iter(table.values()), ())) == 0:
            findings.append(Finding("", "the table has no rows", "no_rows"))
        return findings

    def _used(self, *, target: bool = True, offset: bool = True) -> tuple[Column, ...]:
        """Return the columns that a table must have."""
        columns = self.columns if target else self.features
        return (*columns, Column(self.offset)) if offset and self.offset is not None else columns

    def _findings(self, column: Column, cells: AnyArray, training: bool, at: RowName) -> list[Finding]:
        feature = column in self.features
        fills = self.missing in FILLING and feature
        gaps: Gaps = "fill" if fills else "drop" if training and self.missing == "drop" else "refuse"
        hints = Hints()
        if not (training or self.agreed) and feature:
            filling = argument("missing", "mean")
            fill = f"fill them in, leave these rows out, or fit with {filling}: such a model fills them in"
            hints = Hints(fill)
        return column.findings(cells, gaps, at, hints, open_ended=bool(self.fill))

    def encode(self, columns: Mapping[str, object]) -> Array:
        """Return the encoded features ``(n, q)`` of a table in the user's units, for prediction.

        Gaps are filled as in training. A `TableWarning` names unknown levels, which are treated as an average.
        """
        table = as_columns(columns)
        found = self.check(table, target=False, offset=False)
        raise_findings(found)
        unknown = [str(one) for one in found if one.code == "unknown_level"]
        if unknown:
            warnings.warn("; ".join(unknown), TableWarning, stacklevel=2)
        return self.filled(self.encoded(table))

    def encoded(self, table: Mapping[str, AnyArray]) -> Array:
        """Return encoded columns ``(n, q)`` without checks, NaN for missing cells and unknown levels."""
        n = len(next(iter(table.values()), ()))
        known = {column.name: column for column in self.features}
        parts = [column.encode(table[name]) for name, column in known.items()]
        parts += [known[name].gaps(table[name]).astype(np.float64)[:, None] for name in self.indicators]
        return np.concatenate([np.empty((n, 0)), *parts], axis=1)

    def filled(self, X: Array) -> Array:
        """Return encoded columns with NaN replaced by the training means."""
        return np.where(np.isnan(X), self.fill, X) if self.fill and np.isnan(X).any() else X

    def trained(self, X: Array, weight: Array | None = None) -> Schema:
        """Return the schema with the means of these encoded rows ``(n, q)``; 0 for a column without numbers."""
        there = ~np.isnan(X)
        mass = there if weight is None else there * weight[:, None]
        means = (np.where(there, X, 0.0) * mass).sum(axis=0) / np.maximum(mass.sum(axis=0), 1e-300)
        return replace(self, fill=tuple(means.tolist()))

    def rows(self, columns: Mapping[str, object], intercept: bool) -> Rows:
        """Prepare rows for solvers: encode levels, centre and scale, and number classes from 0."""
        table = self.complete(as_columns(columns))
        X = self.scaled(self.encoded(table), intercept)
        if intercept:
            X = np.column_stack([np.ones(len(X)), X])
        return Rows(np.ascontiguousarray(X), self.target_of(table), self.offset_of(table))

    def complete(self, table: dict[str, AnyArray], more: Sequence[Finding] = ()) -> dict[str, AnyArray]:
        """Return the table without rows to leave out; raise one `DataError` with all errors."""
        raise_findings([*self.check(table), *more])
        if self.missing == "refuse":
            return table
        kept = ~np.any([column.gaps(table[column.name]) for column in self._used()], axis=0)
        if not kept.any():
            raise DataError("every row has a missing cell, so no row is left: fill some in")
        return {name: column[kept] for name, column in table.items()}

    def scaled(self, X: Array, intercept: bool) -> Array:
        """Return encoded columns ``(n, q)`` in prepared units, centred only with an intercept."""
        return (X - self.mean) / self.scale if intercept else X / self.scale

    def target_of(self, table: Mapping[str, AnyArray]) -> Array | None:
        """Return the target of each row: class numbers from 0, and censored times negative."""
        if self.target is None:
            return None
        cells = table[self.target.name]
        if self.classes is not None:
            return level_codes(cells, self.classes).astype(np.float64)
        values = parsed_numbers(cells).values
        if self.event is None:
            return values
        return np.where(level_codes(table[self.event], event_column(self.event).levels) == 0, -values, values)

    def offset_of(self, columns: Mapping[str, object]) -> Array | None:
        """Return the offset of each row, if the schema has one."""
        if self.offset is None:
            return None
        values = parsed_numbers(as_columns(columns)[self.offset]).values
        return np.log(values) if self.log_offset else values

    # --- as plain values --------------------------------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """Return the schema as plain values for JSON; `from_plain` reads it back."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Schema:
        """Read the schema that `plain` described."""
        try:
            return msgspec.convert(dict(plain), cls)
        except msgspec.ValidationError as error:
            raise ParameterError(str(error)) from None


def event_column(name: str) -> Column:
    """Return the column of events."""
    return Column(name, "category", levels=(0, 1))


def positive_findings(name: str, what: str, cells: AnyArray, at: RowName) -> list[Finding]:
    """Find the first number that is not positive."""
    values = parsed_numbers(cells).values
    first = np.flatnonzero(values <= 0)[:1].tolist()
    return [Finding(name, f"{what} must be above 0, but is {values[row]:g} in {at(row)}", "positive") for row in first]
