"""Theorem 2: what the bound of Theorem 1 becomes with high probability."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedkin.data import Federation
from fedkin.errors import ParameterError
from fedkin.graph import Graph


@dataclass(frozen=True)
class Sizes:
    """The numbers of Theorem 2 that can be counted.

    Attributes
    ----------
    n_samples : int
        n, the smallest number of rows of a device.
    n_devices, n_params : int
        |V| and p.
    n_components : int
        K(E), connected components of the graph.
    n_edges, n_false_edges : int
        |E| and |S|.
    """

    n_samples: int
    n_devices: int
    n_params: int
    n_components: int
    n_edges: int
    n_false_edges: int

    @classmethod
    def of(cls, federation: Federation, graph: Graph, theta_star: ArrayLike) -> Sizes:
        """Count them on data whose true parameters ``theta_star (V, p)`` are known.

        Examples
        --------
        >>> import fedkin
        >>> from fedkin.stats.theory import Sizes
        >>> fed = fedkin.Federation({"a": [[0.0]] * 9, "b": [[1.0]] * 8})
        >>> Sizes.of(fed, fedkin.Graph.complete("ab"), [[0.0], [1.0]]).n_false_edges
        1
        """
        graph, theta = graph.aligned(federation.devices), np.asarray(theta_star, dtype=np.float64)
        if theta.ndim != 2 or len(theta) != federation.n_devices:
            raise ParameterError(
                f"theta_star has shape {theta.shape}, expected a row for each of {federation.n_devices} devices"
            )
        i, j = graph.edges.T
        return cls(
            n_samples=int(federation.n_samples.min()),
            n_devices=federation.n_devices,
            n_params=theta.shape[1],
            n_components=int(graph.components().max()) + 1,
            n_edges=graph.n_edges,
            n_false_edges=int((theta[i] != theta[j]).any(axis=1).sum()),
        )


def theorem2_rate(sizes: Sizes, sigma: float = 1.0) -> float:
    """``sigma^2 p (K + |S|) / (n |V|)``: the rate after Theorem 2, without its logarithms and constants.

    Parameters
    ----------
    sizes : Sizes
        n, |V|, p, K and |S|.
    sigma : float
        Sub-Gaussian size of the scores (for the linear model with unit features, the noise).

    Examples
    --------
    >>> from fedkin.stats.theory import Sizes, theorem2_rate
    >>> theorem2_rate(Sizes(100, 100, n_params=20, n_components=5, n_edges=900, n_false_edges=0))
    0.01
    """
    return _unit(sizes, sigma) * (sizes.n_components + sizes.n_false_edges)


def theorem2_bound(
    sizes: Sizes,
    *,
    gamma_squared: float,
    kappa: float,
    kappa_0: float,
    xi: float = 0.05,
    sigma: float = 1.0,
    c_rho: float = 1.0,
    c_lambda: float = 1.0,
) -> float:
    """Right-hand side of eq. thm_prop: a bound that holds with probability about ``1 - xi``.

    Parameters
    ----------
    sizes : Sizes
        n, |V|, p, K, |E| and |S|.
    gamma_squared, kappa, kappa_0 : float
        From the functions of these names and `compatibility_lower_bound`.
    xi : float
        Between 0 and 1.
    sigma : float
        Sub-Gaussian size of the scores.
    c_rho, c_lambda : float
        The theorem's constants, of which it only says that they exist.

    Notes
    -----
    As printed, for phi = l1, with ``u = sigma^2 p / (n |V|)``:
    ``2 kappa^2 {C_rho u K log(1/xi) + 4 C_lambda / (kappa_0 gamma_G^2) u |S| log(|E|/xi)}``.

    Examples
    --------
    >>> from fedkin.stats.theory import Sizes, theorem2_bound
    >>> sizes = Sizes(100, 100, n_params=20, n_components=5, n_edges=900, n_false_edges=0)
    >>> round(theorem2_bound(sizes, gamma_squared=1.0, kappa=1.0, kappa_0=1.0), 4)
    0.0599
    """
    if not 0 < xi < 1:
        raise ParameterError(f"xi is a probability between 0 and 1, got {xi!r}")
    unit = _unit(sizes, sigma)
    noise = c_rho * unit * sizes.n_components * math.log(1 / xi)
    wrong = 0.0
    if sizes.n_false_edges:
        wrong = 4 * c_lambda / (kappa_0 * gamma_squared) * unit * sizes.n_false_edges * math.log(sizes.n_edges / xi)
    return 2 * kappa**2 * (noise + wrong)


def _unit(sizes: Sizes, sigma: float) -> float:
    return sigma**2 * sizes.n_params / (sizes.n_samples * sizes.n_devices)
