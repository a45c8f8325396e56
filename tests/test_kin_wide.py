"""Many coefficients: curvatures of low rank, noise, and contrasts, against whole matrices and closed forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import fedkin
from fedkin.core import RowData
from fedkin.data import Federation
from fedkin.kin.chains import Sampling
from fedkin.kin.groups import find_groups
from fedkin.kin.likelihoods import SiteLikelihoods, common_units
from fedkin.kin.matrices import Dense, LowRank, low_rank
from fedkin.kin.mixed import Priors, _Evidence, fit_mixed, with_noise
from fedkin.kin.partitions import Neighbours
from fedkin.kin.sources import Source
from fedkin.kin.wide import FullEffects


def rows_of(V, p, n, groups, signal, seed=0):
    """Groups of sites with normal parameters: rows, labels, parameters of sites."""
    rng = np.random.default_rng(seed)
    labels = np.arange(V) % groups
    truth = (signal * rng.normal(size=(groups, p)))[labels]
    X = rng.normal(size=(V, n, p))
    y = np.einsum("unp,up->un", X, truth) + rng.normal(size=(V, n))
    return Federation({u: (X[u], y[u]) for u in range(V)}), labels, truth


def in_units(source) -> SiteLikelihoods:
    first = source.first()
    return common_units(first, np.zeros(first.n_params, dtype=bool), has_scale=True).fitted(first)


def both_ways(sums: SiteLikelihoods) -> tuple[SiteLikelihoods, SiteLikelihoods]:
    """The same sums, as low rank and as whole matrices."""
    whole = replace(sums, known=None)
    whole.__dict__["short"] = None
    return sums, whole


def test_low_rank_is_found_where_rows_are_few_and_only_there():
    X = np.random.default_rng(0).normal(size=(3, 20, 60))
    G = np.swapaxes(X, 1, 2) @ X
    G[2] = 0.0  # a site that says nothing
    found = low_rank(G, 20)
    assert found.factor.shape == (3, 60, 20)
    np.testing.assert_allclose([found.of(u) for u in range(3)], G, atol=1e-10)
    assert low_rank(G, 40) is None
    assert low_rank(G[:, :50, :50], 20) is None  # few coefficients keep whole matrices


def test_low_rank_answers_like_whole_matrices():
    rng = np.random.default_rng(1)
    short = LowRank(rng.random((3, 60)), rng.normal(size=(3, 60, 7)))
    whole = Dense(np.stack([short.of(u) for u in range(3)]))
    vectors, C = rng.normal(size=(3, 60)), np.eye(60) + 0.1
    root, weight, some = rng.random(60), rng.random(3), np.array([0, 2])
    np.testing.assert_allclose(short.apply(vectors), whole.apply(vectors))
    np.testing.assert_allclose(short.apply(vectors[0]), whole.apply(vectors[0]))
    np.testing.assert_allclose(short.times(1, C), whole.times(1, C))
    np.testing.assert_allclose(short.sum(some), whole.sum(some))
    np.testing.assert_allclose(short.scaled(root, weight).of(2), whole.scaled(root, weight).of(2))
    (one, log_one), (two, log_two) = short.resolved(), whole.resolved()
    np.testing.assert_allclose(log_one, log_two)
    inverse = np.linalg.inv(np.eye(60) + whole.matrices)
    for ours, theirs in zip(one.sums(C), two.sums(C), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-9)
    expected = [keep + keep @ C @ keep for keep in inverse]
    np.testing.assert_allclose(list(one.posterior_cov(C)), expected, atol=1e-10)
    np.testing.assert_allclose(one.of(0), two.of(0), atol=1e-10)
    A = np.diag(root + 0.5)
    A[0, 1:] = vectors[0, 1:]  # as an intercept that takes up means
    np.testing.assert_allclose(short.congruent(A).of(1), A.T @ short.of(1) @ A, atol=1e-10)
    assert short.congruent(vectors[:1].T @ vectors[:1]) is None


@pytest.mark.parametrize("rank", [None, 20])
def test_the_mixed_model_of_low_rank_is_that_of_whole_matrices(rank):
    made, _, _ = rows_of(8, 60, 25 if rank is None else 100, 2, 0.3)
    source = Source(RowData(made, "linear") if rank is None else fedkin.summarise(made, rank=rank))
    short, whole = both_ways(in_units(source))
    assert short.matrices.factor.shape[2] == (25 if rank is None else 20)
    assert bool(short.matrices.diagonal.any()) == (rank is not None)
    free = np.zeros(60, dtype=bool)
    one, two = (_Evidence(sums, free, None, Priors()) for sums in (short, whole))
    at = one.start() + 0.1 * np.sin(np.arange(62))
    for ours, theirs in zip(one._negative(at), two._negative(at), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-9)
    ours, theirs = one.model(at), two.model(at)
    for name in ("mean", "theta", "covariance", "mean_covariance", "degrees", "log_likelihood"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-9)
    # and groups inside it
    model = fit_mixed(short, free)
    whole = replace(model, matrices=Dense(model.precision))
    found = [find_groups(each, ~free, Neighbours.none(8), 0, Sampling()) for each in (model, whole)]
    for name in ("theta", "covariance", "degrees"):
        np.testing.assert_allclose(getattr(found[0], name), getattr(found[1], name), atol=1e-5)


def test_noise_is_not_explained_by_coefficients():
    """With fewer rows than coefficients, spreads that are learned apart leave next to no noise."""
    made, labels, truth = rows_of(24, 60, 28, 2, 0.4)
    kin = fedkin.find_kin(made)
    assert kin.groups.tolist() == labels.tolist()
    assert 0.8 < kin.noise.mean() < 1.25
    inside = np.abs(kin.theta - truth) < 1.96 * np.sqrt(np.einsum("ujj->uj", kin.covariance))
    assert 0.9 < inside.mean() < 0.99
    # twice the noise has spreads of its own
    sums, free = in_units(Source(RowData(made, "linear"))), np.zeros(60, dtype=bool)
    model = fit_mixed(sums, free)
    twice = with_noise(sums, free, 2 * model.noise, model.parameters)
    np.testing.assert_allclose(twice.noise, 2 * model.noise)
    assert twice.variance.sum() < model.variance.sum()


def test_exact_short_messages_fit_like_rows():
    made, _, _ = rows_of(12, 60, 24, 2, 0.5)
    rows, short = fedkin.find_kin(made), fedkin.find_kin(fedkin.summarise(made, rank=24))
    assert short.groups.tolist() == rows.groups.tolist()
    np.testing.assert_allclose(short.theta, rows.theta, atol=1e-3 * np.abs(rows.theta).max())


@pytest.mark.parametrize(("n", "most"), [(40, 3.0), (240, 1.6)])
def test_what_a_low_rank_loses_is_bounded_and_owned(n, most):
    """Rank 20 of 60 coefficients: a larger error than from everything, and intervals that say so."""
    made, labels, truth = rows_of(16, 60, n, 2, 0.5)
    whole, short = fedkin.find_kin(made), fedkin.find_kin(fedkin.summarise(made, rank=20))
    errors = [((kin.theta - truth) ** 2).sum() for kin in (whole, short)]
    assert short.groups.tolist() == labels.tolist()
    assert errors[0] < errors[1] < most * errors[0]
    inside = np.abs(short.theta - truth) < 1.96 * np.sqrt(np.einsum("ujj->uj", short.covariance))
    assert inside.mean() > 0.9


def test_contrasts_use_all_directions():
    """Of one site they are its own covariance; kin hardly differ; others as for one who is told."""
    everybody, labels, _ = rows_of(13, 60, 80, 2, 0.5, seed=1)
    made, labels = everybody.subset(range(12)), labels[:12]
    kin = fedkin.find_kin(made)
    assert kin.learned.F.shape == (60, 60)
    np.testing.assert_allclose(kin.contrast(3).covariance, kin.covariance[3], rtol=1e-2, atol=1e-6)
    alike, apart = kin.contrast(0, 2), kin.contrast(0, 1)
    assert labels[0] == labels[2] != labels[1]
    assert apart.wald[2] < 1e-6 < alike.wald[2]
    assert alike.standard_error.mean() < 0.5 * apart.standard_error.mean()
    # groups are told apart as well as by someone who knows them
    X = [np.concatenate([made[u].X for u in range(12) if labels[u] == k]) for k in (0, 1)]
    told = np.sqrt(sum(np.diag(np.linalg.inv(one.T @ one)) for one in X))
    np.testing.assert_allclose(apart.standard_error, told, rtol=0.15)
    joined = kin.join(everybody[12])
    assert joined.probability[labels == 0].min() > 0.9 > 0.1 > joined.probability[labels == 1].max()


def test_signs_of_directions_are_not_left_to_rounding():
    """Rows in another order, and sums of them, are sampled alike only if directions have the same signs."""
    rng = np.random.default_rng(0)
    c, half = rng.normal(size=(16, 60)), rng.normal(size=(16, 60, 90))
    W = half @ np.swapaxes(half, 1, 2)
    turn = FullEffects.from_likelihoods(Dense(W), c, 50).turn
    for _ in range(5):
        order = rng.permutation(16)
        np.testing.assert_allclose(FullEffects.from_likelihoods(Dense(W[order]), c[order], 50).turn, turn, atol=1e-9)
    np.testing.assert_allclose(FullEffects.from_likelihoods(Dense(W), -c, 50).turn, turn, atol=1e-9)
