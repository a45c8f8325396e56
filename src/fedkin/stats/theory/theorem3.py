"""Theorem 3: when edge selection finds all false edges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedkin._base import Array, Index
from fedkin.data import Federation
from fedkin.errors import ParameterError
from fedkin.graph import Graph
from fedkin.objective import LossLike
from fedkin.stats.theory.theorem1 import terms_of, true_parameters


@dataclass(frozen=True, eq=False)
class MinimumSignal:
    """Whether every false edge shows clearly enough to be dropped (eq. min_signal).

    Attributes
    ----------
    edges : int array (|S|, 2)
        End points of the false edges (those with different true parameters), as positions in the federation.
    signal : array (|S|,)
        ``n_e dist^2``.
    required : float
        ``4 chi2_p(level / |E|)``.
    """

    edges: Index
    signal: Array
    required: float

    @property
    def ratio(self) -> Array:
        """``signal / required``, at least 1 on every edge when the condition holds."""
        return self.signal / self.required

    @property
    def holds(self) -> bool:
        """Whether the condition of Theorem 3 holds (also when there are no false edges)."""
        return bool((self.signal >= self.required).all())


def minimum_signal_check(
    federation: Federation,
    graph: Graph,
    theta_star: ArrayLike,
    loss: LossLike = "linear",
    level: float = 0.05,
    dispersion: float = 1.0,
) -> MinimumSignal:
    """Check the minimum-signal condition of Theorem 3 on every false edge.

    Parameters
    ----------
    federation : Federation
        The data.
    graph : Graph
        The candidate edges E.
    theta_star : array (V, p)
        True parameters; edges between different rows are false.
    loss : str, Loss or mapping {device: loss}
        What each device minimises.
    level : float
        Size of the edge selection.
    dispersion : float
        Noise variance. The paper's condition has 1 (the second Bartlett identity); the signal is divided by it.

    Notes
    -----
    ``n_e dist^2 = d' {(n_i H_i)^{-1} + (n_j H_j)^{-1}}^{-1} d`` with d the true difference and H_u the Hessian at the
    true parameter: the noncentrality of the Wald statistic.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.stats.theory import minimum_signal_check
    >>> fed = fedkin.Federation({"a": [[0.0]] * 50, "b": [[1.0]] * 50})
    >>> check = minimum_signal_check(fed, fedkin.Graph.complete("ab"), [[0.0], [1.0]], "mean")
    >>> check.signal.round(6).tolist(), round(check.required, 2), check.holds
    ([25.0], 15.37, True)
    """
    from scipy.special import chdtri

    if not 0 < level < 1:
        raise ParameterError(f"level is the size of a test, between 0 and 1, got {level!r}")
    graph = graph.aligned(federation.devices)
    terms = terms_of(federation, loss)
    theta = true_parameters(federation, theta_star, terms)
    i, j = graph.edges.T
    false = (theta[i] != theta[j]).any(axis=1)
    i, j = i[false], j[false]
    hessians = terms.hessians(theta)
    n = federation.n_samples[:, None, None]
    signal = np.empty(i.size)
    step = max(1, 2**20 // terms.n_params**2)
    for start in range(0, i.size, step):
        a, b = i[start : start + step], j[start : start + step]
        # (A^{-1} + B^{-1})^{-1} = A (A + B)^{-1} B, which is also right for singular A or B
        first, second = n[a] * hessians[a], n[b] * hessians[b]
        d = (theta[a] - theta[b])[:, :, None]
        middle = np.linalg.pinv(first + second, hermitian=True) @ (second @ d)
        signal[start : start + step] = (d * (first @ middle)).sum(axis=(1, 2)) / dispersion
    required = 4.0 * float(chdtri(terms.n_params, level / max(graph.n_edges, 1)))
    return MinimumSignal(graph.edges[false], signal, required)
