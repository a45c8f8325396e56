"""Edge selection: the statistic, its reference distributions, the corrections, and sites without a fit."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special, stats

from fedkin.core import LocalFit, local_fit, select_edges, wald_tests
from fedkin.data import Federation
from fedkin.datasets import paper_design
from fedkin.errors import ParameterError


def pairs(n_pairs: int) -> np.ndarray:
    return np.column_stack([np.arange(1, 2 * n_pairs, 2), np.arange(0, 2 * n_pairs, 2)])


def null_pairs(n_pairs, sizes, p, seed, noise=(1.0, 1.0), uneven=False) -> Federation:
    """Pairs of sites with the same parameter; ``uneven`` noise grows with the first feature."""
    rng = np.random.default_rng(seed)
    counts = np.tile(sizes, n_pairs)
    site = np.repeat(np.arange(2 * n_pairs), counts)
    X = rng.standard_normal((site.size, p))
    theta = np.repeat(0.3 * rng.standard_normal((n_pairs, p)), 2, axis=0)
    sd = np.tile(noise, n_pairs)[site] * (np.abs(X[:, 0]) if uneven else 1.0)
    y = np.einsum("kp,kp->k", X, theta[site]) + sd * rng.standard_normal(site.size)
    return Federation.from_arrays(X, y, site)


def test_two_samples_of_equal_spread_are_students_t_test():
    rng = np.random.default_rng(3)
    a = rng.standard_normal(12)
    b = a[::-1] + 0.7
    fed = Federation({"a": a[:, None], "b": b[:, None]})
    chosen = select_edges(fed, loss="mean")
    student = stats.ttest_ind(a, b)
    assert chosen.statistic[0] == pytest.approx(student.statistic**2, rel=1e-10)
    assert chosen.p_value[0] == pytest.approx(student.pvalue, rel=1e-9)
    assert chosen.reference_dof[0] == pytest.approx(22)
    assert chosen.critical is None


def test_against_a_known_mean_it_is_hotellings_test():
    """A site with so many rows that its mean is known: one-sample Hotelling, whose distribution is exact."""
    rng = np.random.default_rng(5)
    few = rng.standard_normal((15, 3)) @ np.diag([1.0, 2.0, 0.5])
    many = np.tile(np.vstack([np.eye(3), -np.eye(3)]), (200_000, 1))
    chosen = select_edges(Federation({"few": few, "many": many}), loss="mean", variance="sandwich")
    mean = few.mean(axis=0)
    t2 = 15 * mean @ np.linalg.inv(np.cov(few.T)) @ mean
    assert chosen.p_value[0] == pytest.approx(stats.f.sf((15 - 3) / (3 * 14) * t2, 3, 12), rel=1e-3)
    assert chosen.reference_dof[0] == pytest.approx(12, rel=1e-3)


@pytest.mark.parametrize(
    ("sizes", "noise"), [((50, 50), (1.0, 1.0)), ((50, 50), (1.0, 3.0)), ((30, 100), (1.0, 1.0))], ids=str
)
def test_size_of_the_test_with_estimated_noise(sizes, noise):
    """n=50, p=20, no difference: rejections at the nominal rate, in the middle and far out; chi-square has far more."""
    local = local_fit(null_pairs(2000, sizes, 20, seed=6, noise=noise))
    statistic, p_value, _ = wald_tests(local, pairs(2000))
    assert 0.04 < (p_value < 0.05).mean() < 0.065
    assert (p_value < 1e-3).mean() < 3e-3
    careless = special.chdtrc(20, statistic)
    assert (careless < 0.05).mean() > 0.085
    assert (careless < 1e-3).mean() > 4 * 1e-3


def test_size_when_the_two_ends_know_different_directions():
    """Covariances far from proportional: one end tells about the first coordinates, the other about the rest."""
    rng = np.random.default_rng(24)
    m, p, f = 6000, 20, 10
    shape = np.where(np.arange(p) < 10, [[1.0], [1e-3]], [[1e-3], [1.0]])
    spread = np.tile(shape, (m, 1))
    noise = rng.chisquare(f, 2 * m) / f
    local = LocalFit(
        sites=tuple(range(2 * m)),
        theta=np.sqrt(spread) * rng.standard_normal((2 * m, p)),
        hessian=np.empty((2 * m, p, p)),
        covariance=np.einsum("v,vp,pq->vpq", noise, spread, np.eye(p)),
        n_samples=np.full(2 * m, 30),
        dispersion=noise,
        residual_dof=np.full(2 * m, float(f)),
        matrix_estimated=np.zeros(2 * m, dtype=bool),
        prior_precision=np.zeros((2 * m, p)),
        rescued=np.zeros(2 * m, dtype=bool),
        notes={},
        variance="model",
        losses=("linear",) * (2 * m),
    )
    _, p_value, _ = wald_tests(local, pairs(m))
    assert 0.045 < (p_value < 0.05).mean() < 0.068


@pytest.mark.parametrize(("sizes", "p", "uneven"), [((100, 60), 4, True), ((40, 300), 3, True), ((25, 25), 3, False)])
def test_sandwich_holds_its_size(sizes, p, uneven):
    fed = null_pairs(2500, sizes, p, seed=8, uneven=uneven)
    robust = wald_tests(local_fit(fed, variance="sandwich"), pairs(2500))[1]
    assert 0.02 < (robust < 0.05).mean() < 0.062
    assert (robust < 1e-3).mean() < 2e-3
    if uneven:
        model = wald_tests(local_fit(fed, variance="model"), pairs(2500))[1]
        assert (model < 0.05).mean() > 0.1


@pytest.mark.parametrize("effect", [0.5, 10.0])
def test_redundant_columns_cost_neither_size_nor_power(effect):
    """An intercept with a full set of indicators, of which every site misses some: no site has full rank."""
    rng = np.random.default_rng(25)
    n_pairs, n = 1500, 50
    site = np.repeat(np.arange(2 * n_pairs), n)
    chances = np.exp(3 * rng.standard_normal((2 * n_pairs, 6)))
    edges = np.cumsum(chances / chances.sum(axis=1, keepdims=True), axis=1)
    category = np.minimum((rng.random((site.size, 1)) > edges[site]).sum(axis=1), 5)
    X = np.column_stack([np.ones(site.size), np.eye(6)[category], rng.standard_normal((site.size, 2))])
    theta = np.repeat(effect * rng.standard_normal((n_pairs, 9)), 2, axis=0)
    y = np.einsum("kp,kp->k", X, theta[site]) + rng.standard_normal(site.size)
    local = local_fit(Federation.from_arrays(X, y, site))
    assert local.rescued.all()
    null = wald_tests(local, pairs(n_pairs))[1]
    assert 0.01 < (null < 0.05).mean() < 0.055
    assert (null < 1e-3).mean() < 2e-3
    strangers = wald_tests(local, np.column_stack([np.arange(2, 2 * n_pairs), np.arange(2 * n_pairs - 2)]))[1]
    assert (strangers < 1e-3).mean() > (0.5 if effect < 1 else 0.99)


def test_exact_fits():
    """Without noise, equal sites are equal up to rounding and different ones differ beyond doubt."""
    rng = np.random.default_rng(14)
    data = {}
    for u in range(4):
        X = rng.standard_normal((20, 3))
        data[u] = (X, X @ [1.0, 2.0, 3.0 + 1e-3 * (u == 3)])
    chosen = select_edges(Federation(data))
    assert set(chosen.graph.edge_ids()) == {(1, 0), (2, 0), (2, 1)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": 0.0}, "level"),
        ({"level": float("nan")}, "level"),
        ({"method": "sidak"}, "bonferroni, holm, bh, by"),
        ({"variance": "hc3"}, "model, sandwich, bartlett"),
    ],
)
def test_bad_arguments(arguments, message):
    design = paper_design(n_sites=5, n_samples=10, n_features=2, seed=21)
    with pytest.raises(ParameterError, match=message):
        select_edges(design.federation, design.graph, **arguments)
    local = local_fit(design.federation, variance="sandwich")
    with pytest.raises(ParameterError, match=r"'model'.*'sandwich'"):
        select_edges(design.federation, design.graph, local=local, variance="model")
    with pytest.raises(ParameterError, match="different sites"):
        select_edges(design.federation.subset([0, 1]), local=local)


@pytest.mark.parametrize("scale", [np.ones(5), np.array([0.1, 1.0, 1.0, 1.0, 10.0])])
def test_means_of_correlated_columns_keep_the_level(scale):
    """Six identical sites: any dropped edge is an error, which a level of 0.05 allows in one run of twenty."""
    rng = np.random.default_rng(8)
    runs, wrong = 150, 0
    for _ in range(runs):
        data = {u: scale * (rng.normal(size=(20, 1)) + 0.3 * rng.normal(size=(20, 5))) for u in range(6)}
        wrong += select_edges(Federation(data), loss="mean").graph.n_edges < 15
    assert wrong / runs < 0.11
