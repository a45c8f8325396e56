"""The mixed model from sums, of few and of many coefficients: against dense algebra, closed forms and statsmodels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp
from statsmodels.regression.mixed_linear_model import MixedLM, MixedLMParams

import fedkin
from fedkin.core import RowData
from fedkin.data import Federation
from fedkin.kin import Priors, QuadraticLikelihoods, common_units, fit_mixed, population_sd
from fedkin.kin.chains import Sampling
from fedkin.kin.directions import FullEffects
from fedkin.kin.evidence import Evidence
from fedkin.kin.groups import find_groups
from fedkin.kin.inference import intraclass_correlation, r_squared, restricted_log_likelihood
from fedkin.kin.likelihoods import Dense
from fedkin.kin.partitions import Neighbours
from fedkin.kin.sources import Source

APART = Priors(likeness=np.inf, ridge=1e6, level=False)


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
    return QuadraticLikelihoods.from_products(G, c, (y**2).sum(axis=1), np.full(len(X), float(X.shape[1])))


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


@pytest.mark.parametrize("case", ["one row", "collinear", "nothing", "one site", "exact"])
def test_degenerate_sites_are_harmless(case):
    X, y, _ = sites(V=1 if case == "one site" else 8, n=1 if case == "one row" else 6)
    if case == "collinear":
        X[:, :, 2] = 2 * X[:, :, 1]
    if case == "exact":
        y = X @ np.array([1.0, 2.0, 3.0])
    if case == "nothing":
        X[0], y[0] = 0.0, 0.0
    sums = sums_of(X, y)
    if case == "nothing":
        sums.n[0] = 0.0
    units = common_units(sums, first(3), has_scale=True)
    model = fit_mixed(units.fitted(sums), first(3))
    assert all(np.isfinite(part).all() for part in (model.theta, model.covariance, model.noise, model.variance))
    assert np.linalg.eigvalsh(model.covariance).min() > -1e-9
    if case == "nothing":
        assert model.theta[0] == pytest.approx(model.mean)
    if case == "exact":
        assert units.theta(model.theta) == pytest.approx(np.tile([1.0, 2.0, 3.0], (8, 1)), abs=0.02)


@pytest.mark.parametrize("columns", [1, 2])
def test_variances_are_integrated_out(columns):
    """Orthogonal columns, as slopes: the likelihood of their variances has a closed form, its integral is a sum."""
    V, n = 20, 5.0
    rng = np.random.default_rng(0)
    means = rng.normal(size=(V, columns))
    means = (means - means.mean(axis=0)) / means.std(axis=0) * np.sqrt(np.array([0.8, 1.3])[:columns] / n)
    G, slopes = np.tile(n * np.eye(columns), (V, 1, 1)), np.zeros(columns, dtype=bool)
    sums = QuadraticLikelihoods.from_products(G, n * means, n * (means**2).sum(axis=1), np.full(V, n))
    grid = np.linspace(-16, 6, 1101)
    each = np.exp(grid) + 1 / n
    logs = [-0.5 * ((V - 1) * np.log(each) + square / each) for square in (means**2).sum(axis=0)]
    nothing = sum(-0.5 * ((V - 1) * np.log(1 / n) + n * square) for square in (means**2).sum(axis=0))
    along = np.meshgrid(*[grid] * columns, indexing="ij")
    level, total = sum(along) / columns, sum(np.meshgrid(*logs, indexing="ij"))
    total = total + stats.logistic.logpdf(level, -np.log(n))
    if columns == 2:  # of log variances around their level; a difference of two has twice the root of two in it
        total += stats.norm.logpdf(along[0] - along[1], 0, np.sqrt(2) * 0.7)
    evidence = Evidence(sums, slopes, 1.0, Priors(ridge=1e9))
    found = evidence.maximise(evidence.start())
    peak = np.unravel_index(total.argmax(), total.shape)
    assert found[:columns] == pytest.approx(grid[list(peak)], abs=0.03)
    log, points = evidence.integrate(found)
    none = evidence.solve(np.append(np.full(columns, -14.0), found[columns:])).log_likelihood
    expected = logsumexp(total) + columns * np.log(grid[1] - grid[0]) - nothing
    assert log - none == pytest.approx(expected, abs=0.1)
    chances, levels = zip(*((chance, at[:columns].mean()) for chance, at in points), strict=True)
    weight = np.exp(total - logsumexp(total))
    assert np.dot(chances, levels) == pytest.approx((weight * level).sum(), abs=0.25)
    assert sum(chances) == pytest.approx(1.0)


# --- many coefficients: curvatures of low rank


def rows_of(V, p, n, groups, signal, seed=0, inside=0.0):
    """Groups of sites with normal parameters: rows, labels, parameters of sites."""
    rng = np.random.default_rng(seed)
    labels = np.arange(V) % groups
    truth = (signal * rng.normal(size=(groups, p)))[labels]
    if inside:
        truth = truth + inside * rng.normal(size=(V, p))
    X = rng.normal(size=(V, n, p))
    y = np.einsum("unp,up->un", X, truth) + rng.normal(size=(V, n))
    return Federation({u: (X[u], y[u]) for u in range(V)}), labels, truth


@pytest.mark.parametrize("rank", [None, 20])
def test_the_mixed_model_of_low_rank_is_that_of_whole_matrices(rank):
    made, _, _ = rows_of(8, 60, 25 if rank is None else 100, 2, 0.3)
    first = Source(RowData(made, "linear") if rank is None else fedkin.summarise(made, rank=rank)).first()
    free = np.zeros(60, dtype=bool)
    short = common_units(first, free, has_scale=True).fitted(first)
    assert short.matrices.factor.shape[2] == (25 if rank is None else 20)
    whole = replace(short, known=None)
    whole.__dict__["matrices"] = Dense(whole.G)
    ours, theirs = (fit_mixed(sums, free) for sums in (short, whole))
    for name in ("mean", "theta", "covariance", "mean_covariance", "degrees", "log_likelihood"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-8, atol=1e-8)
    # and groups inside it
    whole = replace(ours, matrices=Dense(ours.precision))
    found = [find_groups(each, ~free, Neighbours.none(8), 0, Sampling()) for each in (ours, whole)]
    for name in ("theta", "covariance", "degrees"):
        np.testing.assert_allclose(getattr(found[0], name), getattr(found[1], name), atol=1e-5)


def test_noise_is_not_explained_by_coefficients():
    """With fewer rows than coefficients, spreads that are learned apart leave next to no noise."""
    made, labels, truth = rows_of(24, 60, 28, 2, 0.4)
    kin = fedkin.find_kin(made)
    assert kin.groups.tolist() == labels.tolist()
    assert 0.8 < kin.noise.mean() < 1.25
    inside = np.abs(kin.theta - truth) < 1.96 * np.sqrt(np.einsum("ujj->uj", kin.covariance))
    assert 0.9 < inside.mean() < 0.99


def test_differences_inside_groups_are_not_noise():
    kin = fedkin.find_kin(rows_of(16, 60, 120, 2, 1.0, inside=0.3)[0])
    assert 0.8 < kin.noise.mean() < 1.25


@pytest.mark.parametrize(("n", "most"), [(40, 3.0), (240, 1.6)])
def test_what_a_low_rank_loses_is_bounded_and_owned(n, most):
    """Rank 20 of 60 coefficients: a larger error than from everything, and intervals that say so."""
    made, labels, truth = rows_of(16, 60, n, 2, 0.5)
    whole, short = fedkin.find_kin(made), fedkin.find_kin(fedkin.summarise(made, rank=20))
    errors = [((kin.theta - truth) ** 2).sum() for kin in (whole, short)]
    assert short.groups.tolist() == labels.tolist()
    assert errors[0] < errors[1] < most * errors[0]
    inside = np.abs(short.theta - truth) < 1.96 * np.sqrt(np.einsum("ujj->uj", short.covariance))
    assert inside.mean() > 0.9


def test_contrasts_use_all_directions():
    """Of one site they are its own covariance; kin hardly differ; others as for one who is told."""
    everybody, labels, _ = rows_of(13, 60, 80, 2, 0.5, seed=1)
    made, labels = everybody.subset(range(12)), labels[:12]
    kin = fedkin.find_kin(made)
    assert kin.learned.F.shape == (60, 60)
    np.testing.assert_allclose(kin.contrast(3).covariance, kin.covariance[3], rtol=1e-2, atol=1e-6)
    alike, apart = kin.contrast(0, 2), kin.contrast(0, 1)
    assert labels[0] == labels[2] != labels[1]
    assert apart.wald[2] < 1e-6 < alike.wald[2]
    assert alike.standard_error.mean() < 0.5 * apart.standard_error.mean()
    # groups are told apart as well as by someone who knows them
    X = [np.concatenate([made[u].X for u in range(12) if labels[u] == k]) for k in (0, 1)]
    told = np.sqrt(sum(np.diag(np.linalg.inv(one.T @ one)) for one in X))
    np.testing.assert_allclose(apart.standard_error, told, rtol=0.15)
    joined = kin.join(everybody[12])
    assert joined.probability[labels == 0].min() > 0.9 > 0.1 > joined.probability[labels == 1].max()


def test_signs_of_directions_are_not_left_to_rounding():
    """Rows in another order, and sums of them, are sampled alike only if directions have the same signs."""
    rng = np.random.default_rng(0)
    c, half = rng.normal(size=(16, 60)), rng.normal(size=(16, 60, 90))
    W = half @ np.swapaxes(half, 1, 2)
    turn = FullEffects.from_likelihoods(Dense(W), c, 50).turn
    for _ in range(5):
        order = rng.permutation(16)
        np.testing.assert_allclose(FullEffects.from_likelihoods(Dense(W[order]), c[order], 50).turn, turn, atol=1e-9)
    np.testing.assert_allclose(FullEffects.from_likelihoods(Dense(W), -c, 50).turn, turn, atol=1e-9)


# --- effects of the population of sites


def test_population_effects_of_balanced_sites_are_the_analysis_of_variance():
    """The grand mean, with the mean square between sites for its error and one degree less than there are sites."""
    rng = np.random.default_rng(3)
    V, n = 9, 12
    y = 0.4 + rng.normal(size=(V, 1)) + rng.normal(size=(V, n))
    kin = fedkin.find_kin(Federation({u: (np.ones((n, 1)), y[u]) for u in range(V)}, ["(intercept)"]))
    estimate, low, high = kin.population(0.9)[0]
    error = y.mean(axis=1).std(ddof=1) / np.sqrt(V)
    assert estimate == pytest.approx(y.mean(), abs=1e-3)
    assert kin.degrees[0] == pytest.approx(V - 1, rel=0.01)
    assert [low, high] == pytest.approx(stats.t(V - 1, y.mean(), error).interval(0.9), rel=0.01)


@pytest.mark.parametrize("k", [1, 4])
def test_columns_that_are_constant_within_sites_cost_degrees_of_freedom(k):
    """Their effects have V - 1 - k degrees, as in the regression of the sites' means."""
    rng = np.random.default_rng(4)
    V, n = 12, 10
    W = rng.normal(size=(V, k))
    y = rng.normal(size=(V, 1)) + 0.3 * rng.normal(size=(V, n))
    data = {u: (np.column_stack([np.ones(n), np.tile(W[u], (n, 1))]), y[u]) for u in range(V)}
    names = ["(intercept)", *(f"w{j}" for j in range(k))]
    kin = fedkin.find_kin(Federation(data, names), fixed=names[1:])
    np.testing.assert_allclose(kin.degrees[1:], V - 1 - k, rtol=0.02)


def test_population_effects_of_random_intercepts_are_statsmodels_own():
    """Estimate, standard error, standard deviations and log-likelihood, from rows and from summaries.

    The peer has one noise for all sites. Kin has one where they scatter alike, so every site's noise is standardised.
    """
    rng = np.random.default_rng(1)
    V, n = 30, 12
    site, noise = np.repeat(np.arange(V), n), stats.zscore(rng.normal(size=(V, n)), axis=1)
    y = (2 + 3 * rng.normal(size=(V, 1)) + 2 * noise).ravel()
    peer = MixedLM(y, np.ones((V * n, 1)), site).fit()
    fed = Federation.from_arrays(np.ones((V * n, 1)), y, site, feature_names=["(intercept)"])
    for data in (fed, fedkin.summarise(fed)):
        kin = fedkin.find_kin(data, sweeps=4)
        assert kin.population()[0, 0] == pytest.approx(peer.fe_params[0], abs=1e-4)
        assert np.sqrt(kin.mean_covariance[0, 0]) == pytest.approx(peer.bse_fe[0], rel=2e-3)
        assert population_sd(kin) == pytest.approx(np.sqrt(np.diag(peer.cov_re)), rel=2e-3)
        assert restricted_log_likelihood(kin) == pytest.approx(peer.llf, abs=1e-3)


@pytest.mark.realdata
def test_population_effects_of_pupils_in_schools_are_statsmodels_own(real_data):
    table = np.genfromtxt(real_data / "exam" / "exam.csv", delimiter=",", names=True, dtype=None, encoding="utf-8")
    X, y = np.column_stack([np.ones(len(table)), table["standLRT"]]), table["normexam"]
    fed = Federation.from_arrays(X, y, table["school"], feature_names=["(intercept)", "standLRT"])
    kin = fedkin.find_kin(fed)
    independent = MixedLMParams.from_components(fe_params=np.ones(2), cov_re=np.eye(2))
    peer = MixedLM(y, X, table["school"], exog_re=X).fit(free=independent, method="lbfgs")
    error = np.sqrt(np.diag(kin.mean_covariance))
    assert np.abs(kin.mean - peer.fe_params).max() < 0.15 * peer.bse_fe.min()  # kin has a noise for every school
    assert error == pytest.approx(peer.bse_fe, rel=0.02)
    assert np.abs(kin.degrees - 62).max() < 3  # of 65 schools
    assert population_sd(kin) == pytest.approx(np.sqrt(np.diag(peer.cov_re)), rel=0.03)
    assert kin.population()[1] == pytest.approx([0.556, 0.516, 0.596], abs=0.003)


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", ["linear", "logistic", "poisson"])
def test_population_intervals_cover_as_promised_and_nothing_shrinks_the_estimates(loss):
    """A few replications like those of `fedkin study population`, within their chance."""
    rng, times, found, inside = np.random.default_rng(10), 40, [], []
    for _ in range(times):
        fed = population(loss, 10, 30, 0.5, np.array([0.8, 0.4, 0.4]), rng)
        ends = fedkin.find_kin(fed, loss=loss, sweeps=4, chains=2).population()
        found.append(ends[:, 0])
        inside.append((ends[:, 1] < 0.5) & (ends[:, 2] > 0.5))
    assert np.mean(inside) == pytest.approx(0.95, abs=3 * np.sqrt(0.95 * 0.05 / (3 * times)))
    bias = (np.mean(found, axis=0) - 0.5) / np.std(found, axis=0)
    assert np.abs(bias).max() < 0.1 + 3 / np.sqrt(times)


def test_population_effects_that_nobody_can_tell_say_so():
    """One site says nothing about a population, and rows nothing about an intercept beside a constant column."""
    fed = population("linear", 6, 30, 0.5, np.array([0.8, 0.4, 0.4]), np.random.default_rng(0))
    alone = fedkin.find_kin(fed.subset([0]))
    assert np.isfinite(alone.mean).all() and np.isinf(alone.population()[:, 1:]).all() and not alone.degrees.any()
    X = np.column_stack([fed.X, np.full(len(fed.X), 3.0)])
    names = [*fed.feature_names, "constant"]
    aliased = fedkin.find_kin(Federation.from_arrays(X, fed.y, fed.site_index, feature_names=names))
    plain = fedkin.find_kin(fed)
    assert aliased.population()[1:3] == pytest.approx(plain.population()[1:3], abs=0.02)
    assert np.ptp(aliased.population()[[0, 3]], axis=1).min() > 1e3
    assert aliased.mean[0] + 3 * aliased.mean[3] == pytest.approx(plain.mean[0], abs=0.02)
    assert np.abs(aliased.mean).max() < 3


def population(loss, V, n, mean, sd, rng):
    """Sites with normal effects around a common mean, intercept first."""
    X = rng.normal(size=(V, n, len(sd)))
    X[:, :, 0] = 1.0
    eta = (X @ (mean + sd * rng.normal(size=(V, len(sd))))[:, :, None])[:, :, 0]
    if loss == "linear":
        y = eta + rng.normal(size=eta.shape)
    else:
        y = 1.0 * (rng.logistic(size=eta.shape) < eta) if loss == "logistic" else 1.0 * rng.poisson(np.exp(eta))
    return Federation({u: (X[u], y[u]) for u in range(V)}, ["(intercept)", *(f"x{j}" for j in range(1, len(sd)))])


def test_a_summary_has_the_parts_of_the_variance():
    sd, rng = np.array([0.8, 0.4, 0.4]), np.random.default_rng(0)
    kin = fedkin.find_kin(population("linear", 200, 20, 0.5, sd, rng), sweeps=4)
    common, own = 2 * 0.5**2, (sd**2).sum()
    total = common + own + 1.0
    assert intraclass_correlation(kin) == pytest.approx(0.64 / 1.64, abs=0.04)
    assert r_squared(kin) == pytest.approx((common / total, (common + own) / total), abs=0.04)
    text: dict[str, list[str]] = {}  # cells by the first word of a line
    for line in kin.summary(0.9).splitlines():
        text.setdefault(line.split()[0], line.split()[1:])
    error = np.sqrt(kin.mean_covariance[1, 1])
    ends = stats.t(kin.degrees[1], kin.mean[1], error).interval(0.9)
    expected = [kin.mean[1], error, kin.degrees[1], kin.mean[1] / error, 0.0, *ends]
    assert [float(cell) for cell in text["x1"]] == pytest.approx(expected, rel=0.01, abs=0.0005)
    assert float(text["Residual"][0]) == pytest.approx(1.0, abs=0.03)
    assert float(text["Log-likelihood"][0]) == pytest.approx(restricted_log_likelihood(kin), rel=1e-4)
    assert text["Rows:"][0] == "4000" and text["Sites:"][0] == "200"
    classes = fedkin.find_kin(population("logistic", 200, 20, 0.5, sd, rng), loss="logistic", sweeps=4)
    assert intraclass_correlation(classes) == pytest.approx(0.64 / (0.64 + np.pi**2 / 3), abs=0.04)
    assert r_squared(classes) is None and restricted_log_likelihood(classes) is None
    assert "Residual" not in classes.summary()


def test_estimators_print_the_summary_of_their_fit():
    X, y, _ = sites(V=6, n=20)
    model = fedkin.KinRegressor().fit(X[:, :, 1:].reshape(-1, 2), y.ravel(), site=np.repeat(np.arange(6), 20))
    assert model.summary(0.9) == model.kin_.summary(0.9)


@pytest.mark.exhaustive
def test_means_of_rare_classes_are_not_biased_away_from_zero():
    """Of sites without effects of their own it is Firth's logistic regression, whose bias is of second order."""
    rng, found = np.random.default_rng(5), []
    for _ in range(150):
        fed = population("logistic", 8, 15, 2.0, np.array([1e-3]), rng)
        found.append(fedkin.find_kin(fed, loss="logistic", sweeps=4, chains=2).mean[0])
    assert np.mean(found) == pytest.approx(2.0, abs=3 * np.std(found) / np.sqrt(150))
