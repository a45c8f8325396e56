"""Local, global and oracle fits against other libraries and closed forms; devices without an estimate of their own."""

from __future__ import annotations

import time

import numpy as np
import pytest
from scipy import optimize

from fedkin.errors import DataError, DegenerateDeviceWarning, ParameterError, UnknownDeviceError
from fedkin.federation import Federation
from fedkin.local import global_fit, local_fit, oracle_fit
from fedkin.losses import HuberLoss, LinearLoss, MultinomialLoss, UserLoss, make_loss
from fedkin.solvers.newton import damped_newton, solve_positive


def responses(kind: str, eta: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if kind == "logistic":
        return (rng.random(eta.size) < 1 / (1 + np.exp(-eta))).astype(float)
    if kind == "poisson":
        return rng.poisson(np.exp(eta)).astype(float)
    if kind == "multinomial":
        return rng.integers(0, 3, eta.size).astype(float)
    noise = rng.standard_t(3, eta.size) if kind == "huber" else rng.standard_normal(eta.size)
    return eta + 1.5 * noise


def federation(kind: str, sizes=(80, 120, 120), q: int = 3, seed: int = 0, offset: bool = False) -> Federation:
    rng = np.random.default_rng(seed)
    data = {}
    for u, n in enumerate(sizes):
        X = np.column_stack([np.ones(n), rng.standard_normal((n, q - 1))])
        shift = 0.5 * rng.standard_normal(n) if offset else np.zeros(n)
        y = responses(kind, X @ (0.4 * rng.standard_normal(q)) + shift, rng)
        data[f"site {u}"] = (X, y, shift) if offset else (X, y)
    return Federation(data)


def separated(n: int = 20) -> tuple[np.ndarray, np.ndarray]:
    X = np.column_stack([np.ones(n), np.linspace(-1, 1, n)])
    return X, (X[:, 1] > 0.1).astype(float)


# ---------------------------------------------------------------- estimates and variances


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("kind", ["linear", "logistic", "poisson"])
def test_estimates_and_variances_agree_with_statsmodels(kind, offset):
    import statsmodels.api as sm

    family = {"linear": sm.families.Gaussian(), "logistic": sm.families.Binomial(), "poisson": sm.families.Poisson()}
    fed = federation(kind, offset=offset)
    model, robust, plain = (local_fit(fed, kind, v) for v in ("model", "sandwich", "bartlett"))
    for u, device in enumerate(fed.devices):
        data = fed[device]
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

    fed = federation("linear")
    fit = local_fit(fed, variance="sandwich")
    for u, device in enumerate(fed.devices):
        ols = sm.OLS(fed[device].y, fed[device].X).fit()
        np.testing.assert_allclose(fit.covariance[u], ols.cov_HC1, rtol=1e-10)


def test_multinomial_agrees_with_statsmodels_and_sklearn():
    import statsmodels.api as sm
    from sklearn.linear_model import LogisticRegression

    fed = federation("multinomial")
    fit = local_fit(fed, "multinomial")
    for u, device in enumerate(fed.devices):
        X, y = fed[device].X, fed[device].y
        other = sm.MNLogit(y, X).fit(disp=0, tol=1e-13, maxiter=100)
        np.testing.assert_allclose(fit.theta[u], other.params.ravel("F"), atol=1e-8)
        np.testing.assert_allclose(fit.covariance[u], other.cov_params(), rtol=1e-6, atol=1e-9)
        sk = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10, max_iter=1000).fit(X, y)
        np.testing.assert_allclose(fit.theta[u].reshape(2, -1), sk.coef_[1:] - sk.coef_[0], atol=1e-4)


def test_huber_agrees_with_a_general_optimiser_and_with_rlm():
    import statsmodels.api as sm

    fed = federation("huber", sizes=(60, 90))
    fit = local_fit(fed, HuberLoss(1.0))
    for u, device in enumerate(fed.devices):
        X, y = fed[device].X, fed[device].y
        loss = HuberLoss(1.0)
        best = optimize.minimize(loss.value, np.zeros(3), args=(X, y), jac=loss.gradient, method="BFGS", tol=1e-12)
        assert loss.value(fit.theta[u], X, y) <= best.fun + 1e-14
        np.testing.assert_allclose(loss.gradient(fit.theta[u], X, y), 0.0, atol=1e-13)
        # with the scale fixed at 1, RLM is the same estimator
        rlm = sm.RLM(y, X, M=sm.robust.norms.HuberT(1.0))
        beta = np.asarray(fit.theta[u])
        np.testing.assert_allclose(rlm.M.psi(y - X @ beta) @ X, 0.0, atol=1e-10)
    np.testing.assert_array_equal(fit.residual_dof, fed.n_samples - 3)


def test_huber_variance_is_right_on_repeated_samples():
    rng = np.random.default_rng(1)
    n, copies = 60, 1500
    X = rng.standard_normal((copies, n, 3))
    y = rng.standard_t(3, (copies, n))
    fed = Federation.from_arrays(X.reshape(-1, 3), y.ravel(), np.repeat(np.arange(copies), n))
    fit = local_fit(fed, "huber")
    claimed = np.einsum("vpp->vp", fit.covariance).mean(axis=0)
    np.testing.assert_allclose(claimed, fit.theta.var(axis=0), rtol=0.12)


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


@pytest.mark.parametrize("delta", [1.345, 0.3, 0.05])
def test_huber_finds_its_minimum_among_many_outliers(delta):
    """Heavy tails and a narrow corner: Hessians are singular along the way, and often at the end."""
    rng = np.random.default_rng(16)
    X = rng.standard_normal((150, 40, 10))
    y = 3 * rng.standard_t(1.5, (150, 40))
    fed = Federation.from_arrays(X.reshape(-1, 10), y.ravel(), np.repeat(np.arange(150), 40))
    fit = local_fit(fed, HuberLoss(delta))
    slopes = [HuberLoss(delta).gradient(fit.theta[u], X[u], y[u]) for u in range(150)]
    assert np.abs(slopes).max() < 2e-3 * delta
    assert np.median(np.abs(slopes)) < 1e-12 * delta
    assert not fit.rescued.any()


def test_huber_device_that_interpolates_is_as_noisy_as_least_squares():
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


def test_mean_loss_with_too_few_rows_for_a_covariance_takes_equal_columns():
    rng = np.random.default_rng(3)
    fed = Federation({u: rng.standard_normal((3, 5)) for u in "ab"})
    for covariance in local_fit(fed, "mean").covariance:
        np.testing.assert_allclose(covariance, covariance[0, 0] * np.eye(5), atol=1e-15)


def test_user_loss_is_fitted_by_its_functions():
    fed = federation("linear")

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


def test_a_loss_per_device():
    fed = federation("poisson")
    a, b, c = fed.devices
    mixed = local_fit(fed, {a: "poisson", b: "linear", c: LinearLoss()})
    np.testing.assert_allclose(mixed.theta[0], local_fit(fed, "poisson").theta[0])
    np.testing.assert_allclose(mixed.covariance[1:], local_fit(fed, "linear").covariance[1:])
    assert mixed.losses == ("poisson", "linear", "linear")
    with pytest.raises(UnknownDeviceError, match="elsewhere"):
        local_fit(fed, {a: "poisson", b: "linear", c: "linear", "elsewhere": "linear"})
    with pytest.raises(DataError, match="site 2"):
        local_fit(fed, {a: "poisson", b: "linear"})


@pytest.mark.parametrize("kind", ["linear", "logistic", "poisson", "huber", "multinomial"])
def test_units_of_the_features_do_not_matter(kind):
    fed = federation(kind)
    units = np.array([1e-6, 1.0, 1e7])
    scaled = Federation.from_arrays(fed.X * units, fed.y, [fed.devices[u] for u in fed.device_index])
    one, other = local_fit(fed, kind), local_fit(scaled, kind)
    factor = np.tile(units, one.theta.shape[1] // 3)
    np.testing.assert_allclose(other.theta * factor, one.theta, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(other.covariance * np.outer(factor, factor), one.covariance, rtol=1e-5, atol=1e-12)
    assert not other.rescued.any()


@pytest.mark.parametrize("kind", ["linear", "logistic", "huber"])
def test_devices_do_not_influence_each_other(kind):
    """Blocks, batches and the order of devices leave no trace."""
    fed = federation(kind, sizes=(40, 60, 40, 41, 60))
    together = local_fit(fed, kind)
    for u, device in enumerate(fed.devices):
        alone = local_fit(fed.subset([device]), kind)
        np.testing.assert_allclose(together.theta[u], alone.theta[0], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(together.covariance[u], alone.covariance[0], rtol=1e-8)


def test_counts_of_any_size():
    rng = np.random.default_rng(4)
    X = np.column_stack([np.ones(50), rng.standard_normal(50)])
    data = {}
    for level in (-8.0, 0.0, 12.0, 20.0):
        data[level] = (X, np.maximum(np.round(np.exp(level + 0.5 * X[:, 1])), 1.0 * (X[:, 1] > 1)))
    fit = local_fit(Federation(data), "poisson")
    np.testing.assert_allclose(fit.theta[2:], [[12.0, 0.5], [20.0, 0.5]], atol=1e-4)
    assert np.isfinite(fit.covariance).all()


def test_exposures_are_offsets():
    rng = np.random.default_rng(5)
    exposure = rng.uniform(1e3, 1e6, 200)
    X = np.ones((200, 1))
    y = rng.poisson(exposure * 2e-4).astype(float)
    fit = local_fit(Federation({"a": (X, y, np.log(exposure))}), "poisson")
    assert fit.theta[0, 0] == pytest.approx(np.log(y.sum() / exposure.sum()), rel=1e-12)
    assert fit.covariance[0, 0, 0] == pytest.approx(1 / y.sum(), rel=1e-9)


# ---------------------------------------------------------------- devices without an estimate of their own


def degenerate(kind: str) -> Federation:
    """Two ordinary devices and every kind of device that has no estimate."""
    rng = np.random.default_rng(6)
    fed = federation(kind, sizes=(60, 80), q=4, seed=6)
    data = {u: (fed[u].X, fed[u].y) for u in fed.devices}
    X = np.column_stack([np.ones(30), rng.standard_normal((30, 3))])
    y = responses(kind, X @ np.array([0.2, 0.5, -0.5, 0.3]), rng)
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
def test_every_device_gets_a_finite_fit_and_a_proper_variance(kind, variance):
    fed = degenerate(kind)
    fit = local_fit(fed, kind, variance)
    for array in (fit.theta, fit.hessian, fit.covariance, fit.dispersion):
        assert np.isfinite(array).all()
    assert (np.linalg.eigvalsh(fit.covariance) > 0).all()
    assert (fit.residual_dof > 0).all()
    assert set(fit.notes) >= {fed.devices[u] for u in np.flatnonzero(fit.rescued)}
    for device in ("two rows", "one row", "repeated column", "zero column", "same row"):
        assert fit.rescued[fed.index[device]]
        assert "rank" in fit.notes[device]
    assert not fit.rescued[:2].any()
    assert fit.rescued[fed.index["one value"]] == (kind in ("logistic", "poisson", "multinomial"))
    assert not fit.matrix_estimated[fit.rescued].any()


def test_ordinary_devices_do_not_notice_the_others():
    fed = degenerate("linear")
    ordinary = list(fed.devices[:2])
    np.testing.assert_allclose(
        local_fit(fed).covariance[:2], local_fit(fed.subset(ordinary)).covariance, rtol=1e-12, atol=0
    )


def test_degrees_of_freedom_count_the_rank():
    fed = degenerate("linear")
    fit = local_fit(fed)
    assert fit.residual_dof[fed.index["repeated column"]] == 30 - 3
    assert fit.residual_dof[fed.index["zero column"]] == 30 - 3
    assert fit.residual_dof[fed.index["same row"]] == 9 - 1
    X, y = fed["repeated column"].X[:, :3], fed["repeated column"].y
    smaller = local_fit(Federation({"a": (X, y)}))
    assert fit.dispersion[fed.index["repeated column"]] == pytest.approx(smaller.dispersion[0], rel=1e-4)


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
def test_too_few_rows_never_make_a_device_sure_of_a_wrong_value(strength):
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
    assert "pooled over 150 other devices" in fit.notes[0]
    assert (fit.residual_dof[short] == 150 * 30).all()


def test_rows_as_many_as_parameters_interpolate_with_pooled_noise():
    rng = np.random.default_rng(9)
    X, y = rng.standard_normal((4, 4)), rng.standard_normal(4)
    other = rng.standard_normal((50, 4)), 3 * rng.standard_normal(50)
    fit = local_fit(Federation({"square": (X, y), "tall": other}))
    np.testing.assert_allclose(X @ fit.theta[0], y, atol=1e-9)
    assert not fit.rescued[0]
    np.testing.assert_allclose(fit.covariance[0], fit.dispersion[1] * np.linalg.inv(X.T @ X), rtol=1e-6)
    assert fit.residual_dof[0] == 46
    assert "no residual degrees of freedom" in fit.notes["square"]


def test_no_device_with_residual_degrees_of_freedom():
    fed = Federation({u: ([[float(u)]],) for u in range(5)} | {})
    fit = local_fit(fed, "mean")
    np.testing.assert_allclose(fit.theta[:, 0], range(5))
    np.testing.assert_allclose(fit.dispersion, 2.0)  # the variance of 0..4
    assert "no device" in fit.notes[3]


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


def test_poisson_without_counts_and_with_an_empty_group():
    X = np.column_stack([np.ones(20), np.repeat([0.0, 1.0], 10)])
    y = np.r_[np.full(10, 3.0), np.zeros(10)]
    rates = 1e-9 * np.r_[np.full(10, 3.0), np.ones(10)]
    fit = local_fit(Federation({"none": (X, np.zeros(20)), "empty group": (X, y), "tiny": (X, rates)}), "poisson")
    assert fit.rescued.tolist() == [True, True, False]
    assert fit.theta[1, 0] == pytest.approx(np.log(3), rel=0.02)
    assert fit.theta[1, 1] < -2
    assert fit.covariance[1, 1, 1] > 1
    np.testing.assert_allclose(fit.theta[2], [np.log(3e-9), np.log(1 / 3)], rtol=1e-6)


def test_strong_signals_on_small_separated_devices_are_not_contradicted():
    """The reason for the ridge: its Wald distance from the truth rejects at most as often as it should."""
    rng = np.random.default_rng(11)
    theta = 3 * rng.standard_normal((400, 5))
    X = rng.standard_normal((400, 12, 5))
    y = (rng.random((400, 12)) < 1 / (1 + np.exp(-np.einsum("vnp,vp->vn", X, theta)))).astype(float)
    fed = Federation.from_arrays(X.reshape(-1, 5), y.ravel(), np.repeat(np.arange(400), 12))
    fit = local_fit(fed, "logistic")
    assert fit.rescued.mean() > 0.9
    error = fit.theta - theta
    distance = np.einsum("vp,vpq,vq->v", error, np.linalg.inv(fit.covariance), error)
    assert (distance > 11.07).mean() < 0.06  # the 5% quantile of chi-square with 5 degrees of freedom


def test_exact_fits_keep_a_positive_variance():
    rng = np.random.default_rng(12)
    X = rng.standard_normal((30, 3))
    fed = Federation({"exact": (X, X @ [1.0, 2.0, 3.0]), "zero": (X, np.zeros(30))})
    for variance in ("model", "sandwich"):
        fit = local_fit(fed, variance=variance)
        np.testing.assert_allclose(fit.theta, [[1, 2, 3], [0, 0, 0]], atol=1e-12)
        assert (np.linalg.eigvalsh(fit.covariance) > 0).all()
        assert fit.covariance.max() < 1e-15


def test_a_user_loss_without_a_minimum():
    def value(theta, X, y, offset):
        return float(np.mean(np.exp(-(X @ theta))))

    def gradient(theta, X, y, offset):
        return -X.T @ np.exp(-(X @ theta)) / len(X)

    X = np.abs(np.random.default_rng(13).standard_normal((10, 2)))
    fit = local_fit(Federation({"a": (X, np.zeros(10))}), UserLoss(value, gradient))
    assert fit.rescued[0]
    assert np.isfinite(fit.theta).all()
    assert "no unique minimiser" in fit.notes["a"]


def test_unknown_variance():
    with pytest.raises(ParameterError, match=r"'robust'.*model, sandwich, bartlett"):
        local_fit(federation("linear"), variance="robust")


# ---------------------------------------------------------------- pooled fits


@pytest.mark.parametrize("kind", ["linear", "logistic", "poisson", "huber", "multinomial"])
@pytest.mark.parametrize("weights", ["samples", "devices"])
def test_global_fit_minimises_the_stated_sum(kind, weights):
    fed = federation(kind, sizes=(30, 60, 200), offset=True)
    loss = make_loss(kind, fed.y)

    def total(theta):
        out, slope = 0.0, 0.0
        for device in fed.devices:
            data = fed[device]
            factor = data.n_samples / len(fed.X) if weights == "samples" else 1 / 3
            out = out + factor * loss.value(theta, data.X, data.y, data.offset)
            slope = slope + factor * loss.gradient(theta, data.X, data.y, data.offset)
        return out, slope

    theta = global_fit(fed, kind, weights)
    assert theta.shape == (loss.n_params(3),)
    np.testing.assert_allclose(total(theta)[1], 0.0, atol=1e-12)
    best = optimize.minimize(total, np.zeros(theta.size), jac=True, method="BFGS", tol=1e-10)
    assert total(theta)[0] <= best.fun + 1e-12


def test_global_by_samples_is_the_fit_of_the_stacked_rows():
    import statsmodels.api as sm

    fed = federation("logistic")
    np.testing.assert_allclose(global_fit(fed, "logistic"), sm.Logit(fed.y, fed.X).fit(disp=0).params, atol=1e-8)


def test_both_weights_agree_for_equal_sizes():
    fed = federation("poisson", sizes=(50, 50, 50))
    np.testing.assert_allclose(global_fit(fed, "poisson"), global_fit(fed, "poisson", "devices"), rtol=1e-9)


def test_global_fit_of_different_losses():
    fed = federation("poisson", sizes=(50, 70, 40))
    losses = dict(zip(fed.devices, ("poisson", "linear", HuberLoss(0.5)), strict=True))
    for weights in ("samples", "devices"):
        theta = global_fit(fed, losses, weights)
        slope = 0.0
        for device, loss in losses.items():
            data = fed[device]
            factor = data.n_samples if weights == "samples" else 1.0
            slope = slope + factor * make_loss(loss).gradient(theta, data.X, data.y)
        np.testing.assert_allclose(slope, 0.0, atol=1e-8)


def test_oracle_is_global_within_groups():
    fed = federation("linear", sizes=(30, 40, 50, 60))
    theta = oracle_fit(fed, ["x", "y", "x", "y"])
    a, b, c, d = fed.devices
    np.testing.assert_allclose(theta[0], global_fit(fed.subset([a, c])), rtol=1e-10)
    np.testing.assert_allclose(theta[1], global_fit(fed.subset([b, d])), rtol=1e-10)
    np.testing.assert_array_equal(theta[[0, 1]], theta[[2, 3]])
    np.testing.assert_array_equal(theta, oracle_fit(fed, {d: 1, c: 0, b: 1, a: 0}))
    np.testing.assert_allclose(oracle_fit(fed, range(4)), local_fit(fed).theta, rtol=1e-9)
    np.testing.assert_allclose(oracle_fit(fed, [None] * 4)[2], global_fit(fed), rtol=1e-10)


def test_oracle_refuses_wrong_labels_and_weights():
    fed = federation("linear")
    with pytest.raises(DataError, match="2 labels for 3 devices"):
        oracle_fit(fed, [0, 1])
    with pytest.raises(UnknownDeviceError, match="site 2"):
        oracle_fit(fed, {"site 0": 0, "site 1": 0})
    with pytest.raises(ParameterError, match="rows"):
        oracle_fit(fed, [0, 0, 0], weights="rows")
    with pytest.raises(ParameterError, match="rows"):
        global_fit(fed, weights="rows")


def test_pooled_fits_without_a_minimum_warn_and_stay_finite():
    X, y = separated()
    fed = Federation({"a": (X, y), "b": (X, y)})
    with pytest.warns(DegenerateDeviceWarning, match="no minimum"):
        assert np.isfinite(global_fit(fed, "logistic")).all()
    flat = Federation({"a": (np.ones((5, 2)), np.arange(5.0))})
    with pytest.warns(DegenerateDeviceWarning, match="rank 1 for 2 features"):
        theta = global_fit(flat)
    assert theta[0] == pytest.approx(theta[1])
    assert theta.sum() == pytest.approx(2.0, rel=0.1)


# ---------------------------------------------------------------- many devices


@pytest.mark.parametrize("kind", ["linear", "logistic"])
def test_thousands_of_devices_take_seconds(kind):
    rng = np.random.default_rng(14)
    sizes = rng.integers(20, 60, 3000)
    X = rng.standard_normal((sizes.sum(), 5))
    y = responses(kind, X @ np.full(5, 0.3), rng)
    fed = Federation.from_arrays(X, y, np.repeat(np.arange(3000), sizes))
    start = time.perf_counter()
    fit = local_fit(fed, kind)
    assert time.perf_counter() - start < 8
    assert np.isfinite(fit.theta).all()


# ---------------------------------------------------------------- the Newton iteration itself


def test_newton_steps_back_from_infinite_values():
    def value(theta, who):
        x = theta[:, 0]
        return np.where(x > 0, x - np.log(np.where(x > 0, x, 1.0)), np.inf)

    def derivatives(theta, who):
        return 1 - 1 / theta, (1 / theta**2)[:, :, None]

    result = damped_newton(value, derivatives, np.array([[1e-3], [0.5], [50.0]]))
    np.testing.assert_allclose(result.theta, 1.0, rtol=1e-9)
    assert result.converged.all()


def test_newton_reports_what_did_not_converge():
    def value(theta, who):
        return np.where(who == 0, np.exp(-theta[:, 0]), (theta**2).sum(axis=1))

    def derivatives(theta, who):
        first = (who == 0)[:, None]
        grown = np.exp(-theta)
        return np.where(first, -grown, 2 * theta), np.where(first, grown, 2.0)[:, :, None]

    result = damped_newton(value, derivatives, np.ones((2, 1)), max_iter=10)
    assert result.converged.tolist() == [False, True]
    assert result.theta[0, 0] > 5


def test_solve_positive_survives_singular_matrices_in_the_batch():
    rng = np.random.default_rng(15)
    half = rng.standard_normal((3, 4, 4))
    matrices = half @ np.swapaxes(half, 1, 2)
    matrices[1] = np.ones((4, 4))
    right = rng.standard_normal((3, 4))
    right[1] = 1.0
    solution = solve_positive(matrices, right)
    np.testing.assert_allclose(np.einsum("apq,aq->ap", matrices, solution), right, atol=1e-6)
