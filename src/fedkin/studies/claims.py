"""Check claims against results, including those of the paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from fedkin._base import count
from fedkin.core import FAMILY_WISE
from fedkin.studies.figures import label_of, point_label
from fedkin.studies.replications import (
    ConfidenceInterval,
    Point,
    Row,
    Sample,
    distinct,
    group,
    paired,
    paired_difference,
    paired_ratios,
    student,
    summarize,
)


@dataclass(frozen=True)
class Check:
    """Claim with the observed result and whether it holds in these rows."""

    claim: str
    observed: str
    holds: bool | None = None  # by the claim's own criterion; None for an observation, which is evidence for no claim
    doubt: str = ""  # the deciding number with its 95% interval, where that reaches to both sides of the claim
    left_open: bool = False  # whether, with few replications, the doubt is the verdict
    reason: str = ""  # why a claim of the paper does not hold here

    def from_few_replications(self) -> Check:
        """Return the check for fewer replications than the study asks for: a doubtful claim is left open."""
        return replace(self, holds=None, left_open=True, reason="") if self.doubt else self

    @property
    def verdict(self) -> str:
        """``holds``, ``does not hold``, ``too few replications to tell (...)`` or ``observation``.

        If the interval of the deciding number contains the claimed bound, the verdict shows that number.
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
    intervals: Iterable[ConfidenceInterval], low: float = -math.inf, high: float = math.inf, form: str = ".3g"
) -> str:
    """Explain why intervals do not settle whether all numbers lie between ``low`` and ``high``; "" if they do.

    They do if all lie between the two, or if one lies entirely outside.
    """
    found = list(intervals)
    reaching = [one for one in found if one.high > high or one.low < low]
    if not reaching or any(one.low > high or one.high < low for one in found):
        return ""

    def outside(one: ConfidenceInterval) -> tuple[float, float]:
        """Return by how much the estimate is outside, and otherwise the interval."""
        return max(one.estimate - high, low - one.estimate, 0.0), max(one.high - high, low - one.low)

    return max(reaching, key=outside).text(form)


def bound_check(
    claim: str,
    found: Mapping[Point, Sample],
    names: Sequence[str],
    high: float = math.inf,
    *,
    low: float = -math.inf,
    reason: str = "",
    form: str = ".3f",
    interval: Callable[[Sample, int], ConfidenceInterval] = Sample.interval,
    together: int = 0,
) -> list[Check]:
    """Check that all means lie between ``low`` and ``high``; no check without means.

    ``reason`` explains a failure. With ``together``, one mean among many may lie outside by chance: the claim fails
    where an interval, simultaneous for that many, lies outside.
    """
    if not found:
        return []

    def within(one: Sample) -> bool:
        range_ = interval(one, together) if together else ConfidenceInterval(one.mean, one.mean, one.mean)
        return range_.low <= high and range_.high >= low

    ends = [f"the {name} is {end(found, names, form)}" for name, end in (("smallest", smallest), ("largest", largest))]
    shown = ", ".join(ends[math.isinf(low) : 2 - math.isinf(high)])
    inside = sum(map(within, found.values()))
    in_doubt = doubt((interval(one, len(found)) for one in found.values()), low, high, form)
    holds = inside == len(found)
    observed = f"{inside} of {count(len(found), 'cell')}; {shown}"
    return [Check(claim, observed, holds, in_doubt, reason="" if holds else reason)]


def largest(found: Mapping[Point, Sample], names: Sequence[str], form: str = ".3f") -> str:
    """Format the largest mean and its cell."""
    return _at(max(found, key=lambda point: found[point].mean), found, names, form)


def smallest(found: Mapping[Point, Sample], names: Sequence[str], form: str = ".3f") -> str:
    """Format the smallest mean and its cell."""
    return _at(min(found, key=lambda point: found[point].mean), found, names, form)


def _at(point: Point, found: Mapping[Point, Sample], names: Sequence[str], form: str) -> str:
    return f"{found[point].mean:{form}} at {point_label(names, point)}"


# --- the paper's claims -----------------------------------------------------------------------------------------------

#: What "Fed-ADMM" can mean in the paper, the estimator and the output of Algorithm 1, each without and with selection.
OUTPUTS = (("fedadmm", "es"), ("fedadmm-printed", "es-printed"))
WHY_NOT_WORSE = (
    "lam is chosen by cross-validation, and lam near 0 is Local: an estimator with that choice is hardly worse than "
    "Local. Objective and algorithm of the paper differ by a factor |V| in lam;"
)
WHY_FALLING = (
    "a site's true and wrong edges grow in proportion to |V|, so their balance stays, while more rows are shared; "
    "Theorem 2 bounds the error, and its bound need not be attained"
)
WHY_NOT_AHEAD = (
    "the edge test among all pairs hardly errs at this signal: a nearly right graph has nothing to add, and the edges "
    "that it lacks cost a little"
)
WHY_NOT_BETTER = (
    "with n = 50 the test has little power, and among all pairs it keeps more false edges than among those of a graph "
    "with ϱ up to 0.4, which has most of them excluded"
)
WHY_TRUE_EDGES = "flipping removes true edges; choosing among the edges of G cannot bring them back (next claim)"


@dataclass(frozen=True)
class _Errors:
    """Errors of estimators by the columns ``names``, and claims about their ratios."""

    rows: Sequence[Row]
    names: Sequence[str]

    def series(self, name: str) -> list[Row]:
        """Return the rows of an estimator."""
        return [row for row in self.rows if row["estimator"] == name]

    def where(self, test: Callable[[Row], bool]) -> _Errors:
        """Return those of the rows that pass a test."""
        return replace(self, rows=[row for row in self.rows if test(row)])

    def ratios(self, first: str, second: str) -> dict[Point, Sample]:
        """Return the errors of one estimator over those of another."""
        return paired_ratios(self.rows, self.names, "estimator", (first, second), "error")

    def check(
        self,
        claim: str,
        first: str,
        second: str,
        high: float = math.inf,
        *,
        low: float = -math.inf,
        reason: str = "",
    ) -> list[Check]:
        """Check bounds of such ratios; ``{}`` in the claim are the names of the estimators."""
        text = claim.format(label_of(first), label_of(second))
        return bound_check(text, self.ratios(first, second), self.names, high, low=low, reason=reason)

    def known(self) -> list[tuple[str, str]]:
        """Return the outputs that the rows have."""
        return [pair for pair in OUTPUTS if self.series(pair[0])]

    def why_not_worse(self) -> str:
        """Explain why Fed-ADMM is not worse than Local."""
        scaled = self.ratios("fedadmm-scaled", "local")
        words = (
            f"with one such factor too many, the ratio is up to {largest(scaled, self.names, '.2f')}" if scaled else ""
        )
        return f"{WHY_NOT_WORSE} {words}" if words else ""

    def factor_too_many(self) -> list[Check]:
        """Report the errors with one factor |V| too many in lam."""
        if not (scaled := self.ratios("fedadmm-scaled", "local")):
            return []
        least = min(one.mean for one in scaled.values())
        observed = f"between {least:.2f} and {largest(scaled, self.names, '.2f')}"
        return [Check("Error over that of Local with one factor |V| too many in lam", observed)]


def estimation(rows: Sequence[Row]) -> list[Check]:
    """Check the sentences of section 5.1, and Local against theory."""
    names = ["varrho", "n_samples", "n_sites"]
    errors, checks = _Errors(rows, names), []
    for name in ("local", "global"):
        claim = f'Section 5.1: the performance of {label_of(name)} does "not depend on |V|"'
        checks += _flat(claim, errors.series(name), names)
    claim = 'Section 5.1: "the estimation error of Oracle is decreasing as |V| increases", at every step of |V|'
    checks += bound_check(claim, _growth(errors.series("oracle"), names), names, 1.0)
    for name, _ in errors.known():
        claim = "Section 5.1: at ϱ = 0.1 {} has smaller errors than Local"
        checks += errors.where(lambda row: row["varrho"] == 0.1).check(claim, name, "local", 1.0)
        checks += errors.check(
            'Section 5.1: "a non-vanishing performance gap" between {} and {}', name, "oracle", low=1.05
        )
        claim = (
            f"Section 5.1: the error of {label_of(name)} does not decrease as |V| increases (largest over smallest |V|)"
        )
        growth = _growth(errors.series(name), names, ends=True)
        checks += bound_check(claim, growth, names, low=0.9, reason=WHY_FALLING)
        claim, why = "Section 5.1: at ϱ = 0.2 {} is worse than Local", errors.why_not_worse()
        bad = errors.where(lambda row: row["varrho"] == 0.2)
        checks += bad.check(claim, name, "local", low=1.0, reason=why)
    for fed, es in OUTPUTS:
        for other in (fed, "local"):
            checks += errors.check("Section 5.1: {} outperforms {} in all settings", es, other, 1.0)
    claim = 'Section 5.1: Fed-ADMM-ES is "almost indistinguishable from Oracle", with {}: at most {} times'
    few, many = errors.where(lambda row: row["n_samples"] < 100), errors.where(lambda row: row["n_samples"] >= 100)
    for some, sizes, bound in ((many, "n >= 100", 1.05), (few, "n = 50", 1.25)):
        checks += some.check(claim.format(sizes, bound), "es", "oracle", bound, reason=WHY_TRUE_EDGES)
    claim = "Ours: Fed-ADMM-ES at most 1.05 times the best that choosing among the edges of G can do, with n >= 100"
    checks += many.check(claim, "es", "attainable", 1.05)
    if gap := many.ratios("attainable", "pooled"):
        claim = "The best choice among the edges of G over one fit per true cluster, with n >= 100"
        checks.append(Check(claim, f"at most {largest(gap, names)}"))
    p, local = 20, summarize(errors.series("local"), names, "error")
    off = {point: one.scaled(100 * (point[1] - p - 1) / p, -100.0) for point, one in local.items()}  # percent
    checks += bound_check("Ours: Local within 5% of p / (n - p - 1)", off, names, 5.0, low=-5.0, form="+.1f")
    return checks + errors.factor_too_many()


def sensitivity(rows: Sequence[Row]) -> list[Check]:
    """Check the sentences of section 5.2."""
    names = ["n_samples", "n_sites", "varrho"]
    errors, checks = _Errors(rows, names), []
    for name, _ in errors.known():
        early = [row for row in errors.series(name) if row["varrho"] <= 0.5]
        claim = f"Section 5.2: the error of {label_of(name)} increases with ϱ, at every step up to 0.5"
        checks += bound_check(claim, _growth(early, names), names, low=1.0)
        claim, why = "Section 5.2: {} exceeds Local from ϱ = 0.2 on", errors.why_not_worse()
        late = errors.where(lambda row: row["varrho"] >= 0.2)
        checks += late.check(claim, name, "local", low=1.0, reason=why)
    for fed, es in OUTPUTS:
        claim = "Section 5.2: {0} is more robust than {1}: below it at every ϱ > 0"
        checks += errors.where(lambda row: row["varrho"] > 0).check(claim, es, fed, 1.0)
        checks += errors.check("Section 5.2: {} is better than Local even at ϱ = 0.9, and at every ϱ", es, "local", 1.0)
    checks += _flat(
        "Section 5.2: the error of Fed-ADMM-Local-ES does not depend on ϱ", errors.series("local-es"), names
    )
    claim = "Section 5.2: Fed-ADMM-ES is better than Fed-ADMM-Local-ES where ϱ is small (at most 0.1)"
    checks += errors.where(lambda row: row["varrho"] <= 0.1).check(claim, "es", "local-es", 1.0, reason=WHY_NOT_AHEAD)
    claim = "Section 5.2: otherwise (ϱ from 0.2 on) Fed-ADMM-Local-ES is better"
    large = errors.where(lambda row: row["varrho"] > 0.1)
    checks += large.check(claim, "es", "local-es", low=1.0, reason=WHY_NOT_BETTER)
    return checks + errors.factor_too_many()


def _growth(rows: Sequence[Row], names: Sequence[str], *, ends: bool = False) -> dict[Point, Sample]:
    """Return the mean error over that at the next smaller value of the last column (``ends``: at the smallest).

    Errors of both are independent.
    """
    table = summarize(rows, names, "error")
    found: dict[Point, Sample] = {}
    for panel in dict.fromkeys(point[:-1] for point in table):
        values = sorted(point[-1] for point in table if point[:-1] == panel)
        pairs = [(values[0], values[-1])] if ends else list(pairwise(values))
        for low, high in pairs if len(values) > 1 else []:
            first, second = table[*panel, low], table[*panel, high]
            ratio = second.mean / first.mean
            error = ratio * math.hypot(first.error / first.mean, second.error / second.mean)
            n = min(first.n, second.n)
            found[*panel, high] = Sample(ratio, error * math.sqrt(n), n)
    return found


def _flat(claim: str, rows: Sequence[Row], names: Sequence[str]) -> list[Check]:
    """Check that the error has no slope along the last column, wherever the others are fixed."""
    lines = summarize(rows, names, "error")
    if not lines:
        return []
    panels = list(dict.fromkeys(point[:-1] for point in lines))
    steepest, where, fewest = 0.0, panels[0], min(one.n for one in lines.values())
    for one in panels:
        line = {point[-1]: sample for point, sample in lines.items() if point[:-1] == one}
        slope, error = _slope(list(line), [found.mean for found in line.values()], [s.error for s in line.values()])
        if error > 0 and abs(slope / error) > abs(steepest):
            steepest, where = slope / error, one
    observed = f"the steepest line has a slope of {steepest:+.1f} standard errors, at {point_label(names[:-1], where)}"
    # the largest of a handful of normal numbers exceeds 3 in about one study in sixty; few replications do not know
    # their standard errors well: Student's quantile in place of 3
    likely = fewest < 2 or 3 < abs(steepest) <= student(fewest, len(panels))
    doubtful = f"{steepest:+.1f} standard errors" if likely else ""
    return [Check(f"{claim} (slope within 3 standard errors of 0)", observed, abs(steepest) <= 3, doubtful)]


def selection(rows: Sequence[Row]) -> list[Check]:
    """Check the claim of Theorem 3 where its condition holds, and the Bonferroni bound everywhere."""
    names = ["variance", "signal", "n_samples"]
    ratio = group(rows, names, "signal_ratio")
    strong = {point: one for point, one in summarize(rows, names, "exact").items() if min(ratio[point]) >= 1}
    safe = summarize(rows, names, "no_true_edge_dropped")
    how: Any = {"low": 0.95, "interval": Sample.share_interval, "together": 1}
    claim = "Exact recovery with probability >= 0.95 wherever the signal condition holds (95% intervals)"
    checks = bound_check(claim, strong, names, **how)
    return checks + bound_check(
        "No true edge dropped with probability >= 0.95 in every cell (95% intervals)", safe, names, **how
    )


def error_rates(rows: Sequence[Row]) -> list[Check]:
    """Check the level of each correction, although tests share sites."""
    names = ["n_clusters", "n_samples", "level"]
    checks = []
    for method in distinct(rows, "method"):
        observed = summarize([row for row in rows if row["method"] == method], names, "observed")
        over = {point: one.scaled(1.0, -point[-1]) for point, one in observed.items()}
        what = "P(any true edge dropped)" if method in FAMILY_WISE else "share of true edges among dropped"
        claim = f"{label_of(method)}: {what} minus the level at most 0, in every setting (95% intervals)"
        checks += bound_check(claim, over, names, 0.0, form="+.4f", together=len(over))
    return checks


def rate(rows: Sequence[Row]) -> list[Check]:
    """Check slopes of log error in the log of Theorem 2's rate.

    A bound allows the error to fall faster with n and |V| and to grow slower with K and |S|. Slopes may deviate by a
    tenth, because samples are small: a cluster with N rows has an error of p / (N - p - 1), not p / N.
    """
    names = ["varied", "n_samples", "n_sites", "n_clusters", "false_edges"]
    error, bound = summarize(rows, names, "error"), summarize(rows, names, "rate")
    checks = []
    for varied in distinct(rows, "varied"):
        points = [point for point in error if point[0] == varied]
        x, y = ([math.log(one[point].mean) for point in points] for one in (bound, error))
        slope, error_of_slope = _slope(x, y, [error[point].error / error[point].mean for point in points])
        n = min(error[point].n for point in points)
        interval = Sample(slope, error_of_slope * math.sqrt(n) if error_of_slope > 0 else math.inf, n).interval()
        if varied in ("n", "|V|"):
            claim = f"The error falls with {varied} as fast as 1/{varied} or faster (slope at least 0.9)"
            holds, in_doubt = slope + 2 * error_of_slope >= 0.9, doubt([interval], low=0.9, form=".2f")
        else:
            claim = f"The error grows with {varied} no faster than K + |S| (slope at most 1.1)"
            holds, in_doubt = slope - 2 * error_of_slope <= 1.1, doubt([interval], high=1.1, form=".2f")
        observed = f"log-log slope against the rate {slope:.2f} (standard error {error_of_slope:.2f})"
        checks.append(Check(claim, observed, holds, in_doubt))
    return checks


def sparse(rows: Sequence[Row]) -> list[Check]:
    """Check sparsity by cross-validation against none, against no graph, and against the best levels."""
    names, mine = ["n_features", "n_samples"], "sparse-fused"
    errors = _Errors(rows, names)
    checks = errors.check("Discussion: the l1 term helps where p > n, in every cell", mine, "fused", 1.0)
    checks += errors.check("The graph helps: below the lasso of every site on its own", mine, "local-lasso", 1.0)
    claim = "Levels by cross-validation: error at most 1.1 times that at the best levels, in every cell"
    why = "cross-validation looks at predictions of a fifth of few rows"
    checks += errors.check(claim, mine, "told-levels", 1.1, reason=why)
    found, false = (summarize(errors.series(mine), names, measure) for measure in ("found", "false"))
    checks += bound_check("Support: 95% of the true entries are found, in every cell", found, names, low=0.95)
    claim = "Support: fewer than half of the entries that are found are false, in every cell"
    why = "cross-validation chooses levels for prediction, which keep too many entries, as for every lasso"
    return checks + bound_check(claim, false, names, 0.5, reason=why)


WHY_LATE = (
    "a step of kappa / t is longer than the curvature allows until t is about kappa squared: iterates go to the border "
    "of the ball, and the plain average forgets them only as 1 / T"
)
WHY_EARLY = "Fed-ADMM damps its first steps by rho |N_i|; gradient descent does not"


def convergence(rows: Sequence[Row]) -> list[Check]:
    """Check the sentence of section 5.3, for Algorithm 1 as printed and for our steps, at all rounds and at late
    ones."""
    names = ["n_samples", "n_sites", "round"]
    checks = []
    for fed, why in (("printed", WHY_LATE), ("fedadmm", WHY_EARLY)):
        for name, other in ((f"{fed}-full", "gd"), (f"{fed}-batch", "sgd")):
            found = paired_ratios(rows, names, "method", (name, other), "distance")
            claim = (
                f'Section 5.3: "{label_of(name)}" is closer to the minimiser than "{label_of(other)}" at every round'
            )
            checks += bound_check(claim, found, names, 1.0, reason=why, form=".3g")
            late = {point: one for point, one in found.items() if point[-1] >= 100}
            checks += bound_check(f"{claim} from 100 on", late, names, 1.0, reason=why, form=".3g")
    if free := [row for row in rows if row["method"] == "unprojected-batch"]:
        runs = {(row["n_samples"], row["n_sites"], row["replication"]): row["diverged"] for row in free}
        shares = {n: [one for key, one in runs.items() if key[0] == n] for n in distinct(free, "n_samples")}
        observed = "; ".join(f"n = {n}: {sum(one):.0f} of {len(one)}" for n, one in shares.items())
        checks.append(Check("Runs of Algorithm 1 as printed that diverge without the projection", observed))
        last = max(row["round"] for row in rows)
        ends = summarize([row for row in rows if row["round"] == last], ["n_samples", "method"], "distance")
        for n in shares:
            each = [f"{label_of(name)} {one.mean:.1e}" for (size, name), one in ends.items() if size == n]
            checks.append(Check(f"Squared distances to the minimiser after {last} rounds, n = {n}", "; ".join(each)))
    return checks


def availability(rows: Sequence[Row]) -> list[Check]:
    """Check estimated against known probabilities, replicas against a central machine, and the cost of absence."""
    noisy, texts, unlikely, single = [], [], [], False
    levels = distinct(rows, "availability")
    table = summarize(rows, ["availability", "variant"], "distance")
    for p in levels:
        chosen = [row for row in rows if row["availability"] == p]
        known, estimated = table[p, "known-central"], table[p, "estimated-central"]
        apart = paired_difference(chosen, "variant", ("estimated-central", "known-central"), "distance")
        noise = math.hypot(known.error, estimated.error)
        noisy.append(not abs(apart.mean) > 2 * noise)
        # few replications do not know their standard errors well: Student's quantile in place of 2
        unlikely.append(abs(apart.mean) > student(apart.n, len(levels)) * noise)
        single = single or apart.n < 2
        texts.append((abs(apart.mean) / known.mean, f"p = {p}: {apart.mean / known.mean:+.1%} of {known.mean:.1e}"))
    observed = f"{sum(noisy)} of {len(noisy)} availabilities; the largest difference is at {max(texts)[1]}"
    in_doubt = max(texts)[1] if single or not (all(noisy) or any(unlikely)) else ""
    checks = [Check("Estimated p_i as good as known p_i, within 2 standard errors", observed, all(noisy), in_doubt)]
    pairs = paired(rows, ["weighting", "availability"], "placement", ("central", "replicas"), "distance")
    farthest = max((float(abs(x - y).max()) for x, y in pairs.values()), default=0.0)
    checks.append(Check("S-less equals S", f"largest difference of squared distances {farthest:g}", farthest == 0))
    known_rows = [row for row in rows if row["variant"] == "known-central"]
    pairs_of_p = {p: paired_ratios(known_rows, [], "availability", (p, 1.0), "distance") for p in levels if p != 1.0}
    price = {(p,): one.scaled(p) for p, found in pairs_of_p.items() for one in found.values()}
    claim = "The squared distance grows as 1/p, within a factor of 2 (Corollary 1): times p, it is between 0.5 and 2"
    return checks + bound_check(claim, price, ["p"], 2.0, low=0.5, form=".2f")


def _slope(x: Sequence[float], y: Sequence[float], error: Sequence[float]) -> tuple[float, float]:
    """Return the weighted least-squares slope and its standard error, from independent means with known errors."""
    x_, y_, e_ = (np.asarray(one, dtype=np.float64) for one in (x, y, error))
    if x_.size < 2 or not (np.isfinite(e_) & (e_ > 0)).all():
        return 0.0, 0.0
    weight = 1 / e_**2
    centred = x_ - np.average(x_, weights=weight)
    square = float((weight * centred**2).sum())
    return float((weight * centred * y_).sum()) / square, square**-0.5
