"""The parameter ball as a constraint: against cvxpy, its certificate against the truth, and who cannot honour it."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

from builders import LOSS_NAMES, PENALTY_NAMES, federation, log_cosh, random_graph, ring
from cvxpy_reference import check_against, check_gaps, reference
from fedkin import (
    Federation,
    Graph,
    Problem,
    cross_validate_lam,
    fed_admm,
    global_fit,
    lam_max,
    lam_path,
    local_fit,
    solve,
    summarise,
)
from fedkin.core import Summaries, assign_folds, site_answer
from fedkin.errors import ConvergenceWarning, ParameterError
from fedkin.fitting import FitOptions, FittedModel, Queries, fit
from fedkin.losses import make_loss
from fedkin.solvers import ProfiledProblem


def binding(problem: Problem, share: float = 0.6) -> Problem:
    """The problem with a ball that cuts off some of its parameters, and not all."""
    length = np.linalg.norm(solve(problem, 1e-8).theta, axis=1)
    return replace(problem, radius=float(share * length.max() + (1 - share) * length.min()))


def bound(problem: Problem, theta: np.ndarray) -> np.ndarray:
    """Which sites are at the border of the ball; none is outside."""
    length = np.linalg.norm(theta, axis=1)
    assert (length <= problem.radius * (1 + 1e-12)).all()
    return length > problem.radius * (1 - 1e-6)


@pytest.mark.parametrize("backend", ["numpy", "numba"])
@pytest.mark.parametrize("penalty", PENALTY_NAMES)
@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_minima_over_a_binding_ball_are_those_of_cvxpy(loss: str, penalty: str, backend: str) -> None:
    fed = federation(loss, (14, 12, 16, 14, 13), q=3, seed=3, offset=loss != "mean")
    graph = random_graph(5, 0.6, seed=4, weighted=True)
    problem = binding(Problem(fed, graph, loss, penalty, lam=0.02, ridge=0.01))
    expected = reference(problem)
    solution = solve(problem, 1e-9, backend=backend)
    assert (solution.status, solution.radius) == ("converged", None)
    at_border = bound(problem, solution.theta)
    assert at_border.any() and not at_border.all()
    assert solution.objective == pytest.approx(expected.objective, rel=1e-6)
    np.testing.assert_allclose(solution.theta, expected.theta, atol=2e-4)
    check_gaps(solution, min(solution.objective, expected.objective))
    assert solution.objective > solve(replace(problem, radius=None), 1e-9).objective * (1 + 1e-6)


@pytest.mark.parametrize("penalty", PENALTY_NAMES)
@pytest.mark.parametrize("loss", ["linear", "logistic", "huber"])
def test_with_sparsity_and_with_fewer_rows_than_parameters(loss: str, penalty: str) -> None:
    fed = federation(loss, (2, 12, 3, 14, 2), q=4, seed=1)
    for sparsity in (0.0, 0.03):
        problem = Problem(fed, ring(5), loss, penalty, lam=0.02, sparsity=sparsity, radius=0.5)
        solution = check_against(problem, tol=1e-7, theta_tol=None)
        assert solution.radius is None and bound(problem, solution.theta).any()


def test_separable_classes_and_a_loss_known_only_by_its_functions_need_nothing_but_the_ball() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(4, 20, 2))
    apart = Federation({u: (X[u], (X[u, :, 0] > 0).astype(float)) for u in range(4)})
    check_against(Problem(apart, ring(4), "logistic", "l2", lam=0.01, radius=3.0), tol=1e-8)
    problem = Problem(federation("linear", (8, 9, 10), q=2), ring(3), log_cosh(), lam=0.05, radius=0.3)
    solution = solve(problem, 1e-7)
    assert (solution.status, solution.radius) == ("converged", None) and bound(problem, solution.theta).any()
    check_gaps(solution, solve(problem, 1e-10).objective)


@pytest.mark.parametrize("loss", ["linear", "logistic"])
def test_gaps_on_the_way_are_never_below_the_true_ones(loss: str) -> None:
    problem = binding(Problem(federation(loss, (10, 12, 10, 14), q=2, seed=5), ring(4), loss, lam=0.02, sparsity=0.02))
    optimum = min(solve(problem, 1e-11).objective, reference(problem).objective)
    for limit in (1, 2, 3, 7, 12):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            check_gaps(solve(problem, 1e-14, max_iter=limit), optimum)


@pytest.mark.parametrize("loss", ["linear", "poisson"])
def test_paths_and_cross_validation_are_those_of_the_constrained_problem(loss: str) -> None:
    fed = federation(loss, (15, 18, 15, 20, 16), q=2, seed=2)
    problem = binding(Problem(fed, random_graph(5, 0.7, seed=1, weighted=True), loss, "l2"))
    top = lam_max(problem)
    assert len(np.unique(solve(problem.with_lam(1.001 * top), 1e-8).clusters(problem.graph))) == 1
    lams = top * np.array([1.0, 0.3, 0.03])
    for lam, solution in lam_path(problem, lams, tol=1e-8):
        assert solution.objective == pytest.approx(reference(problem.with_lam(lam)).objective, rel=1e-6)
        bound(problem, solution.theta)
    fold_of, scores = assign_folds(fed, 3, 0), []
    for fold in range(3):
        train = replace(problem, federation=fed.take(fold_of != fold))
        held_out = Problem(fed.take(fold_of == fold), problem.graph, loss).terms
        scores.append([held_out.values(solve(train.with_lam(lam), 1e-10).theta).mean() for lam in lams])
    found = cross_validate_lam(problem, lams, folds=3, tol=1e-9).scores
    np.testing.assert_allclose(found, scores, rtol=1e-4)
    assert not np.allclose(found, cross_validate_lam(replace(problem, radius=None), lams, folds=3).scores, rtol=1e-3)


def test_rounds_and_summaries_have_the_minimiser_of_the_rows() -> None:
    problem = binding(Problem(federation("linear", (30, 25, 30, 28), q=2, seed=3), ring(4), lam=0.02))
    exact = solve(problem, 1e-10)
    sums = solve(replace(problem, federation=summarise(problem.federation)), 1e-10)
    np.testing.assert_allclose(sums.theta, exact.theta, atol=1e-7)
    rounds = fed_admm(problem, 3000, tol=1e-6)
    assert (rounds.status, rounds.radius) == ("converged", None) and bound(problem, rounds.theta).any()
    np.testing.assert_allclose(rounds.theta, exact.theta, atol=1e-2)
    check_gaps(rounds, exact.objective)


def test_what_cannot_honour_the_ball_says_so() -> None:
    problem = Problem(federation("linear", (8, 9, 10), q=2), ring(3), lam=0.05, radius=0.3)
    with pytest.raises(ParameterError, match=r"constrains all parameters .* omit fuse_intercept= or radius=0.3"):
        ProfiledProblem.from_problem(problem, np.array([True, False]))
    for wrong in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ParameterError, match="radius must be a positive"):
            replace(problem, radius=wrong)


@pytest.mark.parametrize("loss", [*LOSS_NAMES, "user"])
def test_local_and_pooled_fits_are_minimisers_over_the_ball(loss: str) -> None:
    fed = federation("linear" if loss == "user" else loss, (14, 12, 3, 16), q=3, seed=3)
    one = log_cosh() if loss == "user" else loss
    lengths = np.linalg.norm(local_fit(fed, one).theta, axis=1)
    radius = float(np.sort(lengths)[1:3].mean())
    fit = local_fit(fed, one, radius=radius)
    alone = Problem(fed, Graph.empty(fed.sites), one, radius=radius)
    expected = solve(alone, 1e-11).theta
    own = ~fit.rescued
    values = [alone.terms.values(theta)[own] for theta in (fit.theta, expected)]
    np.testing.assert_allclose(*values, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(fit.theta[own], expected[own], atol=1e-4)
    at_border = bound(alone, fit.theta)
    np.testing.assert_array_equal(at_border, lengths > radius)
    assert all(("boundary of the ball" in fit.notes.get(site, "")) == at_border[u] for u, site in enumerate(fed.sites))
    pooled = global_fit(fed, one, "sites", radius=0.1)
    together = replace(alone, graph=Graph.complete(fed.sites), lam=1e3, radius=0.1)
    np.testing.assert_allclose(np.tile(pooled, (4, 1)), solve(together, 1e-11).theta, atol=1e-5)
    assert np.linalg.norm(pooled) == pytest.approx(0.1)


def parameters(model: FittedModel) -> np.ndarray:
    return np.column_stack([model.intercept.ravel(), model.coef.reshape(model.n_sites, -1)])


def answers(asked: Queries, fed: Federation, loss: str) -> Summaries:
    one = make_loss(loss)
    return Summaries.stack([site_answer(asked[s], fed[s], one, feature_names=fed.feature_names) for s in fed.sites])


@pytest.mark.filterwarnings("ignore:counts vary")
@pytest.mark.parametrize("loss", ["linear", "logistic", "poisson"])
def test_fits_of_rows_and_summaries_solve_the_constrained_problem(loss: str) -> None:
    fed = federation(loss, (40, 35, 30, 45), q=2, seed=1)
    fed = Federation({f"site {u}": fed[u] for u in fed.sites}, ["a", "b"])
    radius = 0.15
    options = FitOptions(method="fused", loss=loss, lam=0.01, select="none", standardize=False, radius=radius)
    model = fit(fed, None, options)
    theta = parameters(model)
    problem = Problem(fed.with_intercept(), Graph.complete(fed.sites), loss, lam=0.01, radius=radius)
    assert bound(problem, theta).any() and model.status == "converged"
    np.testing.assert_allclose(theta, solve(problem, 1e-9).theta, atol=1e-3)
    refitted = fit(fed, None, replace(options, select="bonferroni", lam="cv", refit=True))
    bound(problem, parameters(refitted))
    sums = summarise(fed.with_intercept(), loss)
    if loss == "linear":
        np.testing.assert_allclose(fit(sums, None, options).coef, model.coef, atol=1e-8)
    else:
        answered = fit(sums, None, options, answer=lambda asked: answers(asked, fed.with_intercept(), loss))
        assert answered.fused.gap <= options.tol
        bound(problem, parameters(answered))
        value, least = problem.objective(parameters(answered)), reference(problem).objective
        assert least * (1 - 1e-6) <= value <= least * (1 + 2 * options.tol)
    with pytest.raises(ParameterError, match="the ball holds intercepts and slopes together"):
        replace(options, fuse_intercept=False)
    with pytest.raises(ParameterError, match="radius= is for the fused estimator, not for kin"):
        FitOptions(method="kin", radius=1.0)
