"""The task of Figures S1 and S3 and of the rate study: the error of several estimators on one generated design."""

from __future__ import annotations

from collections.abc import Iterator
from time import process_time
from typing import Any

import numpy as np

from fedkin.datasets import Design
from fedkin.studies.tasks.designs import DESIGN_OPTIONS, make_design
from fedkin.studies.tasks.estimators import LABELS, TUNING_OPTIONS, Settings, Workbench
from fedkin.studies.tasks.replication import Replication, settle_backend

OPTIONS = {"estimation": {**DESIGN_OPTIONS, **TUNING_OPTIONS, "estimators": tuple(LABELS)}}


def estimation(replication: Replication) -> Iterator[dict[str, Any]]:
    """A row per estimator: error ``||Theta - Theta*||_F^2 / |V|``, lam, edges and parts of its graph, CPU seconds."""
    backend = settle_backend()
    options = replication.options
    design = make_design(replication)
    bench = Workbench(design, Settings.of(options), replication.seed % 2**31)
    rate = theorem_rate(design)
    for name in options.get("estimators", list(LABELS)):
        started = process_time()
        estimate = bench.estimate(name)
        graph = estimate.graph
        yield {
            "estimator": name,
            "error": design.error(estimate.theta),
            "rate": rate,
            "lam": estimate.lam,
            "edges": None if graph is None else graph.n_edges,
            "edges_across": None if graph is None else int((np.diff(design.labels[graph.edges]) != 0).sum()),
            "components": None if graph is None else graph.n_components,
            "cpu_seconds": process_time() - started,
            "backend": backend,
        }


def theorem_rate(design: Design) -> float:
    """``p (K(E) + |E minus E0|) / (n |V|)`` of Theorem 2; K(E) is the number of connected parts of the graph."""
    graph, (n_devices, p) = design.graph, design.theta_star.shape
    wrong = int((np.diff(design.labels[graph.edges]) != 0).sum())
    n = int(design.federation.n_samples.min())
    return float(p * (graph.n_components + wrong) / (n * n_devices))
