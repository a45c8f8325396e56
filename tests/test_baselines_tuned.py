"""Local, Global and site intercepts, tuned: the numbers of scikit-learn, or of fits without each row."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV, PoissonRegressor, Ridge, RidgeCV
from sklearn.metrics import log_loss
from sklearn.model_selection import LeaveOneOut
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fedkin import Federation
from fedkin.fitting import FitOptions, baseline_models
from fedkin.fitting.baselines import (
    HOLDS,
    RIDGES,
    SMOOTH_RIDGES,
    SiteRows,
    own_fits,
    own_ridges,
    pooled_ridge,
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
    return SiteRows(np.column_stack([np.ones(len(X)), X]), fed.y, np.ones(len(X)), fed.starts, True)


# --- least squares --------------------------------------------------------------------------------------------


def test_ridge_at_each_site_is_that_of_scikit_learn():
    fed = sites()
    local = baseline_models(fed)["Local"]
    for u in fed.sites:
        known = make_pipeline(StandardScaler(), RidgeCV(RIDGES)).fit(fed[u].X, fed[u].y)
        np.testing.assert_allclose(local.predict(fed[u].X, u), known.predict(fed[u].X), rtol=1e-8, atol=1e-10)


def test_one_ridge_for_all_is_that_of_scikit_learn():
    fed = sites()
    known = make_pipeline(StandardScaler(), RidgeCV(RIDGES)).fit(fed.X, fed.y)
    found = baseline_models(fed)["Global"].predict(fed.X, fed.site_index.tolist())
    np.testing.assert_allclose(found, known.predict(fed.X), rtol=1e-8, atol=1e-10)


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
    found = pooled_ridge(rows, HOLDS)
    np.testing.assert_allclose((rows.X * found[fed.site_index]).sum(axis=1), known.predict(Z), rtol=1e-7)


def test_sites_with_one_row_constant_columns_and_weights():
    fed = sites(sizes=(8, 1, 2, 1), q=2)
    fed = Federation.from_arrays(np.column_stack([fed.X, np.full(12, 7.0)]), fed.y, fed.site_index)
    for model in baseline_models(fed).values():
        assert np.isfinite(model.coef).all()
        assert np.isfinite(model.intercept).all()
    assert baseline_models(fed)["Local"].predict(fed[1].X, 1) == pytest.approx(fed[1].y)
    rows = standardised(sites(sizes=(9, 5, 4)))
    whole = rows._replace(weight=np.full(len(rows.y), 3.0))
    # weights of 3 everywhere are a third of every ridge
    assert np.isfinite(own_ridges(whole)).all()
    assert np.isfinite(pooled_ridge(whole, HOLDS)).all()


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
        X = StandardScaler().fit_transform(fed[u].X)

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


def test_logistic_ridges_are_as_good_as_those_of_cross_validation():
    fed = sites("logistic", sizes=(300, 300, 300), seed=3)
    train, test = fed.split(0.5, seed=0)
    found = baseline_models(train, FitOptions(loss="logistic"))
    known = np.concatenate(
        [
            make_pipeline(
                StandardScaler(),
                LogisticRegressionCV(
                    Cs=1 / SMOOTH_RIDGES,
                    l1_ratios=(0.0,),
                    scoring="neg_log_loss",
                    use_legacy_attributes=False,
                    max_iter=1000,
                ),
            )
            .fit(train[u].X, train[u].y)
            .predict_proba(test[u].X)
            for u in fed.sites
        ]
    )
    ours = log_loss(test.y, found["Local"].predict_proba(test.X, test.site_index.tolist()))
    assert ours <= log_loss(test.y, known) + 0.005
    with_intercepts = log_loss(test.y, found["Site intercepts"].predict_proba(test.X, test.site_index.tolist()))
    assert with_intercepts <= ours  # the sites differ in nothing else


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


@pytest.mark.parametrize("loss", ["huber", "mean"])
def test_other_losses(loss):
    fed = sites()
    found = baseline_models(fed, FitOptions(loss=loss)) if loss == "huber" else None
    if found is None:
        rows = Federation.from_arrays(fed.X, None, fed.site_index)
        found = baseline_models(rows, FitOptions(loss="mean"))
        assert list(found) == ["Local", "Global"]
        np.testing.assert_allclose(found["Local"].coef[0, 0], fed[0].X.mean(axis=0))
    assert all(np.isfinite(model.coef).all() for model in found.values())


def test_own_fits_of_equal_weights_do_not_depend_on_their_size():
    fed = sites("logistic", sizes=(30, 20))
    rows = standardised(fed)
    twice = SiteRows(
        np.repeat(rows.X, 2, axis=0), np.repeat(rows.y, 2), np.full(100, 0.5), np.array([0, 60, 100]), True
    )
    a, b = (own_fits(make_loss("logistic", fed.y), one) for one in (rows, twice))
    # rows of half the weight, each twice, have the same fits along the path; left out one by one they are worth half
    assert a.shape == b.shape
    assert np.isfinite(b).all()
