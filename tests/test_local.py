"""Local fits against other libraries and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize

from builders import sites
from fedkin.core import damped_newton, local_fit, solve_positive
from fedkin.data import Federation
from fedkin.errors import DataError, UnknownSiteError
from fedkin.losses import HuberLoss, LinearLoss, UserLoss

# ---------------------------------------------------------------- estimates and variances


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


def test_linear_sandwich_is_hc1():
    import statsmodels.api as sm

    fed = sites("linear")
    fit = local_fit(fed, variance="sandwich")
    for u, site in enumerate(fed.sites):
        ols = sm.OLS(fed[site].y, fed[site].X).fit()
        np.testing.assert_allclose(fit.covariance[u], ols.cov_HC1, rtol=1e-10)


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
        np.r_[0, 0, 0, 0, np.ones(82)],
        A_eq=np.hstack([X, -X, np.eye(41), -np.eye(41)]),
        b_eq=y,
        bounds=(0, None),
    )
    assert loss.value(fit.theta[0], X, y) <= 1e-3 * best.fun / 41 + 1e-9
    assert np.isfinite(fit.covariance).all()
    assert (np.linalg.eigvalsh(fit.covariance[0]) > 0).all()


def test_huber_site_that_interpolates_is_as_noisy_as_least_squares():
    rng = np.random.default_rng(17)
    data = {}
    for u in range(40):
        n = 3 if u == 0 else 60
        X = rng.standard_normal((n, 5))
        data[u] = (X, X.sum(axis=1) + rng.standard_t(3, n))
    fed = Federation(data)
    fit = local_fit(fed, "huber")
    squares = sum(((fed[u].y - fed[u].X @ fit.theta[u]) ** 2).sum() for u in range(1, 40))
    assert fit.dispersion[0] == pytest.approx(squares / (39 * 55), rel=1e-9)
    assert fit.dispersion[0] > 1.3 * np.median(fit.dispersion[1:])


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


def test_user_loss_is_fitted_by_its_functions():
    fed = sites("linear")

    def value(theta, X, y, offset):
        return float(np.mean((y - X @ theta) ** 2) / 2)

    def gradient(theta, X, y, offset):
        return -X.T @ (y - X @ theta) / len(y)

    own = local_fit(fed, UserLoss(value, gradient, name="mine"), "sandwich")
    known = local_fit(fed, "linear", "sandwich")
    np.testing.assert_allclose(own.theta, known.theta, atol=1e-7)
    np.testing.assert_allclose(own.covariance, known.covariance, rtol=1e-5, atol=1e-9)
    assert own.losses == ("mine",) * 3
    assert own.notes == {}


def test_a_loss_per_site():
    fed = sites("poisson")
    a, b, c = fed.sites
    mixed = local_fit(fed, {a: "poisson", b: "linear", c: LinearLoss()})
    np.testing.assert_allclose(mixed.theta[0], local_fit(fed, "poisson").theta[0])
    np.testing.assert_allclose(mixed.covariance[1:], local_fit(fed, "linear").covariance[1:])
    assert mixed.losses == ("poisson", "linear", "linear")
    with pytest.raises(UnknownSiteError, match="elsewhere"):
        local_fit(fed, {a: "poisson", b: "linear", c: "linear", "elsewhere": "linear"})
    with pytest.raises(DataError, match="site 2"):
        local_fit(fed, {a: "poisson", b: "linear"})


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


# ---------------------------------------------------------------- many sites


# ---------------------------------------------------------------- the Newton iteration itself


def test_newton_steps_back_from_infinite_values():
    def value(theta, who):
        x = theta[:, 0]
        return np.where(x > 0, x - np.log(np.where(x > 0, x, 1.0)), np.inf)

    def derivatives(theta, who):
        return 1 - 1 / theta, (1 / theta**2)[:, :, None]

    theta, converged = damped_newton(value, derivatives, np.array([[1e-3], [0.5], [50.0]]))
    np.testing.assert_allclose(theta, 1.0, rtol=1e-9)
    assert converged.all()


def test_solve_positive_survives_singular_matrices_in_the_batch():
    rng = np.random.default_rng(15)
    half = rng.standard_normal((3, 4, 4))
    matrices = half @ np.swapaxes(half, 1, 2)
    matrices[1] = np.ones((4, 4))
    right = rng.standard_normal((3, 4))
    right[1] = 1.0
    solution = solve_positive(matrices, right)
    np.testing.assert_allclose(np.einsum("apq,aq->ap", matrices, solution), right, atol=1e-6)
