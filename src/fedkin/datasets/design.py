"""Draw the paper's simulation, with its truth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array
from fedkin.data import Federation
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
