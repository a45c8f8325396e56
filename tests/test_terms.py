"""The sites' mean losses on arrays, and the Fenchel-Young gaps that certificates are made of."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import LOSS_NAMES, federation
from cvxpy_reference import mean_loss, minimum
from fedkin.core import build_terms, summed_terms
from fedkin.data import Federation
from fedkin.losses import HuberLoss, Loss, make_loss

LOSSES: dict[str, Loss] = {name: make_loss(name, np.arange(3)) for name in LOSS_NAMES} | {"huber": HuberLoss(0.7)}
ROW_LOSSES = tuple(name for name, loss in LOSSES.items() if loss.n_outputs and not loss.quadratic)


def terms_of(loss: str, fed: Federation, ridge: float | np.ndarray = 0.0):
    one = LOSSES[loss]
    p = one.n_params(fed.n_features)
    return build_terms(fed, (one,) * fed.n_sites, np.broadcast_to(ridge, (p,)).astype(float))


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
def test_values_and_derivatives_are_those_of_each_site_alone(loss: str, offset: bool) -> None:
    fed = federation(loss, (4, 7, 4, 1, 7), offset=offset)
    ridge = 0.3
    terms = terms_of(loss, fed, ridge)
    theta = np.random.default_rng(1).normal(size=(5, terms.n_params))
    one = LOSSES[loss]
    values, gradients, hessians = terms.values(theta), terms.gradients(theta), terms.hessians(theta)
    assert hessians.shape == (5, terms.n_params, terms.n_params)
    for u, site in enumerate(fed.sites):
        rows = fed[site].X, fed[site].y, fed[site].offset
        square = 0.5 * ridge * theta[u] @ theta[u]
        np.testing.assert_allclose(values[u], one.value(theta[u], *rows) + square, rtol=1e-12)
        np.testing.assert_allclose(
            gradients[u], one.gradient(theta[u], *rows) + ridge * theta[u], rtol=1e-10, atol=1e-12
        )
        expected = one.hessian(theta[u], *rows) + ridge * np.eye(terms.n_params)
        np.testing.assert_allclose(hessians[u], expected, rtol=1e-10, atol=1e-12)


def true_gaps(
    loss: str, fed: Federation, theta: np.ndarray, s: np.ndarray, ridge: np.ndarray, radius: float
) -> np.ndarray:
    """``M_u(theta_u) + <s_u, theta_u>`` minus its minimum over the ball, by cvxpy."""
    gaps = []
    terms = terms_of(loss, fed, ridge)
    values = terms.values(theta) + (s * theta).sum(axis=1)
    for u, site in enumerate(fed.sites):
        v = cp.Variable(theta.shape[1])
        total = mean_loss(LOSSES[loss], v, fed[site]) + s[u] @ v + 0.5 * cp.sum(cp.multiply(ridge, cp.square(v)))
        task = cp.Problem(cp.Minimize(total), [cp.norm(v, 2) <= radius] if np.isfinite(radius) else [])
        gaps.append(values[u] - minimum(task))
    return np.array(gaps)


@pytest.mark.parametrize("ridge", [0.0, 0.2])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("size", [1e-3, 0.3])
def test_young_gaps_are_upper_bounds_and_tight_nearby(loss: str, ridge: float, size: float) -> None:
    fed = federation(loss, (25, 20, 25), seed=3)
    terms = terms_of(loss, fed, ridge)
    rng = np.random.default_rng(0)
    theta = 0.3 * rng.normal(size=(3, terms.n_params))
    s = -terms.gradients(theta) + size * 0.1 * rng.normal(size=theta.shape)
    gaps = terms.young_gaps(theta, s)
    exact = true_gaps(loss, fed, theta, s, np.full(terms.n_params, ridge), np.inf)
    assert (gaps >= exact - 1e-8).all()
    if size < 0.1:
        np.testing.assert_allclose(terms.young_gaps(theta, -terms.gradients(theta)), 0.0, atol=1e-14)
        # Huber's threshold leaves less slack to repair a dual point
        assert (gaps <= (10 if loss == "huber" else 1.1) * exact + 1e-7).all()


@pytest.mark.parametrize("loss", ["linear", *ROW_LOSSES])
def test_far_from_balance_only_a_ball_or_a_ridge_gives_a_bound(loss: str) -> None:
    fed = federation(loss, (3, 12), q=4, seed=1)
    p = LOSSES[loss].n_params(4)
    rng = np.random.default_rng(0)
    theta = 0.1 * rng.normal(size=(2, p))
    s = 3.0 * rng.normal(size=theta.shape)
    bare, held = terms_of(loss, fed), terms_of(loss, fed, 0.5)
    assert np.isinf(bare.young_gaps(theta, s)[0]), "fewer rows than parameters: nothing balances s"
    radius = 4.0
    inside = bare.young_gaps(theta, s, radius)
    assert np.isfinite(inside).all()
    assert (inside >= true_gaps(loss, fed, theta, s, np.zeros(p), radius) - 1e-7).all()
    ridged = held.young_gaps(theta, s)
    assert np.isfinite(ridged).all()
    assert (ridged >= true_gaps(loss, fed, theta, s, np.full(p, 0.5), np.inf) - 1e-7).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_gaps_of_groups_are_upper_bounds(loss: str) -> None:
    fed = federation(loss, (20, 15, 20), seed=3)
    terms = terms_of(loss, fed)
    groups = summed_terms(terms, np.array([0, 0, 0]))
    rng = np.random.default_rng(0)
    theta = 0.2 * rng.normal(size=(1, terms.n_params))
    s = -groups.gradients(theta) + 0.02 * rng.normal(size=theta.shape)
    v = cp.Variable(terms.n_params)
    total = sum(mean_loss(LOSSES[loss], v, fed[site]) for site in fed.sites) + s[0] @ v
    exact = groups.values(theta)[0] + float(s[0] @ theta[0]) - minimum(cp.Problem(cp.Minimize(total)))
    gap = groups.young_gaps(theta, s)[0]
    assert exact - 1e-8 <= gap <= 20 * exact


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.floats(0.1, 30.0), loss=st.sampled_from(list(LOSSES)))
def test_lower_bounds_are_never_undercut(seed: int, scale: float, loss: str) -> None:
    terms = terms_of(loss, federation(loss, (3, 9), seed=seed), 0.1)
    theta = scale * np.random.default_rng(seed).normal(size=(2, terms.n_params))
    lower, values = terms.lower_bounds(), terms.values(theta)
    assert np.isfinite(lower).all()
    assert (lower <= values + 1e-12 * (1 + np.abs(values))).all()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scale=st.floats(0.01, 100.0),
    loss=st.sampled_from(["linear", "logistic", "huber", "multinomial"]),
)
def test_cautious_models_lie_above_losses_with_bounded_curvature(seed: int, scale: float, loss: str) -> None:
    terms = terms_of(loss, federation(loss, (6, 9), seed=seed))
    rng = np.random.default_rng(seed)
    theta, step = rng.normal(size=(2, terms.n_params)), scale * rng.normal(size=(2, terms.n_params))
    A = terms.cautious_hessians(theta)
    model = terms.values(theta) + (terms.gradients(theta) * step).sum(axis=1)
    model += 0.5 * np.einsum("vp,vpq,vq->v", step, A, step)
    assert (terms.values(theta + step) <= model * (1 + 1e-9) + 1e-9).all()


def nearly_collinear(spread: float, sizes: tuple[int, ...] = (140,) * 8, p: int = 20, noise: float = 0.1) -> Federation:
    rng = np.random.default_rng(0)
    data = {}
    for u, n in enumerate(sizes):
        X = rng.normal(size=(n, 1)) + spread * rng.normal(size=(n, p))
        data[u] = (X, X @ rng.normal(size=p) + noise * rng.normal(size=n))
    return Federation(data)


def misfits(fed: Federation, theta: np.ndarray) -> np.ndarray:
    rows = [fed[site] for site in fed.sites]
    return np.array([0.5 * np.mean((row.y - row.X @ t) ** 2) for row, t in zip(rows, theta, strict=True)])


def local_solutions(fed: Federation) -> np.ndarray:
    return np.stack([np.linalg.lstsq(fed[u].X, fed[u].y, rcond=1e-13)[0] for u in fed.sites])


@pytest.mark.parametrize("spread", [1e-3, 1e-5, 1e-7])
def test_minimisers_on_nearly_collinear_rows(spread: float) -> None:
    """A Gram matrix has lost the small directions at 1e-7, where rows still have them."""
    fed = nearly_collinear(spread, (140, 60, 140, 25))
    terms, expected = terms_of("linear", fed), local_solutions(fed)
    own = terms.minimizers()
    np.testing.assert_allclose(own, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    np.testing.assert_allclose(terms.values(own), misfits(fed, expected), rtol=1e-7)
    np.testing.assert_allclose(terms.lower_bounds(), misfits(fed, expected), rtol=1e-7)
    zero = np.zeros_like(own)
    assert (terms.young_gaps(own, zero) <= 1e-9 * terms.values(own)).all()
    elsewhere = own + np.abs(own).max() * 1e-3
    lost = misfits(fed, elsewhere) - misfits(fed, expected)
    np.testing.assert_allclose(terms.young_gaps(elsewhere, zero), lost, rtol=1e-6)
