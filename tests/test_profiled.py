"""Intercepts that no edge pulls at: against cvxpy, cross-validation by hand, and through every door."""

import cvxpy as cp
import numpy as np
import pytest

import fedkin
from fedkin import FedADMMRegressor, Graph
from fedkin.cli import main
from fedkin.errors import ParameterError
from fedkin.fitting import FitOptions, fit_federation, fit_summaries
from fedkin.objective import assign_folds
from fedkin.solvers import ProfiledProblem

FREE = np.array([True, False, False])


def sites(v=5, n=20, seed=0, spread=5.0):
    """Sites with slopes in two groups, and intercepts of their own."""
    rng = np.random.default_rng(seed)
    X, site = rng.normal(size=(v * n, 2)) + 1.0, np.repeat(np.arange(v), n)
    slope = np.where(np.arange(v)[:, None] < 3, [1.0, 0.0], [-1.0, 0.5])[site]
    y = (X * slope).sum(axis=1) + spread * rng.normal(size=v)[site] + 0.5 * rng.normal(size=v * n)
    return fedkin.Federation.from_arrays(X, y, site, weight=rng.integers(1, 3, v * n))


@pytest.mark.parametrize("penalty", ["l1", "l2", "linf"])
@pytest.mark.parametrize("sparsity", [0.0, 0.05])
def test_the_solution_is_that_of_cvxpy(penalty, sparsity):
    fed = sites().with_intercept()
    graph, lam, V = Graph.complete(fed.devices), 0.03, fed.n_devices
    shrink = sparsity * ~FREE
    problem = fedkin.Problem(
        fed, graph, penalty=penalty, ridge=0.1 * ~FREE, sparsity=np.tile(shrink, (V, 1)) if sparsity else 0.0
    )
    found = ProfiledProblem(problem, FREE).solve(lam, 1e-9)
    theta = cp.Variable((V, 3))
    losses = [
        cp.sum(cp.multiply(fed.weight[own], cp.square(fed.X[own] @ theta[u] - fed.y[own])))
        / (2 * fed.weight[own].sum())
        for u, own in enumerate(fed.device_index == u for u in range(V))
    ]
    norm = {"l1": 1, "l2": 2, "linf": "inf"}[penalty]
    pulls = [
        w * cp.norm(theta[i, 1:] - theta[j, 1:], norm) for (i, j), w in zip(graph.edges, graph.weights, strict=True)
    ]
    extras = 0.05 * cp.sum_squares(theta[:, 1:]) + sparsity * cp.sum(cp.abs(theta[:, 1:]))
    value = cp.Problem(cp.Minimize((cp.sum(losses) + extras) / V + lam * cp.sum(pulls))).solve(
        solver=cp.CLARABEL, tol_gap_abs=1e-11, tol_gap_rel=1e-11
    )
    assert found.gap <= 1e-9
    assert found.objective == pytest.approx(value, rel=1e-7)
    assert np.allclose(found.theta, theta.value, atol=1e-4)
    assert (found.alpha[:, 0] == 0).all()


def test_held_out_rows_meet_intercepts_of_training():
    fed = sites()
    fed = fed.replaced(weight=None).with_intercept()
    lams = [0.3, 0.05, 0.005]
    choice = ProfiledProblem(fedkin.Problem(fed, Graph.complete(fed.devices)), FREE).choose(
        lams, folds=3, seed=1, tol=1e-9
    )
    fold_of = assign_folds(fed, 3, 1)
    for k in range(3):
        train, test = fed.take(fold_of != k), fed.take(fold_of == k)
        for m, lam in enumerate(lams):
            part = fedkin.Problem(train, Graph.complete(fed.devices))
            theta = ProfiledProblem(part, FREE).solve(lam, 1e-8).theta
            rows = 0.5 * ((test.X * theta[test.device_index]).sum(axis=1) - test.y) ** 2
            mean = np.mean([rows[test.device_index == u].mean() for u in range(fed.n_devices)])
            assert choice.scores[k, m] == pytest.approx(mean, rel=1e-4)


def test_groups_share_slopes_and_no_intercept():
    fed = sites(v=6, n=40, spread=20.0)
    how = {"method": "fused", "select": "none"}
    model = fit_federation(fed, None, FitOptions(fuse_intercept=False, lam=0.02, **how))
    assert model.clusters.tolist() == [0, 0, 0, 1, 1, 1]
    assert len(np.unique(model.intercept)) == 6
    fused = fit_federation(fed, None, FitOptions(lam=0.02, **how))
    own = [fed.y[fed.device_index == u].mean() for u in range(6)]
    assert np.corrcoef(model.intercept[:, 0], own)[0, 1] > 0.99
    assert np.abs(model.intercept[:, 0] - own).max() < np.abs(fused.intercept[:, 0] - own).max()
    chosen = fit_federation(fed, None, FitOptions(fuse_intercept="auto", **how))
    assert chosen.history["choice"]["fuse_intercept"] is False
    assert fit_federation(fed, None, FitOptions(fuse_intercept=False, **how)).lam == chosen.lam
    same = sites(v=12, n=4, spread=0.0, seed=1)  # few rows and one level: edges help intercepts, too
    one = fit_federation(same, None, FitOptions(fuse_intercept="auto", **how))
    assert one.history["choice"]["fuse_intercept"] is True
    assert one.lam == fit_federation(same, None, FitOptions(**how)).lam


def test_summaries_estimators_and_the_command_line(tmp_path, monkeypatch):
    fed = sites(v=6, n=40).replaced(weight=None)
    options = FitOptions(method="fused", select="none", fuse_intercept=False)
    model = fit_federation(fed, None, options)
    summed = fit_summaries(fedkin.summarise(fed.with_intercept(), "linear"), None, options)
    assert np.allclose(model.coef, summed.coef, atol=1e-5)
    estimator = FedADMMRegressor(select=None, fuse_intercept=False).fit(fed.X, fed.y, device=fed.device_index)
    assert np.allclose(model.coef[:, 0], estimator.coef_, atol=1e-5)
    monkeypatch.chdir(tmp_path)
    rows = np.column_stack([fed.device_index, fed.X, fed.y])
    np.savetxt("rows.csv", rows, delimiter=",", header="site,a,b,y", comments="")
    asked = ["fit", "rows.csv", "--site", "site", "--target", "y", "--select", "none", "--test-size", "0"]
    assert main([*asked, "--fuse-intercept", "no", "--report", "page.html"]) == 0
    again = fedkin.load("fedkin-model")
    assert np.allclose(again.coef, model.coef, atol=1e-5)
    assert again.options["fuse_intercept"] is False


def test_what_cannot_leave_intercepts_alone_says_so():
    fed = sites()
    labels = fed.replaced(y=(fed.y > np.median(fed.y)).astype(float), weight=None)
    with pytest.raises(ParameterError, match="only least squares can leave intercepts unfused"):
        fit_federation(labels, None, FitOptions(loss="logistic", lam=0.1, fuse_intercept=False))
    with pytest.raises(ParameterError, match="refit pools intercepts"):
        FitOptions(refit=True, fuse_intercept=False)
    with pytest.raises(ParameterError, match="fuse_intercept must be True, False or 'auto'"):
        FitOptions(fuse_intercept="never")
    with pytest.raises(ParameterError, match=r'fuse_intercept= .*solver="exact"'):
        FitOptions(solver="fedadmm", fuse_intercept=False)
