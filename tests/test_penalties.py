"""Penalties against the definitions of prox, projection and dual norm."""

from __future__ import annotations

import numpy as np
import pytest

from builders import PENALTY_NAMES
from fedkin.core import make_penalty
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
def test_no_edges(name):
    penalty = make_penalty(name)
    none = np.empty((0, 3))
    assert penalty.value(none).shape == penalty.dual_norm(none).shape == (0,)
    assert penalty.prox(none, 1.0).shape == (0, 3)
    assert penalty.prox(none, np.empty(0)).shape == (0, 3)


@every_penalty
@pytest.mark.parametrize("p", [1, 2, 7])
def test_euclidean_bound_holds_and_is_attained(name, p):
    penalty = make_penalty(name)
    bound = penalty.euclidean_bound(p)
    candidates = np.vstack([differences(8, edges=200, p=p), np.eye(p), np.ones((1, p))])
    ratio = np.linalg.norm(candidates, axis=1) / penalty.value(candidates)
    assert ratio.max() == pytest.approx(bound, rel=1e-12)


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
