"""Edge selection between sites: the edges that `select_edges` keeps, with only summaries travelling to neighbours."""

from __future__ import annotations

import numpy as np
import pytest

from federations import in_threads, part_of, plan_of
from fedkin.core import Problem, select_edges
from fedkin.data import Federation
from fedkin.datasets import paper_design
from fedkin.federate import EdgeTests, Journal
from fedkin.federate.participant import select, summary
from fedkin.federate.records import Selection
from fedkin.graph import Graph
from memory_network import QUICK, Faults, MemoryNetwork


def renamed(problem: Problem) -> Problem:
    """With names instead of numbers."""
    names = {site: f"d{site}" for site in problem.federation.sites}
    graph = Graph.from_indices(list(names.values()), problem.graph.edges, problem.graph.weights)
    federation = Federation({name: problem.federation[site] for site, name in names.items()})
    return Problem(federation, graph, lam=problem.lam)


@pytest.mark.parametrize("variance", ["bartlett", "model", "sandwich"])
def test_sites_keep_the_edges_that_one_machine_would_keep(variance: str) -> None:
    design = paper_design(n_sites=8, n_samples=60, n_features=3, n_clusters=2, varrho=0.3, seed=2)
    problem = Problem(design.federation, design.graph, lam=0.01)
    plan = plan_of(renamed(problem), 5, select=EdgeTests(level=0.05, variance=variance))
    network = MemoryNetwork(Faults(loss=0.1, duplication=0.1, delay=0.01))
    chosen: dict[int, Selection] = {}

    def one(u: int) -> None:
        chosen[u] = select(part_of(plan, u), network.join(), Journal(str(u)), QUICK)

    in_threads(one, 8)
    network.close()
    expected = select_edges(problem.federation, problem.graph, level=0.05, variance=variance)  # type: ignore[arg-type]
    assert 0 < expected.kept.sum() < expected.kept.size
    for (i, j), kept, p_value in zip(problem.graph.edges.tolist(), expected.kept, expected.p_value, strict=True):
        assert (f"d{j}" in chosen[i].dropped) == (f"d{i}" in chosen[j].dropped) == (not kept)
        assert chosen[i].p_values[f"d{j}"] == chosen[j].p_values[f"d{i}"]
        if variance != "model":  # noise variances are steadied across all sites there, across two here
            assert np.isclose(chosen[i].p_values[f"d{j}"], p_value, rtol=1e-8, atol=1e-300)


def test_a_summary_is_finite_and_as_long_as_it_says() -> None:
    design = paper_design(n_sites=2, n_samples=3, n_features=4, n_clusters=1, seed=0)  # fewer rows than features
    problem = Problem(design.federation, design.graph, lam=0.01)
    values = summary(part_of(plan_of(renamed(problem), 5, batch=2, select=EdgeTests()), 0))
    assert values.size == 4 * 4 + 2 * 4 + 5  # covariance, estimate and prior precision, five facts
    assert np.isfinite(values).all()
    assert values[-1] == 1.0
