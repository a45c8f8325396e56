"""Fits of single sites, of all sites and of groups: other libraries, closed forms, and sites without an estimate."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize

from builders import drawn, separated, sites
from fedkin.core import global_fit, local_fit, oracle_fit, select_edges
from fedkin.data import Federation
from fedkin.errors import DataError, DegenerateSiteWarning, ParameterError, UnknownSiteError
from fedkin.losses import HuberLoss, MultinomialLoss, make_loss


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("kind", ["linear", "logistic", "poisson"])
def test_estimates_and_variances_agree_with_statsmodels(kind, offset):
    import statsmodels.api as sm

    family = {"linear": sm.families.Gaussian(), "logistic": sm.families.Binomial(), "poisson": sm.families.Poisson()}
    fed = sites(kind, offset=offset)
    model, robust, plain = (local_fit(fed, kind, v) for v in ("model", "sandwich", "bartlett"))
    for u, site in enumerate(fed.sites):
        data = fed[site]
        glm = sm.GLM(data.y, data.X, family=family[kind], offset=data.offset)
        fit = glm.fit(tol=1e-13)
        white = glm.fit(tol=1e-13, cov_type="HC0")
        n, p = data.X.shape
        np.testing.assert_allclose(model.theta[u], fit.params, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(model.covariance[u], fit.cov_params(), rtol=1e-6, atol=1e-10)
        np.testing.assert_allclose(robust.covariance[u], white.cov_params() * n / (n - p), rtol=1e-6, atol=1e-10)
        np.testing.assert_allclose(plain.covariance[u], fit.cov_params() / fit.scale, rtol=1e-6, atol=1e-10)
        np.testing.assert_allclose(model.dispersion[u], fit.scale, rtol=1e-7)
        np.testing.assert_allclose(n * model.hessian[u] @ plain.covariance[u], np.eye(p), atol=1e-9)
    assert model.notes == {}
    assert not model.rescued.any()
    expected = fed.n_samples - fed.n_features if kind == "linear" else np.inf
    np.testing.assert_array_equal(model.residual_dof, np.broadcast_to(expected, len(fed)))
    assert not model.matrix_estimated.any()
    assert robust.matrix_estimated.all()
    assert np.isinf(plain.residual_dof).all()


def test_multinomial_agrees_with_statsmodels_and_sklearn():
    import statsmodels.api as sm
    from sklearn.linear_model import LogisticRegression

    fed = sites("multinomial")
    fit = local_fit(fed, "multinomial")
    for u, site in enumerate(fed.sites):
        X, y = fed[site].X, fed[site].y
        other = sm.MNLogit(y, X).fit(disp=0, tol=1e-13, maxiter=100)
        np.testing.assert_allclose(fit.theta[u], other.params.ravel("F"), atol=1e-8)
        np.testing.assert_allclose(fit.covariance[u], other.cov_params(), rtol=1e-6, atol=1e-9)
        sk = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10, max_iter=1000).fit(X, y)
        np.testing.assert_allclose(fit.theta[u].reshape(2, -1), sk.coef_[1:] - sk.coef_[0], atol=1e-4)


def test_huber_agrees_with_a_general_optimiser_and_with_rlm():
    import statsmodels.api as sm

    fed = sites("huber", sizes=(60, 90))
    fit = local_fit(fed, HuberLoss(1.0))
    for u, site in enumerate(fed.sites):
        X, y = fed[site].X, fed[site].y
        loss = HuberLoss(1.0)
        best = optimize.minimize(loss.value, np.zeros(3), args=(X, y), jac=loss.gradient, method="BFGS", tol=1e-12)
        assert loss.value(fit.theta[u], X, y) <= best.fun + 1e-14
        np.testing.assert_allclose(loss.gradient(fit.theta[u], X, y), 0.0, atol=1e-13)
        # with the scale fixed at 1, RLM is the same estimator
        rlm = sm.RLM(y, X, M=sm.robust.norms.HuberT(1.0))
        beta = np.asarray(fit.theta[u])
        np.testing.assert_allclose(rlm.M.psi(y - X @ beta) @ X, 0.0, atol=1e-10)
    np.testing.assert_array_equal(fit.residual_dof, fed.n_samples - 3)


def test_huber_with_a_corner_that_leaves_no_inliers():
    """delta near 0 is least absolute deviations: the Hessian is singular, the fit and its variance are not."""
    rng = np.random.default_rng(2)
    X = np.column_stack([np.ones(41), rng.standard_normal(41)])
    y = rng.standard_t(2, 41)
    fed = Federation({"a": (X, y)})
    fit = local_fit(fed, HuberLoss(1e-3))
    loss = HuberLoss(1e-3)
    best = optimize.linprog(
        np.r_[0, 0, 0, 0, np.ones(82)], A_eq=np.hstack([X, -X, np.eye(41), -np.eye(41)]), b_eq=y, bounds=(0, None)
    )
    assert loss.value(fit.theta[0], X, y) <= 1e-3 * best.fun / 41 + 1e-9
    assert np.isfinite(fit.covariance).all()
    assert (np.linalg.eigvalsh(fit.covariance[0]) > 0).all()


def test_mean_loss():
    rng = np.random.default_rng(3)
    data = {u: rng.standard_normal((n, 2)) * 2 for u, n in (("a", 10), ("b", 25), ("c", 25))}
    fed = Federation(data)
    robust = local_fit(fed, "mean", "sandwich")
    for u, rows in enumerate(data.values()):
        n = len(rows)
        np.testing.assert_allclose(robust.theta[u], rows.mean(axis=0))
        np.testing.assert_allclose(robust.covariance[u], np.cov(rows.T) / n, rtol=1e-12)
    np.testing.assert_array_equal(robust.residual_dof, [9, 24, 24])
    # the mean loss has no model of the columns' covariance
    np.testing.assert_array_equal(local_fit(fed, "mean").covariance, robust.covariance)


@pytest.mark.parametrize("kind", ["linear", "logistic", "poisson", "huber", "multinomial"])
def test_units_of_the_features_do_not_matter(kind):
    fed = sites(kind)
    units = np.array([1e-6, 1.0, 1e7])
    scaled = Federation.from_arrays(fed.X * units, fed.y, [fed.sites[u] for u in fed.site_index])
    one, other = local_fit(fed, kind), local_fit(scaled, kind)
    factor = np.tile(units, one.theta.shape[1] // 3)
    np.testing.assert_allclose(other.theta * factor, one.theta, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(other.covariance * np.outer(factor, factor), one.covariance, rtol=1e-5, atol=1e-12)
    assert not other.rescued.any()


def test_counts_of_any_size():
    rng = np.random.default_rng(4)
    X = np.column_stack([np.ones(50), rng.standard_normal(50)])
    data = {}
    for level in (-8.0, 0.0, 12.0, 20.0):
        data[level] = (X, np.maximum(np.round(np.exp(level + 0.5 * X[:, 1])), 1.0 * (X[:, 1] > 1)))
    fit = local_fit(Federation(data), "poisson")
    np.testing.assert_allclose(fit.theta[2:], [[12.0, 0.5], [20.0, 0.5]], atol=1e-4)
    assert np.isfinite(fit.covariance).all()


# --- sites without an estimate of their own: too few rows, separation, no counts


def degenerate(kind: str) -> Federation:
    """Two ordinary sites and every kind of site that has no estimate."""
    rng = np.random.default_rng(6)
    fed = sites(kind, sizes=(60, 80), q=4, seed=6)
    data = {u: (fed[u].X, fed[u].y) for u in fed.sites}
    X = np.column_stack([np.ones(30), rng.standard_normal((30, 3))])
    y = drawn(kind, X @ np.array([0.2, 0.5, -0.5, 0.3]), np.zeros(30), rng)
    repeated = X.copy()
    repeated[:, 3] = repeated[:, 1]
    zero = X.copy()
    zero[:, 2] = 0.0
    data["two rows"] = (X[:2], y[:2])
    data["one row"] = (X[:1], y[:1])
    data["p rows"] = (X[:4], y[:4])
    data["repeated column"] = (repeated, y)
    data["zero column"] = (zero, y)
    data["one value"] = (X, np.zeros(30))
    data["same row"] = (np.tile(X[:1], (9, 1)), y[:9])
    return Federation(data)


@pytest.mark.parametrize("variance", ["model", "sandwich", "bartlett"])
@pytest.mark.parametrize("kind", ["linear", "logistic", "poisson", "huber", "multinomial"])
def test_every_site_gets_a_finite_fit_and_a_proper_variance(kind, variance):
    fed = degenerate(kind)
    fit = local_fit(fed, kind, variance)
    for array in (fit.theta, fit.hessian, fit.covariance, fit.dispersion):
        assert np.isfinite(array).all()
    assert (np.linalg.eigvalsh(fit.covariance) > 0).all()
    assert (fit.residual_dof > 0).all()
    assert set(fit.notes) >= {fed.sites[u] for u in np.flatnonzero(fit.rescued)}
    for site in ("two rows", "one row", "repeated column", "zero column", "same row"):
        assert fit.rescued[fed.index[site]]
        assert "rank" in fit.notes[site]
    assert not fit.rescued[:2].any()
    assert fit.rescued[fed.index["one value"]] == (kind in ("logistic", "poisson", "multinomial"))
    assert not fit.matrix_estimated[fit.rescued].any()
    chosen = select_edges(fed, loss=kind, local=fit)  # and no edge is left without a decision
    assert np.isfinite(chosen.statistic).all()
    assert ((chosen.p_value >= 0) & (chosen.p_value <= 1)).all()
    assert (chosen.reference_dof > 0).all()
    if variance == "model" and kind in ("linear", "logistic", "poisson"):  # sites that know little keep their edges
        kept = set(chosen.graph.edge_ids())
        assert {(poor, site) for poor in ("one row", "two rows") for site in fed.sites[:2]} <= kept


def test_unidentified_directions_are_wide_and_identified_ones_are_not():
    """One feature repeated: the sum of the two coefficients is known as well as ever, their difference not at all."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal(200)
    y = 3 * x + rng.standard_normal(200)
    fed = Federation(
        {"twice": (np.column_stack([x, x]), y), "once": (np.column_stack([x, rng.standard_normal(200)]), y)}
    )
    fit = local_fit(fed)
    sum_, difference = np.array([1.0, 1.0]), np.array([1.0, -1.0])
    known = local_fit(Federation({"a": (x[:, None], y)}))
    assert sum_ @ fit.theta[0] == pytest.approx(known.theta[0, 0], rel=0.01)
    assert sum_ @ fit.covariance[0] @ sum_ == pytest.approx(known.covariance[0, 0, 0], rel=0.05)
    # the difference may be as large as the response allows
    assert difference @ fit.covariance[0] @ difference > np.mean(y**2)
    assert fit.hessian[0] @ difference == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("strength", [0.5, 20.0])
def test_too_few_rows_never_make_a_site_sure_of_a_wrong_value(strength):
    """n < p: the truth stays within the claimed error, also when the signal is far above the noise."""
    rng = np.random.default_rng(8)
    p, copies = 10, 300
    data, truths = {}, []
    for u in range(copies):
        theta = strength * rng.standard_normal(p)
        n = (5, 40)[u % 2]
        X = rng.standard_normal((n, p))
        data[u] = (X, X @ theta + rng.standard_normal(n))
        truths.append(theta)
    fit = local_fit(Federation(data))
    error = fit.theta - np.array(truths)
    distance = np.einsum("vp,vpq,vq->v", error, np.linalg.inv(fit.covariance), error)
    short = np.arange(copies) % 2 == 0
    assert fit.rescued[short].all()
    assert not fit.rescued[~short].any()
    assert np.quantile(distance[short], 0.95) < 18.3  # the chi-square quantile with 10 degrees of freedom
    assert "pooled over 150 other sites" in fit.notes[0]
    assert (fit.residual_dof[short] == 150 * 30).all()


@pytest.mark.parametrize("kind", ["logistic", "multinomial"])
def test_separation_is_noticed(kind):
    X, y = separated()
    overlap = y.copy()
    overlap[[5, 14]] = [1.0, 0.0]
    quasi_X = np.column_stack([np.ones(20), np.repeat([0.0, 1.0], 10)])
    quasi_y = np.r_[np.tile([0.0, 1.0], 5), np.ones(10)]
    data = {"apart": (X, y), "overlap": (X, overlap), "quasi": (quasi_X, quasi_y), "one class": (X, np.ones(20))}
    loss = "logistic" if kind == "logistic" else MultinomialLoss(2)
    fit = local_fit(Federation(data), loss)
    assert fit.rescued.tolist() == [True, False, True, True]
    assert "no minimum" in fit.notes["apart"]
    # the direction in which the classes lie apart is wide, the intercept of the quasi-separated group is ordinary
    assert fit.covariance[0, 1, 1] > 4
    assert fit.covariance[2, 1, 1] > 2
    assert fit.covariance[2, 0, 0] == pytest.approx(0.4, rel=0.1)
    assert fit.theta[0, 1] > 0
    assert fit.theta[3, 0] > 2


def test_rare_events_are_not_taken_for_separation():
    """One case among a hundred thousand has a maximum; so has a slope so steep that few rows are undecided."""
    y = np.zeros(100_000)
    y[0] = 1.0
    fit = local_fit(Federation({"rare": (np.ones((100_000, 1)), y)}), "logistic")
    assert not fit.rescued[0]
    assert fit.theta[0, 0] == pytest.approx(np.log(1 / 99_999), rel=1e-9)
    rng = np.random.default_rng(10)
    x = rng.uniform(-1, 1, 4000)
    steep = (rng.random(4000) < 1 / (1 + np.exp(-np.clip(80 * x, -500, 500)))).astype(float)
    fit = local_fit(Federation({"steep": (np.column_stack([np.ones(4000), x]), steep)}), "logistic")
    assert not fit.rescued[0]
    assert 40 < fit.theta[0, 1] < 160


# --- pooled fits


@pytest.mark.parametrize("kind", ["linear", "logistic", "poisson", "huber", "multinomial"])
@pytest.mark.parametrize("weights", ["samples", "sites"])
def test_global_fit_minimises_the_stated_sum(kind, weights):
    fed = sites(kind, sizes=(30, 60, 200), offset=True)
    loss = make_loss(kind, fed.y)

    def total(theta):
        out, slope = 0.0, 0.0
        for site in fed.sites:
            data = fed[site]
            factor = data.n_samples / len(fed.X) if weights == "samples" else 1 / 3
            out = out + factor * loss.value(theta, data.X, data.y, data.offset)
            slope = slope + factor * loss.gradient(theta, data.X, data.y, data.offset)
        return out, slope

    theta = global_fit(fed, kind, weights)
    assert theta.shape == (loss.n_params(3),)
    np.testing.assert_allclose(total(theta)[1], 0.0, atol=1e-12)
    best = optimize.minimize(total, np.zeros(theta.size), jac=True, method="BFGS", tol=1e-10)
    assert total(theta)[0] <= best.fun + 1e-12


def test_oracle_refuses_wrong_labels_and_weights():
    fed = sites("linear")
    with pytest.raises(DataError, match="2 labels for 3 sites"):
        oracle_fit(fed, [0, 1])
    with pytest.raises(UnknownSiteError, match="site 2"):
        oracle_fit(fed, {"site 0": 0, "site 1": 0})
    with pytest.raises(ParameterError, match="rows"):
        oracle_fit(fed, [0, 0, 0], weights="rows")
    with pytest.raises(ParameterError, match="rows"):
        global_fit(fed, weights="rows")


def test_pooled_fits_without_a_minimum_warn_and_stay_finite():
    X, y = separated()
    fed = Federation({"a": (X, y), "b": (X, y)})
    with pytest.warns(DegenerateSiteWarning, match="no minimum"):
        assert np.isfinite(global_fit(fed, "logistic")).all()
    flat = Federation({"a": (np.ones((5, 2)), np.arange(5.0))})
    with pytest.warns(DegenerateSiteWarning, match="rank 1 for 2 features"):
        theta = global_fit(flat)
    assert theta[0] == pytest.approx(theta[1])
    assert theta.sum() == pytest.approx(2.0, rel=0.1)
