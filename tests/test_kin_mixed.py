"""The mixed model from sums: against dense algebra, closed forms and statsmodels."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize, stats
from statsmodels.regression.mixed_linear_model import MixedLM, MixedLMParams

from fedkin.kin import Priors, SiteLikelihoods, common_units, fit_mixed, mixed
from fedkin.kin.groups import chance_of_none
from fedkin.kin.mixed import LEAST_LOG, _Evidence, moderate_variances

APART = Priors(likeness=np.inf, log_variance=(0.0, np.inf), ridge=1e6, level=0.0)


def sites(V=30, n=12, spread=(0.6, 0.5, 0.4), noise=0.7, seed=0):
    """Rows of V sites with an intercept: X (V, n, p), y (V, n), theta (V, p)."""
    rng = np.random.default_rng(seed)
    p = len(spread)
    X = rng.normal(size=(V, n, p))
    X[:, :, 0] = 1.0
    theta = np.linspace(1, -1, p) + np.array(spread) * rng.normal(size=(V, p))
    return X, np.einsum("unp,up->un", X, theta) + noise * rng.normal(size=(V, n)), theta


def sums_of(X, y):
    G, c = np.einsum("uni,unj->uij", X, X), np.einsum("uni,un->ui", X, y)
    return SiteLikelihoods(G, c, (y**2).sum(axis=1), np.full(len(X), float(X.shape[1])))


def first(p):
    return np.arange(p) == 0


def test_agrees_with_statsmodels():
    X, y, _ = sites(V=40, n=15)
    p = X.shape[2]
    model = fit_mixed(sums_of(X, y), first(p), priors=APART, passes=1)
    rows, group = X.reshape(-1, p), np.repeat(np.arange(len(X)), X.shape[1])
    independent = MixedLMParams.from_components(fe_params=np.ones(p), cov_re=np.eye(p))
    peer = MixedLM(y.ravel(), rows, group, exog_re=rows).fit(free=independent, method="lbfgs")
    assert model.variance == pytest.approx(np.diag(peer.cov_re), rel=2e-3)
    assert model.noise == pytest.approx(np.full(len(X), peer.scale), rel=1e-3)
    assert model.mean == pytest.approx(peer.fe_params, abs=1e-3)
    assert np.sqrt(np.diag(model.mean_covariance)) == pytest.approx(peer.bse_fe, rel=2e-3)
    effects = np.array([peer.random_effects[u] for u in range(len(X))])
    assert np.abs(model.theta - model.mean - effects).max() < 2e-3


@pytest.mark.parametrize("priors", [Priors(), APART], ids=["held together", "apart"])
def test_fisher_scoring_ends_where_lbfgs_ends_with_fewer_steps(priors):
    X, y, _ = sites(V=25, n=8, spread=(0.6, 0.5, 0.4, 0.0, 0.2), seed=3)
    evidence = _Evidence(sums_of(X, y), first(5), None, priors)
    asked = []

    def negative(parameters):
        asked.append(parameters)
        return evidence.__class__._negative(evidence, parameters)[:2]

    fixed = evidence.start()[5]
    ridge = (-9.0, 9.0) if priors.ridge is None else (fixed, fixed)
    bounds = [(LEAST_LOG, 8.0)] * 5 + [ridge, (-14.0, 14.0)]
    tight = {"ftol": 1e-14, "gtol": 1e-9, "maxiter": 2000}
    peer = optimize.minimize(negative, evidence.start(), jac=True, method="L-BFGS-B", bounds=bounds, options=tight)
    lbfgs, asked[:] = len(asked), []
    evidence._negative = lambda parameters: (*negative(parameters), _Evidence._negative(evidence, parameters)[2])
    found = evidence.maximise(evidence.start())
    assert _Evidence._negative(evidence, found)[0] < peer.fun + 1e-4
    assert found[[0, 1, 2, 4, 6]] == pytest.approx(peer.x[[0, 1, 2, 4, 6]], abs=5e-3)
    assert len(asked) < lbfgs / 2


def test_the_information_about_log_variances_is_the_expected_curvature():
    """Of the likelihood given the mean: averaged over data that the model itself draws."""
    rng, p, V, n = np.random.default_rng(0), 2, 400, 6
    parameters = np.log([0.5, 0.2, 1e-9, 0.6])  # no room for the mean
    X = rng.normal(size=(V, n, p))
    theta = np.sqrt([0.5, 0.2]) * rng.normal(size=(V, p))
    y = np.einsum("unp,up->un", X, theta) + np.sqrt(0.6) * rng.normal(size=(V, n))
    flat = Priors(likeness=np.inf, log_variance=(0.0, np.inf))
    evidence = _Evidence(sums_of(X, y), np.zeros(p, dtype=bool), None, flat)
    slope = [evidence._negative(parameters + step)[1] for step in 1e-4 * np.eye(4)[[0, 1, 3]]]
    slope -= evidence._negative(parameters)[1]
    observed = slope[:, [0, 1, 3]] / 1e-4
    expected = evidence._negative(parameters)[2][np.ix_([0, 1, 3], [0, 1, 3])]
    assert observed == pytest.approx(expected, rel=0.15, abs=0.05 * V)


def test_likelihood_and_posterior_are_those_of_the_dense_normal_model():
    X, y, _ = sites(V=4, n=5)
    p, ridge = X.shape[2], 0.3
    model = fit_mixed(sums_of(X, y), np.zeros(p, dtype=bool), priors=Priors(ridge=ridge), passes=1)
    rows, V, n = X.reshape(-1, p), len(X), X.shape[1]
    effects = np.zeros((V * n, V * p))
    for u in range(V):
        effects[u * n : (u + 1) * n, u * p : (u + 1) * p] = X[u]
    between = np.kron(np.eye(V), np.diag(model.variance))
    prior = ridge * np.kron(np.ones((V, V)), np.eye(p)) + between
    total = effects @ prior @ effects.T + model.noise[0] * np.eye(V * n)
    assert rows.shape == (V * n, p)
    density = stats.multivariate_normal(np.zeros(V * n), total).logpdf(y.ravel())
    assert model.log_likelihood == pytest.approx(density + 0.5 * V * n * np.log(2 * np.pi), rel=1e-9)
    gain = prior @ effects.T @ np.linalg.inv(total)
    assert model.theta.ravel() == pytest.approx(gain @ y.ravel(), abs=1e-8)
    covariance = prior - gain @ effects @ prior
    for u in range(V):
        mine = covariance[u * p : (u + 1) * p, u * p : (u + 1) * p]
        assert model.covariance[u] == pytest.approx(mine, abs=1e-8)


def test_balanced_means_have_the_textbook_variances():
    """One column of ones, n rows each: restricted maximum likelihood is the analysis of variance."""
    rng = np.random.default_rng(3)
    V, n = 25, 6
    y = 1.5 * rng.normal(size=(V, 1)) + rng.normal(size=(V, n))
    model = fit_mixed(sums_of(np.ones((V, n, 1)), y), first(1), priors=APART, passes=1)
    within = ((y - y.mean(axis=1, keepdims=True)) ** 2).sum() / (V * (n - 1))
    between = n * y.mean(axis=1).var(ddof=1)
    assert model.noise[0] == pytest.approx(within, rel=1e-3)
    assert model.variance[0] == pytest.approx((between - within) / n, rel=1e-3)
    shrunk = model.variance[0] / (model.variance[0] + model.noise[0] / n)
    assert model.theta[:, 0] == pytest.approx(y.mean() + shrunk * (y.mean(axis=1) - y.mean()), abs=1e-6)


def test_noise_per_site_is_found_half_way():
    rng = np.random.default_rng(5)
    X, y, _ = sites(V=40, n=60, noise=0.0)
    noise = np.where(np.arange(40) < 20, 0.5, 2.0)
    y = y + noise[:, None] * rng.normal(size=y.shape)
    model = fit_mixed(sums_of(X, y), first(3))
    ratio = model.noise[20:].mean() / model.noise[:20].mean()
    assert 3.0 < ratio < 5.5  # variances differ by 16, square-rooted
    equal = fit_mixed(sums_of(*sites(V=40, n=60)[:2]), first(3))
    assert np.ptp(equal.noise) < 1e-12


def test_steadied_variances():
    rng = np.random.default_rng(6)
    true = rng.choice([0.5, 2.0], size=300)
    seen = true * rng.chisquare(6, size=300) / 6
    better = moderate_variances(seen, np.full(300, 6.0))
    assert np.mean(np.log(better / true) ** 2) < 0.75 * np.mean(np.log(seen / true) ** 2)
    few = moderate_variances(np.array([1.0, 3.0]), np.array([3.0, 1.0]))
    assert few == pytest.approx([1.5, 1.5])
    assert moderate_variances(np.array([5.0, 0.0]), np.zeros(2)).tolist() == [1.0, 1.0]
    with_empty = moderate_variances(np.r_[seen, 0.0], np.r_[np.full(300, 6.0), 0.0])
    assert 0.5 < with_empty[-1] < 2.0


def test_units_there_and_back():
    X, y, theta = sites(V=6, n=9)
    X = X * [1.0, 50.0, 0.01] + [0.0, 1000.0, -3.0]
    y = 7 + 300 * y
    sums = sums_of(X, y)
    units = common_units(sums, first(3), has_scale=True)
    rows = X.reshape(-1, 3)
    Z = rows @ units.A / units.target
    assert Z[:, 0] == pytest.approx(np.ones(len(rows)))
    assert Z[:, 1:].mean(axis=0) == pytest.approx([0, 0], abs=1e-9)
    assert Z[:, 1:].std(axis=0) == pytest.approx([1, 1])
    fitted = units.fitted(sums)
    beta = np.linalg.solve(fitted.G.sum(axis=0), fitted.c.sum(axis=0))
    own = np.linalg.lstsq(rows, y.ravel(), rcond=None)[0]
    assert units.theta(beta) == pytest.approx(own, rel=1e-6)
    assert units.to_fitted(units.theta(theta)) == pytest.approx(theta)
    assert fitted.values(np.tile(beta, (6, 1))).sum() * units.target**2 == pytest.approx(
        0.5 * ((y.ravel() - rows @ own) ** 2).sum()
    )


@pytest.mark.parametrize("case", ["constant", "one row", "collinear", "nothing", "one site", "exact"])
def test_degenerate_sites_are_harmless(case):
    X, y, _ = sites(V=1 if case == "one site" else 8, n=6)
    if case == "constant":
        X[:, :, 2] = 4.0
    if case == "collinear":
        X[:, :, 2] = 2 * X[:, :, 1]
    if case == "exact":
        y = X @ np.array([1.0, 2.0, 3.0])
    sums = sums_of(X, y)
    if case == "one row":
        sums = sums_of(X[:, :1], y[:, :1])
    if case == "nothing":
        sums = SiteLikelihoods(sums.G.copy(), sums.c.copy(), sums.yy.copy(), sums.n.copy())
        sums.G[0], sums.c[0], sums.yy[0], sums.n[0] = 0.0, 0.0, 0.0, 0.0
    units = common_units(sums, first(3), has_scale=True)
    model = fit_mixed(units.fitted(sums), first(3))
    for part in (model.theta, model.covariance, model.noise, model.variance):
        assert np.isfinite(part).all()
    assert np.linalg.eigvalsh(model.covariance).min() > -1e-9
    if case == "nothing":
        assert model.theta[0] == pytest.approx(model.mean)
    if case == "exact":
        assert units.theta(model.theta) == pytest.approx(np.tile([1.0, 2.0, 3.0], (8, 1)), abs=0.02)


def test_spreads_of_many_coefficients_are_learned_from_some_sites(monkeypatch):
    X, y, _ = sites(V=60)
    sums = sums_of(X, y)
    every = fit_mixed(sums, first(3))
    monkeypatch.setattr(mixed, "MOST_WORK", 1.0)
    some = fit_mixed(sums, first(3))
    few = np.linspace(0, 59, mixed.FEW_SITES).astype(int)
    monkeypatch.undo()
    theirs = fit_mixed(sums.take(few), first(3))
    assert some.variance == pytest.approx(theirs.variance)
    assert some.theta.shape == every.theta.shape
    assert np.abs(some.theta - every.theta).max() < 0.5 * np.sqrt(every.covariance[:, 0, 0]).max()


def test_spreads_of_slopes_do_not_come_out_as_nothing_where_the_likelihood_hardly_tells():
    """One column of ones, as a slope: the likelihood of its spread has a closed form."""
    V, n = 20, 5.0
    rng = np.random.default_rng(0)
    means = rng.normal(size=V)
    means = (means - means.mean()) / np.sqrt(((means - means.mean()) ** 2).mean()) * np.sqrt(0.8 / n)  # less than noise
    sums = SiteLikelihoods(np.full((V, 1, 1), n), n * means[:, None], n * means**2, np.full(V, n))
    slope = np.array([False])

    def negative(log_spread, power):
        total = np.exp(log_spread) + 1 / n
        square = (means**2).sum() / total
        return 0.5 * ((V - 1) * np.log(total) + square) - power * log_spread

    found = {}
    for power in (0.0, 0.5, 1.0):
        priors = Priors(log_variance=(0.0, np.inf), ridge=1e9, level=power)
        found[power] = fit_mixed(sums, slope, dispersion=1.0, priors=priors).variance[0]
        peer = optimize.minimize_scalar(
            negative, bounds=(-14, 8), args=(power,), method="bounded", options={"xatol": 1e-8}
        )
        if power:
            assert found[power] == pytest.approx(np.exp(peer.x), rel=1e-2)
    error = np.sqrt(2 / V) / n
    assert found[0.0] < 1e-3 * error  # the likelihood alone says that nothing differs
    assert 0.3 * error < found[0.5] < error < 2 * found[1.0]
    few = SiteLikelihoods(*(getattr(sums, name)[:2] for name in ("G", "c", "yy", "n")))
    assert fit_mixed(few, slope, dispersion=1.0).variance[0] < 1.0  # two sites do not hold against a prior that rises


def test_the_freedom_of_spreads_costs_what_the_integral_over_them_does():
    """A quadratic log likelihood of three log spreads: the integral over their differences by quadrature."""
    peak, told = np.array([-3.0, -2.2, -2.6]), np.diag([4.0, 7.0, 2.0])
    priors = Priors(likeness=0.7)
    level = peak.mean()
    turn = np.linalg.svd(np.ones((1, 3)))[2][1:]  # differences
    grid = np.linspace(-6, 6, 801)
    u, v = np.meshgrid(grid, grid, indexing="ij")
    logs = level + u[..., None] * turn[0] + v[..., None] * turn[1]
    density = np.exp(-0.5 * (u**2 + v**2) / 0.49) / (2 * np.pi * 0.49)

    def evidence(centre):
        off = logs - centre
        return float(
            (np.exp(-0.5 * np.einsum("abj,jk,abk->ab", off, told, off)) * density).sum() * np.diff(grid)[0] ** 2
        )

    # where likelihood and prior agree best, as a fit has it
    best = np.linalg.solve(turn @ told @ turn.T + np.eye(2) / 0.49, turn @ told @ (peak - level)) @ turn + level
    at_best = np.exp(-0.5 * (best - peak) @ told @ (best - peak))
    expected = np.log(at_best) - np.log(evidence(peak))
    assert priors.freedom(best, np.ones(3, dtype=bool), told) == pytest.approx(expected, rel=1e-6)
    assert priors.freedom(best, np.array([True, False, False]), told) == 0.0


def test_what_sure_allows_is_the_tail_area_of_its_difference():
    """Under the mean that b0 names, SURE favours b1 by so much with no more than the stated probability."""
    rng = np.random.default_rng(3)
    V, d = 40, 3
    W = np.tile(np.eye(d), (V, 1, 1))
    tails = []
    for _ in range(400):
        c = rng.normal(size=(V, d))  # sites do not differ, and their mean is 0
        b0, b1 = np.zeros((V, d)), 0.5 * c  # one model that is right, and half way to every site's own
        tails.append(chance_of_none(W, c, b0, b1, np.array([0.0, 0.5 * V * d])))
    tails = np.array(tails)
    assert (tails <= 0.05).mean() <= 0.05 and (tails == 1.0).mean() > 0.9
    c = rng.normal(size=(V, d)) * 2  # they differ: one model loses by many standard deviations
    assert chance_of_none(W, c, np.zeros((V, d)), 0.75 * c, np.array([0.0, 0.75 * V * d])) < 1e-4
    # by hand: SURE(b) = sum |c - b|^2 + 2 degrees, and the standard deviation of its difference is twice the distance
    b0, b1, degrees = 0.1 * c, 0.75 * c, np.array([0.1, 0.75]) * V * d
    sure = [((c - b) ** 2).sum() + 2 * k for b, k in zip((b0, b1), degrees, strict=True)]
    z = (sure[0] - sure[1]) / (2 * np.sqrt(((b0 - b1) ** 2).sum()))
    np.testing.assert_allclose(chance_of_none(W, c, b0, b1, degrees), 2 * stats.norm.sf(z), rtol=1e-10)
