"""New sites where perhaps no site differs at all: against mixtures of normal models, with densities of scipy."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from fedkin import find_kin
from fedkin.data import Rows
from fedkin.datasets import paper_design
from fedkin.kin.partitions import SHARES, log_partitions, log_prior


@cache
def small_fit(V):
    made = paper_design(n_sites=V, n_samples=25, n_features=2, n_clusters=2, signal=0.7, seed=4)
    return find_kin(made.federation, sweeps=30)


def fitted(V, one, weight=None, **more):
    """A small fit that is told how probable it is that no site differs."""
    kin = small_fit(V)
    given = {
        "one": one,
        "one_mean": kin.learned.mean + 0.1,
        "one_covariance": np.array([[0.02, 0.01], [0.01, 0.03]]),
        **({} if weight is None else {"weight": weight}),
        **more,
    }
    return replace(kin, learned=replace(kin.learned, **given))


def new_rows(n, at, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    return Rows(X, X @ np.asarray(at) + rng.normal(size=n))


def kinds_of_sites(learned):
    """What a site may be if sites differ: chances, means and covariances in the units of the fit."""
    states, F = learned.states, learned.F
    assert np.allclose(F @ F.T, np.diag(learned.variance))
    made = [
        (learned.weight * chance, learned.mean, share * F @ F.T)
        for chance, share in zip(learned.scales, SHARES, strict=True)
    ]
    V = len(learned.score)
    before, after = (log_partitions(count, count) for count in (V, V + 1))
    for s, (sizes, Hs, cs) in enumerate(learned.group_sums):
        m, w, share = states.m[s], np.diag(states.w[s]), SHARES[states.share[s]]
        for group in range(len(sizes) + 1):
            joined, centre, left = np.append(sizes, 1), m, w
            if group < len(sizes):
                joined = sizes + (np.arange(len(sizes)) == group)
                left = np.linalg.inv(Hs[group] + np.linalg.inv(w))
                centre = m + left @ (cs[group] - Hs[group] @ m)
            odds = np.exp(log_prior(after, joined) - log_prior(before, sizes))
            total = F @ (left + share * np.eye(2)) @ F.T
            made.append(((1 - learned.weight) * states.weight[s] * odds, learned.mean + F @ centre, total))
    chances = np.array([chance for chance, _, _ in made])
    return chances / chances.sum(), [mean for _, mean, _ in made], [total for _, _, total in made]


def mixture(learned, chances, means, totals, rows):
    """Mean, covariance and weights of a mixture of normal models given rows; in the units of the rows."""
    units, noise = learned.units, learned.noise * learned.units.target**2
    logs, found, left = [], [], []
    for mean, total in zip(means, totals, strict=True):
        mean, total = units.theta(mean), units.covariance(total)
        if rows is not None:
            spread = rows.X @ total @ rows.X.T + noise * np.eye(len(rows.y))
            logs.append(multivariate_normal(rows.X @ mean, spread).logpdf(rows.y))
            gain = total @ rows.X.T @ np.linalg.inv(spread)
            mean, total = mean + gain @ (rows.y - rows.X @ mean), total - gain @ rows.X @ total
        found.append(mean)
        left.append(total)
    weights = np.asarray(chances) * (np.exp(np.array(logs) - max(logs)) if logs else 1.0)
    weights /= weights.sum()
    middle = weights @ np.array(found)
    apart = np.array(found) - middle
    return middle, np.tensordot(weights, left, 1) + (weights[:, None] * apart).T @ apart, weights


@pytest.mark.parametrize("rows", [None, new_rows(1, (0, 0)), new_rows(3, (0.3, -0.2)), new_rows(12, (2.0, -1.0))])
@pytest.mark.parametrize("weight", [0.3, 1.0])
@pytest.mark.parametrize("one", [0.0, 0.6, 1.0])
def test_a_new_site_is_a_mixture_of_all_that_sites_may_be(rows, weight, one):
    kin = fitted(8, one, weight, mean_covariance=np.zeros((2, 2)))
    learned = kin.learned
    chances, means, totals = kinds_of_sites(learned)
    one = min(one, 9 / 10)  # never certain: one in V + 2 may differ
    everything = np.append((1 - one) * chances, one)
    theta, covariance, weights = mixture(
        learned, everything, [*means, learned.one_mean], [*totals, learned.one_covariance], rows
    )
    joined = kin.join(rows)
    assert joined.theta == pytest.approx(theta, abs=1e-9)
    assert joined.covariance == pytest.approx(covariance, abs=1e-9)
    assert (joined.probability >= weights[-1] - 1e-9).all()


@pytest.mark.parametrize("n", [0, 2, 10])
def test_without_groups_what_is_open_about_the_mean_counts(n):
    kin = fitted(3, 0.5)
    learned, rows = kin.learned, new_rows(n, (0.5, 0.5)) if n else None
    assert learned.states is None
    priors = [np.diag(learned.variance) + learned.mean_covariance, learned.one_covariance]
    _, _, (_, one) = mixture(learned, [0.5, 0.5], [learned.mean, learned.one_mean], priors, rows)
    differs = replace(kin, learned=replace(learned, one=0.0)).join(rows)
    alike, left, _ = mixture(learned, [1.0], [learned.one_mean], [learned.one_covariance], rows)
    joined, apart = kin.join(rows), alike - differs.theta
    assert joined.theta == pytest.approx(differs.theta + one * apart, abs=1e-9)
    expected = (1 - one) * differs.covariance + one * left + one * (1 - one) * np.outer(apart, apart)
    assert joined.covariance == pytest.approx(expected, abs=1e-9)
    assert joined.probability == pytest.approx(np.full(3, one))


def test_where_all_sites_are_alike_a_new_one_is_told_so_before_it_has_rows():
    made = paper_design(n_sites=30, n_samples=60, n_features=3, n_clusters=1, signal=1.0, seed=1)
    kin = find_kin(made.federation, sweeps=30)
    assert kin.learned.one > 0.5
    joined, unmixed = kin.join(), replace(kin, learned=replace(kin.learned, one=0.0)).join()
    assert joined.probability.min() >= min(kin.learned.one, 31 / 32)
    assert np.trace(joined.covariance) < np.trace(unmixed.covariance)
    far = kin.join(Rows(np.eye(3).repeat(20, axis=0), np.repeat([9.0, -9.0, 9.0], 20)))
    assert far.probability.max() < 1e-6  # its own rows say that it is not like the others
