"""Penalties against the definitions of prox, projection and dual norm."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import PENALTY_NAMES
from fedkin.core import L1, make_penalty
from fedkin.errors import ParameterError

ORDER = {"l1": 1, "l2": 2, "linf": np.inf}
DUAL = {"l1": np.inf, "l2": 2, "linf": 1}
every_penalty = pytest.mark.parametrize("name", PENALTY_NAMES)


def differences(seed: int, edges: int = 5, p: int = 4, size: float = 2.0) -> np.ndarray:
    return size * np.random.default_rng(seed).standard_normal((edges, p))


@every_penalty
def test_values_and_dual_norms_are_the_named_norms(name):
    d = differences(0)
    penalty = make_penalty(name)
    np.testing.assert_allclose(penalty.value(d), np.linalg.norm(d, ORDER[name], axis=1))
    np.testing.assert_allclose(penalty.dual_norm(d), np.linalg.norm(d, DUAL[name], axis=1))


@every_penalty
def test_dual_norm_is_the_largest_inner_product_over_the_unit_ball(name):
    import cvxpy as cp

    penalty = make_penalty(name)
    for v in differences(1, edges=3):
        u = cp.Variable(v.size)
        best = cp.Problem(cp.Maximize(v @ u), [cp.norm(u, ORDER[name]) <= 1]).solve(solver="CLARABEL")
        assert penalty.dual_norm(v[None])[0] == pytest.approx(best, rel=1e-6)


@every_penalty
@pytest.mark.parametrize("scale", [0.3, 1.7, 20.0])
def test_prox_is_the_minimiser(name, scale):
    import cvxpy as cp

    d = differences(2, edges=3)
    x = cp.Variable(d.shape)
    norms = sum(cp.norm(x[e], ORDER[name]) for e in range(3))
    cp.Problem(cp.Minimize(scale * norms + 0.5 * cp.sum_squares(x - d))).solve(solver="CLARABEL")
    np.testing.assert_allclose(make_penalty(name).prox(d, scale), x.value, atol=1e-5)


@every_penalty
@pytest.mark.parametrize("radius", [0.5, 2.0, 50.0])
def test_projection_is_the_nearest_point_of_the_dual_ball(name, radius):
    import cvxpy as cp

    y = differences(3, edges=3)
    x = cp.Variable(y.shape)
    ball = [cp.norm(x[e], DUAL[name]) <= radius for e in range(3)]
    cp.Problem(cp.Minimize(cp.sum_squares(x - y)), ball).solve(solver="CLARABEL")
    np.testing.assert_allclose(make_penalty(name).project(y, radius), x.value, atol=1e-5)


@every_penalty
@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10_000), p=st.integers(1, 8), scale=st.floats(0.0, 30.0), size=st.floats(1e-6, 1e3))
def test_optimality_of_the_prox(name, seed, p, scale, size):
    """x = prox(d) exactly when d - x lies in the dual ball and attains phi at x (the subdifferential of a norm)."""
    penalty = make_penalty(name)
    d = differences(seed, p=p, size=size)
    x = penalty.prox(d, scale)
    rest = d - x
    slack = 1e-12 * (1 + np.abs(d).sum(axis=1))
    assert (penalty.dual_norm(rest) <= scale + slack).all()
    np.testing.assert_allclose((rest * x).sum(axis=1), scale * penalty.value(x), rtol=1e-9, atol=slack.max() * size)
    np.testing.assert_allclose(x + penalty.project(d, scale), d, atol=slack.max())


@every_penalty
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.0, 5.0))
def test_prox_and_projection_are_firmly_nonexpansive(name, seed, scale):
    penalty = make_penalty(name)
    a, b = differences(seed), differences(seed + 1)
    for image in (penalty.prox, penalty.project):
        moved = image(a, scale) - image(b, scale)
        assert ((moved**2).sum(axis=1) <= (moved * (a - b)).sum(axis=1) + 1e-10).all()


@every_penalty
def test_scales_per_edge_are_the_scales_one_by_one(name):
    penalty = make_penalty(name)
    d, scales = differences(4), np.array([0.0, 0.2, 1.0, 4.0, 100.0])
    for image in (penalty.prox, penalty.project):
        together = image(d, scales)
        for e in range(5):
            np.testing.assert_allclose(together[e], image(d[e : e + 1], float(scales[e]))[0], atol=1e-14)


@every_penalty
def test_extreme_scales(name):
    penalty = make_penalty(name)
    d = differences(5)
    np.testing.assert_array_equal(penalty.prox(d, 0.0), d)
    np.testing.assert_allclose(penalty.project(d, 0.0), 0.0, atol=1e-15)
    np.testing.assert_allclose(penalty.prox(d, 1e6), 0.0, atol=1e-15)
    np.testing.assert_array_equal(penalty.project(d, np.inf), d)
    np.testing.assert_array_equal(penalty.prox(np.zeros((2, 3)), 1.0), np.zeros((2, 3)))


@every_penalty
def test_no_edges(name):
    penalty = make_penalty(name)
    none = np.empty((0, 3))
    assert penalty.value(none).shape == penalty.dual_norm(none).shape == (0,)
    assert penalty.prox(none, 1.0).shape == (0, 3)
    assert penalty.prox(none, np.empty(0)).shape == (0, 3)


def test_one_coordinate_knows_only_one_norm():
    d = differences(6, p=1)
    for name in PENALTY_NAMES:
        np.testing.assert_allclose(make_penalty(name).prox(d, 0.8), L1().prox(d, 0.8), atol=1e-14)


@every_penalty
def test_arguments_are_left_alone(name):
    d = differences(7)
    kept = d.copy()
    make_penalty(name).project(d, 0.5)
    make_penalty(name).prox(d, 0.5)
    np.testing.assert_array_equal(d, kept)


@every_penalty
@pytest.mark.parametrize("p", [1, 2, 7])
def test_euclidean_bound_holds_and_is_attained(name, p):
    penalty = make_penalty(name)
    bound = penalty.euclidean_bound(p)
    candidates = np.vstack([differences(8, edges=200, p=p), np.eye(p), np.ones((1, p))])
    ratio = np.linalg.norm(candidates, axis=1) / penalty.value(candidates)
    assert ratio.max() == pytest.approx(bound, rel=1e-12)


def test_only_l1_is_separable():
    assert L1.separable
    assert not make_penalty("l2").separable
    assert not make_penalty("linf").separable


def test_make_penalty():
    penalty = make_penalty("l2")
    assert make_penalty(penalty) is penalty
    assert repr(make_penalty("linf")) == "Penalty('linf')"
    with pytest.raises(ParameterError, match=r"unknown penalty 'l3'.*l1, l2, linf"):
        make_penalty("l3")


@every_penalty
@pytest.mark.parametrize("size", [1e20, 1e160, 1.7e308, np.inf])
def test_however_large_a_difference_is_its_dual_lies_on_the_ball(name, size):
    """A neighbour may send any finite number; of the difference the direction counts."""
    y = np.array([[size, -size, 0.0, 1.0], [size, 0.5, -0.25, 0.0], [0.5, 0.25, 0.0, 0.0]])
    penalty = make_penalty(name)
    found = penalty.project(y, np.array([1.5, 1.5, 1.5]))
    np.testing.assert_allclose(penalty.dual_norm(found)[:2], 1.5, rtol=1e-12)
    best = {"l1": 1.5, "l2": 1.5 / np.sqrt(2.0), "linf": 0.75}[name]
    np.testing.assert_allclose(found[0, :2], [best, -best], rtol=1e-12)
    assert found[1, 0] == pytest.approx(1.5) and found[2].tolist() == y[2].tolist()
    assert penalty.project(y, 0.0).tolist() == np.zeros((3, 4)).tolist()
