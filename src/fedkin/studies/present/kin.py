"""Tables, claims and the reliability diagram of the kin studies, from their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkin.studies.present.claims import Check, doubt, doubt_of_means, largest
from fedkin.studies.present.figures import add_legend
from fedkin.studies.present.report import Table, mean_and_error
from fedkin.studies.present.summary import (
    Sample,
    column_label,
    distinct,
    label_of,
    paired_ratios,
    point_label,
    ratio_of_sums,
    summarize,
)
from fedkin.studies.rows import Row

CELL = ["varrho", "signal"]
#: Estimators that are told something about the truth: no rivals.
TOLD = ("pooled", "ifca", "limit")
#: What is promised: error over the target, and over the best rival; stated probabilities; coverage.
TARGET, RIVAL, RELIABLE, COVERAGE = 1.05, 1.02, 0.05, (0.93, 0.97)
#: Groups are right when this share of the pairs inside them are kin; the rule that shows them, when that many are.
PURE, RIGHT = 0.9, 0.95


def ratio_table(spec: Mapping[str, Any], rows: Sequence[Row]) -> Table:
    """Error over that of an oracle who is told the groups, an estimator in each column."""
    names = [name for name in distinct(rows, "estimator") if name != "pooled"]
    ratios = {name: paired_ratios(rows, CELL, "estimator", (name, "pooled"), "error") for name in names}
    targets = summarize(rows, CELL, "target")
    points = sorted({point for found in ratios.values() for point in found})
    text, exact = [], []
    for point in points:
        target = targets[point].mean if point in targets else None
        text.append(
            [f"{one:g}" for one in point]
            + [mean_and_error(ratios[name].get(point)) for name in names]
            + ["" if target is None else f"{target:.2f}"]
        )
        exact += [
            [*point, name, one.mean, one.error, one.n, target]
            for name in names
            if (one := ratios[name].get(point)) is not None
        ]
    head = [*map(column_label, CELL), *map(label_of, names), "kin's target"]
    caption = (
        "Mean error over the mean error of an oracle who is told the groups, on the same replications, with its "
        "standard error in brackets."
    )
    exact_head = [*CELL, "estimator", "ratio", "standard_error", "n", "target"]
    return Table(spec["name"], head, text, exact_head, exact, caption)


def group_table(spec: Mapping[str, Any], rows: Sequence[Row]) -> Table:
    """What kin says of itself at each grid point, beside the truth."""
    mine = _of_kin(rows)
    names = _grid(mine)
    measures = {
        "resolved": "groups resolved",
        "exact": "groups exactly right",
        "purity": "pairs inside groups that are kin",
        "coverage": "coverage of 95% intervals",
        "coverage_site": "of those from own rows alone",
    }
    tables = {name: summarize(mine, names, name) for name in measures}
    points = list(tables["coverage"])
    text = [[*map(label_of, point), *(f"{tables[name][point].mean:.3f}" for name in measures)] for point in points]
    exact = [
        [*point, *(tables[name][point].mean for name in measures), tables["coverage"][point].n] for point in points
    ]
    head = [*map(column_label, names), *measures.values()]
    caption = (
        "Means over the replications. Where groups are not resolved, one is shown; pairs inside groups are counted "
        "whether they are resolved or not."
    )
    return Table(spec["name"], head, text, [*names, *measures, "n"], exact, caption)


def reliability(spec: Mapping[str, Any], rows: Sequence[Row], folder: Path | None = None) -> Any:
    """Share of pairs that are kin against the stated probability, where groups are resolved and where not."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, (title, resolved) in zip(axes, {"resolved": 1.0, "not resolved": 0.0}.items(), strict=True):
        chosen = [row for row in rows if row["resolved"] == resolved]
        axis.plot([0, 1], [0, 1], color="#555555", linewidth=1.0, linestyle=(0, (2, 2)), label="as stated")
        for stated, true, pairs in _bins(chosen):
            half = true.half_width() if true.n > 1 else 0.0
            ends = np.clip([true.mean - half, true.mean + half], 0.0, 1.0)
            axis.plot([stated, stated], ends, color="#D55E00", linewidth=1.0)
            size = 12 + 300 * pairs / max(sum(one[2] for one in _bins(chosen)), 1.0)
            axis.scatter([stated], [true.mean], s=size, color="#D55E00", edgecolor="white", zorder=3)
        axis.set_title(f"groups {title}: {len(chosen)} federations", loc="left")
    figure.supxlabel("stated probability that two sites are kin", fontsize=10)
    figure.supylabel("share of pairs that are kin", fontsize=10)
    add_legend(figure, axes)
    return figure


def _bins(rows: Sequence[Row]) -> list[tuple[float, Sample, float]]:
    """Of each bin with pairs: mean stated probability, share of pairs that are kin, number of pairs."""
    if not rows:
        return []
    pairs, stated, true = (np.array([row[name] for row in rows]) for name in ("pairs", "stated", "true"))
    found = []
    for k in range(pairs.shape[1]):
        used = pairs[:, k] > 0
        if used.any():
            n = float(pairs[used, k].sum())
            found.append((float(stated[used, k].sum()) / n, ratio_of_sums(true[used, k], pairs[used, k]), n))
    return found


def checks(rows: Sequence[Row]) -> list[Check]:
    """Errors against targets and rivals, probabilities against truth, coverage, and when groups are shown."""
    return [*_error_checks(rows), *coverage_checks(rows)]


def _error_checks(rows: Sequence[Row]) -> list[Check]:
    oracle = paired_ratios(rows, CELL, "estimator", ("kin", "pooled"), "error")
    targets = summarize(rows, CELL, "target")
    over = {point: one.scaled(1 / targets[point].mean) for point, one in oracle.items() if point in targets}
    rivals = [name for name in distinct(rows, "estimator") if name not in ("kin", *TOLD)]
    against = [paired_ratios(rows, CELL, "estimator", ("kin", name), "error") for name in rivals]
    worst = {
        point: max((one[point] for one in against if point in one), key=lambda one: one.mean)
        for point in dict.fromkeys(point for one in against for point in one)
    }
    found = []
    for claim, ratios, bound in (
        ("kin / Oracle at most {} times its target in every cell that has one", over, TARGET),
        ("kin at most {} times the best of the others that are told nothing, in every cell", worst, RIVAL),
    ):
        if ratios:
            within = sum(one.mean <= bound for one in ratios.values())
            observed = f"{within} of {len(ratios)} cells; the largest is {largest(ratios, CELL)}"
            in_doubt = doubt_of_means(ratios, high=bound, form=".3f")
            found.append(Check(claim.format(bound), observed, within == len(ratios), in_doubt))
    limits = paired_ratios(rows, CELL, "estimator", ("kin", "limit"), "error")
    if limits:
        middle = float(np.median([one.mean for one in limits.values()]))
        observed = f"median {middle:.3f}; the largest is {largest(limits, CELL)}"
        found.append(Check("kin / the information limit", observed, None))
    return found


def coverage_checks(rows: Sequence[Row]) -> list[Check]:
    """Coverage of intervals, reliability of probabilities, purity of groups that are shown."""
    mine = _of_kin(rows)
    names = _grid(mine)
    low, high = COVERAGE
    shares = summarize(mine, names, "coverage")
    outside = [point for point, one in shares.items() if not low <= one.mean <= high]
    farthest = max(shares, key=lambda point: abs(shares[point].mean - 0.95))
    observed = (
        f"{len(shares) - len(outside)} of {len(shares)} cells; the farthest is {shares[farthest].mean:.3f} at "
        f"{point_label(names, farthest)}"
    )
    claim = f"95% intervals cover between {low:.0%} and {high:.0%} of parameters, on average over sites, in every cell"
    found = [Check(claim, observed, not outside, doubt_of_means(shares, low, high, ".3f"))]
    shown = [row for row in mine if row["resolved"]]
    off = {stated: one.scaled(1.0, -stated) for stated, one, _ in _bins(shown)}
    if off:
        worst = max(off, key=lambda stated: abs(off[stated].mean))
        observed = f"the farthest: stated {worst:.2f}, true {worst + off[worst].mean:.2f}"
        claim = f"Stated probabilities within {RELIABLE} of the truth where groups are resolved, in every bin"
        in_doubt = doubt_of_means(off, -RELIABLE, RELIABLE, "+.3f")
        found.append(Check(claim, observed, abs(off[worst].mean) <= RELIABLE, in_doubt))
        pure = Sample.of([float(row["purity"] >= PURE) for row in shown])
        observed = f"{pure.mean:.3f} of {pure.n}; resolved in {len(shown)} of {len(mine)} federations"
        claim = f"Where groups are resolved, {PURE:.0%} of pairs inside them are kin, in {RIGHT:.0%} of federations"
        in_doubt = doubt([pure.share_interval()], low=RIGHT, form=".3f")
        found.append(Check(claim, observed, pure.mean >= RIGHT, in_doubt))
    return found


def _grid(rows: Sequence[Row]) -> list[str]:
    """Columns that tell the grid points apart."""
    return [name for name in ("truth", "loss", "n_samples", *CELL) if any(row.get(name) is not None for row in rows)]


def _of_kin(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.get("estimator", "kin") == "kin"]
