"""The objective, its scale, and what may be asked of it."""

from __future__ import annotations

import numpy as np
import pytest

from fedkin import Federation, Graph, Problem
from fedkin.core import MixedTerms
from fedkin.errors import DataError, GraphError, GraphWarning, ParameterError, UnknownSiteError
from fedkin.losses import LogisticLoss, MultinomialLoss


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


def test_parameters_out_of_range_are_named(fed: Federation, chain: Graph) -> None:
    with pytest.raises(ParameterError, match="penalty 'l3'"):
        Problem(fed, chain, penalty="l3")
    with pytest.raises(ParameterError, match="unknown loss 'cubic'"):
        Problem(fed, chain, loss="cubic")
    with pytest.raises(ParameterError, match="radius"):
        Problem(fed, chain, radius=0.0)
    with pytest.raises(ParameterError, match="ridge"):
        _ = Problem(fed, chain, ridge=-1.0).fused
    with pytest.raises(ParameterError, match=r"ridge has shape \(3,\), expected a number or \(2,\)"):
        _ = Problem(fed, chain, ridge=[1.0, 2.0, 3.0]).fused
    with pytest.raises(ParameterError, match="sparsity"):
        _ = Problem(fed, chain, sparsity=-0.1).fused
    with pytest.raises(ParameterError, match="sparsity"):
        _ = Problem(fed, chain, sparsity={"a": np.nan}).fused
    with pytest.raises(ParameterError, match=r"sparsity has shape \(4, 1\)"):
        _ = Problem(fed, chain, sparsity=np.ones(4)).fused
    with pytest.raises(UnknownSiteError, match="'z'"):
        _ = Problem(fed, chain, sparsity={"z": 1.0}).fused


# --- losses -----------------------------------------------------------------------------------------------------------


def test_losses_by_site(fed: Federation, chain: Graph) -> None:
    binary = Federation({d: (fed[d].X, (fed[d].y > 0).astype(float)) for d in fed.sites})
    problem = Problem(binary, chain, loss={"a": "linear", "b": LogisticLoss(), "c": "linear"})
    assert [loss.name for loss in problem.losses] == ["linear", "logistic", "linear"]
    assert isinstance(problem.terms, MixedTerms)
    theta = np.random.default_rng(1).normal(size=(3, 2))
    eta = binary["b"].X @ theta[1]
    assert problem.terms.values(theta)[1] == pytest.approx(np.mean(np.logaddexp(0, eta) - binary["b"].y * eta))


def test_losses_by_site_must_be_complete_known_and_of_one_length(fed: Federation, chain: Graph) -> None:
    with pytest.raises(DataError, match=r"no loss is given for site 'b' and 1 others; name every site"):
        _ = Problem(fed, chain, loss={"a": "linear"}).losses
    with pytest.raises(DataError, match=r"no loss is given for site 'c'; name every site"):
        _ = Problem(fed, chain, loss={"a": "linear", "b": "linear"}).losses
    with pytest.raises(UnknownSiteError, match="'z'"):
        _ = Problem(fed, chain, loss={"a": "linear", "b": "linear", "c": "linear", "z": "mean"}).losses
    classes = Federation({d: (fed[d].X, np.zeros(len(fed[d].y))) for d in fed.sites})
    with pytest.raises(DataError, match="different length"):
        _ = Problem(classes, chain, loss={"a": "linear", "b": MultinomialLoss(3), "c": "linear"}).losses


def test_a_target_that_does_not_fit_names_its_site(fed: Federation, chain: Graph) -> None:
    bad = Federation({d: (fed[d].X, np.full(len(fed[d].y), 3.0 if d == "b" else 1.0)) for d in fed.sites})
    with pytest.raises(DataError, match="site 'b'"):
        _ = Problem(bad, chain, loss="logistic").losses
    with pytest.raises(DataError, match="no target"):
        _ = Problem(Federation({d: fed[d].X for d in fed.sites}), chain).losses


def test_another_lam_shares_what_was_computed_from_the_rows(fed: Federation, chain: Graph) -> None:
    problem = Problem(fed, chain, lam=0.1, sparsity=0.2)
    other = problem.with_lam(0.4)
    assert other.terms is problem.terms
    assert other.lam == 0.4
    assert problem.lam == 0.1
    assert other.fused.strength == pytest.approx(1.2)


# --- gaps, clusters, labels -------------------------------------------------------------------------------------------


