"""Sites without an estimate of their own: too few rows, separation, no counts."""

from __future__ import annotations

import numpy as np
import pytest

from builders import responses, separated, sites
from fedkin.core import local_fit
from fedkin.data import Federation
from fedkin.losses import MultinomialLoss, UserLoss

# ---------------------------------------------------------------- sites without an estimate of their own


def degenerate(kind: str) -> Federation:
    """Two ordinary sites and every kind of site that has no estimate."""
    rng = np.random.default_rng(6)
    fed = sites(kind, sizes=(60, 80), q=4, seed=6)
    data = {u: (fed[u].X, fed[u].y) for u in fed.sites}
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


