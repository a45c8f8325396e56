"""Means and confidence intervals of rows, by groups; pairs of methods on the same replications; names for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkin._base import Array
from fedkin.errors import ParameterError
from fedkin.studies.rows import Row
from fedkin.studies.tasks.estimation import LABELS as ESTIMATOR_LABELS
from fedkin.studies.tasks.kin import LABELS as KIN_LABELS

COLUMN_LABELS: Mapping[str, str] = {
    "n_samples": "n",
    "n_sites": "|V|",
    "varrho": "ϱ",
    "n_clusters": "K₀",
    "false_edges": "|S|",
    "signal": "s",
}
VALUE_LABELS: Mapping[str, str] = {
    **ESTIMATOR_LABELS,
    **KIN_LABELS,
    "fedadmm-full": "Fed-ADMM, all samples",
    "fedadmm-batch": "Fed-ADMM, batches of 10",
    "gd": "GD, all samples",
    "sgd": "SGD, batches of 10",
    "known-central": "p known, central S",
    "estimated-central": "p estimated, central S",
    "known-replicas": "p known, S-less",
    "estimated-replicas": "p estimated, S-less",
    "bartlett": "the paper's (Bartlett)",
    "model": "noise estimated, F test",
    "bonferroni": "Bonferroni",
    "holm": "Holm",
    "bh": "Benjamini-Hochberg",
    "by": "Benjamini-Yekutieli",
}


def column_label(name: str) -> str:
    """A column's name as people read it."""
    return COLUMN_LABELS.get(name, name)


def label_of(value: Any) -> str:
    """A value as people read it."""
    return VALUE_LABELS.get(value, value) if isinstance(value, str) else f"{value:g}"


def point_label(names: Sequence[str], point: Sequence[object]) -> str:
    """A grid point: ``ϱ = 0.2, n = 100, |V| = 20``."""
    return ", ".join(f"{column_label(name)} = {label_of(value)}" for name, value in zip(names, point, strict=True))


Point = tuple[Any, ...]


@dataclass(frozen=True)
class Interval:
    """An estimate with the ends of its confidence interval."""

    estimate: float
    low: float
    high: float

    def text(self, form: str = ".3g") -> str:
        """``1.09 ± 0.08``, or the two ends where they are not symmetric."""
        if math.isinf(self.high - self.low):
            return f"{self.estimate:{form}}, without an interval"
        up, down = self.high - self.estimate, self.estimate - self.low
        if math.isclose(up, down, rel_tol=1e-6, abs_tol=1e-12):
            return f"{self.estimate:{form}} ± {up:.2g}"
        return f"{self.estimate:{form}}, between {self.low:{form}} and {self.high:{form}}"


@dataclass(frozen=True)
class Sample:
    """A sample of numbers in short; ``sd`` is NaN for a single number."""

    mean: float
    sd: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Sample:
        """The summary of some numbers."""
        array = np.fromiter(values, dtype=np.float64)
        if array.size == 0:
            return cls(math.nan, math.nan, 0)
        sd = float(array.std(ddof=1)) if array.size > 1 else math.nan
        return cls(float(array.mean()), sd, int(array.size))

    def scaled(self, factor: float, shift: float = 0.0) -> Sample:
        """The summary of ``factor * x + shift``."""
        return Sample(factor * self.mean + shift, abs(factor) * self.sd, self.n)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.sd / math.sqrt(self.n) if self.n > 1 else math.nan

    def half_width(self, n_together: int = 1) -> float:
        """Half the width of Student's 95% interval of the mean; infinite for a single number.

        All of ``n_together`` such intervals hold with that probability (Bonferroni).
        """
        return student(self.n, n_together) * self.error if self.n > 1 else math.inf

    def interval(self, n_together: int = 1) -> Interval:
        """Student's 95% interval of the mean, one of ``n_together``."""
        half = self.half_width(n_together)
        return Interval(self.mean, self.mean - half, self.mean + half)

    def share_interval(self, n_together: int = 1) -> Interval:
        """Wilson's 95% interval of a probability, where the numbers are 0 and 1; one of ``n_together``."""
        from scipy.special import ndtri

        z = float(ndtri(1 - 0.025 / n_together))
        centre = (self.mean + z**2 / (2 * self.n)) / (1 + z**2 / self.n)
        half = z * math.sqrt(self.mean * (1 - self.mean) / self.n + z**2 / (4 * self.n**2)) / (1 + z**2 / self.n)
        return Interval(self.mean, centre - half, centre + half)


def student(n: int, n_together: int = 1) -> float:
    """Standard errors of a mean of ``n`` numbers on each side of it in a 95% interval, one of ``n_together``."""
    from scipy.special import stdtrit

    return float(stdtrit(n - 1, 1 - 0.025 / n_together)) if n > 1 else math.inf


def group(rows: Iterable[Row], names: Sequence[str], value: str) -> dict[Point, list[float]]:
    """Values by the columns ``names``, groups in the order in which they appear; rows without a value are left out."""
    groups: dict[Point, list[float]] = {}
    for row in rows:
        if row.get(value) is not None:
            groups.setdefault(tuple(row.get(name) for name in names), []).append(float(row[value]))
    return groups


def summarize(rows: Iterable[Row], names: Sequence[str], value: str) -> dict[Point, Sample]:
    """`Sample` of a column by the columns ``names``."""
    return {key: Sample.of(values) for key, values in group(rows, names, value).items()}


def distinct(rows: Iterable[Row], name: str) -> list[Any]:
    """Distinct values of a column: numbers sorted, texts in the order in which they appear."""
    values = list(dict.fromkeys(row[name] for row in rows if row.get(name) is not None))
    return sorted(values) if values and not isinstance(values[0], str) else values


def paired(
    rows: Iterable[Row], names: Sequence[str], series: str, sides: tuple[Any, Any], value: str
) -> dict[Point, tuple[Array, Array]]:
    """Values of two series on the replications that both have, by the columns ``names``."""
    values: dict[Point, tuple[dict[Any, float], dict[Any, float]]] = {}
    for row in rows:
        if row[series] in sides and row.get(value) is not None:
            here = values.setdefault(tuple(row.get(name) for name in names), ({}, {}))
            here[sides.index(row[series])][row.get("replication")] = float(row[value])
    found = {}
    for point, (first, second) in values.items():
        shared = [unit for unit in first if unit in second]
        if shared:
            found[point] = tuple(np.array([side[unit] for unit in shared]) for side in (first, second))
    return found  # type: ignore[return-value]


def paired_difference(rows: Iterable[Row], series: str, sides: tuple[Any, Any], value: str) -> Sample:
    """`Sample` of ``value`` under the first side minus under the second, replication by replication."""
    x, y = paired(rows, [], series, sides, value).get((), (np.empty(0), np.empty(0)))
    return Sample.of(x - y)


def ratio_of_sums(x: Array, y: Array) -> Sample:
    """The ratio of two sums over the same replications.

    Its spread is that of the linearised ratio (delta method): the numbers ``(x - ratio * y) / mean(y)``.
    """
    ratio = float(x.mean() / y.mean())
    return Sample(ratio, Sample.of((x - ratio * y) / y.mean()).sd, x.size)


def paired_ratios(
    rows: Iterable[Row], names: Sequence[str], series: str, sides: tuple[Any, Any], value: str
) -> dict[Point, Sample]:
    """Ratios of the means of two series on the same replications, by the columns ``names``."""
    found = {}
    for point, (x, y) in paired(rows, names, series, sides, value).items():
        found[point] = ratio_of_sums(x, y)
    return found


def chosen_rows(
    what: str, rows: Sequence[Row], asked: Mapping[str, str], where: Mapping[str, Any], numbers: Sequence[str]
) -> list[Row]:
    """The rows with the values ``where``, for the figure or table ``what``.

    ``asked`` are the entries of the study's file that name columns, ``numbers`` those whose columns must hold numbers;
    raises `ParameterError` if no row has such a column, or none is as wanted.
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
    chosen = [row for row in rows if all(row.get(name) == value for name, value in where.items())]
    if not chosen:
        raise ParameterError(f"{what}: no row has {dict(where)} (where); {safe}")
    return chosen
