"""Summaries of rows: means with intervals, comparisons on the same replications, claims in doubt, names for readers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import ndtri, stdtrit

from fedkin._base import Array, count
from fedkin.errors import ParameterError

Row = Mapping[str, Any]
Point = tuple[Any, ...]

COLUMN_LABELS: Mapping[str, str] = {
    "n_samples": "n",
    "n_features": "p",
    "n_sites": "|V|",
    "varrho": "ϱ",
    "n_clusters": "K₀",
    "false_edges": "|S|",
    "signal": "s",
}
VALUE_LABELS: Mapping[str, str] = {
    "local": "Local",
    "global": "Global",
    "oracle": "Oracle",
    "fedadmm": "Fed-ADMM (exact minimiser)",
    "fedadmm-printed": "Fed-ADMM (Algorithm 1 as printed)",
    "fedadmm-variant": "Fed-ADMM (our steps and average)",
    "fedadmm-scaled": "Minimiser with lam times |V|",
    "es": "Fed-ADMM-ES (exact)",
    "es-printed": "Fed-ADMM-ES (as printed)",
    "local-es": "Fed-ADMM-Local-ES (exact)",
    "pooled": "Pooled by true cluster",
    "attainable": "Pooled along the true edges of G",
    "local-lasso": "Local lasso",
    "fused": "Fused, no sparsity",
    "sparse-fused": "Fused and sparse, both by CV",
    "sparse-sites": "Fused and sparse, levels by site",
    "sparse-oracle": "Fused and sparse, true graph",
    "told-levels": "Fused and sparse, best levels",
    "clustering": "Greedy clustering, BIC",
    "clusterpath": "Clusterpath, lam by CV",
    "mixed": "Mixed model",
    "ifca": "IFCA, told K",
    "kin": "kin",
    "limit": "Information limit",
    "fedadmm-full": "Our steps, all samples",
    "fedadmm-batch": "Our steps, batches of 10",
    "printed-full": "Algorithm 1 as printed, all samples",
    "printed-batch": "Algorithm 1 as printed, batches of 10",
    "unprojected-batch": "As printed, without the projection",
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
    """Return the name of a column for readers."""
    return COLUMN_LABELS.get(name, name)


def label_of(value: Any) -> str:
    """Return a value for readers."""
    return VALUE_LABELS.get(value, value) if isinstance(value, str) else f"{value:g}"


def point_label(names: Sequence[str], point: Sequence[object]) -> str:
    """Format a grid point: ``ϱ = 0.2, n = 100, |V| = 20``."""
    return ", ".join(f"{column_label(name)} = {label_of(value)}" for name, value in zip(names, point, strict=True))


@dataclass(frozen=True)
class Interval:
    """An estimate with the ends of its confidence interval."""

    estimate: float
    low: float
    high: float

    def text(self, form: str = ".3g") -> str:
        """Format as ``1.09 ± 0.08``, or with both ends where they are not symmetric."""
        if math.isinf(self.high - self.low):
            return f"{self.estimate:{form}}, without an interval"
        up, down = self.high - self.estimate, self.estimate - self.low
        if math.isclose(up, down, rel_tol=1e-6, abs_tol=1e-12):
            return f"{self.estimate:{form}} ± {up:.2g}"
        return f"{self.estimate:{form}}, between {self.low:{form}} and {self.high:{form}}"


@dataclass(frozen=True)
class Sample:
    """Mean, standard deviation (NaN for a single number) and size of a sample."""

    mean: float
    sd: float
    n: int

    @classmethod
    def from_values(cls, values: Iterable[float]) -> Sample:
        """Summarise numbers."""
        array = np.fromiter(values, dtype=np.float64)
        if array.size == 0:
            return cls(math.nan, math.nan, 0)
        return cls(float(array.mean()), float(array.std(ddof=1)) if array.size > 1 else math.nan, int(array.size))

    def scaled(self, factor: float, shift: float = 0.0) -> Sample:
        """Return the summary of ``factor * x + shift``."""
        return Sample(factor * self.mean + shift, abs(factor) * self.sd, self.n)

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.sd / math.sqrt(self.n) if self.n > 1 else math.nan

    def half_width(self, n_together: int = 1) -> float:
        """Return half the width of Student's 95% interval, which holds together with all of ``n_together``."""
        return student(self.n, n_together) * self.error if self.n > 1 else math.inf

    def interval(self, n_together: int = 1) -> Interval:
        """Return Student's 95% interval of the mean, one of ``n_together`` (Bonferroni)."""
        half = self.half_width(n_together)
        return Interval(self.mean, self.mean - half, self.mean + half)

    def share_interval(self, n_together: int = 1) -> Interval:
        """Return Wilson's 95% interval of a probability, where the numbers are 0 and 1; one of ``n_together``."""
        z = float(ndtri(1 - 0.025 / n_together))
        centre = (self.mean + z**2 / (2 * self.n)) / (1 + z**2 / self.n)
        half = z * math.sqrt(self.mean * (1 - self.mean) / self.n + z**2 / (4 * self.n**2)) / (1 + z**2 / self.n)
        return Interval(self.mean, centre - half, centre + half)


def student(n: int, n_together: int = 1) -> float:
    """Return the quantile of Student's 95% interval of a mean of ``n`` numbers, one of ``n_together``."""
    return float(stdtrit(n - 1, 1 - 0.025 / n_together)) if n > 1 else math.inf


def group(rows: Iterable[Row], names: Sequence[str], value: str) -> dict[Point, list[float]]:
    """Collect values by the columns ``names`` in order of appearance; rows without a value are left out."""
    groups: dict[Point, list[float]] = {}
    for row in rows:
        if row.get(value) is not None:
            groups.setdefault(tuple(row.get(name) for name in names), []).append(float(row[value]))
    return groups


def summarize(rows: Iterable[Row], names: Sequence[str], value: str) -> dict[Point, Sample]:
    """Summarise a column by the columns ``names``."""
    return {key: Sample.from_values(values) for key, values in group(rows, names, value).items()}


def distinct(rows: Iterable[Row], name: str) -> list[Any]:
    """Return the distinct values of a column: numbers sorted, texts in order of appearance."""
    values = list(dict.fromkeys(row[name] for row in rows if row.get(name) is not None))
    return sorted(values) if values and not isinstance(values[0], str) else values


def paired(
    rows: Iterable[Row], names: Sequence[str], series: str, sides: tuple[Any, Any], value: str
) -> dict[Point, tuple[Array, Array]]:
    """Return the values of two series on the replications that both have, by the columns ``names``."""
    values: dict[Point, tuple[dict[Any, float], dict[Any, float]]] = {}
    for row in rows:
        if row[series] in sides and row.get(value) is not None:
            here = values.setdefault(tuple(row.get(name) for name in names), ({}, {}))
            here[sides.index(row[series])][row.get("replication")] = float(row[value])
    found = {}
    for point, (first, second) in values.items():
        shared = [unit for unit in first if unit in second]
        if shared:
            found[point] = (np.array([first[unit] for unit in shared]), np.array([second[unit] for unit in shared]))
    return found


def paired_difference(rows: Iterable[Row], series: str, sides: tuple[Any, Any], value: str) -> Sample:
    """Summarise ``value`` of the first side minus the second, replication by replication."""
    x, y = paired(rows, [], series, sides, value).get((), (np.empty(0), np.empty(0)))
    return Sample.from_values(x - y)


def ratio_of_sums(x: Array, y: Array) -> Sample:
    """Return the ratio of two sums over the same replications, with the sd of the linearised ratio (delta method)."""
    ratio = float(x.mean() / y.mean())
    return Sample(ratio, Sample.from_values((x - ratio * y) / y.mean()).sd, x.size)


def paired_ratios(
    rows: Iterable[Row], names: Sequence[str], series: str, sides: tuple[Any, Any], value: str
) -> dict[Point, Sample]:
    """Return ratios of the means of two series on the same replications, by the columns ``names``."""
    return {point: ratio_of_sums(x, y) for point, (x, y) in paired(rows, names, series, sides, value).items()}


def chosen_rows(
    what: str, rows: Sequence[Row], asked: Mapping[str, str], where: Mapping[str, Any], numbers: Sequence[str]
) -> list[Row]:
    """Return the rows with the values ``where``, for the figure or table ``what``.

    ``asked`` are the entries of the study's file that name columns, ``numbers`` those whose columns must hold numbers.
    """
    known = list(dict.fromkeys(name for row in rows for name in row))
    safe = "the rows are safe: fix the study's file and run the same command again, which only draws"
    for entry, column in [*asked.items(), *(("where", name) for name in where)]:
        if column not in known:
            have = ", ".join(known)
            raise ParameterError(f"{what}: no row has the column {column!r} ({entry}); there are {have}; {safe}")
    for entry in set(numbers) & set(asked):
        value = next((row[asked[entry]] for row in rows if row.get(asked[entry]) is not None), 0.0)
        if not isinstance(value, int | float):
            raise ParameterError(f"{what}: column {asked[entry]!r} ({entry}) holds {value!r}, not numbers; {safe}")
    chosen = [row for row in rows if all(row.get(name) == value for name, value in where.items())]
    if not chosen:
        raise ParameterError(f"{what}: no row has {dict(where)} (where); {safe}")
    return chosen


@dataclass(frozen=True)
class Check:
    """A claim, what was observed, and whether the claim holds in these rows."""

    claim: str
    observed: str
    holds: bool | None  # by the claim's own criterion; None for an observation, which is evidence for no claim
    doubt: str = ""  # the deciding number with its 95% interval, where that reaches to both sides of the claim
    left_open: bool = False  # whether, with few replications, the doubt is the verdict
    reason: str = ""  # why a claim of the paper does not hold here

    def from_few_replications(self) -> Check:
        """Return the check with fewer replications than the study asks for: a claim in doubt is left open."""
        return replace(self, holds=None, left_open=True, reason="") if self.doubt else self

    @property
    def verdict(self) -> str:
        """``holds``, ``does not hold``, ``too few replications to tell (...)`` or ``observation``.

        Where the interval of the deciding number reaches to both sides of the claim, the verdict has that number.
        """
        if self.left_open:
            return f"too few replications to tell ({self.doubt})"
        if self.holds is None:
            return "observation"
        return ("holds" if self.holds else "does not hold") + (f", within noise ({self.doubt})" if self.doubt else "")

    def __str__(self) -> str:
        """Format the verdict, the claim, what was observed, and the reason."""
        verdict = self.verdict.upper() if self.holds is False else self.verdict
        return f"{verdict}: {self.claim} ({self.observed})" + (f": {self.reason}" if self.reason else "")


def doubt(
    intervals: Iterable[Interval], low: float = -math.inf, high: float = math.inf, form: str = ".3g", unit: str = ""
) -> str:
    """Say why intervals do not settle whether all numbers lie between ``low`` and ``high``; "" when they do.

    They do when all lie between the two, or when one lies outside as a whole.
    """
    found = list(intervals)
    reaching = [one for one in found if one.high > high or one.low < low]
    if not reaching or any(one.low > high or one.high < low for one in found):
        return ""

    def outside(one: Interval) -> tuple[float, float]:
        """By how much the estimate, as a reader sees it among what was observed, and else the interval is outside."""
        return max(one.estimate - high, low - one.estimate, 0.0), max(one.high - high, low - one.low)

    return max(reaching, key=outside).text(form) + unit


def doubt_of_means(
    found: Mapping[Any, Sample], low: float = -math.inf, high: float = math.inf, form: str = ".3g", unit: str = ""
) -> str:
    """Apply `doubt` to means, by intervals that hold together."""
    return doubt((one.interval(len(found)) for one in found.values()), low, high, form, unit)


def largest(ratios: Mapping[Point, Sample], names: Sequence[str], form: str = ".3f") -> str:
    """Format the largest mean and where it is."""
    worst = max(ratios, key=lambda point: ratios[point].mean)
    return f"{ratios[worst].mean:{form}} at {point_label(names, worst)}"


def bound_check(
    claim: str,
    found: Mapping[Point, Sample],
    names: Sequence[str],
    high: float = math.inf,
    *,
    low: float = -math.inf,
    reason: str = "",
    form: str = ".3f",
) -> list[Check]:
    """Check that all means lie between ``low`` and ``high``; no check where there are none.

    ``reason`` says why, where they do not.
    """
    if not found:
        return []
    within = sum(low <= one.mean <= high for one in found.values())
    ends = f"the largest is {largest(found, names, form)}"
    if math.isfinite(low):
        least = min(found, key=lambda point: found[point].mean)
        smallest = f"the smallest is {found[least].mean:{form}} at {point_label(names, least)}"
        ends = smallest if math.isinf(high) else f"{smallest}, {ends}"
    observed = f"{within} of {count(len(found), 'cell')}; {ends}"
    holds = within == len(found)
    return [Check(claim, observed, holds, doubt_of_means(found, low, high, form), reason="" if holds else reason)]
