"""The task of the selection study: does the test find the edges of Theorem 3?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import numpy as np

from fedkin.datasets import Design
from fedkin.stats import EdgeSelection, Variance, local_fit, select_edges
from fedkin.studies.tasks.designs import DESIGN_OPTIONS, make_design
from fedkin.studies.tasks.replication import Replication

OPTIONS = {"selection": {**DESIGN_OPTIONS, "level": (), "variances": get_args(Variance)}}


def edge_selection(replication: Replication) -> Iterator[dict[str, Any]]:
    """A row per variance estimate: whether exactly the true edges are kept, errors of both kinds, the signal.

    ``signal_ratio`` is the left side of the theorem's condition (con:min_signal) over its right side: with standard
    normal features the distance between two devices is ``||theta_i - theta_j||^2 / 2``.
    """
    options = replication.options
    level = replication.params.get("level", options.get("level", 0.05))
    design = make_design(replication)
    federation, graph = design.federation, design.graph
    true = design.labels[graph.edges[:, 0]] == design.labels[graph.edges[:, 1]]
    ratio = _signal_ratio(design, true, level)
    for variance in options.get("variances", ["bartlett"]):
        local = local_fit(federation, "linear", variance)
        chosen: EdgeSelection = select_edges(federation, graph, "linear", level, local=local)
        dropped, kept = int((true & ~chosen.kept).sum()), int((~true & chosen.kept).sum())
        yield {
            "variance": variance,
            "exact": float(dropped == 0 and kept == 0),
            "no_true_edge_dropped": float(dropped == 0),
            "true_dropped": dropped,
            "false_kept": kept,
            "edges": graph.n_edges,
            "signal_ratio": ratio,
        }


def _signal_ratio(design: Design, true: np.ndarray[Any, np.dtype[np.bool_]], level: float) -> float:
    from scipy.special import chdtri

    i, j = design.graph.edges[~true].T
    if i.size == 0:
        return float("inf")
    n = np.minimum(design.federation.n_samples[i], design.federation.n_samples[j])
    distance = ((design.theta_star[i] - design.theta_star[j]) ** 2).sum(axis=1) / 2
    p = design.theta_star.shape[1]
    return float((n * distance).min() / (4 * chdtri(p, level / design.graph.n_edges)))
