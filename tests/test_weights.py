"""Weights of rows: a row of weight w counts as w rows, in every fit."""

import numpy as np
import pytest
from sklearn.base import clone

import fedkin
from fedkin import FedADMMRegressor
from fedkin.data import Federation
from fedkin.errors import DataError, ParameterError
from fedkin.kin import find_kin


def design(loss, seed=0, sites=4, n=25):
    """Rows with whole weights, and the same rows written that many times."""
    rng = np.random.default_rng(seed)
    site = np.repeat(np.arange(sites), n)
    X = rng.normal(size=(site.size, 2)) + 0.3
    eta = X @ [1.0, -0.5] + 0.5 * site
    offset = 0.1 * rng.normal(size=site.size)
    y = {
        "linear": eta + offset + rng.normal(size=eta.size),
        "logistic": (rng.random(eta.size) < 1 / (1 + np.exp(-eta))).astype(float),
        "poisson": rng.poisson(np.exp(0.5 * eta)).astype(float),
        "mean": None,
        "huber": eta + offset + rng.standard_t(2, eta.size),
    }[loss]
    offset = None if loss == "mean" else offset
    weight = rng.integers(1, 4, site.size)
    again = np.repeat(np.arange(site.size), weight)

    def taken(values):
        return None if values is None else values[again]

    one = Federation.from_arrays(X, y, site, offset=offset, weight=weight)
    return one, Federation.from_arrays(X[again], taken(y), site[again], offset=taken(offset)), weight


LOSSES = ["linear", "logistic", "poisson", "mean", "huber"]


@pytest.mark.parametrize("loss", LOSSES)
def test_local_and_global_fits(loss):
    weighted, repeated, _ = design(loss)
    for variance in ("model", "sandwich"):
        one, two = (fedkin.local_fit(fed, loss, variance=variance) for fed in (weighted, repeated))
        assert np.allclose(one.theta, two.theta, rtol=1e-8)
        assert np.allclose(one.covariance, two.covariance, rtol=1e-6)
    for weights in ("samples", "sites"):
        assert np.allclose(*(fedkin.global_fit(fed, loss, weights) for fed in (weighted, repeated)), rtol=1e-8)


@pytest.mark.parametrize("loss", LOSSES)
def test_problems_and_their_certificates(loss):
    weighted, repeated, _ = design(loss)
    graph = fedkin.Graph.complete(weighted.sites)
    problems = [fedkin.Problem(fed, graph, loss, lam=0.05, ridge=0.1) for fed in (weighted, repeated)]
    one, two = (fedkin.solve(problem, 1e-9) for problem in problems)
    assert one.gap <= 1e-9
    assert np.allclose(one.theta, two.theta, atol=1e-4)
    assert np.isclose(one.objective, two.objective, rtol=1e-8)
    theta = np.random.default_rng(1).normal(size=one.theta.shape)
    s = 0.01 * theta
    for name in ("values", "gradients", "hessians"):
        assert np.allclose(*(getattr(problem.terms, name)(theta) for problem in problems))
    assert np.allclose(*(problem.terms.young_gaps(theta, s) for problem in problems))
    assert np.allclose(*(problem.terms.lower_bounds() for problem in problems))


@pytest.mark.parametrize("loss", LOSSES)
def test_summaries(loss):
    weighted, repeated, _ = design(loss)
    one, two = (fedkin.summarise(fed, loss, folds=2) for fed in (weighted, repeated))
    assert np.allclose(one.n_samples, two.n_samples)
    for name in ("value", "gradient", "hessian"):
        totals = [getattr(summaries.sums.total(), name) for summaries in (one, two)]
        assert np.allclose(*totals, rtol=1e-6, atol=1e-6)
    assert np.allclose(one.column_sums, two.column_sums)
    assert np.allclose(one.standardized()[2], two.standardized()[2])


@pytest.mark.parametrize("loss", ["linear", "logistic", "poisson", "huber"])
def test_kin(loss):
    weighted, repeated, _ = design(loss)
    one, two = (find_kin(fed.with_intercept(), loss=loss, seed=0) for fed in (weighted, repeated))
    assert np.allclose(one.theta, two.theta, atol=1e-6)
    assert np.allclose(one.sd, two.sd, rtol=1e-4)


def test_weights_that_are_not_whole_and_their_scale():
    weighted, _, weight = design("linear")
    half = weighted.replaced(weight=0.5 * weight)
    assert np.allclose(fedkin.local_fit(half).theta, fedkin.local_fit(weighted).theta)
    assert np.allclose(half.weight_sums, 0.5 * weighted.weight_sums)


def test_weights_of_tables(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("site,x,y,w\n" + "".join(f"{'ab'[k % 2]},{k},{k * k % 7},{k % 3}\n" for k in range(30)))
    fed = Federation.read(path, site="site", target="y", weight="w")
    assert fed.feature_names == ("x",)
    assert len(fed.X) == 20 and set(fed.weight) == {1.0, 2.0}
    path.write_text("site,x,y,w\na,1,2,-1\nb,2,3,1\n")
    with pytest.raises(DataError, match="w: a weight must be at least 0, but is -1 in line 2"):
        Federation.read(path, site="site", target="y", weight="w")


def test_what_takes_no_weights_says_so():
    weighted, _, _ = design("linear")
    own = fedkin.losses.UserLoss(lambda *rows: 0.0, lambda theta, *rows: 0 * theta)
    with pytest.raises(ParameterError, match="the user loss does not support row weights"):
        fedkin.local_fit(weighted, own)
    problem = fedkin.Problem(weighted, fedkin.Graph.complete(weighted.sites), lam=0.1)
    with pytest.raises(ParameterError, match="Fed-ADMM draws rows and does not support weights"):
        fedkin.fed_admm(problem, 3)
    with pytest.raises(DataError, match="row 1 has the weight 0: weights must be more than 0"):
        Federation.from_arrays([[1.0], [2.0]], None, ["a", "a"], weight=[1, 0])


def test_weights_are_routed(tmp_path):
    import sklearn
    from sklearn.model_selection import cross_validate

    weighted, _, weight = design("linear")
    params = {"site": weighted.site_index, "groups": weighted.site_index, "sample_weight": weight}
    with sklearn.config_context(enable_metadata_routing=True):
        cv = fedkin.WithinSiteKFold(3)
        model = FedADMMRegressor(lam=0.05, select=None)
        found = cross_validate(model, weighted.X, weighted.y, cv=cv, params=params, return_estimator=True)
    train, _ = next(iter(cv.split(weighted.X, groups=weighted.site_index)))
    mine = clone(model).fit(
        weighted.X[train], weighted.y[train], weighted.site_index[train], sample_weight=weight[train]
    )
    assert np.array_equal(found["estimator"][0].coef_, mine.coef_)
