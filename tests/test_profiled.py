"""Intercepts that no edge pulls at: against cvxpy, cross-validation by hand, and through every door."""

from dataclasses import replace

import cvxpy as cp
import numpy as np
import pytest

import fedkin
from cvxpy_reference import NORMS, mean_loss
from fedkin import FedADMMRegressor, Graph
from fedkin.core import assign_folds
from fedkin.errors import DegenerateSiteWarning, ParameterError, SolverError
from fedkin.fitting import FitOptions, fit
from fedkin.solvers import ProfiledProblem

FREE = np.array([True, False, False])


def solved(profiled, lam, tol=1e-6):
    """The solution at a level, with all parameters."""
    return profiled.lifted(fedkin.solve(profiled.with_lam(lam), tol))


def sites(v=5, n=20, seed=0, spread=5.0):
    """Sites with slopes in two groups, and intercepts of their own."""
    rng = np.random.default_rng(seed)
    X, site = rng.normal(size=(v * n, 2)) + 1.0, np.repeat(np.arange(v), n)
    slope = np.where(np.arange(v)[:, None] < 3, [1.0, 0.0], [-1.0, 0.5])[site]
    y = (X * slope).sum(axis=1) + spread * rng.normal(size=v)[site] + 0.5 * rng.normal(size=v * n)
    return fedkin.Federation.from_arrays(X, y, site, weight=rng.integers(1, 3, v * n))


def test_groups_share_slopes_and_no_intercept():
    fed = sites(v=6, n=40, spread=20.0)
    how = {"select": "none"}
    model = fit(fed, None, FitOptions(method="fused", fuse_intercept=False, lam=0.02, **how))
    assert model.groups.tolist() == [0, 0, 0, 1, 1, 1]
    assert len(np.unique(model.intercept)) == 6
    fused = fit(fed, None, FitOptions(method="fused", lam=0.02, **how))
    own = [fed.y[fed.site_index == u].mean() for u in range(6)]
    assert np.corrcoef(model.intercept[:, 0], own)[0, 1] > 0.99
    assert np.abs(model.intercept[:, 0] - own).max() < np.abs(fused.intercept[:, 0] - own).max()
    chosen = fit(fed, None, FitOptions(method="fused", fuse_intercept="auto", **how))
    assert chosen.history["choice"]["fuse_intercept"] is False
    assert fit(fed, None, FitOptions(method="fused", fuse_intercept=False, **how)).fused.lam == chosen.fused.lam
    same = sites(v=12, n=4, spread=0.0, seed=1)  # few rows and one level: edges help intercepts, too
    one = fit(same, None, FitOptions(method="fused", fuse_intercept="auto", **how))
    assert one.history["choice"]["fuse_intercept"] is True
    assert one.fused.lam == fit(same, None, FitOptions(method="fused", **how)).fused.lam


def test_summaries_and_estimators_give_the_model_of_the_rows():
    fed = sites(v=6, n=40).replaced(weight=None)
    options = FitOptions(method="fused", select="none", fuse_intercept=False)
    model = fit(fed, None, options)
    summed = fit(fedkin.summarise(fed.with_intercept(), "linear"), None, options)
    assert np.allclose(model.coef, summed.coef, atol=1e-5)
    estimator = FedADMMRegressor(select=None, fuse_intercept=False).fit(fed.X, fed.y, site=fed.site_index)
    assert np.allclose(model.coef[:, 0], estimator.coef_, atol=1e-5)


def smooth(loss, v=4, n=30, seed=0):
    """Sites with a target for that loss, levels of their own, and an intercept column."""
    rng = np.random.default_rng(seed)
    X, site = rng.normal(size=(v * n, 2)), np.repeat(np.arange(v), n)
    eta = X @ [0.8, -0.5] + rng.normal(size=v)[site]
    if loss == "poisson":
        offset = rng.uniform(-1, 1, v * n)
        return fedkin.Federation.from_arrays(X, rng.poisson(np.exp(eta + offset)), site, offset=offset).with_intercept()
    if loss == "multinomial":
        y = np.argmax(np.column_stack([0 * eta, eta, -eta]) + rng.gumbel(size=(v * n, 3)), axis=1)
    elif loss in ("linear", "huber"):
        y = 2 * eta + rng.standard_t(2, v * n)
    else:
        y = rng.uniform(size=v * n) < 1 / (1 + np.exp(-eta))
    return fedkin.Federation.from_arrays(X, y.astype(float), site).with_intercept()


@pytest.mark.parametrize(
    ("loss", "penalty", "sparsity"),
    [
        ("linear", "l1", 0.0),
        ("linear", "l2", 0.05),
        ("linear", "linf", 0.0),
        ("logistic", "l1", 0.0),
        ("logistic", "l2", 0.02),
        ("poisson", "l1", 0.0),
        ("poisson", "linf", 0.0),
        ("huber", "l1", 0.0),
        ("huber", "l2", 0.0),
        ("multinomial", "l2", 0.0),
    ],
)
def test_solutions_are_those_of_cvxpy(loss, penalty, sparsity):
    fed, lam = smooth(loss), 0.02
    graph, V = Graph.complete(fed.sites), fed.n_sites
    free = np.tile(FREE, 2 if loss == "multinomial" else 1)
    shrink = np.tile(sparsity * ~free, (V, 1)) if sparsity else 0.0
    problem = fedkin.Problem(fed, graph, loss, penalty, sparsity=shrink, ridge=0.05 * ~free)
    found = solved(ProfiledProblem.from_problem(problem, free), lam, 1e-9)
    theta = cp.Variable((V, free.size))
    value = sum(mean_loss(problem.losses[u], theta[u], fed[u]) for u in range(V))
    value += 0.025 * cp.sum_squares(theta[:, ~free]) + sparsity * cp.sum(cp.abs(theta[:, ~free]))
    pulls = [cp.norm((theta[i] - theta[j])[np.flatnonzero(~free)], NORMS[penalty]) for i, j in graph.edges]
    task = cp.Problem(cp.Minimize(value / V + lam * cp.sum(pulls)))
    best = task.solve(solver=cp.CLARABEL, tol_gap_abs=1e-9, tol_gap_rel=1e-9)
    assert found.status == "converged" and found.gap <= 1e-9
    assert found.objective == pytest.approx(best, rel=1e-7)
    assert np.allclose(found.theta, theta.value, atol=1e-3)
    assert np.ptp(found.theta[:, 0]) > 0.1, "levels stay apart"
    assert (found.alpha[:, free] == 0).all()
    # a certificate that is asked far from the optimum is still an upper bound
    rough = solved(ProfiledProblem.from_problem(problem, free), lam, 1e-2)
    assert rough.objective - best <= rough.gap * max(abs(rough.objective), 1e-6) + 1e-8


@pytest.mark.parametrize("loss", ["linear", "logistic", "poisson", "huber"])
def test_paths_and_cross_validation_by_hand(loss):
    fed = smooth(loss)
    graph, lams = Graph.complete(fed.sites), [0.2, 0.02]
    problem = fedkin.Problem(fed, graph, loss)
    profiled = ProfiledProblem.from_problem(problem, FREE)
    for lam, solution in fedkin.lam_path(profiled, lams, tol=1e-9):
        again = solved(profiled, lam, 1e-9)
        assert solution.objective == pytest.approx(again.objective, rel=1e-8)
        assert np.allclose(profiled.lifted(solution).theta, again.theta, atol=1e-3)
    choice = fedkin.cross_validate_lam(problem, lams, free=FREE, folds=3, seed=1, tol=1e-8)
    fold_of = assign_folds(fed, 3, 1)
    for k in range(3):
        train, test = fed.take(fold_of != k), fed.take(fold_of == k)
        for m, lam in enumerate(lams):
            theta = solved(ProfiledProblem.from_problem(fedkin.Problem(train, graph, loss), FREE), lam, 1e-8).theta
            mean = fedkin.Problem(test, graph, loss).terms.values(theta).mean()
            assert choice.scores[k, m] == pytest.approx(mean, rel=1e-4)


def test_a_site_with_one_class_needs_a_ridge_or_edges():
    fed = smooth("logistic")
    y = np.where(fed.site_index == 2, 1.0, fed.y)
    one = fed.replaced(y=y)
    problem = fedkin.Problem(one, Graph.complete(fed.sites), "logistic")
    with pytest.raises(SolverError, match="the intercept of site 2 has no finite minimiser without an edge penalty"):
        solved(ProfiledProblem.from_problem(problem, FREE), 0.1)
    assert solved(ProfiledProblem.from_problem(replace(problem, ridge=1e-2), FREE), 0.1).gap <= 1e-6
    rows = fedkin.Federation.from_arrays(one.X[:, 1:], y, one.site_index)
    for fuse in (False, "auto"):
        options = FitOptions(method="fused", loss="logistic", fuse_intercept=fuse, select="none", cv_folds=3)
        with pytest.warns(DegenerateSiteWarning, match="a missing class"):
            model = fit(rows, None, options)
        assert model.fused.gap <= 1e-6 and np.isfinite(model.coef).all()
        assert "fuse_intercept" in model.history["choice"]


def test_what_cannot_leave_intercepts_alone_says_so():
    with pytest.raises(ParameterError, match="refit pools intercepts"):
        FitOptions(method="fused", refit=True, fuse_intercept=False)
    with pytest.raises(ParameterError, match="fuse_intercept must be True, False or 'auto'"):
        FitOptions(method="fused", fuse_intercept="never")
    with pytest.raises(ParameterError, match=r'fuse_intercept= .*solver="exact"'):
        FitOptions(method="fused", solver="fedadmm", fuse_intercept=False)
