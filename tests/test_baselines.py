"""Local, Global and site intercepts, tuned on rows or on folds of sums: the numbers of scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge, RidgeCV
from sklearn.model_selection import LeaveOneOut
from sklearn.preprocessing import StandardScaler

import fedkin
from fedkin import Federation
from fedkin.core import assign_folds
from fedkin.fitting import FitOptions, baseline_models, compare, fit
from fedkin.fitting.baselines import (
    FOLD_RIDGES,
    HOLDS,
    RIDGES,
    SMOOTH_RIDGES,
    StackedRows,
    fold_baselines,
    ridge_with_site_intercepts,
    with_site_intercepts,
)
from fedkin.losses import make_loss


def sites(loss="linear", sizes=(40, 25, 12, 6), q=3, seed=0):
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    site = np.repeat(np.arange(len(sizes)), sizes)
    X = rng.normal(size=(n, q)) * [1.0, 5.0, 0.2][:q] + [0.0, 3.0, -1.0][:q]
    eta = 0.8 * X[:, 0] + 0.1 * X[:, 1] + 1.5 * rng.normal(size=len(sizes))[site]
    if loss == "linear":
        y = eta + rng.normal(size=n)
    elif loss == "logistic":
        y = (eta + rng.logistic(size=n) > 0).astype(float)
    elif loss == "poisson":
        y = rng.poisson(np.exp(0.5 * eta)).astype(float)
    else:
        y = np.digitize(eta + rng.logistic(size=n), [-1.0, 1.0]).astype(float)
    return Federation.from_arrays(X, y, site)


def standardised(fed):
    X = (fed.X - fed.X.mean(axis=0)) / fed.X.std(axis=0)
    return StackedRows(np.column_stack([np.ones(len(X)), X]), fed.y, np.ones(len(X)), fed.starts, True)


# --- least squares --------------------------------------------------------------------------------------------


def test_site_intercepts_predict_best_without_each_row():
    """Every ridge and hold, every row left out: by hand, as ridge regressions with columns for sites."""
    fed = sites(sizes=(9, 5, 4))
    rows = standardised(fed)
    member = (fed.site_index[:, None] == np.arange(3)).astype(float)

    def fitted(keep, ridge, hold):
        # a ridge on scaled columns is a ridge of its own for each kind of column
        Z = np.column_stack([rows.X[:, 1:], member * np.sqrt(ridge / hold)])
        return Z, Ridge(alpha=ridge).fit(Z[keep], rows.y[keep])

    def score(ridge, hold):
        missed = []
        for train, test in LeaveOneOut().split(rows.X):
            Z, known = fitted(train, ridge, hold)
            missed.append(rows.y[test] - known.predict(Z[test]))
        return float(np.mean(np.square(missed)))

    _, ridge, hold = min((score(ridge, hold), ridge, hold) for ridge in RIDGES for hold in HOLDS)
    Z, known = fitted(slice(None), ridge, hold)
    found = ridge_with_site_intercepts(rows)
    np.testing.assert_allclose((rows.X * found[fed.site_index]).sum(axis=1), known.predict(Z), rtol=1e-7)


def test_sites_with_one_row_and_constant_columns():
    fed = sites(sizes=(8, 1, 2, 1), q=2)
    fed = Federation.from_arrays(np.column_stack([fed.X, np.full(12, 7.0)]), fed.y, fed.site_index)
    for model in baseline_models(fed).values():
        assert np.isfinite(model.coef).all()
        assert np.isfinite(model.intercept).all()
    assert baseline_models(fed)["Local"].predict(fed[1].X, 1) == pytest.approx(fed[1].y)


def test_without_an_intercept_there_are_no_site_intercepts():
    fed = sites()
    found = baseline_models(fed, FitOptions(fit_intercept=False))
    assert list(found) == ["Local", "Global"]
    scale = fed.X.std(axis=0)
    known = RidgeCV(RIDGES, fit_intercept=False).fit(fed.X / scale, fed.y)
    np.testing.assert_allclose(found["Global"].coef[0, 0], known.coef_ / scale, rtol=0.05)
    assert "Site intercepts" not in baseline_models(fed.subset([0]))


# --- smooth losses --------------------------------------------------------------------------------------------


def without_each_row(make, X, y):
    """The ridge that is best when every row is really left out."""
    scores = []
    for ridge in SMOOTH_RIDGES:
        values = []
        for train, test in LeaveOneOut().split(X):
            if len(np.unique(y[train])) < 2:
                return None
            values.append(make(ridge, len(train)).fit(X[train], y[train]).predict_proba(X[test])[0, int(y[test][0])])
        scores.append(-np.log(values).mean())
    return np.array(scores)


def test_logistic_ridges_at_each_site():
    fed = sites("logistic", sizes=(40, 25))
    local = baseline_models(fed, FitOptions(loss="logistic"))["Local"]
    for u in fed.sites:
        X = StandardScaler().fit(fed.X).transform(fed[u].X)

        def make(ridge, n):
            return LogisticRegression(C=1 / ridge, tol=1e-8, max_iter=1000)

        scores = without_each_row(make, X, fed[u].y)
        chances = local.predict_proba(fed[u].X, u)[:, 1]
        errors = [
            np.abs(make(ridge, 0).fit(X, fed[u].y).predict_proba(X)[:, 1] - chances).max() for ridge in SMOOTH_RIDGES
        ]
        # it is one of scikit-learn's fits (but for the light ridge of the intercept), and as good as the best of them
        assert min(errors) < 0.01
        assert scores[int(np.argmin(errors))] <= scores.min() + 0.01


@pytest.mark.parametrize("loss", ["logistic", "poisson", "multinomial"])
def test_site_intercepts_of_smooth_losses_minimise_what_they_should(loss):
    fed = sites(loss, sizes=(30, 20, 10, 5))
    rows, made = standardised(fed), make_loss(loss, fed.y)
    start = np.zeros(made.n_params(4))
    theta = with_site_intercepts(made, rows, start).reshape(4, made.n_outputs, 4)
    assert (np.ptp(theta[:, :, 1:], axis=0) < 1e-12).all()
    slope = made.slope_at(np.einsum("np,nkp->nk", rows.X, theta[fed.site_index]), fed.y)
    pull = np.add.reduceat(slope, fed.starts[:-1], axis=0)
    # a site's gradient is balanced by its hold, the same one for all: sum slope + hold b = 0
    own = theta[:, :, 0] - theta[:, :, 0].mean(axis=0)
    hold = -(pull * own).sum() / (own**2).sum()
    assert hold > 0
    np.testing.assert_allclose(pull - pull.mean(axis=0), -hold * own, atol=0.05 * np.abs(pull).max() + 1e-3)


def test_poisson_with_offset():
    fed = sites("poisson", sizes=(50, 50))
    exposure = np.log(np.random.default_rng(0).uniform(1, 20, len(fed.y)))
    y = np.random.default_rng(1).poisson(np.exp(0.3 * fed.X[:, 0] + exposure))
    made = Federation.from_arrays(fed.X, y, fed.site_index, offset=exposure)
    found = baseline_models(made, FitOptions(loss="poisson"))
    scale = made.X.std(axis=0)
    rates, weight = y / np.exp(exposure), np.exp(exposure)
    known = [
        PoissonRegressor(alpha=ridge / weight.sum(), tol=1e-9, max_iter=2000).fit(
            (made.X - made.X.mean(axis=0)) / scale, rates, sample_weight=weight
        )
        for ridge in SMOOTH_RIDGES
    ]
    errors = [np.abs(one.coef_ - found["Global"].coef[0, 0] * scale).max() for one in known]
    assert min(errors) < 1e-3


def test_one_class_at_a_site_is_finite():
    fed = sites("logistic", sizes=(30, 20, 10))
    y = np.where(fed.site_index == 2, 1.0, fed.y)
    found = baseline_models(Federation.from_arrays(fed.X, y, fed.site_index), FitOptions(loss="logistic"))
    chances = found["Local"].predict_proba(fed[2].X, 2)[:, 1]
    assert ((chances > 0.9) & (chances < 1)).all()


V, K = 4, 3


def few_rows(n=12, seed=0):
    rng = np.random.default_rng(seed)
    X, site = rng.normal(size=(V * n, 3)), np.repeat(np.arange(V), n)
    y = X @ [1.0, 0.5, 0.0] + 2.0 * site + rng.normal(size=V * n)
    return fedkin.Federation.from_arrays(X, y, site)


def ridge_fit(X, y, ridge):
    return Ridge(alpha=ridge * len(y)).fit(X, y)


def site_dummies(X, site):
    return np.column_stack([X, 1e6 * np.eye(V)[site]])  # next to no penalty on the sites' levels


def squared_errors(kind, fed, train, test, ridge):
    """Squared errors of the test rows, by scikit-learn, each divided by two."""
    X, y, site = fed.X, fed.y, fed.site_index
    out = np.empty(test.sum())
    if kind == "Local":
        for u in range(V):
            fit = ridge_fit(X[train & (site == u)], y[train & (site == u)], ridge[u])
            out[site[test] == u] = fit.predict(X[test & (site == u)])
    else:
        Z = X if kind == "Global" else site_dummies(X, site)
        out = Ridge(alpha=ridge[0] * train.sum(), tol=1e-12).fit(Z[train], y[train]).predict(Z[test])
    return 0.5 * (out - y[test]) ** 2


@pytest.mark.parametrize("kind", ["Local", "Global", "Site intercepts"])
def test_ridges_are_tuned_by_the_folds_that_train(kind):
    fed = few_rows()
    fold = assign_folds(fed.with_intercept(), K, 0)
    sums = fedkin.summarise(fed.with_intercept(), folds=K).sums
    ours = fold_baselines(sums, np.array([True, False, False, False]), 0)[kind]
    loss = np.zeros((len(FOLD_RIDGES), V))
    for k in (1, 2):
        train, test = (fold != 0) & (fold != k), fold == k
        for m, ridge in enumerate(FOLD_RIDGES):
            each = squared_errors(kind, fed, train, test, np.full(V, ridge))
            loss[m] += np.bincount(fed.site_index[test], each, V)
    best = FOLD_RIDGES[loss.argmin(axis=0)] if kind == "Local" else np.full(V, FOLD_RIDGES[loss.sum(axis=1).argmin()])
    test = fold == 0
    Z = fed.with_intercept().X[test]
    mine = 0.5 * ((Z * ours[fed.site_index[test]]).sum(axis=1) - fed.y[test]) ** 2
    assert np.allclose(mine, squared_errors(kind, fed, ~test, test, best), rtol=1e-5, atol=1e-7)


def test_the_comparison_has_four_methods_and_few_rows_do_no_harm():
    fed = few_rows(n=5)
    fed = fedkin.Federation.from_arrays(
        np.vstack([fed.X, [[0.1, 0.2, 0.3]]]), np.append(fed.y, 1.0), [*fed.site_index.tolist(), 99]
    )
    summaries = fedkin.summarise(fed.with_intercept(), folds=5)
    options = FitOptions(method="fused", select="none", fuse_intercept=False)
    model = fit(summaries, None, options)
    compared = compare(summaries, None, options, model=model)
    found = {name: compared.mean(name) for name in compared.errors}
    assert list(found) == ["Local", "Global", "Site intercepts", "Fedkin"]
    assert all(np.isfinite(error) and error < 20 for error in found.values())
    assert found["Fedkin"] < found["Global"]
    fold = assign_folds(fed.with_intercept(), 5, 0)
    sizes = np.bincount(fold[fold >= 0], minlength=5)
    for name, each in compared.errors.items():
        assert np.average(each, weights=sizes) == pytest.approx(found[name])
    apart = compared.errors["Local"] - compared.errors["Fedkin"]
    share = sizes.mean() / len(fed.X)  # one row always trains
    factor = (1 / 5 + share / (1 - share)) ** 0.5
    assert compared.difference_error("Local") == pytest.approx(np.std(apart, ddof=1) * factor)
    assert compared.site_means("Local").shape == (V + 1,)
    assert compared.difference("Local") == pytest.approx(found["Local"] - found["Fedkin"])
