"""Means, standard errors and confidence intervals of rows, by groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkin.errors import ParameterError
from fedkin.studies.rows import Row


@dataclass(frozen=True)
class Summary:
    """A sample of numbers in short.

    Attributes
    ----------
    mean, sd : float
        ``sd`` is NaN for a single number.
    n : int

    Examples
    --------
    >>> summary = Summary.of([1.0, 2.0, 3.0])
    >>> summary.mean, summary.sd, round(summary.half_width, 2)
    (2.0, 1.0, 2.48)
    """

    mean: float
    sd: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary:
        """The summary of some numbers."""
        array = np.fromiter(values, dtype=np.float64)
        if array.size == 0:
            return cls(math.nan, math.nan, 0)
        sd = float(array.std(ddof=1)) if array.size > 1 else math.nan
        return cls(float(array.mean()), sd, int(array.size))

    def scaled(self, factor: float, shift: float = 0.0) -> Summary:
        """The summary of ``factor * x + shift``."""
        return Summary(factor * self.mean + shift, abs(factor) * self.sd, self.n)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.sd / math.sqrt(self.n) if self.n > 1 else math.nan

    @property
    def half_width(self) -> float:
        """Half the width of the 95% confidence interval of the mean (Student's)."""
        if self.n < 2:
            return math.nan
        from scipy.special import stdtrit

        return float(stdtrit(self.n - 1, 0.975)) * self.error

    def wilson(self, z: float = 1.959963984540054) -> tuple[float, float]:
        """Interval of a probability, where the numbers are 0 and 1; 95% unless another normal quantile is given.

        Examples
        --------
        >>> low, high = Summary.of([1.0] * 20).wilson()
        >>> round(low, 2), round(high, 2)
        (0.84, 1.0)
        """
        centre = (self.mean + z**2 / (2 * self.n)) / (1 + z**2 / self.n)
        half = z * math.sqrt(self.mean * (1 - self.mean) / self.n + z**2 / (4 * self.n**2)) / (1 + z**2 / self.n)
        return centre - half, centre + half


def group(rows: Iterable[Row], names: Sequence[str], value: str) -> dict[tuple[Any, ...], list[float]]:
    """Values by the columns ``names``, groups in the order in which they appear; rows without a value are left out.

    Examples
    --------
    >>> group([{"a": 1, "x": 2.0}, {"a": 1, "x": 4.0}, {"a": 2, "x": None}], ["a"], "x")
    {(1,): [2.0, 4.0]}
    """
    groups: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        if row.get(value) is not None:
            groups.setdefault(tuple(row.get(name) for name in names), []).append(float(row[value]))
    return groups


def summarize(rows: Iterable[Row], names: Sequence[str], value: str) -> dict[tuple[Any, ...], Summary]:
    """`Summary` of a column by the columns ``names``."""
    return {key: Summary.of(values) for key, values in group(rows, names, value).items()}


def distinct(rows: Iterable[Row], name: str) -> list[Any]:
    """Distinct values of a column: numbers sorted, texts in the order in which they appear."""
    values = list(dict.fromkeys(row[name] for row in rows if row.get(name) is not None))
    return sorted(values) if values and not isinstance(values[0], str) else values


def check_columns(
    what: str, rows: Sequence[Row], asked: Mapping[str, str], where: Mapping[str, Any], numbers: Sequence[str] = ()
) -> None:
    """Raise `ParameterError` unless the rows have the columns that a figure or table asks for.

    Parameters
    ----------
    what : str
        The figure or table, for the message.
    rows : sequence of mappings
        All rows.
    asked : mapping entry -> column
        Entries of the study's file that name columns.
    where : mapping column -> value
        The rows that are wanted.
    numbers : sequence of str
        Entries whose columns must hold numbers.
    """
    known = list(dict.fromkeys(name for row in rows for name in row))
    safe = "the rows are safe: mend the study's file and run the same command again, which only draws"
    for entry, column in [*asked.items(), *(("where", name) for name in where)]:
        if column not in known:
            raise ParameterError(
                f"{what}: no row has the column {column!r} ({entry}); there are {', '.join(known)}; {safe}"
            )
    for entry in set(numbers) & set(asked):
        value = next((row[asked[entry]] for row in rows if row.get(asked[entry]) is not None), 0.0)
        if not isinstance(value, int | float):
            raise ParameterError(f"{what}: column {asked[entry]!r} ({entry}) holds {value!r}, not numbers; {safe}")
    if not any(all(row.get(name) == value for name, value in where.items()) for row in rows):
        raise ParameterError(f"{what}: no row has {dict(where)} (where); {safe}")


def paired_difference(
    rows: Iterable[Row], name: str, first: Any, second: Any, value: str, unit: Sequence[str] = ("replication",)
) -> Summary:
    """`Summary` of ``value`` under ``first`` minus under ``second``, unit by unit.

    Examples
    --------
    >>> rows = [{"replication": r, "m": m, "x": x} for r, m, x in [(0, "a", 3), (0, "b", 1), (1, "a", 5), (1, "b", 1)]]
    >>> paired_difference(rows, "m", "a", "b", "x").mean
    3.0
    """
    sides: dict[Any, dict[tuple[Any, ...], float]] = {first: {}, second: {}}
    for row in rows:
        if row[name] in sides and row.get(value) is not None:
            sides[row[name]][tuple(row[one] for one in unit)] = float(row[value])
    shared = [unit for unit in sides[first] if unit in sides[second]]
    return Summary.of(sides[first][unit] - sides[second][unit] for unit in shared)
