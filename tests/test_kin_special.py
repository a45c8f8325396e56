"""What finding kin has instead of scipy, which takes long to load, is what scipy has."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy import special as scipy_special
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from fedkin.kin import special
from fedkin.kin.display import average_linkage
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


@pytest.mark.parametrize("size", [2, 3, 12, 60])
def test_average_linkage(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(5):
        points = rng.normal(size=(size, 3))
        distance = np.linalg.norm(points[:, None] - points[None], axis=2)
        expected = linkage(squareform(distance, checks=False), "average")
        assert average_linkage(distance).tolist() == expected[:, :2].astype(int).tolist()


@pytest.mark.parametrize(("sites", "groups"), [(30, 30), (30, 7), (300, 100)])
def test_sums_over_groups(sites: int, groups: int) -> None:
    rng = np.random.default_rng(0)
    z = rng.permutation(sites) if groups == sites else rng.integers(groups - 1, size=sites)
    sums = rng.normal(size=(2, sites, 5))
    expected = np.zeros((2, groups, 5))
    np.add.at(expected, (slice(None), z), sums)
    np.testing.assert_allclose(group_sums(sums, z, groups), expected, atol=1e-12)


FIT = """
import sys
import numpy as np
from fedkin.cli import main
assert main(["fit", sys.argv[1], "--site", "site", "--target", "y", "--out", sys.argv[2]]) == 0
slow = "scipy.special scipy.sparse scipy.cluster scipy.linalg sklearn pandas pyarrow http.server asyncio".split()
print([name for name in slow if name in sys.modules])
"""


def test_a_fit_of_numbers_loads_nothing_slow(tmp_path) -> None:
    """scipy alone takes as long to load as a small table takes to be fitted."""
    rng = np.random.default_rng(0)
    lines = [f"{u % 6},{x:.3f},{x * (u % 2) + e:.3f}" for u, (x, e) in enumerate(rng.normal(size=(120, 2)))]
    (tmp_path / "rows.csv").write_text("\n".join(["site,x,y", *lines]))
    arguments = [sys.executable, "-c", FIT, str(tmp_path / "rows.csv"), str(tmp_path / "model")]
    run = subprocess.run(arguments, check=True, capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "[]"
