"""The objective and what may be asked of it; penalties against the definitions of prox, projection and dual norm."""

from __future__ import annotations

import numpy as np
import pytest

from builders import PENALTY_NAMES
from fedkin import Federation, Graph, Problem
from fedkin.core import MixedTerms, make_penalty
from fedkin.errors import DataError, GraphError, GraphWarning, ParameterError, UnknownSiteError
from fedkin.losses import LogisticLoss, MultinomialLoss

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
@pytest.mark.parametrize("scale", [0.3, 1.7, 50.0])
def test_prox_is_the_minimiser_and_what_it_leaves_the_nearest_point_of_the_dual_ball(name, scale):
    import cvxpy as cp

    d = differences(2, edges=3)
    x = cp.Variable(d.shape)
    norms = sum(cp.norm(x[e], ORDER[name]) for e in range(3))
    cp.Problem(cp.Minimize(scale * norms + 0.5 * cp.sum_squares(x - d))).solve(solver="CLARABEL")
    penalty = make_penalty(name)
    np.testing.assert_allclose(penalty.prox(d, scale), x.value, atol=1e-5)
    assert (penalty.dual_norm(penalty.project(d, scale)) <= scale * (1 + 1e-12)).all()


@every_penalty
@pytest.mark.parametrize("p", [1, 2, 7])
def test_euclidean_bound_holds_and_is_attained(name, p):
    penalty = make_penalty(name)
    bound = penalty.euclidean_bound(p)
    candidates = np.vstack([differences(8, edges=200, p=p), np.eye(p), np.ones((1, p))])
    ratio = np.linalg.norm(candidates, axis=1) / penalty.value(candidates)
    assert ratio.max() == pytest.approx(bound, rel=1e-12)


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


# --- problems


@pytest.fixture
def fed() -> Federation:
    rng = np.random.default_rng(0)
    return Federation(
        {name: (rng.normal(size=(n, 2)), rng.normal(size=n)) for name, n in (("a", 3), ("b", 5), ("c", 4))}
    )


@pytest.fixture
def chain() -> Graph:
    return Graph(["a", "b", "c"], [("a", "b"), ("b", "c")], weights=[2.0, 0.5])


def test_sparsity_and_ridge_are_per_site_and_averaged(fed: Federation, chain: Graph) -> None:
    theta = np.random.default_rng(1).normal(size=(3, 2))
    plain = Problem(fed, chain, lam=0.1).objective(theta)
    weights = np.array([0.5, 0.0, 2.0])
    expected = plain + (weights * np.abs(theta).sum(axis=1)).mean()
    for sparsity in (weights, weights.tolist(), {"c": 2.0, "a": 0.5}, np.repeat(weights[:, None], 2, axis=1)):
        assert Problem(fed, chain, lam=0.1, sparsity=sparsity).objective(theta) == pytest.approx(expected, rel=1e-13)
    assert Problem(fed, chain, lam=0.1, sparsity=0.0).fused.sparsity is None
    both = Problem(fed, chain, lam=0.1, ridge=[0.3, 0.0]).objective(theta)
    assert both == pytest.approx(plain + 0.15 * (theta[:, 0] ** 2).mean(), rel=1e-13)


def test_a_graph_over_other_sites_is_refused_and_one_over_fewer_leaves_them_alone(fed: Federation) -> None:
    with pytest.warns(GraphWarning, match="does not name site 'c', which has no edges"):
        assert Problem(fed, Graph.complete(["a", "b"])).graph.degree.tolist() == [1, 1, 0]
    with pytest.raises(GraphError, match="'d'"):
        Problem(fed, Graph.complete(["a", "b", "c", "d"]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lam": -1.0}, "lam"),
        ({"penalty": "l3"}, "l3"),
        ({"radius": 0.0}, "radius"),
        ({"ridge": -1.0}, "ridge"),
        ({"ridge": [1.0, 2.0, 3.0]}, r"ridge has shape \(3,\), expected a number or \(2,\)"),
        ({"sparsity": -0.1}, "sparsity"),
        ({"sparsity": {"a": np.nan}}, "sparsity"),
        ({"sparsity": np.ones(4)}, r"sparsity has shape \(4, 1\)"),
        ({"sparsity": {"z": 1.0}}, "'z'"),
    ],
)
def test_parameters_out_of_range_are_named(fed: Federation, chain: Graph, given: dict, message: str) -> None:
    with pytest.raises((ParameterError, UnknownSiteError), match=message):
        _ = Problem(fed, chain, **given).fused


def test_losses_by_site(fed: Federation, chain: Graph) -> None:
    binary = Federation({d: (fed[d].X, (fed[d].y > 0).astype(float)) for d in fed.sites})
    problem = Problem(binary, chain, loss={"a": "linear", "b": LogisticLoss(), "c": "linear"})
    assert [loss.name for loss in problem.losses] == ["linear", "logistic", "linear"]
    assert isinstance(problem.terms, MixedTerms)
    theta = np.random.default_rng(1).normal(size=(3, 2))
    eta = binary["b"].X @ theta[1]
    assert problem.terms.values(theta)[1] == pytest.approx(np.mean(np.logaddexp(0, eta) - binary["b"].y * eta))


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ({"a": "linear"}, "no loss is given for site 'b' and 1 others; name every site"),
        ({"a": "linear", "b": "linear", "c": "linear", "z": "mean"}, "'z'"),
        ({"a": "linear", "b": MultinomialLoss(3), "c": "linear"}, "different length"),
        ("logistic", "site 'b'"),
    ],
)
def test_losses_must_be_complete_known_of_one_length_and_fit_the_target(fed, chain, losses, message) -> None:
    counts = Federation({d: (fed[d].X, np.full(len(fed[d].y), 2.0 if d == "b" else 1.0)) for d in fed.sites})
    with pytest.raises((DataError, UnknownSiteError), match=message):
        _ = Problem(counts, chain, loss=losses).losses
    with pytest.raises(DataError, match="no target"):
        _ = Problem(Federation({d: fed[d].X for d in fed.sites}), chain).losses
