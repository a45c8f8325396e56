"""Simulation-based calibration of kin (Talts et al. 2018): truths rank uniformly among draws of their posterior.

Mean, variances and noise of the mixed model are fixed where the sampler is asked alone. Variances are drawn from their
prior where `find_kin` is asked whether sites differ; mean and noise have flat priors. Everything else is drawn from
kin's prior: evenness, number of kinds, shares of the sites, variance inside groups, widths and centres of groups.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedkin import Federation, find_kin
from fedkin.kin import QUICK
from fedkin.kin.partitions import EVENNESS, SHARES, Neighbours, SiteLikelihoods
from fedkin.kin.sampler import LOG_SHARES, MEAN_PRECISION, SHAPES, TYPICAL_WIDTH, Chain, State

pytestmark = pytest.mark.studies

#: A calibrated sampler fails a test with this probability.
LEAST_P = 0.001


def draw_partition(rng, V):
    """Labels of V sites from the prior of partitions."""
    kinds = np.arange(1, V + 1)
    prior = stats.betanbinom(1, 4, 3).pmf(kinds - 1.0)
    M = rng.choice(kinds, p=prior / prior.sum())
    return rng.choice(M, size=V, p=rng.dirichlet(np.full(M, rng.choice(EVENNESS))))


def draw_effects(rng, V, p):
    """Effects in units of their standard deviation ``(V, p)``, their groups' centres ``(V, p)`` and mean ``(p,)``."""
    z = np.unique(draw_partition(rng, V), return_inverse=True)[1]
    share = rng.choice(len(SHARES), p=np.exp(LOG_SHARES))
    shape, typical = rng.choice(SHAPES), rng.choice(TYPICAL_WIDTH)
    w = np.clip(shape * typical / rng.standard_gamma(shape, p), 1e-6, 1e6)
    m = rng.standard_normal(p) / np.sqrt(MEAN_PRECISION)
    nu = (m + np.sqrt(w) * rng.standard_normal((z.max() + 1, p)))[z]
    return z, share, m, nu, nu + np.sqrt(SHARES[share]) * rng.standard_normal((V, p))


def ranks(rng, *, collapsed, V=8, p=2, burn=60, draws=19, thin=8):
    """Ranks, 0 to ``draws``, of a site's coefficient, its group's centre, the groups' mean, and how many groups."""
    z, share, m, nu, b = draw_effects(rng, V, p)
    roots = rng.normal(size=(V, p, 6)) * np.sqrt(rng.choice([0.3, 3.0]))
    W = roots @ np.swapaxes(roots, 1, 2)
    c = np.einsum("uij,uj->ui", W, b) + np.einsum("uij,uj->ui", np.linalg.cholesky(W), rng.standard_normal((V, p)))
    sites = SiteLikelihoods.from_effects(W, c, Neighbours.none(V))
    state = State(rng.integers(3, size=V).astype(np.int64), 0, np.zeros(p), np.ones(p), 1.0)
    chain, kept = Chain(sites, state, rng, collapsed=collapsed), []
    for sweep in range(burn + draws * thin):
        chain.sweep(np.zeros((0, 0)))
        if sweep >= burn and (sweep - burn) % thin == 0:
            rho, centre = SHARES[state.share], chain.drawn[chain.labels[0]]
            B = np.linalg.inv(np.eye(p) + rho * W[0])
            drawn = B @ (centre + rho * c[0]) + np.sqrt(rho) * np.linalg.cholesky(B) @ rng.standard_normal(p)
            kept.append((drawn[0], centre[0], state.m[0], chain.n_groups + rng.random(), state.share + rng.random()))
        chain.move()
    truth = b[0, 0], nu[0, 0], m[0], z.max() + 1 + rng.random(), share + rng.random()
    return (np.array(kept) < truth).sum(axis=0)


def p_values(found):
    """P values of the ranks ``(n, k)``: by chi-square, and by mean and variance of their normal scores."""
    scores = stats.norm.ppf((found + 0.5) / 20)
    scores /= np.sqrt((stats.norm.ppf((np.arange(20) + 0.5) / 20) ** 2).mean())
    n, drift, square = len(found), scores.mean(axis=0), (scores**2).sum(axis=0)
    chance = stats.chi2(n).cdf(square)  # conservative: uniform ranks have lighter tails than normal scores
    shape = [stats.chisquare(np.bincount(one // 2, minlength=10)).pvalue for one in found.T]
    return np.array([shape, 2 * stats.norm.sf(np.abs(drift) * np.sqrt(n)), 2 * np.minimum(chance, 1 - chance)])


@pytest.mark.parametrize("collapsed", [True, False])
def test_truths_rank_uniformly_among_draws_of_the_sampler(collapsed):
    """Site coefficients, centres of groups, their mean, number of groups, variance inside."""
    rng = np.random.default_rng(20 + collapsed)
    found = p_values(np.array([ranks(rng, collapsed=collapsed) for _ in range(400)]))
    assert found.min() > LEAST_P, found


def test_ranks_show_a_likelihood_that_is_overstated(monkeypatch):
    """As if every site had half as many rows again."""
    right = SiteLikelihoods.from_effects.__func__
    wrong = classmethod(lambda cls, W, c, neighbours: right(cls, 1.5 * W, 1.5 * c, neighbours))
    monkeypatch.setattr(SiteLikelihoods, "from_effects", wrong)
    rng = np.random.default_rng(22)
    assert p_values(np.array([ranks(rng, collapsed=True) for _ in range(400)])).min() < LEAST_P


def test_the_probability_that_no_site_differs_is_right_as_often_as_it_says():
    """Of federations from the prior, with one model or with variances between sites: reliability in three bins."""
    rng, V, n, p = np.random.default_rng(5), 12, 20, 3
    differ, stated, covered = rng.random(150) < 0.5, [], []
    for one in differ:
        share = rng.random()  # of the variance of a site's own estimate that is between sites: uniform
        apart = 0.7 * rng.normal(size=p)
        logs = np.log(share / (1 - share) / n) + apart - apart.mean()
        theta = rng.normal(size=p) + one * np.exp(0.5 * logs) * rng.normal(size=(V, p))
        X = rng.normal(size=(V, n, p))
        y = np.einsum("unp,up->un", X, theta) + rng.normal(size=(V, n))
        kin = find_kin(Federation({u: (X[u], y[u]) for u in range(V)}), **QUICK)
        stated.append(kin.learned.one)
        low, high = np.moveaxis(kin.confint(0.95), 2, 0)
        covered.append(float(((low < theta) & (theta < high)).mean()))
    stated, covered = np.array(stated), np.array(covered)
    for least, most in ((0.0, 0.3), (0.3, 0.7), (0.7, 1.0)):
        mine = (stated >= least) & (stated <= most)
        error = np.sqrt((stated[mine] * (1 - stated[mine])).sum() + 1)
        assert abs((~differ[mine]).sum() - stated[mine].sum()) < 3 * error
    assert 0.93 < covered[differ].mean() < 0.98  # intervals are those of sites that differ
    assert covered[~differ].mean() > 0.98
