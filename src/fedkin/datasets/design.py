"""Draw the paper's simulation, with its truth, and tables that are like public ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, listed
from fedkin.data import Federation
from fedkin.datasets.public import PublicTable
from fedkin.errors import ParameterError
from fedkin.graph import Graph


@dataclass(frozen=True, eq=False)
class Design:
    """A generated federation together with the truth behind it.

    Attributes
    ----------
    federation : Federation
    graph : Graph
        The corrupted graph G that a user would be given.
    truth : Graph
        The characteristic graph G0: a clique per cluster.
    theta_star : array (V, p)
    labels : array (V,)
        Cluster of each site.
    """

    federation: Federation
    graph: Graph
    truth: Graph
    theta_star: Array
    labels: NDArray[np.int64]

    def error(self, theta: Array) -> float:
        """Return the average squared estimation error ``||theta - theta_star||_F^2 / |V|``."""
        return float(((theta - self.theta_star) ** 2).sum() / self.theta_star.shape[0])


def paper_design(
    n_sites: int = 100,
    n_samples: int = 100,
    n_features: int = 20,
    n_clusters: int = 5,
    *,
    varrho: float = 0.1,
    loss: str = "linear",
    signal: float = 1.0,
    noise: float = 1.0,
    seed: int = 0,
) -> Design:
    """Draw the simulation design of section 5.

    Parameters
    ----------
    n_sites, n_samples, n_features, n_clusters : int
        |V|, n on every site, p and K0; clusters are contiguous and as equal as possible.
    varrho : float
        Probability with which each pair's edge status is flipped.
    loss : "linear" or "logistic"
        How responses are drawn.
    signal : float
        Factor on the cluster parameters, which are N(0, p^{-1/2} I).
    noise : float
        Standard deviation of the linear model's noise.
    seed : int
        Of all draws: parameters, flips, features and noise, in this order.

    Examples
    --------
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(seed=0)
    >>> design.graph.n_edges
    1284
    """
    if not 1 <= n_clusters <= n_sites:
        raise ParameterError(f"n_clusters must lie between 1 and n_sites={n_sites}, got {n_clusters}")
    if loss not in ("linear", "logistic"):
        raise ParameterError(f"loss must be 'linear' or 'logistic', got {loss!r}")
    rng = np.random.default_rng(seed)
    # the order of the draws is fixed: parameters, flips, features, noise
    centres = signal * rng.normal(scale=n_features**-0.25, size=(n_clusters, n_features))
    labels = np.arange(n_sites) * n_clusters // n_sites
    truth = Graph.clusters(labels.tolist())
    graph = truth.corrupt(varrho, seed=rng)
    X = rng.normal(size=(n_sites, n_samples, n_features))
    theta_star = centres[labels]
    mean = np.einsum("vnp,vp->vn", X, theta_star)
    if loss == "linear":
        y = mean + noise * rng.normal(size=mean.shape)
    else:
        y = (rng.random(mean.shape) < 1.0 / (1.0 + np.exp(-mean))).astype(np.float64)
    site = np.repeat(np.arange(n_sites), n_samples)
    federation = Federation.from_arrays(X.reshape(-1, n_features), y.reshape(-1), site)
    return Design(federation, graph, truth, theta_star, labels)


# --- tables like them ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    """What a look-alike is drawn from: ``intercepts`` and ``slopes`` are standard deviations between sites."""

    sites: int
    rows: tuple[int, int]
    features: int
    loss: str
    test_size: float
    intercepts: float
    slopes: float
    groups: int = 1
    level: float = 0.0
    noise: float = 1.0


_SHAPES: Mapping[str, _Shape] = {
    "school": _Shape(40, (25, 120), 10, "linear", 0.25, 0.4, 0.1),
    "landmine": _Shape(29, (50, 70), 9, "logistic", 0.5, 0.4, 0.2, groups=2, level=-2.5),
    "sacramento": _Shape(30, (1, 40), 3, "linear", 1 / 3, 0.5, 0.05, noise=0.6),
    "computer survey": _Shape(60, (20, 20), 8, "linear", 0.2, 0.8, 0.4, groups=3),
    "melanoma": _Shape(9, (3, 60), 1, "poisson", 0.3, 0.4, 0.1),
    "election": _Shape(15, (50, 100), 12, "logistic", 1 / 3, 0.8, 0.3, level=-1.5),
}


def look_alike(name: str, seed: int = 0) -> PublicTable:
    """Generate a small table that is like a public one, for where the files are not.

    Examples
    --------
    >>> from fedkin.datasets import look_alike
    >>> look_alike("melanoma").federation
    Federation(9 sites, 189 rows, 1 feature)
    """
    if name not in _SHAPES:
        raise ParameterError(f"there is no table {name!r} to be like; choose one of {listed(_SHAPES)}")
    shape, rng = _SHAPES[name], np.random.default_rng(seed)
    sizes = rng.integers(shape.rows[0], shape.rows[1] + 1, shape.sites)
    site = np.repeat(np.arange(shape.sites), sizes)
    centre = rng.normal(scale=(2 * shape.features) ** -0.5, size=(shape.groups, shape.features))
    slopes = centre[np.arange(shape.sites) * shape.groups // shape.sites]
    slopes = slopes + shape.slopes * rng.normal(size=slopes.shape)
    X = rng.normal(size=(len(site), shape.features))
    eta = shape.level + (shape.intercepts * rng.normal(size=shape.sites))[site] + (X * slopes[site]).sum(axis=1)
    offset = None
    if shape.loss == "linear":
        y = eta + shape.noise * rng.normal(size=len(eta))
    elif shape.loss == "logistic":
        y = (rng.random(len(eta)) < 1 / (1 + np.exp(-eta))).astype(np.float64)
    else:
        offset = rng.uniform(1.0, 4.0, len(eta))
        y = rng.poisson(np.exp(eta + offset)).astype(np.float64)
    federation = Federation.from_arrays(X, y, [f"site {u}" for u in site], offset=offset)
    return PublicTable(name, federation, shape.loss, shape.test_size, generated=True)
