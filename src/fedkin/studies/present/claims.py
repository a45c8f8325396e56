"""The claims that a study puts to the test, with what was observed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedkin.studies.present.figures import COLUMN_LABELS, label_of
from fedkin.studies.present.intervals import Interval, doubt, paired_ratios, student
from fedkin.studies.present.summary import distinct, group, paired_difference, summarize
from fedkin.studies.rows import Row


@dataclass(frozen=True)
class Check:
    """A claim, what was observed, and whether the claim holds in these rows.

    Attributes
    ----------
    claim, observed : str
    holds : bool or None
        By the claim's own criterion. None for an observation: something to know, which is evidence for no claim.
    doubt : str
        The number that decides with its 95% confidence interval, where that reaches to both sides of the claim.
    left_open : bool
        Whether, with few replications, the doubt is the verdict.
    """

    claim: str
    observed: str
    holds: bool | None
    doubt: str = ""
    left_open: bool = False

    def from_few_replications(self) -> Check:
        """The check where there are fewer replications than the study asks for: a claim in doubt is left open."""
        return replace(self, holds=None, left_open=True) if self.doubt else self

    @property
    def verdict(self) -> str:
        """``holds``, ``does not hold``, ``too few replications to tell (...)`` or ``observation``."""
        if self.left_open:
            return f"too few replications to tell ({self.doubt})"
        return "observation" if self.holds is None else "holds" if self.holds else "does not hold"


def estimation(rows: Sequence[Row]) -> list[Check]:
    """Edge selection is as good as the oracle, and Local is what theory says."""
    names = ["varrho", "n_samples", "n_devices"]
    table = summarize(rows, [*names, "estimator"], "error")
    points = list(dict.fromkeys(key[:-1] for key in table))
    paired = paired_ratios(rows, names, "estimator", [("es", "oracle"), ("es", "attainable")], "error")
    checks = []
    for sizes, bound in (("n >= 100", 1.05), ("n = 50", 1.25)):
        chosen = [point for point in points if (point[1] >= 100) == (sizes == "n >= 100")]
        if not chosen:
            continue
        ratio = {point: table[(*point, "es")].mean / table[(*point, "oracle")].mean for point in chosen}
        worst = max(ratio, key=ratio.__getitem__)
        within = sum(value <= bound for value in ratio.values())
        observed = f"{within} of {len(ratio)} cells; the largest is {ratio[worst]:.3f} at {_at(names, worst)}"
        claim = f"Fed-ADMM-ES / Oracle <= {bound} in every cell with {sizes}"
        intervals = [Interval.of(paired[(*point, "es", "oracle")], len(chosen)) for point in chosen]
        checks.append(Check(claim, observed, within == len(ratio), doubt(intervals, high=bound, form=".3f")))
    reference = {
        point: table[(*point, "es")].mean / table[(*point, "attainable")].mean for point in points if point[1] >= 100
    }
    if reference:
        worst = max(reference, key=reference.__getitem__)
        gap = {point: table[(*point, "attainable")].mean / table[(*point, "pooled")].mean for point in reference}
        widest = max(gap, key=gap.__getitem__)
        observed = (
            f"the largest is {reference[worst]:.3f} at {_at(names, worst)}; that best / pooled by true cluster is at "
            f"most {gap[widest]:.3f} at {_at(names, widest)}"
        )
        claim = "Fed-ADMM-ES / the best that choosing among the edges of G can do <= 1.05 in every cell with n >= 100"
        intervals = [Interval.of(paired[(*point, "es", "attainable")], len(reference)) for point in reference]
        checks.append(Check(claim, observed, reference[worst] <= 1.05, doubt(intervals, high=1.05, form=".3f")))
    p = 20
    expected = {point: p / (point[1] - p - 1) for point in points}
    off = {point: table[(*point, "local")].mean / expected[point] - 1 for point in points}
    worst = max(off, key=lambda point: abs(off[point]))
    observed = f"the largest deviation is {off[worst]:+.1%} at {_at(names, worst)}"
    intervals = [
        Interval.of(table[(*point, "local")].scaled(100 / expected[point], -100.0), len(points)) for point in points
    ]
    in_doubt = doubt(intervals, -5.0, 5.0, "+.1f", " %")
    checks.append(Check("Local within 5% of p / (n - p - 1)", observed, abs(off[worst]) <= 0.05, in_doubt))
    return checks


def sensitivity(rows: Sequence[Row]) -> list[Check]:
    """Edge selection survives any graph; selection among all pairs does not look at the graph."""
    names = ["n_samples", "n_devices"]
    table = summarize(rows, [*names, "varrho", "estimator"], "error")
    points = list(dict.fromkeys(key[:-1] for key in table))
    ratio = {point: table[(*point, "es")].mean / table[(*point, "local")].mean for point in points}
    worst = max(ratio, key=ratio.__getitem__)
    below = f"the largest Fed-ADMM-ES / Local is {ratio[worst]:.3f} at {_at([*names, 'varrho'], worst)}"
    paired = paired_ratios(rows, [*names, "varrho"], "estimator", [("es", "local")], "error")
    in_doubt = doubt([Interval.of(one, len(paired)) for one in paired.values()], high=1.0)
    checks = [Check("Fed-ADMM-ES below Local at every ϱ", below, ratio[worst] < 1, in_doubt)]
    levels = distinct(rows, "varrho")
    panels = list(dict.fromkeys(point[:-1] for point in points))
    steepest, where, fewest = 0.0, panels[0], min(one.n for one in table.values())
    for panel in panels:
        line = [table[(*panel, varrho, "local-es")] for varrho in levels]
        slope, error = _slope(levels, [one.mean for one in line], [one.error for one in line])
        if error > 0 and abs(slope / error) > abs(steepest):
            steepest, where = slope / error, panel
    flat = f"the steepest line has a slope of {steepest:+.1f} standard errors, at {_at(names, where)}"
    # the largest of a handful of normal numbers exceeds 3 in about one study in sixty
    claim = "Fed-ADMM-Local-ES flat in ϱ (slope within 3 standard errors of 0)"
    # few replications do not know their standard errors well: Student's quantile in place of 3
    likely = fewest < 2 or 3 < abs(steepest) <= student(fewest, len(panels))
    checks.append(Check(claim, flat, abs(steepest) <= 3, f"{steepest:+.1f} standard errors" if likely else ""))
    return checks


def selection(rows: Sequence[Row]) -> list[Check]:
    """The promise of Theorem 3 where its condition holds, and Bonferroni's everywhere."""
    names = ["variance", "signal", "n_samples"]
    exact, ratio = summarize(rows, names, "exact"), group(rows, names, "signal_ratio")
    strong = [point for point in exact if min(ratio[point]) >= 1]
    checks = []
    if strong:
        worst = min(strong, key=lambda point: exact[point].mean)
        # one cell among many may fall below by chance: what counts is that the interval reaches the promise
        broken = [point for point in strong if exact[point].wilson()[1] < 0.95]
        observed = (
            f"lowest {exact[worst].mean:.3f} of {len(strong)} cells, at {_at(names, worst)}; "
            f"{_none_or(len(broken))} below"
        )
        claim = "Exact recovery with probability >= 0.95 wherever the signal condition holds (95% intervals)"
        intervals = [Interval.of_share(exact[point], len(strong)) for point in strong]
        checks.append(Check(claim, observed, not broken, doubt(intervals, low=0.95, form=".2f")))
    safe = summarize(rows, names, "no_true_edge_dropped")
    broken = [point for point in safe if safe[point].wilson()[1] < 0.95]
    worst = min(safe, key=lambda point: safe[point].mean)
    observed = (
        f"lowest {safe[worst].mean:.3f}, at {_at(names, worst)}; {_none_or(len(broken))} of {len(safe)} cells below"
    )
    claim = "No true edge dropped with probability >= 0.95 in every cell (95% intervals)"
    intervals = [Interval.of_share(one, len(safe)) for one in safe.values()]
    checks.append(Check(claim, observed, not broken, doubt(intervals, low=0.95, form=".2f")))
    return checks


def rate(rows: Sequence[Row]) -> list[Check]:
    """Slopes of log error in the log of Theorem 2's rate.

    A bound allows the error to fall faster with n and |V| and to grow slower with K and |S|. A tenth of slope is left
    for small samples: a cluster with N rows has an error of p / (N - p - 1), not p / N.
    """
    names = ["varied", "n_samples", "n_devices", "n_clusters", "false_edges"]
    error, bound = summarize(rows, names, "error"), summarize(rows, names, "rate")
    checks = []
    for varied in distinct(rows, "varied"):
        points = [point for point in error if point[0] == varied]
        x = [math.log(bound[point].mean) for point in points]
        y = [math.log(error[point].mean) for point in points]
        relative = [error[point].error / error[point].mean for point in points]
        slope, spread = _slope(x, y, relative)
        half = student(min(error[point].n for point in points)) * spread if spread > 0 else math.inf
        interval = Interval(slope, slope - half, slope + half)
        if varied in ("n", "|V|"):
            claim = f"The error falls with {varied} as fast as 1/{varied} or faster (slope at least 0.9)"
            holds, in_doubt = slope + 2 * spread >= 0.9, doubt([interval], low=0.9, form=".2f")
        else:
            claim = f"The error grows with {varied} no faster than K + |S| (slope at most 1.1)"
            holds, in_doubt = slope - 2 * spread <= 1.1, doubt([interval], high=1.1, form=".2f")
        observed = f"log-log slope against the rate {slope:.2f} (standard error {spread:.2f})"
        checks.append(Check(claim, observed, holds, in_doubt))
    return checks


def convergence(rows: Sequence[Row]) -> list[Check]:
    """Fed-ADMM ahead of gradient descent from the hundredth round on."""
    names = ["n_samples", "n_devices", "round"]
    table = summarize(rows, [*names, "method"], "distance")
    pairs = [("fedadmm-full", "gd"), ("fedadmm-batch", "sgd")]
    paired = paired_ratios([row for row in rows if row["round"] >= 100], names, "method", pairs, "distance")
    checks = []
    for fed, other in pairs:
        points = [key[:-1] for key in table if key[-1] == fed and key[2] >= 100 and (*key[:-1], other) in table]
        if not points:
            continue
        ratio = {point: table[(*point, fed)].mean / table[(*point, other)].mean for point in points}
        worst = max(ratio, key=ratio.__getitem__)
        last = max(points, key=lambda point: point[2])[2]
        at_end = max(value for point, value in ratio.items() if point[2] == last)
        observed = f"largest ratio {ratio[worst]:.3g} at {_at(names, worst)}; at round {last} at most {at_end:.2g}"
        claim = f'"{label_of(fed)}" closer to the minimiser than "{label_of(other)}" at every round from 100 on'
        intervals = [Interval.of(paired[(*point, fed, other)], len(points)) for point in points]
        checks.append(Check(claim, observed, ratio[worst] < 1, doubt(intervals, high=1.0)))
    return checks


def availability(rows: Sequence[Row]) -> list[Check]:
    """Estimated probabilities are as good as known ones, S-less is the same as S, and the price of absence."""
    noisy, texts, unlikely, single = [], [], [], False
    levels = distinct(rows, "availability")
    for p in levels:
        chosen = [row for row in rows if row["availability"] == p]
        table = summarize(chosen, ["variant"], "distance")
        known, estimated = table[("known-central",)], table[("estimated-central",)]
        paired = paired_difference(chosen, "variant", "estimated-central", "known-central", "distance")
        noise = math.hypot(known.error, estimated.error)
        noisy.append(not abs(paired.mean) > 2 * noise)
        # few replications do not know their standard errors well: Student's quantile in place of 2
        unlikely.append(abs(paired.mean) > student(paired.n, len(levels)) * noise)
        single = single or paired.n < 2
        texts.append((abs(paired.mean) / known.mean, f"p = {p}: {paired.mean / known.mean:+.1%} of {known.mean:.1e}"))
    observed = f"{sum(noisy)} of {len(noisy)} availabilities; the largest difference is at {max(texts)[1]}"
    in_doubt = max(texts)[1] if single or not (all(noisy) or any(unlikely)) else ""
    checks = [Check("Estimated p_i as good as known p_i, within 2 standard errors", observed, all(noisy), in_doubt)]
    apart = 0.0
    for weighting in distinct(rows, "weighting"):
        chosen = [row for row in rows if row["weighting"] == weighting]
        unit = ("availability", "replication")
        sides = [
            {tuple(row[name] for name in unit): row["distance"] for row in chosen if row["placement"] == placement}
            for placement in ("central", "replicas")
        ]
        apart = max([apart, *(abs(sides[0][key] - sides[1][key]) for key in sides[0] if key in sides[1])])
    checks.append(Check("S-less equals S", f"largest difference of squared distances {apart:g}", apart == 0))
    known_rows = [row for row in rows if row["variant"] == "known-central"]
    table = summarize(known_rows, ["availability"], "distance")
    full = table.get((1.0,))
    if full is not None:
        price = {p: table[(p,)].mean / full.mean * p for (p,) in table}
        extreme = max(price, key=lambda p: abs(math.log(price[p])))
        observed = f"the farthest is {price[extreme] / extreme:.2f} at p = {extreme}, where 1/p is {1 / extreme:.2f}"
        claim = "The squared distance grows as 1/p, within a factor of 2 (Corollary 1)"
        absent = [p for p in levels if p != 1.0]
        ratios = paired_ratios(known_rows, [], "availability", [(p, 1.0) for p in absent], "distance")
        intervals = [Interval.of(ratios[p, 1.0].scaled(p), len(absent)) for p in absent if (p, 1.0) in ratios]
        in_doubt = doubt(intervals, 0.5, 2.0, ".2f", " of 1/p")
        checks.append(Check(claim, observed, all(0.5 <= value <= 2 for value in price.values()), in_doubt))
    return checks


def _none_or(count: int) -> str:
    return str(count) if count else "none"


def _slope(x: Sequence[float], y: Sequence[float], error: Sequence[float]) -> tuple[float, float]:
    """Weighted least-squares slope and its standard error, from independent means with known errors."""
    x_, y_, e_ = (np.asarray(one, dtype=np.float64) for one in (x, y, error))
    if x_.size < 2 or not (np.isfinite(e_) & (e_ > 0)).all():
        return 0.0, 0.0
    weight = 1 / e_**2
    centred = x_ - np.average(x_, weights=weight)
    square = float((weight * centred**2).sum())
    return float((weight * centred * y_).sum()) / square, square**-0.5


def _at(names: Sequence[str], point: Sequence[object]) -> str:
    """A grid point in the words of the figures: ``ϱ = 0.2, n = 100, |V| = 20``."""
    return ", ".join(
        f"{COLUMN_LABELS.get(name, name)} = {label_of(value)}" for name, value in zip(names, point, strict=True)
    )
