"""Cox proportional hazards: against a plain Efron likelihood, statsmodels' PHReg, and simulations."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from scipy.optimize import minimize

import fedkin
from fedkin import Federation
from fedkin.losses import CoxLoss

LOSS = CoxLoss()


def trial(
    n_sites: int = 4, n: int = 80, ties: bool = True, spread: float = 0.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, signed times and sites of a trial whose centres have baselines of their own."""
    rng = np.random.default_rng(seed)
    site, X = np.repeat(np.arange(n_sites), n), rng.normal(size=(n_sites * n, 2))
    b = np.array([0.7, -0.4]) + spread * rng.normal(size=(n_sites, 2))
    time = rng.exponential(5.0 / (1 + site) * np.exp(-(X * b[site]).sum(axis=1)))
    end = rng.exponential(6.0 / (1 + site))
    time, died = np.minimum(time, end), time <= end
    time = np.ceil(4 * time) / 4 if ties else time
    return X, np.where(died, time, -time), site


def plain_efron(theta: np.ndarray, X: np.ndarray, y: np.ndarray) -> float:
    """Minus the partial log-likelihood, written as in textbooks."""
    eta, time, total = X @ theta, np.abs(y), 0.0
    for t in np.unique(time[y > 0]):
        dead, risk = (time == t) & (y > 0), time >= t
        total -= eta[dead].sum()
        for k in range(int(dead.sum())):
            total += np.log(np.exp(eta[risk]).sum() - k / dead.sum() * np.exp(eta[dead]).sum())
    return total


@pytest.mark.parametrize("ties", [True, False])
def test_value_gradient_and_hessian_are_those_of_the_plain_likelihood(ties: bool) -> None:
    X, y, _ = trial(1, 60, ties)
    theta, step = np.array([0.3, 0.5]), 1e-5 * np.eye(2)
    assert LOSS.value(theta, X, y) == pytest.approx(plain_efron(theta, X, y) / 60, rel=1e-12)
    slope = [(plain_efron(theta + e, X, y) - plain_efron(theta - e, X, y)) / 2e-5 / 60 for e in step]
    np.testing.assert_allclose(LOSS.gradient(theta, X, y), slope, atol=1e-8)
    bend = [(LOSS.gradient(theta + e, X, y) - LOSS.gradient(theta - e, X, y)) / 2e-5 for e in step]
    np.testing.assert_allclose(LOSS.hessian(theta, X, y), bend, atol=1e-8)
    shift = np.random.default_rng(1).normal(size=60)
    both = np.column_stack([X, shift])
    assert LOSS.value(theta, X, y, shift) == pytest.approx(LOSS.value(np.append(theta, 1.0), both, y), rel=1e-12)


def phreg(X: np.ndarray, y: np.ndarray, strata: np.ndarray | None = None) -> np.ndarray:
    from statsmodels.duration.hazard_regression import PHReg

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = PHReg(np.abs(y), X, status=(y > 0).astype(int), ties="efron", strata=strata)
        return np.asarray(found.fit(gtol=1e-12, method="newton", maxiter=100, disp=False).params)


def federation(X: np.ndarray, y: np.ndarray, site: np.ndarray) -> Federation:
    return Federation({int(s): (X[site == s], y[site == s]) for s in np.unique(site)})


def test_each_site_alone_is_phreg_and_the_best_of_the_plain_likelihood() -> None:
    X, y, site = trial()
    own = fedkin.local_fit(federation(X, y, site), LOSS)
    for s in range(4):
        rows = X[site == s], y[site == s]
        best = minimize(plain_efron, np.zeros(2), args=rows, method="BFGS", options={"gtol": 1e-7})
        np.testing.assert_allclose(own.theta[s], best.x, atol=1e-5)
        np.testing.assert_allclose(own.theta[s], phreg(*rows), atol=1e-6)


def test_one_model_for_all_sites_is_stratified_phreg() -> None:
    X, y, site = trial()
    pooled = fedkin.global_fit(federation(X, y, site), LOSS)
    np.testing.assert_allclose(pooled, phreg(X, y, site), atol=1e-6)
