"""What finding kin has instead of scipy, which takes long to load, is what scipy has."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special as scipy_special

from fedkin.kin import special
from fedkin.kin.sampler.sites import group_sums

X = np.concatenate([np.logspace(-3, 6, 200), np.arange(1, 40) / 2])


def test_gamma_functions() -> None:
    np.testing.assert_allclose(special.log_gamma(X), scipy_special.gammaln(X), rtol=1e-13, atol=1e-14)
    # a difference of logarithms that may be large: only their digits are there
    exact, size = scipy_special.betaln(X, X[::-1]), scipy_special.gammaln(X + X[::-1])
    assert (np.abs(special.log_beta(X, X[::-1]) - exact) <= 1e-13 * np.maximum(size, 1)).all()


@pytest.mark.parametrize(("name", "order"), [("digamma", 0), ("trigamma", 1), ("tetragamma", 2)])
def test_derivatives(name: str, order: int) -> None:
    own = getattr(special, name)
    np.testing.assert_allclose(own(X), scipy_special.polygamma(order, X), rtol=2e-13, atol=1e-13 if order == 0 else 0)
    assert own(2.5).shape == ()


@pytest.mark.parametrize(("sites", "groups"), [(30, 30), (30, 7), (300, 100)])
def test_sums_over_groups(sites: int, groups: int) -> None:
    rng = np.random.default_rng(0)
    z = rng.permutation(sites) if groups == sites else rng.integers(groups - 1, size=sites)
    sums = rng.normal(size=(2, sites, 5))
    expected = np.zeros((2, groups, 5))
    np.add.at(expected, (slice(None), z), sums)
    np.testing.assert_allclose(group_sums(sums, z, groups), expected, atol=1e-12)
