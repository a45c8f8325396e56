"""Groups by Gibbs sampling: against enumeration of all partitions, quadrature, and the designs they are for."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import gammaln, logsumexp

import fedkin.kin.sharded
from fedkin.cluster import LocalEngine
from fedkin.kin import effective_size, split_rhat
from fedkin.kin.partitions import EVENNESS, SHARES, Neighbours, SiteLikelihoods, log_partitions, log_prior, unpacked
from fedkin.kin.sampler import LOG_SHARES, MEAN_PRECISION, SHAPES, TYPICAL_WIDTH, Chain, Record, State
from fedkin.kin.sharded import ShardedSites

pytestmark = pytest.mark.exhaustive


def partitions(n):
    """All partitions of n sites, as labels in order of first appearance."""
    if n == 1:
        return [(0,)]
    return [(*z, k) for z in partitions(n - 1) for k in range(max(z) + 2)]


def test_partitions_have_the_prior_that_their_story_has():
    """A number of kinds, their shares more or less even, sites drawn from them: by simulation, and all sum to one."""
    rng, V = np.random.default_rng(0), 4
    chance = {z: np.exp(log_prior(log_partitions(V, V), np.bincount(z))) for z in partitions(V)}
    assert sum(chance.values()) == pytest.approx(1.0)
    kinds = np.arange(1.0, V + 1)
    prior = stats.betanbinom(1, 4, 3).pmf(kinds - 1)
    story = dict.fromkeys(chance, 0)
    for M in rng.choice(V, size=40_000, p=prior / prior.sum()) + 1:
        story[in_order(rng.choice(M, size=V, p=rng.dirichlet(np.full(M, rng.choice(EVENNESS)))).tolist())] += 1
    assert [n / 40_000 for n in story.values()] == pytest.approx(list(chance.values()), abs=0.008)


def small_sites(V=5, p=2, seed=0, edges=((0, 1), (2, 3), (3, 4)), weights=None):
    rng = np.random.default_rng(seed)
    roots = rng.normal(size=(V, p, p + 1))
    W = roots @ np.swapaxes(roots, 1, 2)
    W[0] = 0.0 if p > 1 else W[0]  # a site without rows
    centres = np.array([-1.0, 1.0])[np.arange(V) % 2]
    c = W @ np.ones(p) * centres[:, None] + np.linalg.cholesky(W + 1e-9 * np.eye(p)) @ rng.normal(size=p)
    pairs = np.array(edges, dtype=np.int64).reshape(-1, 2)
    neighbours = Neighbours.from_edges(V, pairs, None if weights is None else np.array(weights))
    return SiteLikelihoods.from_effects(W, c, neighbours)


def fill(edge, neighbours):
    edge[np.repeat(np.arange(len(edge)), np.diff(neighbours.first)), neighbours.neighbour] = neighbours.weight


def in_order(z):
    """The same partition, its groups numbered by first appearance."""
    number = {k: i for i, k in enumerate(dict.fromkeys(z))}
    return tuple(number[k] for k in z)


def together(z):
    z = np.asarray(z)
    return z[:, None] == z


def log_marginal(H, c, w):
    total = H + np.diag(1 / w)
    return 0.5 * (c @ np.linalg.solve(total, c) - np.linalg.slogdet(total)[1] - np.log(w).sum())


def run(sites, *, sweeps, share=0, moves=False, collapsed=True, w=0.7, rates=(0.6, 0.3), seed=1, splits=False, even=0):
    V, p = sites.size
    state = State(np.zeros(V, dtype=np.int64), share, np.full(p, 0.2), np.full(p, w), w, 2.0, rates, even)
    record = Record(V, p, sweeps)
    rng = np.random.default_rng(seed)
    Chain(sites, state, rng, collapsed=collapsed, moves=moves, splits=splits).run(200, record)
    return record


def exact(sites, *, share, w=0.7, rates=(0.6, 0.3), even=0):
    """Probabilities of sharing a group, means and squares of effects, at fixed hyper-parameters."""
    V, p = sites.size
    m, width, g = np.full(p, 0.2), np.full(p, w), SHARES[share]
    H = unpacked(sites.H[share], p)
    c = sites.c[share] - H @ m
    edge = np.zeros((V, V))
    fill(edge, sites.neighbours)
    logs, same, means, squares = [], [], [], []
    for z in map(np.array, partitions(V)):
        log, b, bb = log_partitions(V, V)[even, z.max() + 1], np.zeros((V, p)), np.zeros((V, p, p))
        for k in range(z.max() + 1):
            mine = z == k
            Hk, ck = H[mine].sum(axis=0), c[mine].sum(axis=0)
            log += gammaln(mine.sum() + EVENNESS[even]) + log_marginal(Hk, ck, width)
            C = np.linalg.inv(Hk + np.diag(1 / width))
            for u in np.flatnonzero(mine):
                B = np.eye(p) - g * H[u]
                b[u] = B @ (m + C @ ck) + g * sites.c[share, u]
                bb[u] = g * B + B @ C @ B + np.outer(b[u], b[u])
        rate = np.where(together(z), *rates)
        pairs = np.triu_indices(V, 1)
        log += (edge * np.log(rate) + (1 - edge) * np.log(1 - rate))[pairs].sum()
        logs.append(log)
        same.append(together(z))
        means.append(b)
        squares.append(bb)
    weight = np.exp(np.array(logs) - logsumexp(logs))
    return [np.tensordot(weight, np.array(part, dtype=float), 1) for part in (same, means, squares)]


@pytest.mark.parametrize(
    ("share", "collapsed", "weights", "splits", "even"),
    [
        (0, True, None, False, 0),
        (3, True, (0.2, 1.0, 0.7), True, 2),
        (0, False, None, True, 1),
        (3, False, (0.2, 1.0, 0.7), False, 0),
    ],
)
def test_sampler_agrees_with_all_52_partitions(share, collapsed, weights, splits, even):
    sites = small_sites(weights=weights)
    same, b, bb = exact(sites, share=share, even=even)
    sweeps = 8000
    record = run(sites, sweeps=sweeps, share=share, collapsed=collapsed, splits=splits, even=even)
    found = np.mean([together(z) for z in record.z], axis=0)
    assert np.abs(found - same).max() < 0.025
    if share == 0:  # the same with less noise; with a spread inside, a single group counts as none
        found = 0.5 * (record.same + record.same.T) / sweeps + np.eye(5)
        assert np.abs(found - same).max() < 0.016
    assert np.abs(record.b / sweeps - b).max() < 0.02
    assert np.abs(unpacked(record.moments / sweeps, 2) - bb).max() < 0.04
    assert np.ptp(same[np.triu_indices(5, 1)]) > 0.2


@pytest.mark.parametrize(("share", "even"), [(0, 1), (3, 0)])
def test_sampler_in_shards_agrees_with_all_52_partitions(share, even, monkeypatch):
    """And has the same bits in any number of shards."""
    monkeypatch.setattr(fedkin.kin.sharded, "PART", 2)
    sites, sweeps = small_sites(edges=()), 4000
    same, b, bb = exact(sites, share=share, even=even, rates=(0.5, 0.5))
    records = []
    for workers, length in ((2, sweeps), (1, 200), (3, 200)):
        state = State(np.zeros(5, dtype=np.int64), share, np.full(2, 0.2), np.full(2, 0.7), 0.7, 2.0, (0.5, 0.5), even)
        shards = ShardedSites(LocalEngine(workers), sites)
        records += [shards.run([state], [np.random.default_rng(1)], 100, length, moves=False)[0][1]]
        shards.shards.close()
    found = np.mean([together(z) for z in records[0].z], axis=0)
    assert np.abs(found - same).max() < 0.025
    assert np.abs(records[0].b / sweeps - b).max() < 0.03
    assert np.abs(unpacked(records[0].moments / sweeps, 2) - bb).max() < 0.06
    for other in records[1:]:
        np.testing.assert_array_equal(other.z, records[0].z[:200])
        np.testing.assert_array_equal(other.trace, records[0].trace[:200])
    np.testing.assert_array_equal(records[1].b, records[2].b)


def test_moving_hyper_parameters_agree_with_quadrature():
    """One coefficient, four sites: partitions enumerated, m and w on a grid, the rest summed out exactly."""
    sites = small_sites(V=4, p=1, seed=2, edges=())
    V = 4
    m = np.linspace(-3, 3, 121)
    w = np.exp(np.linspace(np.log(1e-5), np.log(1e5), 241))
    log_m = stats.norm(0, MEAN_PRECISION**-0.5).logpdf(m)
    # width: inverse gamma with typical width and shape summed out; times w for the logarithmic grid
    widths = np.array([stats.invgamma(a, scale=a * t).logpdf(w) for a in SHAPES for t in TYPICAL_WIDTH])
    log_w = logsumexp(widths, axis=0) + np.log(w)
    logs = []
    for z in map(np.array, partitions(V)):
        K = z.max() + 1
        prior = log_prior(log_partitions(V, V), np.bincount(z))
        shares = []
        for r in range(len(SHARES)):
            total = log_m[:, None] + log_w
            for k in range(K):
                H, c = sites.H[r, z == k, 0].sum(), sites.c[r, z == k, 0].sum()
                rest = c - H * m[:, None]
                total = (
                    total + 0.5 * (rest**2 / (H + 1 / w) - np.log1p(H * w)) + (c - 0.5 * H * m[:, None]) * m[:, None]
                )
            shares.append(logsumexp(total) + sites.k[r].sum() + math.log(0.5 / (1 if r == 0 else len(SHARES) - 1)))
        logs.append(np.array(shares) + prior)
    weight = np.exp(np.array(logs) - logsumexp(logs))
    record = run(sites, sweeps=15_000, moves=True)
    share = np.bincount(record.trace[:, 2].astype(int), minlength=len(SHARES)) / 15_000
    groups = np.bincount(record.trace[:, 1].astype(int), minlength=V + 1)[1:] / 15_000
    assert share == pytest.approx(weight.sum(axis=0), abs=0.025)
    n_groups = np.array([max(z) + 1 for z in partitions(V)])
    assert groups == pytest.approx([weight[n_groups == k].sum() for k in range(1, V + 1)], abs=0.025)
    codes = {z: i for i, z in enumerate(partitions(V))}
    visits = np.bincount([codes[in_order(z)] for z in record.z.tolist()], minlength=15)
    assert visits / 15_000 == pytest.approx(weight.sum(axis=1), abs=0.025)


def test_groups_that_say_the_same_merge():
    """Two plain groups, each cut into two at random: a few sweeps join the halves, which single sites do not."""
    rng = np.random.default_rng(0)
    V, labels = 2000, np.arange(2000) % 2
    W = np.full((V, 1, 1), 60.0)
    c = 60.0 * np.where(labels, 1.0, -1.0)[:, None] + np.sqrt(60.0) * rng.normal(size=(V, 1))
    sites = SiteLikelihoods.from_effects(W, c, Neighbours.from_edges(V, np.zeros((0, 2), dtype=np.int64), None))
    cut = 2 * labels + rng.integers(2, size=V)
    found = []
    for splits in (False, True):
        state = State(cut.copy(), 0, np.zeros(1), np.ones(1), 1.0)
        chain = Chain(sites, state, np.random.default_rng(1), collapsed=True, moves=False, splits=splits)
        chain.run(6, Record(V, 1, 0))
        found.append(state.z)
    halves, whole = found
    assert min(np.sort(np.bincount(halves))[-4:]) > 100
    assert np.sort(np.bincount(whole))[-2:].sum() > 1950
    assert all(len(set(labels[whole == k].tolist())) <= 1 for k in range(int(whole.max()) + 1))


@pytest.mark.parametrize(("V", "splits"), [(3, False), (8, False), (30, True)])
def test_the_bound_on_the_evidence_is_one(V, splits):
    """Sites that say nothing have an evidence of 1, however small groups are: no uncertainty counts twice."""
    nothing = SiteLikelihoods.from_effects(np.zeros((V, 1, 1)), np.zeros((V, 1)), Neighbours.none(V))
    bound = run(nothing, sweeps=4000, splits=splits).trace[:, 0].mean() - LOG_SHARES[0]
    assert -0.5 * V < bound < 0.02


# --- R-hat and effective sizes


@pytest.mark.parametrize("correlation", [-0.3, 0.0, 0.3, 0.9])
def test_effective_size_and_rhat_of_autoregressive_chains(correlation):
    """Draws of an autoregression are worth ``(1 - r) / (1 + r)`` independent ones; R-hat is 1, unless means differ."""
    rng, n = np.random.default_rng(0), 2000
    x = rng.normal(size=(4, n, 50))
    for t in range(1, n):
        x[:, t] = correlation * x[:, t - 1] + np.sqrt(1 - correlation**2) * x[:, t]
    assert effective_size(x).mean() == pytest.approx(4 * n * (1 - correlation) / (1 + correlation), rel=0.06)
    assert np.median(split_rhat(x)) == pytest.approx(1.0, abs=0.01)
    apart = x + np.arange(4.0)[:, None, None]  # halves of four chains: their means have a variance of 10/7
    assert np.median(split_rhat(apart)) == pytest.approx(np.sqrt(1 + 10 / 7), abs=0.03)


def test_chains_that_never_move():
    draws = np.stack([np.full((4, 201), 3.0), np.repeat(np.arange(4.0)[:, None], 201, axis=1)], axis=2)
    assert split_rhat(draws).tolist() == [1.0, np.inf]
    assert effective_size(draws)[0] == 800 > 10 > effective_size(draws)[1]
