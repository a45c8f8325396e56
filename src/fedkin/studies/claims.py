"""The claims that the paper's studies put to the test, with what was observed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedkin.core import FAMILY_WISE
from fedkin.studies.summary import (
    Check,
    Interval,
    Row,
    bound_check,
    distinct,
    doubt,
    doubt_of_means,
    group,
    label_of,
    largest,
    paired,
    paired_difference,
    paired_ratios,
    point_label,
    student,
    summarize,
)


def estimation(rows: Sequence[Row]) -> list[Check]:
    """Check that edge selection is as good as the oracle, and Local what theory says."""
    names = ["varrho", "n_samples", "n_sites"]
    oracle, best, gap = (
        paired_ratios(rows, names, "estimator", sides, "error")
        for sides in (("es", "oracle"), ("es", "attainable"), ("attainable", "pooled"))
    )
    checks = []
    for sizes, bound in (("n >= 100", 1.05), ("n = 50", 1.25)):
        ratios = {point: one for point, one in oracle.items() if (point[1] >= 100) == (sizes == "n >= 100")}
        checks += bound_check(f"Fed-ADMM-ES / Oracle <= {bound} in every cell with {sizes}", ratios, names, bound)
    best, gap = ({point: one for point, one in ratios.items() if point[1] >= 100} for ratios in (best, gap))
    if best:
        observed = f"the largest is {largest(best, names)}; that best / pooled by true cluster is at most "
        observed += largest(gap, names)
        claim = "Fed-ADMM-ES / the best that choosing among the edges of G can do <= 1.05 in every cell with n >= 100"
        holds = max(one.mean for one in best.values()) <= 1.05
        checks.append(Check(claim, observed, holds, doubt_of_means(best, high=1.05, form=".3f")))
    p = 20
    local = summarize([row for row in rows if row["estimator"] == "local"], names, "error")
    off = {point: one.scaled(100 * (point[1] - p - 1) / p, -100.0) for point, one in local.items()}  # percent
    worst = max(off, key=lambda point: abs(off[point].mean))
    observed = f"the largest deviation is {off[worst].mean:+.1f}% at {point_label(names, worst)}"
    in_doubt = doubt_of_means(off, -5.0, 5.0, "+.1f", " %")
    checks.append(Check("Local within 5% of p / (n - p - 1)", observed, abs(off[worst].mean) <= 5, in_doubt))
    return checks


def sensitivity(rows: Sequence[Row]) -> list[Check]:
    """Check that edge selection survives any graph, and that selection among all pairs ignores it."""
    names = ["n_samples", "n_sites"]
    ratios = paired_ratios(rows, [*names, "varrho"], "estimator", ("es", "local"), "error")
    below = f"the largest Fed-ADMM-ES / Local is {largest(ratios, [*names, 'varrho'])}"
    holds = max(one.mean for one in ratios.values()) < 1
    checks = [Check("Fed-ADMM-ES below Local at every ϱ", below, holds, doubt_of_means(ratios, high=1.0))]
    lines = summarize([row for row in rows if row["estimator"] == "local-es"], [*names, "varrho"], "error")
    panels = list(dict.fromkeys(point[:-1] for point in lines))
    steepest, where, fewest = 0.0, panels[0], min(one.n for one in lines.values())
    for panel in panels:
        line = {point[-1]: one for point, one in lines.items() if point[:-1] == panel}
        slope, error = _slope(list(line), [one.mean for one in line.values()], [one.error for one in line.values()])
        if error > 0 and abs(slope / error) > abs(steepest):
            steepest, where = slope / error, panel
    flat = f"the steepest line has a slope of {steepest:+.1f} standard errors, at {point_label(names, where)}"
    # the largest of a handful of normal numbers exceeds 3 in about one study in sixty
    claim = "Fed-ADMM-Local-ES flat in ϱ (slope within 3 standard errors of 0)"
    # few replications do not know their standard errors well: Student's quantile in place of 3
    likely = fewest < 2 or 3 < abs(steepest) <= student(fewest, len(panels))
    checks.append(Check(claim, flat, abs(steepest) <= 3, f"{steepest:+.1f} standard errors" if likely else ""))
    return checks


def selection(rows: Sequence[Row]) -> list[Check]:
    """Check the promise of Theorem 3 where its condition holds, and Bonferroni's everywhere."""
    names = ["variance", "signal", "n_samples"]
    ratio = group(rows, names, "signal_ratio")
    strong = {point: one for point, one in summarize(rows, names, "exact").items() if min(ratio[point]) >= 1}
    safe = summarize(rows, names, "no_true_edge_dropped")
    checks = []
    for claim, shares in (
        ("Exact recovery with probability >= 0.95 wherever the signal condition holds (95% intervals)", strong),
        ("No true edge dropped with probability >= 0.95 in every cell (95% intervals)", safe),
    ):
        if shares:
            worst = min(shares, key=lambda point: shares[point].mean)
            # one cell among many may fall below by chance: what counts is that the interval reaches the promise
            broken = sum(one.share_interval().high < 0.95 for one in shares.values())
            lowest = f"lowest {shares[worst].mean:.3f}, at {point_label(names, worst)}"
            observed = f"{lowest}; {broken or 'none'} of {len(shares)} cells below"
            intervals = [one.share_interval(len(shares)) for one in shares.values()]
            checks.append(Check(claim, observed, not broken, doubt(intervals, low=0.95, form=".2f")))
    return checks


def error_rates(rows: Sequence[Row]) -> list[Check]:
    """Check what each correction promises, although tests share sites."""
    names = ["n_clusters", "n_samples", "level"]
    checks = []
    for method in distinct(rows, "method"):
        observed = summarize([row for row in rows if row["method"] == method], names, "observed")
        over = {point: one.scaled(1.0, -point[-1]) for point, one in observed.items()}
        # one setting among many may lie above by chance: what counts is that the interval reaches the promise
        broken = sum(one.mean - one.half_width(len(over)) > 0 for one in over.values())
        worst = max(over, key=lambda point: over[point].mean)
        what = "P(any true edge dropped)" if method in FAMILY_WISE else "share of true edges among dropped"
        found = f"{broken or 'none'} of {len(over)} settings above; nearest to it: {observed[worst].mean:.4f} at "
        claim = f"{label_of(method)}: {what} at most the level, in every setting (95% intervals)"
        in_doubt = doubt_of_means(over, high=0.0)
        checks.append(Check(claim, found + point_label(names, worst), not broken, in_doubt))
    return checks


def rate(rows: Sequence[Row]) -> list[Check]:
    """Check slopes of log error in the log of Theorem 2's rate.

    A bound allows the error to fall faster with n and |V| and to grow slower with K and |S|. A tenth of slope is left
    for small samples: a cluster with N rows has an error of p / (N - p - 1), not p / N.
    """
    names = ["varied", "n_samples", "n_sites", "n_clusters", "false_edges"]
    error, bound = summarize(rows, names, "error"), summarize(rows, names, "rate")
    checks = []
    for varied in distinct(rows, "varied"):
        points = [point for point in error if point[0] == varied]
        x, y = ([math.log(one[point].mean) for point in points] for one in (bound, error))
        relative = [error[point].error / error[point].mean for point in points]
        slope, error_of_slope = _slope(x, y, relative)
        half = student(min(error[point].n for point in points)) * error_of_slope if error_of_slope > 0 else math.inf
        interval = Interval(slope, slope - half, slope + half)
        if varied in ("n", "|V|"):
            claim = f"The error falls with {varied} as fast as 1/{varied} or faster (slope at least 0.9)"
            holds, in_doubt = slope + 2 * error_of_slope >= 0.9, doubt([interval], low=0.9, form=".2f")
        else:
            claim = f"The error grows with {varied} no faster than K + |S| (slope at most 1.1)"
            holds, in_doubt = slope - 2 * error_of_slope <= 1.1, doubt([interval], high=1.1, form=".2f")
        observed = f"log-log slope against the rate {slope:.2f} (standard error {error_of_slope:.2f})"
        checks.append(Check(claim, observed, holds, in_doubt))
    return checks


def convergence(rows: Sequence[Row]) -> list[Check]:
    """Check that Fed-ADMM is ahead of gradient descent from the hundredth round on."""
    names = ["n_samples", "n_sites", "round"]
    late = [row for row in rows if row["round"] >= 100]
    checks = []
    for fed, other in (("fedadmm-full", "gd"), ("fedadmm-batch", "sgd")):
        ratios = paired_ratios(late, names, "method", (fed, other), "distance")
        if ratios:
            last = max(point[2] for point in ratios)
            at_end = max(one.mean for point, one in ratios.items() if point[2] == last)
            observed = f"largest ratio {largest(ratios, names, '.3g')}; at round {last} at most {at_end:.2g}"
            claim = f'"{label_of(fed)}" closer to the minimiser than "{label_of(other)}" at every round from 100 on'
            holds = max(one.mean for one in ratios.values()) < 1
            checks.append(Check(claim, observed, holds, doubt_of_means(ratios, high=1.0)))
    return checks


def availability(rows: Sequence[Row]) -> list[Check]:
    """Check estimated against known probabilities, S-less against S, and the price of absence."""
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
    if 1.0 in levels:
        price = {
            p: one.scaled(p)
            for p in levels
            if p != 1.0
            for one in paired_ratios(known_rows, [], "availability", (p, 1.0), "distance").values()
        }
        means = {1.0: 1.0} | {p: one.mean for p, one in price.items()}
        extreme = max(levels, key=lambda p: abs(math.log(means[p])))
        observed = f"the farthest is {means[extreme] / extreme:.2f} at p = {extreme}, where 1/p is {1 / extreme:.2f}"
        claim = "The squared distance grows as 1/p, within a factor of 2 (Corollary 1)"
        in_doubt = doubt_of_means(price, 0.5, 2.0, ".2f", " of 1/p")
        checks.append(Check(claim, observed, all(0.5 <= value <= 2 for value in means.values()), in_doubt))
    return checks


def _slope(x: Sequence[float], y: Sequence[float], error: Sequence[float]) -> tuple[float, float]:
    """Return the weighted least-squares slope and its standard error, from independent means with known errors."""
    x_, y_, e_ = (np.asarray(one, dtype=np.float64) for one in (x, y, error))
    if x_.size < 2 or not (np.isfinite(e_) & (e_ > 0)).all():
        return 0.0, 0.0
    weight = 1 / e_**2
    centred = x_ - np.average(x_, weights=weight)
    square = float((weight * centred**2).sum())
    return float((weight * centred * y_).sum()) / square, square**-0.5
