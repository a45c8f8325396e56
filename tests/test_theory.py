"""The paper's quantities against dense linear algebra, brute force, and the theorems themselves."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from builders import path, star
from fedkin import Availability, Problem, Solution, fed_admm, solve
from fedkin.core import RowData, select_edges
from fedkin.core.theory import (
    ConvergenceConstants,
    compatibility_lower_bound,
    kappa,
    minimum_signal_check,
    objective_lam,
    rho,
    score_bound,
    theorem1_bound,
    theorem1_lambda,
)
from fedkin.data import Federation
from fedkin.datasets import paper_design
from fedkin.errors import GraphError, ParameterError
from fedkin.graph import Graph

GRAPHS = {
    "path": path(6),
    "star": star(6),
    "complete": Graph.complete(range(6)),
    "two parts": Graph(range(6), [(0, 1), (1, 2), (0, 2), (4, 5)]),
}
every_graph = pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS.keys())


def data(seed: int):
    """Six sites of least squares and their parameters."""
    rng = np.random.default_rng(seed)
    theta, X = rng.standard_normal((6, 2)), [rng.standard_normal((15 + u, 2)) for u in range(6)]
    return Federation({u: (X[u], X[u] @ theta[u] + rng.standard_normal(15 + u)) for u in range(6)}), theta


@every_graph
@pytest.mark.parametrize(("penalty", "dual"), [("l1", np.inf), ("l2", 2), ("linf", 1)])
@pytest.mark.parametrize("weighted", [False, True])
def test_lambda_is_the_dual_norm_of_the_pseudo_inverse(graph, penalty, dual, weighted):
    fed, theta = data(1)
    if weighted:
        graph = graph.reweighted(np.linspace(0.5, 3, graph.n_edges))
    D = graph.weights[:, None] * graph.incidence().toarray()
    gradients = [fed[u].X.T @ (fed[u].X @ theta[u] - fed[u].y) / len(fed[u].y) for u in range(6)]
    rows = np.linalg.pinv(D).T @ np.array(gradients)
    expected = np.linalg.norm(rows, dual, axis=1).max() / math.sqrt(6)
    assert theorem1_lambda(fed, graph, theta, penalty=penalty) == pytest.approx(expected, rel=1e-9)


def test_parameters_of_the_wrong_shape():
    fed, theta = data(5)
    for function in (rho, theorem1_lambda, minimum_signal_check):
        with pytest.raises(ParameterError, match=r"\(6, 1\), expected \(6, 2\)"):
            function(fed, GRAPHS["path"], theta[:, :1])
    with pytest.raises(GraphError):
        rho(fed, Graph.complete(range(7)), theta)


def compatibility(graph: Graph, edges: list[int], weighted: bool = False) -> float:
    """kappa_T for p = 1 by brute force: the largest sum |D theta| over unit vectors, over all signs."""
    D = graph.incidence().toarray()[edges]
    if weighted:
        D = graph.weights[edges][:, None] * D
    largest = max(np.linalg.norm(np.array(s) @ D) for s in itertools.product((-1, 1), repeat=len(edges)))
    return math.sqrt(len(edges)) / largest


@every_graph
@pytest.mark.parametrize("weighted", [False, True])
def test_compatibility_bound_holds(graph, weighted):
    rng = np.random.default_rng(6)
    if weighted:
        graph = graph.reweighted(rng.uniform(0.2, 4, graph.n_edges))
    for size in range(1, min(graph.n_edges, 8) + 1):
        edges = rng.choice(graph.n_edges, size, replace=False).tolist()
        assert compatibility_lower_bound(graph, size, n_params=1) <= compatibility(graph, edges, weighted) + 1e-12


def test_compatibility_bound_for_l1_needs_the_number_of_parameters():
    """With equal coordinates R grows like p and the Frobenius norm like sqrt(p): the bound for p = 1 is broken."""
    graph, p = GRAPHS["path"], 16
    D = graph.incidence().toarray()
    signs = max(itertools.product((-1, 1), repeat=5), key=lambda s: np.linalg.norm(np.array(s) @ D))
    theta = np.tile((np.array(signs) @ D)[:, None], p)
    ratio = math.sqrt(5) * np.linalg.norm(theta) / np.abs(D @ theta).sum()
    assert ratio < compatibility_lower_bound(graph, 5, "l1", n_params=1)
    assert ratio >= compatibility_lower_bound(graph, 5, "l1", n_params=p)
    assert compatibility_lower_bound(graph, 5, "l2", n_params=p) == compatibility_lower_bound(graph, 5, n_params=1)
    euclidean = math.sqrt(5) * np.linalg.norm(theta) / np.linalg.norm(D @ theta, axis=1).sum()
    assert euclidean >= compatibility_lower_bound(graph, 5, "l2", n_params=p)


@pytest.mark.parametrize("penalty", ["l1", "l2", "linf"])
@pytest.mark.parametrize("seed", range(3))
def test_theorem_1_holds_at_its_lambda(penalty, seed):
    design = paper_design(n_sites=8, n_samples=20, n_features=2, n_clusters=2, varrho=0.25, seed=seed)
    fed, graph = design.federation, design.graph
    i, j = graph.edges.T
    wrong = int((design.labels[i] != design.labels[j]).sum())
    lam = theorem1_lambda(fed, graph, design.theta_star, penalty=penalty)
    known = rho(fed, graph, design.theta_star), kappa(fed, design.theta_star)
    compatible = compatibility_lower_bound(graph, wrong, penalty, n_params=2)
    for level in (lam, 3 * lam):  # larger levels are covered too, when the bound is told
        bound = theorem1_bound(known[0], level, wrong, known[1], compatible)
        problem = Problem(fed, graph, penalty=penalty, lam=objective_lam(level, 8))
        assert design.error(solve(problem, 1e-8).theta) <= bound


def test_lambda_as_printed_is_on_another_scale():
    """Two groups far apart on a complete graph: each false edge pulls with full force.

    At ``objective_lam`` the theorem holds; with its number taken literally as ``lam`` the same bound is broken.
    """
    V = 60
    rng = np.random.default_rng(7)
    truth = np.where(np.arange(V) < V // 2, 0.0, 500.0)
    fed = Federation({u: [[truth[u] + rng.standard_normal()]] for u in range(V)})
    graph = Graph.complete(range(V))
    wrong = (V // 2) ** 2
    lam = theorem1_lambda(fed, graph, truth[:, None], "mean")
    bound = theorem1_bound(
        rho(fed, graph, truth[:, None], "mean"), lam, wrong, 1.0, compatibility_lower_bound(graph, wrong, n_params=1)
    )
    levels = objective_lam(lam, V), lam
    found = [solve(Problem(fed, graph, "mean", lam=level), 1e-8).theta[:, 0] for level in levels]
    errors = [((theta - truth) ** 2).mean() for theta in found]
    assert errors[0] <= bound < errors[1]


def test_theorem_3_when_its_condition_holds():
    recovered, held = [], []
    for seed in range(40):
        design = paper_design(n_sites=10, n_samples=80, n_features=3, n_clusters=2, varrho=0.2, signal=2.0, seed=seed)
        held.append(minimum_signal_check(design.federation, design.graph, design.theta_star).holds)
        i, j = design.graph.edges.T
        kept = select_edges(design.federation, design.graph, variance="bartlett").kept
        recovered.append(np.array_equal(kept, design.labels[i] == design.labels[j]))
    held, recovered = np.array(held), np.array(recovered)
    assert held.sum() >= 20
    assert recovered[held].mean() >= 0.9  # the theorem: at least 0.95 in the limit
    assert held.sum() < 40 or recovered.all()


# --- Theorem 4 and Corollary 1 --------------------------------------------------------------------------------


def small_problem(penalty: str, seed: int) -> tuple[Problem, Solution]:
    design = paper_design(n_sites=6, n_samples=20, n_features=2, n_clusters=2, varrho=0.2, seed=seed)
    problem = Problem(design.federation, design.graph, penalty=penalty, lam=0.02)
    return problem, solve(problem, 1e-12)


@pytest.mark.parametrize("penalty", ["l1", "l2", "linf"])
def test_constants_of_theorem_4_by_brute_force(penalty):
    problem, exact = small_problem(penalty, 0)
    found = ConvergenceConstants.from_problem(problem, radius=3.0, rho=0.4, solution=exact)
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(20_000, 2))
    norm = np.linalg.norm(directions, {"l1": 1, "l2": 2, "linf": np.inf}[penalty], axis=1)
    ratio = (norm / np.linalg.norm(directions, axis=1)).max()
    assert found.dual_radius == pytest.approx(0.02 * 6 * ratio, rel=1e-3)
    largest = (exact.alpha**2).sum(axis=1).max()
    assert found.kappa_alpha == pytest.approx(max(largest, found.dual_radius), rel=1e-9)
    assert math.sqrt(largest) <= found.dual_radius * (1 + 1e-9)
    fed = problem.federation
    ball = 3.0 * directions / np.linalg.norm(directions, axis=1)[:, None]
    scores = [
        ((fed[u].X @ ball.T - fed[u].y[:, None]) ** 2 * (fed[u].X ** 2).sum(axis=1)[:, None]).mean(axis=0)
        for u in range(6)
    ]
    assert np.max(scores) <= found.c_psi <= 4 * np.max(scores)


@pytest.mark.parametrize("loss", ["logistic", "poisson", "huber", "mean"])
def test_scores_of_other_losses_stay_below_their_bound(loss):
    rng = np.random.default_rng(1)
    X = rng.normal(size=(30, 3))
    fed = Federation({0: X if loss == "mean" else (X, rng.integers(0, 2, 30).astype(float))})
    bound = score_bound(fed, 1.5, loss)
    one = RowData(fed, loss).losses[0]
    for _ in range(200):
        theta = rng.normal(size=3)
        theta *= 1.5 / np.linalg.norm(theta)
        assert (one.scores(theta, fed[0].X, fed[0].y) ** 2).sum(axis=1).mean() <= bound


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", ["literal", "proximal"])
@pytest.mark.parametrize("p", [1.0, 0.5])
@pytest.mark.parametrize("penalty", ["l1", "l2"])
def test_theorem_4_and_corollary_1_hold_in_simulated_runs(penalty, p, step):
    for seed in range(3):
        problem, exact = small_problem(penalty, seed)
        radius = 1.5 * float(np.linalg.norm(exact.theta, axis=1).max())
        constants = ConvergenceConstants.from_problem(problem, radius, rho=0.3, solution=exact)
        how = {"step": constants.kappa} if step == "proximal" else {"step": "literal", "kappa": constants.kappa}
        if p < 1:
            how["availability"] = Availability.bernoulli(p, weighting="known")
        inside = replace(problem, radius=radius)
        for rounds in (5, 50, 500):
            errors = [
                ((fed_admm(inside, rounds, 5, rho=0.3, average="paper", seed=k, **how).theta - exact.theta) ** 2).sum()
                / 6
                for k in range(5)
            ]
            assert np.mean(errors) <= constants.bound(rounds, availability=p)
            assert np.mean(errors) <= constants.bound(rounds, "printed", availability=p)


def test_rounds_that_theorem_4_asks_for():
    constants = ConvergenceConstants(10, 40, 3.0, 5.0, 0.2, 0.4, 2.0, 0.5)
    for form in ("proved", "printed"):
        for p in (1.0, 0.3):
            rounds = constants.rounds_for(1e-3, form, availability=p)
            assert constants.bound(rounds, form, availability=p) <= 1e-3
            assert constants.bound(rounds - 1, form, availability=p) > 1e-3
    first = constants.valid_from()
    edges = 40 * (8 * 0.2 / 0.5 + 2 * 2.0**2 * 0.5 + 4 * 2.0 * 0.2)
    assert 3 * 5 * 10 * math.log(first - 1) < edges <= 3 * 5 * 10 * math.log(first)
    assert constants.bound(first - 1, "printed") == math.inf and constants.bound(first, "printed") < math.inf
    with pytest.raises(ParameterError, match=r"from T = exp\(.* use form='proved'"):
        ConvergenceConstants(10, 10**6, 3.0, 5.0, 0.2, 0.4, 2.0, 0.5).valid_from()
    with pytest.raises(ParameterError, match="not for multinomial"):
        score_bound(Federation({0: ([[1.0], [2.0], [3.0]], [0.0, 1.0, 2.0])}), 1.0, "multinomial")
