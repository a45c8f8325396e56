"""Several penalty levels in one compiled call: each certified like a solution of its own."""

from __future__ import annotations

import numpy as np
import pytest

from builders import PENALTY_NAMES, federation, random_graph
from fedkin import Problem, lam_path, solve
from fedkin.core import FusedObjective, Solution
from fedkin.datasets import paper_design
from fedkin.solvers import solve_fused
from fedkin.solvers.backend import Limits
from fedkin.solvers.path import solve_levels

TOL = 1e-8


def random_problem(loss: str, penalty: str, seed: int = 0, **options: object) -> Problem:
    fed = federation(loss, (15, 18, 15, 20, 16, 17, 14, 15), q=3, seed=seed, groups=2)
    return Problem(fed, random_graph(8, 0.6, seed=seed, weighted=True), loss, penalty, **options)


def proven_gap(objective: FusedObjective, solution: Solution) -> float:
    """The relative gap by the definition on numpy arrays, with duals inside their balls."""
    assert (objective.penalty.dual_norm(solution.alpha) <= objective.edge_radius * (1 + 1e-12)).all()
    balance = np.asarray(objective.graph.incidence().T @ solution.alpha)
    gap, conditional = objective.gap(solution.theta, solution.alpha, None, balance)
    assert not conditional
    return gap / abs(objective.value(solution.theta))


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
@pytest.mark.parametrize("loss", ["mean", "linear"])
def test_every_level_has_a_certificate_of_its_own(loss: str, penalty: str) -> None:
    objective = random_problem(loss, penalty).fused
    strengths = np.array([0.02, 0.015, 0.008, 0.004, 0.001])
    found = solve_levels(objective, [], strengths, TOL, 20_000)
    assert len(found) == 5
    for strength, solution in zip(strengths.tolist(), found, strict=True):
        at = objective.with_strength(strength)
        assert solution.status == "converged" and solution.gap <= TOL
        assert proven_gap(at, solution) == pytest.approx(solution.gap, abs=1e-13)
        assert solution.objective == pytest.approx(at.value(solution.theta), rel=1e-13)
        alone = solve_fused(at, 1e-11, backend="numpy")
        assert solution.objective - alone.objective <= TOL * solution.objective
        np.testing.assert_allclose(solution.theta, alone.theta, atol=1e-3)
        assert solution.trace["gap"][-1] == solution.gap and len(solution.trace["gap"]) >= 1


def test_known_solutions_save_iterations() -> None:
    objective = random_problem("linear", "l1").fused
    strengths = np.array([0.012, 0.011, 0.010])
    known = [(at, solve_fused(objective.with_strength(at), TOL)) for at in (0.014, 0.013)]
    cold, warm = (solve_levels(objective, start, strengths, TOL, 20_000) for start in ([], known))
    assert len(cold) == len(warm) == 3
    assert warm[0].n_iter < cold[0].n_iter
    for one, other in zip(cold, warm, strict=True):
        assert one.objective == pytest.approx(other.objective, rel=2 * TOL)


def test_components_are_fused_on_the_way() -> None:
    """Far above lam_max sites are exactly fused, with a certificate; below, levels follow as if nothing had been."""
    problem = random_problem("linear", "l2")
    objective = problem.fused
    found = solve_levels(objective, [], np.array([60.0, 50.0, 0.02, 0.01]), TOL, 20_000)
    assert len(found) == 4
    for strength, solution in zip((60.0, 50.0, 0.02, 0.01), found, strict=True):
        at = objective.with_strength(strength)
        assert solution.gap <= TOL and solution.objective == pytest.approx(at.value(solution.theta), rel=1e-13)
        alone = solve_fused(at, 1e-11, backend="numpy")
        np.testing.assert_allclose(solution.theta, alone.theta, atol=1e-3)
        assert (np.ptp(solution.theta, axis=0).max() == 0.0) == (strength > 1)
    path = lam_path(problem, np.array([50.0, 0.02, 0.01]) / problem.n_sites, backend="numba")
    assert np.unique(path.solutions[0].clusters(problem.graph)).size == 1
    assert np.ptp(path.solutions[0].theta, axis=0).max() == 0.0


@pytest.mark.parametrize(
    ("problem", "strengths"),
    [
        (random_problem("linear", "l1"), [0.01, 0.0]),
        (random_problem("linear", "l1", sparsity=0.1), [0.01]),
        (random_problem("logistic", "l1"), [0.01]),
        (Problem(federation("linear", (1, 9, 9)), random_graph(3, 1.0), "linear"), [0.01]),
    ],
    ids=["strength 0", "sparsity", "logistic", "singular design"],
)
def test_what_needs_more_care_is_left_alone(problem: Problem, strengths: list[float]) -> None:
    assert solve_levels(problem.fused, [], np.array(strengths), 1e-6, 20_000) == []


def test_a_limit_on_iterations_leaves_the_rest() -> None:
    objective = random_problem("linear", "l1").fused
    strengths = np.array([0.02, 0.015, 0.008])
    assert solve_levels(objective, [], strengths, TOL, 3) == []
    took = [solution.n_iter for solution in solve_levels(objective, [], strengths, TOL, 20_000)]
    assert took[0] > max(took[1:])
    known = [(0.02, solve_fused(objective.with_strength(0.02), TOL))]
    assert solve_levels(objective, known, strengths[1:], TOL, took[1] - 1) == []
    assert len(solve_levels(objective, known, strengths[1:], TOL, took[0])) == 2


def test_scrambled_sites_come_back_in_the_callers_order() -> None:
    objective = random_problem("linear", "l1").fused
    strengths = np.array([50.0, 0.02, 0.01])
    expected = solve_levels(objective, [], strengths, TOL, 20_000)
    moved = solve_levels(objective, [], strengths, TOL, 20_000, limits=Limits(scrambled_sites=2))
    assert len(moved) == len(expected) == 3
    for strength, one, other in zip(strengths.tolist(), moved, expected, strict=True):
        assert proven_gap(objective.with_strength(strength), one) <= TOL * (1 + 1e-6)
        np.testing.assert_allclose(one.theta, other.theta, atol=1e-3)


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
def test_a_path_is_the_solutions_one_by_one(penalty: str) -> None:
    design = paper_design(n_sites=20, n_samples=40, n_features=6, n_clusters=3, seed=1)
    problem = Problem(design.federation, design.graph, penalty=penalty)
    path = lam_path(problem, n_lams=9, tol=TOL, backend="numba")
    for lam, solution in path:
        alone = solve(problem.with_lam(lam), 1e-11, backend="numpy")
        assert solution.objective - alone.objective <= TOL * alone.objective
        assert solution.gap <= TOL
