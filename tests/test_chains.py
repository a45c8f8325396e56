"""Exact solutions along chains, and the iteration built on them, against cvxpy and the edge-by-edge iteration."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import grid, path
from fedkin.core import FusedObjective, QuadraticTerms, make_penalty
from fedkin.graph import Graph
from fedkin.solvers import chains as module
from fedkin.solvers import solve_fused
from fedkin.solvers.chains import ChainIteration, chains_for, two_chain_sets
from fedkin.solvers.compiled import CompiledIteration
from fedkin.solvers.exact import start_iteration
from fedkin.solvers.kernels.chains import Links, chain_step
from fedkin.solvers.kernels.jit import frozen


def objective_on(graph: Graph, p: int = 1, strength: float = 0.3, seed: int = 0, even: bool = False) -> FusedObjective:
    rng = np.random.default_rng(seed)
    n = graph.n_sites
    a = np.ones(n) if even else rng.uniform(0.5, 2.0, n)
    centre = np.cumsum(rng.normal(size=(n, p)) * (rng.random((n, 1)) < 0.1), axis=0)
    b = a[:, None] * (centre + 0.3 * rng.normal(size=(n, p)))
    return FusedObjective(QuadraticTerms(a, b, 0.5 * (b**2).sum(axis=1)), graph, make_penalty("l1"), strength)


def solve_chain(y: np.ndarray, a: np.ndarray, radius: np.ndarray) -> np.ndarray:
    n = y.size
    starts, nodes = np.array([0, n], dtype=np.int32), np.arange(n, dtype=np.int32)
    rest = np.empty(n)
    links = Links(*(frozen(of) for of in (starts, nodes, nodes, np.ones(n), np.r_[radius, 0.0])))
    chain_step(0, 1, links, a, a * y, np.zeros(n), rest)
    return y - rest / a


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.integers(0, 10**6), st.sampled_from([0.01, 0.3, 3.0]), st.booleans())
def test_one_chain_satisfies_the_optimality_conditions(n: int, seed: int, level: float, coarse: bool) -> None:
    rng = np.random.default_rng(seed)
    y, a, radius = rng.normal(size=n), rng.uniform(0.2, 3.0, n), level * rng.uniform(0.0, 2.0, max(n - 1, 0))
    if coarse:  # ties
        y, a, radius = np.round(y), np.ones(n), np.round(radius, 1)
    x = solve_chain(y, a, radius)
    # u_k = sum_{j <= k} a_j (y_j - x_j) is a dual: inside its bound, at it where x jumps, and 0 at the end
    u = np.cumsum(a * (y - x))
    assert abs(u[-1]) <= 1e-12 * n
    jump = np.diff(x)
    assert (np.abs(u[:-1]) <= radius + 1e-12).all()
    np.testing.assert_allclose(u[:-1] * -jump, radius * np.abs(jump), atol=1e-11)


def test_one_chain_against_cvxpy() -> None:
    cvxpy = pytest.importorskip("cvxpy")
    rng = np.random.default_rng(3)
    y, a, radius = rng.normal(size=30), rng.uniform(0.5, 2, 30), rng.uniform(0.1, 1, 29)
    x = cvxpy.Variable(30)
    cost = cvxpy.sum(cvxpy.multiply(a / 2, (x - y) ** 2)) + cvxpy.sum(cvxpy.multiply(radius, cvxpy.abs(cvxpy.diff(x))))
    cvxpy.Problem(cvxpy.Minimize(cost)).solve(solver="CLARABEL")
    np.testing.assert_allclose(solve_chain(y, a, radius), x.value, atol=1e-5)


GRAPHS = {
    "grid": grid(20, 25),
    "grid by columns": grid(20, 25, by_column=True),
    "path": path(300),
    "weighted path": path(200, np.random.default_rng(0).uniform(0.2, 2, 199)),
    "grid with holes": grid(24, 24).keep(np.random.default_rng(1).random(24 * 23 * 2) < 0.97),
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("p", [1, 3])
def test_same_solution_as_edge_by_edge(name: str, p: int) -> None:
    objective = objective_on(GRAPHS[name], p)
    assert isinstance(objective.terms, QuadraticTerms)
    assert chains_for(objective, objective.terms) is not None
    reference = solve_fused(objective, 1e-10, backend="numpy")
    quick = solve_fused(objective, 1e-9, backend="numba")
    assert quick.status == "converged"
    assert quick.objective - reference.objective <= 1e-9 * abs(reference.objective) * 1.01
    # the objective is strongly convex: ||theta - best||^2 <= 2 * suboptimality / min a
    bound = np.sqrt(2 * 2e-9 * abs(reference.objective) / objective.terms.A.min())
    assert np.linalg.norm(quick.theta - reference.theta) <= bound
    assert (np.abs(quick.alpha) <= objective.edge_radius[:, None]).all()


def test_a_path_takes_one_sweep() -> None:
    objective = objective_on(GRAPHS["path"])
    assert isinstance(objective.terms, QuadraticTerms)
    chains = chains_for(objective, objective.terms)
    assert chains is not None
    iteration = ChainIteration(objective, objective.terms, chains, None)
    iteration.advance(1)
    value, gap = iteration.certificate()
    assert gap <= 1e-12 * value


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_threads_change_nothing(n_threads: int) -> None:
    objective = objective_on(GRAPHS["grid"], 2)
    assert isinstance(objective.terms, QuadraticTerms)
    chains = chains_for(objective, objective.terms)
    assert chains is not None
    pairs = []
    for threads in (1, n_threads):
        iteration = ChainIteration(objective, objective.terms, chains, None, threads)
        iteration.advance(7)
        pairs.append(iteration.pair(iteration.fused()))
        iteration.close()
    np.testing.assert_allclose(pairs[1].theta, pairs[0].theta, atol=1e-13)
    np.testing.assert_allclose(pairs[1].alpha, pairs[0].alpha, atol=1e-13)


def test_certificate_is_the_objectives() -> None:
    objective = objective_on(GRAPHS["grid"], 2)
    assert isinstance(objective.terms, QuadraticTerms)
    chains = chains_for(objective, objective.terms)
    assert chains is not None
    iteration = ChainIteration(objective, objective.terms, chains, None)
    iteration.advance(5)
    for theta in (None, iteration.fused()):
        pair = iteration.pair(theta)
        gap, _ = objective.gap(pair.theta, pair.alpha, None, pair.balance)
        np.testing.assert_allclose(pair.balance, objective.graph.incidence().T @ pair.alpha, atol=1e-13)
        np.testing.assert_allclose(iteration.certificate(theta), (objective.value(pair.theta), gap), rtol=1e-9)


def test_warm_start_saves_sweeps() -> None:
    objective = objective_on(GRAPHS["grid"], even=True)
    cold = solve_fused(objective, 1e-8, backend="numba")
    warm = solve_fused(objective, 1e-8, warm_start=cold, backend="numba")
    assert warm.n_iter < cold.n_iter


ring = np.column_stack([np.r_[np.arange(1, 40), 39], np.r_[np.arange(39), 0]])


@pytest.mark.parametrize(
    "graph",
    [
        Graph.complete(range(6)),
        Graph.from_indices(range(40), ring),
        Graph.empty(range(5)),
        Graph.from_indices(
            range(60), np.column_stack([np.arange(1, 60, 2), np.arange(0, 60, 2)])
        ),  # chains of one edge
    ],
    ids=["degree above 4", "ring", "no edges", "short chains"],
)
def test_where_chains_do_not_apply(graph: Graph) -> None:
    assert two_chain_sets(graph) is None


def test_scrambled_grids_are_left_to_edges() -> None:
    graph = grid(20, 20)
    scrambled = np.random.default_rng(0).permutation(400)[graph.edges]
    objective = objective_on(Graph.from_indices(range(400), scrambled))
    assert isinstance(objective.terms, QuadraticTerms)
    iteration = start_iteration("numba", objective, objective.terms, np.ones(1))
    assert isinstance(iteration, CompiledIteration)


@pytest.mark.parametrize("change", ["l2", "gram", "sparsity", "no penalty"])
def test_where_the_objective_does_not_separate(change: str) -> None:
    objective = objective_on(GRAPHS["grid"], 2)
    terms = objective.terms
    assert isinstance(terms, QuadraticTerms)
    penalty, strength, sparsity = objective.penalty, objective.strength, None
    if change == "l2":
        penalty = make_penalty("l2")
    elif change == "gram":
        terms = QuadraticTerms(terms.hessians(terms.b), terms.b, terms.c)
    elif change == "sparsity":
        sparsity = np.ones_like(terms.b)
    else:
        strength = 0.0
    changed = FusedObjective(terms, objective.graph, penalty, strength, sparsity)
    assert chains_for(changed, terms) is None


def test_chains_cover_every_edge_once() -> None:
    graph = GRAPHS["grid with holes"]
    sets = two_chain_sets(graph)
    assert sets is not None
    used = np.concatenate([chains.edges[chains.edges >= 0] for chains in sets])
    np.testing.assert_array_equal(np.sort(used), np.arange(graph.n_edges))
    for chains in sets:
        np.testing.assert_array_equal(np.sort(chains.nodes), np.arange(graph.n_sites))
    assert module.WORTHWHILE > 1
