"""The task of the kin studies: one estimator on one design, its error, and what `find_kin` says of itself.

The estimator is an entry of the grid, shared by the seeds: each has its own cells, on the same designs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import process_time
from typing import Any

import numpy as np

from fedkin._base import Array
from fedkin.core import oracle_fit
from fedkin.datasets import Design
from fedkin.errors import ParameterError
from fedkin.graph import Graph
from fedkin.kin import Kin, display_groups, find_kin
from fedkin.studies.tasks import peers
from fedkin.studies.tasks.designs import DESIGN_OPTIONS, Replication, make_design, settle_backend
from fedkin.studies.tasks.estimation import TUNING_OPTIONS, Estimate, Tuning, Workbench

#: Ends of the bins of stated probabilities in a reliability diagram.
BINS = np.linspace(0.0, 1.0, 11)
LEVEL = 0.95  # of the intervals whose coverage is looked at

#: Estimators of this task beside those of `estimation`, with the names that figures and tables show.
LABELS: Mapping[str, str] = {
    "clustering": "Greedy clustering, BIC",
    "clusterpath": "Clusterpath, lam by CV",
    "mixed": "Mixed model",
    "ifca": "IFCA, told K",
    "kin": "kin",
    "limit": "Information limit",
}

OPTIONS = {"kin": {**DESIGN_OPTIONS, **TUNING_OPTIONS, "targets": ()}}


def kin(replication: Replication) -> Iterator[dict[str, Any]]:
    """One row: error of the grid point's estimator and of an oracle who is told the groups; for kin, see `judged`."""
    settle_backend()
    params, options = replication.params, replication.options
    design, name = make_design(replication), params.get("estimator", "kin")
    bench = Workbench(design, Tuning.of({**options, **params}), replication.seed % 2**31)
    started = process_time()
    found: dict[str, Any] = {}
    if name == "kin":
        kin = find_kin(design.federation, design.graph, loss=bench.settings.loss, seed=bench.seed)
        seconds, theta, found = process_time() - started, kin.theta, judged(design, kin)
    else:
        theta = _ESTIMATORS[name](bench, replication) if name in _ESTIMATORS else bench.estimate(name).theta
        seconds = process_time() - started
    target = [one[-1] for one in options.get("targets", ()) if one[:-1] == [params.get("varrho"), params.get("signal")]]
    yield {
        "error": design.error(theta),
        "oracle_error": design.error(oracle_fit(design.federation, design.labels.tolist(), bench.settings.loss)),
        "target": target[0] if target else None,
        **found,
        "cpu_seconds": seconds,
    }


def judged(design: Design, kin: Kin) -> dict[str, Any]:
    """What a result says of itself beside the truth.

    ``coverage`` is the share of parameters inside their intervals, ``coverage_site`` that of the intervals from own
    rows alone. ``exact`` is whether the groups that are shown (one, where none are resolved) are the truth. ``purity``
    is the share of pairs inside groups that are kin, whether the groups count as resolved or not. ``pairs``, ``stated``
    and ``true`` are, by bins of the stated probability, the number of pairs, their sum of probabilities, and how many
    of them are kin.
    """
    best = display_groups(kin.probability)
    i, j = np.tril_indices(len(best), -1)
    same, together, shown = (labels[i] == labels[j] for labels in (design.labels, best, kin.groups))
    stated = kin.probability[i, j]
    place = np.clip(np.digitize(stated, BINS) - 1, 0, len(BINS) - 2)
    bins = {"pairs": np.ones_like(stated), "stated": stated, "true": same.astype(np.float64)}
    return {
        "coverage": _coverage(design, kin.confint(LEVEL)),
        "coverage_site": _coverage(design, kin.confint(LEVEL, "site")),
        "resolved": float(kin.resolved),
        "purity": float(same[together].mean()) if together.any() else 1.0,
        "exact": float((same == shown).all()),
        "shown_groups": int(kin.groups.max()) + 1,
        "graph_use": kin.graph_use,
        **{name: np.bincount(place, weights, minlength=len(BINS) - 1).tolist() for name, weights in bins.items()},
    }


def _coverage(design: Design, intervals: Array) -> float:
    inside = (intervals[:, :, 0] <= design.theta_star) & (design.theta_star <= intervals[:, :, 1])
    return float(inside.mean())


def _clusterpath(bench: Workbench, replication: Replication) -> Array:
    estimate: Estimate = bench.penalised(Graph.complete(bench.design.federation.sites))
    return estimate.theta


def _clustering(bench: Workbench, replication: Replication) -> Array:
    sums = peers.least_squares(bench.design.federation)
    return peers.pooled(sums, peers.clustering(sums, bench.design.graph))


def _ifca(bench: Workbench, replication: Replication) -> Array:
    sums = peers.least_squares(bench.design.federation)
    return peers.pooled(sums, peers.ifca(sums, len(np.unique(bench.design.labels)), bench.seed))


def _limit(bench: Workbench, replication: Replication) -> Array:
    if replication.options.get("generator", "paper") != "paper":
        raise ParameterError('the limit is known for generator = "paper" alone; leave "limit" out of the grid')
    given = {"signal": 1.0, "noise": 1.0, "varrho": 0.1, **replication.options.get("design", {}), **replication.params}
    p = bench.design.theta_star.shape[1]
    truth = peers.Truth(
        n_groups=len(np.unique(bench.design.labels)),
        variance=given["signal"] ** 2 * p**-0.5,
        noise=given["noise"] ** 2,
        inside=1 - given["varrho"],
        between=given["varrho"],
    )
    return peers.limit(bench.design, peers.least_squares(bench.design.federation), truth, bench.seed)


_ESTIMATORS: Mapping[str, Callable[[Workbench, Replication], Array]] = {
    "clustering": _clustering,
    "clusterpath": _clusterpath,
    "mixed": lambda bench, _: peers.mixed(peers.least_squares(bench.design.federation)),
    "ifca": _ifca,
    "limit": _limit,
}
