"""What a few replications can say about a claim: confidence intervals of means and ratios beside the claim's bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkin.studies.present.summary import Summary
from fedkin.studies.rows import Row


@dataclass(frozen=True)
class Interval:
    """An estimate with the ends of its confidence interval.

    Attributes
    ----------
    estimate, low, high : float
    """

    estimate: float
    low: float
    high: float

    @classmethod
    def of(cls, summary: Summary, n_together: int = 1) -> Interval:
        """Student's 95% interval of a mean; all of ``n_together`` intervals hold with that probability (Bonferroni)."""
        half = student(summary.n, n_together) * summary.error if summary.n > 1 else math.inf
        return cls(summary.mean, summary.mean - half, summary.mean + half)

    @classmethod
    def of_share(cls, summary: Summary, n_together: int = 1) -> Interval:
        """Wilson's interval of a probability, where the numbers are 0 and 1."""
        from scipy.special import ndtri

        return cls(summary.mean, *summary.wilson(float(ndtri(1 - 0.025 / n_together))))

    def text(self, form: str = ".3g") -> str:
        """``1.09 ± 0.08``, or the two ends where they are not symmetric."""
        if math.isinf(self.high - self.low):
            return f"{self.estimate:{form}}, without an interval"
        up, down = self.high - self.estimate, self.estimate - self.low
        if math.isclose(up, down, rel_tol=1e-6, abs_tol=1e-12):
            return f"{self.estimate:{form}} ± {up:.2g}"
        return f"{self.estimate:{form}}, between {self.low:{form}} and {self.high:{form}}"


def student(n: int, n_together: int = 1) -> float:
    """Standard errors of a mean of ``n`` numbers on each side of it in a 95% interval, one of ``n_together``."""
    from scipy.special import stdtrit

    return float(stdtrit(n - 1, 1 - 0.025 / n_together)) if n > 1 else math.inf


def doubt(
    intervals: Iterable[Interval], low: float = -math.inf, high: float = math.inf, form: str = ".3g", unit: str = ""
) -> str:
    """Why intervals do not settle whether all numbers lie between ``low`` and ``high``; "" when they do.

    They do when all lie between the two, or when one lies outside as a whole.

    Examples
    --------
    >>> doubt([Interval(1.09, 1.01, 1.17), Interval(1.0, 0.8, 1.2)], high=1.05)
    '1.09 ± 0.08'
    >>> doubt([Interval(1.09, 1.06, 1.12)], high=1.05), doubt([Interval(1.0, 0.99, 1.01)], high=1.05)
    ('', '')
    """
    found = list(intervals)
    if any(one.low > high or one.high < low for one in found):
        return ""
    reaching = [one for one in found if one.high > high or one.low < low]
    if not reaching:
        return ""
    # the estimate that is farthest outside, as a reader sees it among what was observed; else the interval that is
    farthest = max(
        reaching,
        key=lambda one: (max(one.estimate - high, low - one.estimate, 0.0), max(one.high - high, low - one.low)),
    )
    return farthest.text(form) + unit


def paired_ratios(
    rows: Iterable[Row], names: Sequence[str], series: str, pairs: Sequence[tuple[Any, Any]], value: str
) -> dict[tuple[Any, ...], Summary]:
    """Ratios of means of two series on the same replications, as summaries, by ``(*names, first, second)``.

    The spread is that of the linearised ratio (delta method): the numbers ``(x - ratio * y) / mean(y)``.

    Examples
    --------
    >>> rows = [{"replication": r, "m": m, "x": x} for r, m, x in [(0, "a", 2), (0, "b", 1), (1, "a", 6), (1, "b", 3)]]
    >>> paired_ratios(rows, [], "m", [("a", "b")], "x")
    {('a', 'b'): Summary(mean=2.0, sd=0.0, n=2)}
    """
    values: dict[tuple[Any, ...], dict[Any, dict[Any, float]]] = {}
    for row in rows:
        if row.get(value) is not None:
            here = values.setdefault(tuple(row.get(name) for name in names), {})
            here.setdefault(row[series], {})[row.get("replication")] = float(row[value])
    found = {}
    for point, sides in values.items():
        for first, second in pairs:
            shared = [unit for unit in sides.get(first, {}) if unit in sides.get(second, {})]
            if shared:
                x, y = (np.array([sides[side][unit] for unit in shared]) for side in (first, second))
                ratio = float(x.mean() / y.mean())
                found[(*point, first, second)] = Summary(ratio, Summary.of((x - ratio * y) / y.mean()).sd, len(shared))
    return found
