"""The kin studies: compare `find_kin` and other methods with the truth on one design; tables, figure and claims.

The estimator is an entry of the grid that shares seeds: each has its own cells, on the same designs. Custom estimators
are functions "module:function" of design, workbench and replication (benchmarks/rivals has some).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from fedkin.core import oracle_fit
from fedkin.data import INTERCEPT, Federation
from fedkin.datasets import Design
from fedkin.kin import QUICK, Kin, display_groups, find_kin
from fedkin.studies.claims import Check, bound_check, doubt, largest
from fedkin.studies.figures import ResultTable, add_legend, column_label, label_of
from fedkin.studies.replications import (
    Point,
    Replication,
    Row,
    Sample,
    StudyTask,
    distinct,
    find_function,
    paired_ratios,
    ratio_of_sums,
    summarize,
)
from fedkin.studies.tasks import TUNED_OPTIONS, Workbench

BINS = np.linspace(0.0, 1.0, 11)  # ends of the bins of stated probabilities in a reliability diagram
LEVEL = 0.95  # of the intervals whose coverage is looked at
CELL = ["varrho", "signal"]


def kin(replication: Replication) -> Iterator[dict[str, Any]]:
    """Yield one row with the errors of the grid point's estimator and of an oracle that knows the groups."""
    params, bench = replication.params, Workbench.from_replication(replication)
    design, name = bench.design, params.get("estimator", "kin")
    started, result = process_time(), None
    if name == "kin":
        result = find_kin(design.federation, design.graph, loss=bench.settings.loss, seed=bench.seed)
        theta = result.theta
    elif ":" in name:
        theta = find_function(name, f"estimator {name!r}", replication.folder)(design, bench, replication)
    else:
        theta = bench.estimate(name).theta
    seconds = process_time() - started
    targets = {tuple(point): target for *point, target in replication.options.get("targets", ())}
    yield {
        "error": design.error(theta),
        "oracle_error": design.error(oracle_fit(design.federation, design.labels.tolist(), bench.settings.loss)),
        "target": targets.get((params.get("varrho"), params.get("signal"))),
        **({} if result is None else judged(design, result)),
        "cpu_seconds": seconds,
    }


def judged(design: Design, kin: Kin) -> dict[str, Any]:
    """Compare the stated uncertainty of a result with the truth.

    ``coverage`` is the share of parameters inside their intervals, ``coverage_site`` that for intervals from a site's
    own rows. ``exact`` is whether the reported groups (one, if none are resolved) are the truth. ``purity`` is the
    share of pairs inside groups that are truly alike, whether groups are resolved or not. ``pairs``, ``stated`` and
    ``true`` are, by bins of the stated probability, the number of pairs, the sum of their probabilities, and the number
    of pairs that are truly alike.
    """
    best = display_groups(kin.probability)
    i, j = np.tril_indices(len(best), -1)
    same, together, shown = (labels[i] == labels[j] for labels in (design.labels, best, kin.groups))
    stated = kin.probability[i, j]
    place = np.clip(np.digitize(stated, BINS) - 1, 0, len(BINS) - 2)
    bins = {"pairs": np.ones_like(stated), "stated": stated, "true": same.astype(np.float64)}
    intervals = np.moveaxis(np.array([kin.confint(LEVEL), kin.confint(LEVEL, "site")]), 3, 1)
    covered = [float(((low <= design.theta_star) & (design.theta_star <= high)).mean()) for low, high in intervals]
    return {
        "coverage": covered[0],
        "coverage_site": covered[1],
        "resolved": float(kin.resolved),
        "purity": float(same[together].mean()) if together.any() else 1.0,
        "exact": float((same == shown).all()),
        "shown_groups": int(kin.groups.max()) + 1,
        "graph_use": kin.graph_use,
        **{name: np.bincount(place, weights, minlength=len(BINS) - 1).tolist() for name, weights in bins.items()},
    }


def population(replication: Replication) -> Iterator[dict[str, Any]]:
    """Yield one row on population effects, for sites with normal coefficients around one mean.

    Site u has coefficients ``N(ratio sd, diag(sd^2))`` with ``sd`` from the options. The first is an intercept, except
    for Cox, where a third to a half of the times are censored at random. ``coverage`` is the share of population
    effects inside their 95% intervals; ``errors`` and ``stated`` are lists of errors and of stated standard errors.
    """
    V, loss, rng = replication.params["n_sites"], replication.params["loss"], np.random.default_rng(replication.seed)
    sd, n = np.array(replication.options["sd"]), replication.options["n_samples"]
    mean, names = replication.params["ratio"] * sd, [f"x{j}" for j in range(len(sd))]
    X = rng.normal(size=(V, n, len(sd)))
    if loss != "cox":
        X[:, :, 0], names[0] = 1.0, INTERCEPT
    eta = np.einsum("unp,up->un", X, mean + sd * rng.normal(size=(V, len(sd))))
    if loss == "linear":
        y = eta + rng.normal(size=(V, n))
    elif loss == "logistic":
        y = (rng.logistic(size=(V, n)) < eta).astype(np.float64)
    elif loss == "poisson":
        y = rng.poisson(np.exp(eta)).astype(np.float64)
    else:  # every site has its own baseline hazard
        times, ends = rng.exponential(size=(2, V, n)) * [[[1.0]], [[2.0]]]
        times = times * np.exp(-eta - rng.normal(size=(V, 1)))
        y = np.where(times <= ends, times, -ends)
    found = find_kin(Federation({u: (X[u], y[u]) for u in range(V)}, names), loss=loss, seed=0, **QUICK)
    estimate, low, high = found.population(LEVEL).T
    yield {
        "coverage": float(((low <= mean) & (mean <= high)).mean()),
        "errors": (estimate - mean).tolist(),
        "stated": np.sqrt(np.diag(found.mean_covariance)).tolist(),
    }


#: The tasks of this module with their options, as in `fedkin.studies.tasks`.
TASKS: Mapping[str, tuple[StudyTask, Mapping[str, Sequence[str]]]] = {
    "kin": (kin, {**TUNED_OPTIONS, "targets": ()}),
    "population": (population, {"sd": (), "n_samples": ()}),
}


# --- tables, figure and claims ----------------------------------------------------------------------------------------

#: The best that any method can do, and estimators that are told something about the truth: no rivals.
LIMIT = "rivals:limit"
TOLD = ("pooled", "rivals:ifca", LIMIT)
#: What is promised: error over the target, and over the best rival; stated probabilities; coverage.
TARGET, RIVAL, RELIABLE, COVERAGE = 1.05, 1.02, 0.05, (0.93, 0.97)
POPULATION_CELL, BIAS = ["loss", "n_sites", "ratio"], 0.1
#: Groups are right when this share of the pairs inside them are kin; the rule that shows them, when that many are.
PURE, RIGHT = 0.9, 0.95


def ratio_table(spec: Mapping[str, Any], rows: Sequence[Row]) -> ResultTable:
    """Make the table of errors relative to an oracle that knows the groups."""
    names = [name for name in distinct(rows, "estimator") if name != "pooled"]
    ratios = [paired_ratios(rows, CELL, "estimator", (name, "pooled"), "error") for name in names]
    targets = {point: one.mean for point, one in summarize(rows, CELL, "target").items()}
    points = sorted({point for found in ratios for point in found})
    cells = [[*point, *(found.get(point) for found in ratios), targets.get(point)] for point in points]
    caption = (
        "Mean error over the mean error of an oracle that knows the groups, on the same replications, with its "
        "standard error in brackets."
    )
    return ResultTable(spec["name"], [*map(column_label, CELL), *map(label_of, names), "kin's target"], cells, caption)


def group_table(spec: Mapping[str, Any], rows: Sequence[Row]) -> ResultTable:
    """Make the table that compares kin's stated uncertainty with the truth at each grid point."""
    mine = _of_kin(rows)
    names = _grid(mine)
    measures = {
        "resolved": "groups resolved",
        "exact": "groups exactly right",
        "purity": "pairs inside groups that are alike",
        "coverage": "coverage of 95% intervals",
        "coverage_site": "coverage of intervals from own rows",
    }
    tables = [summarize(mine, names, name) for name in measures]
    cells = [[*point, *(table[point] for table in tables)] for point in tables[0]]
    caption = (
        "Means over the replications, with standard errors in brackets. Where groups are not resolved, one is shown; "
        "pairs inside groups are counted whether they are resolved or not."
    )
    return ResultTable(spec["name"], [*map(column_label, names), *measures.values()], cells, caption)


def reliability(spec: Mapping[str, Any], rows: Sequence[Row], folder: Path) -> Any:
    """Draw the share of pairs that are alike against the stated probability, with groups resolved and not resolved."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    for axis, (title, resolved) in zip(axes, {"resolved": 1.0, "not resolved": 0.0}.items(), strict=True):
        chosen = [row for row in rows if row["resolved"] == resolved]
        axis.plot([0, 1], [0, 1], color="#555555", linewidth=1.0, linestyle=(0, (2, 2)), label="as stated")
        for stated, true, pairs in _bins(chosen):
            ends = np.clip([true.interval().low, true.interval().high] if true.n > 1 else true.mean, 0.0, 1.0)
            axis.plot([stated, stated], ends, color="#D55E00", linewidth=1.0)
            size = 12 + 300 * pairs / max(sum(one[2] for one in _bins(chosen)), 1.0)
            axis.scatter([stated], [true.mean], s=size, color="#D55E00", edgecolor="white", zorder=3)
        axis.set_title(f"groups {title}: {len(chosen)} federations", loc="left")
    figure.supxlabel("stated probability that two sites are alike", fontsize=10)
    figure.supylabel("share of pairs that are alike", fontsize=10)
    add_legend(figure, axes)
    return figure


def _bins(rows: Sequence[Row]) -> list[tuple[float, Sample, float]]:
    """Return mean stated probability, share of kin pairs and number of pairs for each nonempty bin."""
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
    """Check errors against targets and rivals, probabilities, coverage, and when groups are reported."""

    def against(other: str) -> dict[Point, Sample]:
        return paired_ratios(rows, CELL, "estimator", ("kin", other), "error")

    targets = summarize(rows, CELL, "target")
    over = {point: one.scaled(1 / targets[point].mean) for point, one in against("pooled").items() if point in targets}
    rivals = [against(name) for name in distinct(rows, "estimator") if name not in ("kin", *TOLD)]
    worst = {
        point: max((one[point] for one in rivals if point in one), key=lambda one: one.mean)
        for point in dict.fromkeys(point for one in rivals for point in one)
    }
    claim = f"kin / Oracle at most {TARGET} times its target in every cell that has one"
    found = bound_check(claim, over, CELL, TARGET)
    claim = f"kin at most {RIVAL} times the best of the others that are told nothing, in every cell"
    found += bound_check(claim, worst, CELL, RIVAL)
    if limits := against(LIMIT):
        middle = float(np.median([one.mean for one in limits.values()]))
        found.append(
            Check("kin / the information limit", f"median {middle:.3f}; the largest is {largest(limits, CELL)}")
        )
    return [*found, *coverage_checks(rows)]


def coverage_checks(rows: Sequence[Row]) -> list[Check]:
    """Check the coverage of intervals, the reliability of probabilities, and the purity of reported groups."""
    mine = _of_kin(rows)
    names, (low, high) = _grid(mine), COVERAGE
    claim = f"95% intervals cover between {low:.0%} and {high:.0%} of parameters, on average over sites, in every cell"
    found = bound_check(claim, summarize(mine, names, "coverage"), names, high, low=low)
    shown = [row for row in mine if row["resolved"]]
    off = {(round(stated, 3),): one.scaled(1.0, -stated) for stated, one, _ in _bins(shown)}
    claim = f"Stated probabilities within {RELIABLE} of the truth where groups are resolved, in every bin"
    found += bound_check(claim, off, ["stated"], RELIABLE, low=-RELIABLE, form="+.3f")
    if shown:
        pure = Sample.from_values([float(row["purity"] >= PURE) for row in shown])
        observed = f"{pure.mean:.3f} of {pure.n}; resolved in {len(shown)} of {len(mine)} federations"
        claim = f"Where groups are resolved, {PURE:.0%} of pairs inside them are alike, in {RIGHT:.0%} of federations"
        in_doubt = doubt([pure.share_interval()], low=RIGHT, form=".3f")
        found.append(Check(claim, observed, pure.mean >= RIGHT, in_doubt))
    return found


def _population(rows: Sequence[Row]) -> dict[tuple[Any, ...], tuple[Sample, Sample, Sample]]:
    """Return coverage, bias in standard errors, and the ratio of stated to true standard errors by cell.

    Both are means over coefficients. All true effects are positive, so a negative bias is towards 0.
    """
    made: dict[tuple[Any, ...], tuple[Sample, Sample, Sample]] = {}
    for point, coverage in summarize(rows, POPULATION_CELL, "coverage").items():
        chosen = [row for row in rows if tuple(row[name] for name in POPULATION_CELL) == point]
        errors, stated = (np.array([row[name] for row in chosen]) for name in ("errors", "stated"))
        true = errors.std(axis=0, ddof=1) if len(errors) > 1 else np.full(errors.shape[1], np.nan)
        bias, ratio = (Sample.from_values((one / true).mean(axis=1)) for one in (errors, stated))
        made[point] = coverage, bias, ratio
    return made


def population_table(spec: Mapping[str, Any], rows: Sequence[Row]) -> ResultTable:
    """Make the table of population effects: coverage, bias and standard errors."""
    cells = [[*point, *found] for point, found in _population(rows).items()]
    caption = (
        "Means over replications and coefficients, with standard errors in brackets. The bias is in true standard "
        "errors, those over replications; negative is towards 0."
    )
    head = [*map(column_label, POPULATION_CELL), "coverage of 95% intervals", "bias / s.e.", "stated / true s.e."]
    return ResultTable(spec["name"], head, cells, caption)


def population_checks(rows: Sequence[Row]) -> list[Check]:
    """Check coverage and bias of population effects in every cell."""
    found, (low, high) = _population(rows), COVERAGE
    coverage, bias = ({point: one[k] for point, one in found.items()} for k in (0, 1))
    claim = f"95% intervals of population effects cover between {low:.0%} and {high:.0%}, in every cell"
    made = bound_check(claim, coverage, POPULATION_CELL, high, low=low)
    claim = f"The bias of population effects is below {BIAS} standard errors, in every cell"
    return [*made, *bound_check(claim, bias, POPULATION_CELL, BIAS, low=-BIAS)]


def _grid(rows: Sequence[Row]) -> list[str]:
    """Return the columns that differ between grid points."""
    return [name for name in ("truth", "loss", "n_samples", *CELL) if any(row.get(name) is not None for row in rows)]


def _of_kin(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.get("estimator", "kin") == "kin"]
