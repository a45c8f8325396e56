"""Split R-hat and effective sample size, against the formulas written out one draw at a time."""

from __future__ import annotations

import numpy as np
import pytest

from fedkin.kin import effective_size, split_rhat


def chains(correlation, shift=0.0, m=4, n=201, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(m, n))
    for t in range(1, n):
        x[:, t] = correlation * x[:, t - 1] + np.sqrt(1 - correlation**2) * x[:, t]
    return x + shift * np.arange(m)[:, None]


def halves_of(draws):
    half = draws.shape[1] // 2
    return np.concatenate([draws[:, :half], draws[:, -half:]])


def reference_ess(draws):
    """The loop of Stan and arviz (Vehtari et al. 2021, section 3.2)."""
    x = halves_of(draws)
    m, n = x.shape
    centred = x - x.mean(axis=1, keepdims=True)
    covariance = [np.mean([(c[: n - t] * c[t:]).sum() / n for c in centred]) for t in range(n)]
    within = covariance[0] * n / (n - 1)
    plus = covariance[0] + x.mean(axis=1).var(ddof=1)
    rho = np.zeros(n)
    even, odd = 1.0, 1 - (within - covariance[1]) / plus
    rho[0], rho[1], t = even, odd, 1
    while t < n - 3 and even + odd > 0:
        even, odd = (1 - (within - covariance[t + k]) / plus for k in (1, 2))
        if even + odd >= 0:
            rho[t + 1], rho[t + 2] = even, odd
        t += 2
    last = t - 2
    if even > 0:
        rho[last + 1] = even
    t = 1
    while t <= last - 2:
        if rho[t + 1] + rho[t + 2] > rho[t - 1] + rho[t]:
            rho[t + 1] = rho[t + 2] = (rho[t - 1] + rho[t]) / 2
        t += 2
    time = max(-1 + 2 * rho[: last + 1].sum() + rho[last + 1], 1 / np.log10(m * n))
    return m * n / time


@pytest.mark.parametrize("correlation", [-0.5, 0.0, 0.3, 0.9])
@pytest.mark.parametrize("n", [40, 70, 201])
def test_effective_size_is_the_reference(correlation, n):
    draws = chains(correlation, n=n)
    assert effective_size(draws) == pytest.approx(reference_ess(draws), rel=0.02)


def test_rhat_is_the_reference():
    for shift in (0.0, 0.5):
        draws = chains(0.5, shift)
        x = halves_of(draws)
        n = x.shape[1]
        within, between = x.var(axis=1, ddof=1).mean(), n * x.mean(axis=1).var(ddof=1)
        assert split_rhat(draws) == pytest.approx(np.sqrt(((n - 1) / n * within + between / n) / within))
    assert split_rhat(chains(0.5)) < 1.05 < 1.1 < split_rhat(chains(0.5, 0.5))


def test_arrays_and_constants():
    draws = np.stack([chains(0.0), np.full((4, 201), 3.0), np.repeat(np.arange(4.0)[:, None], 201, axis=1)], axis=2)
    rhat, size = split_rhat(draws), effective_size(draws)
    assert rhat[1] == 1.0
    assert rhat[2] == np.inf
    assert size[1] == 800
    assert size[2] < 10
    assert rhat[0] == split_rhat(draws[:, :, 0])


def test_expectations_given_a_part_of_the_state_count_by_what_they_are_of_the_variance():
    """Draws and their expectations given a slow part: R-hat and size from either are those of the draws."""
    slow, rng = 0.5 * chains(0.9, shift=0.3, m=4, n=2000, seed=3), np.random.default_rng(4)
    draws = slow + rng.normal(size=slow.shape)
    halves = halves_of(draws)
    variance = np.asarray(halves.var(axis=1).mean())
    assert split_rhat(slow, variance) == pytest.approx(split_rhat(draws), abs=0.002)
    assert split_rhat(slow) > split_rhat(draws) + 0.02
    assert effective_size(slow) < effective_size(slow, variance) <= draws.size
    # the error of a mean is its variance over the size, whichever is asked
    errors = [slow.var() / effective_size(slow), draws.var() / effective_size(slow, variance)]
    assert errors[1] == pytest.approx(errors[0], rel=0.1)
