"""The paper's quantities on given data: what its theorems promise, when the truth is known.

Each function names its equation. The scale of lambda needs care: Theorem 1 states
``lambda = |V|^{-1/2} R*{(D^+)' Psi}``, but its proof uses ``lambda / |V|^{1/2}`` as the penalty level of the objective
(eq. basic_ineq3 against eq. ob). `theorem1_lambda` is the theorem's number and `objective_lam` turns it into the
``lam`` of `fedkin.Problem`.

Arguments that several functions take: ``federation``, the data; ``graph``, the edges E; ``theta_star (V, p)``, the
true parameters in the federation's order; ``loss``, what each site minimises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse
from scipy.sparse.linalg import splu
from scipy.special import chdtri

from fedkin._base import Array, Index, Mask, check_choice
from fedkin.core.newton import sum_groups
from fedkin.core.penalties import L1, Penalty, make_penalty
from fedkin.core.quadratics import RowData
from fedkin.core.rows import LossLike
from fedkin.core.terms import SiteTerms
from fedkin.data import Federation
from fedkin.errors import ParameterError
from fedkin.graph import Graph

__all__ = [
    "MinimumSignal",
    "Sizes",
    "compatibility_lower_bound",
    "gamma_squared",
    "graph_fidelity",
    "kappa",
    "minimum_signal_check",
    "objective_lam",
    "rho",
    "theorem1_bound",
    "theorem1_lambda",
    "theorem2_bound",
    "theorem2_rate",
]


def rho(federation: Federation, graph: Graph, theta_star: ArrayLike, loss: LossLike = "linear") -> float:
    """``rho = |V|^{-1/2} ||Pi_ker(D) Psi||_F`` (Theorem 1): the noise that agreement along the graph cannot remove.

    Psi are the gradients of the sites' mean losses at ``theta_star``; of the graph, only components matter.

    Examples
    --------
    >>> import fedkin
    >>> fed, truth = fedkin.Federation({"a": [[1.0]], "b": [[-1.0]]}), [[0.0], [0.0]]
    >>> rho(fed, fedkin.Graph.complete("ab"), truth, "mean"), rho(fed, fedkin.Graph.empty("ab"), truth, "mean")
    (0.0, 1.0)
    """
    terms, theta = _at_truth(federation, theta_star, loss)
    means = _component_means(graph.aligned(federation.sites), terms.gradients(theta))
    return float(np.linalg.norm(means) / math.sqrt(federation.n_sites))


def theorem1_lambda(
    federation: Federation,
    graph: Graph,
    theta_star: ArrayLike,
    loss: LossLike = "linear",
    penalty: str | Penalty = "l1",
) -> float:
    """``lambda = |V|^{-1/2} R*{(D^+)' Psi}`` (Theorem 1), with ``R*`` the largest dual norm of ``penalty`` over edges.

    Notes
    -----
    On the theorem's scale. The estimator that the theorem is about has the penalty level `objective_lam` of it, smaller
    by ``|V|^{1/2}``; with the number as it stands for ``lam``, the bound of the theorem can fail. With edge weights w,
    R is ``sum_e w_e phi`` and D becomes ``diag(w) D``.

    Examples
    --------
    >>> import fedkin
    >>> fed = fedkin.Federation({"a": [[1.0]], "b": [[-1.0]]})
    >>> lam = theorem1_lambda(fed, fedkin.Graph.complete("ab"), [[0.0], [0.0]], "mean")
    >>> round(lam, 4), round(objective_lam(lam, 2), 4)
    (0.7071, 0.5)
    """
    graph = graph.aligned(federation.sites)
    if graph.n_edges == 0:
        return 0.0
    terms, theta = _at_truth(federation, theta_star, loss)
    psi = terms.gradients(theta)
    # (D^+)' = D (D'D)^+. Differences do not see constants on components, so any solution x of D'D x = psi - mean will
    # do; asking for 0 at the first site of each component makes the matrix regular.
    grounded = np.zeros(graph.n_sites)
    grounded[np.unique(graph.components(), return_index=True)[1]] = 1.0
    laplacian = graph.reweighted(graph.weights**2).laplacian() + sparse.diags_array(grounded)
    x = splu(sparse.csc_array(laplacian)).solve(psi - _component_means(graph, psi))
    rows = graph.weights[:, None] * (graph.incidence() @ x)
    return float(make_penalty(penalty).dual_norm(rows).max() / math.sqrt(federation.n_sites))


def objective_lam(lam: float, n_sites: int) -> float:
    """The ``lam`` of the objective that belongs to the theorem's lambda: ``lambda / |V|^{1/2}``.

    Examples
    --------
    >>> objective_lam(0.5, 4)
    0.25
    """
    return lam / math.sqrt(n_sites)


def kappa(federation: Federation, theta_star: ArrayLike, loss: LossLike = "linear") -> float:
    """Smallest ``kappa >= 1`` with all Hessians' eigenvalues at ``theta_star`` in ``[1/kappa, kappa]`` (Condition 2.2).

    Infinite when some Hessian is singular. The condition asks for a ball around ``theta_star``; for losses that are not
    quadratic the value here is its centre's.

    Examples
    --------
    >>> import fedkin
    >>> kappa(fedkin.Federation({"a": ([[2.0], [2.0]], [0.0, 1.0])}), [[0.0]])
    4.0
    """
    terms, theta = _at_truth(federation, theta_star, loss)
    values = np.linalg.eigvalsh(terms.hessians(theta))
    smallest, largest = float(values.min()), float(values.max())
    return max(largest, 1.0 / smallest, 1.0) if smallest > 0 else math.inf


def theorem1_bound(
    rho: float,
    lam: float,
    n_false_edges: int,
    kappa: float,
    kappa_0: float,
    form: Literal["proved", "printed"] = "proved",
) -> float:
    """Right-hand side of Theorem 1, a bound on ``||Theta_hat - Theta_star||_F^2 / |V|``.

    Parameters
    ----------
    rho, kappa : float
        From the functions of these names.
    lam : float
        From `theorem1_lambda`, on the theorem's scale (any larger one will do, if the estimator uses it).
    n_false_edges : int
        |S|, edges between sites with different parameters.
    kappa_0 : float
        Lower bound on the compatibility factor, from `compatibility_lower_bound`.
    form : "proved" or "printed"
        The proof arrives at ``2 kappa^2 (rho^2 + 4 |S| lambda^2 / kappa_0^2)``; the theorem prints ``kappa_0`` without
        the square, which gives less for ``kappa_0 < 1``.

    Examples
    --------
    >>> theorem1_bound(rho=0.5, lam=0.5, n_false_edges=1, kappa=1.0, kappa_0=0.5)
    8.5
    """
    check_choice("form", form, ("proved", "printed"))
    factor = kappa_0**2 if form == "proved" else kappa_0
    return 2.0 * kappa**2 * (rho**2 + 4.0 * n_false_edges * lam**2 / factor)


@dataclass(frozen=True)
class Sizes:
    """The numbers of Theorem 2 that can be counted."""

    n_samples: int  # n, the smallest number of rows of a site
    n_sites: int  # |V|
    n_params: int  # p
    n_components: int  # K(E), connected components of the graph
    n_edges: int  # |E|
    n_false_edges: int  # |S|

    @classmethod
    def of(cls, federation: Federation, graph: Graph, theta_star: ArrayLike) -> Sizes:
        """Count them on data whose true parameters ``theta_star (V, p)`` are known.

        Examples
        --------
        >>> import fedkin
        >>> fed = fedkin.Federation({"a": [[0.0]] * 9, "b": [[1.0]] * 8})
        >>> Sizes.of(fed, fedkin.Graph.complete("ab"), [[0.0], [1.0]]).n_false_edges
        1
        """
        graph, theta = graph.aligned(federation.sites), np.asarray(theta_star, dtype=np.float64)
        if theta.ndim != 2 or len(theta) != federation.n_sites:
            raise ParameterError(
                f"theta_star has shape {theta.shape}, expected a row for each of {federation.n_sites} sites"
            )
        n, false = int(federation.n_samples.min()), int(_joins_different(graph, theta).sum())
        return cls(n, federation.n_sites, theta.shape[1], graph.n_components, graph.n_edges, false)

    def unit(self, sigma: float) -> float:
        """``sigma^2 p / (n |V|)``."""
        return sigma**2 * self.n_params / (self.n_samples * self.n_sites)


def theorem2_rate(sizes: Sizes, sigma: float = 1.0) -> float:
    """``sigma^2 p (K + |S|) / (n |V|)``: the rate after Theorem 2, without its logarithms and constants.

    ``sigma`` is the sub-Gaussian size of the scores (for the linear model with unit features, the noise).

    Examples
    --------
    >>> theorem2_rate(Sizes(100, 100, n_params=20, n_components=5, n_edges=900, n_false_edges=0))
    0.01
    """
    return sizes.unit(sigma) * (sizes.n_components + sizes.n_false_edges)


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
        The counts.
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
    >>> sizes = Sizes(100, 100, n_params=20, n_components=5, n_edges=900, n_false_edges=0)
    >>> round(theorem2_bound(sizes, gamma_squared=1.0, kappa=1.0, kappa_0=1.0), 4)
    0.0599
    """
    if not 0 < xi < 1:
        raise ParameterError(f"xi is a probability between 0 and 1, got {xi!r}")
    unit, wrong = sizes.unit(sigma), 0.0
    if sizes.n_false_edges:
        wrong = 4 * c_lambda / (kappa_0 * gamma_squared) * unit * sizes.n_false_edges * math.log(sizes.n_edges / xi)
    return 2 * kappa**2 * (c_rho * unit * sizes.n_components * math.log(1 / xi) + wrong)


def gamma_squared(graph: Graph) -> float:
    """``gamma_G^2``, the smallest nonzero eigenvalue of ``D'D`` without weights (Theorem 2); infinite without edges.

    For a connected graph it is the algebraic connectivity.

    Examples
    --------
    >>> from fedkin import Graph
    >>> round(gamma_squared(Graph.complete(range(6))), 9)
    6.0
    """
    return graph.algebraic_connectivity()


def graph_fidelity(graph: Graph, truth: Graph) -> float:
    """``GF = K(E0) / (K(E) + |E minus E0|)`` (after Theorem 2); ``truth`` has a clique for each group of equal sites.

    Examples
    --------
    >>> from fedkin import Graph
    >>> truth = Graph.clusters([0, 0, 1, 1])
    >>> graph_fidelity(truth, truth), graph_fidelity(Graph.empty(range(4)), truth)
    (1.0, 0.5)
    """
    return graph.fidelity(truth)


def compatibility_lower_bound(
    graph: Graph, n_false_edges: int, penalty: str | Penalty = "l1", *, n_params: int
) -> float:
    """Lower bound ``1 / (2 min(sqrt(d), sqrt(|T|)))`` on the compatibility factor ``kappa_T(D)`` (after Definition 1).

    Parameters
    ----------
    graph : Graph
        G, with largest degree d.
    n_false_edges : int
        |T|; in the theorems T = S, the false edges. The bound is 1 for an empty T.
    penalty : str or Penalty
        The norm phi that R sums.
    n_params : int
        p, which matters for "l1" only.

    Notes
    -----
    The bound comes from p = 1, and carries over to p > 1 for norms that are at most the Euclidean one ("l2", "linf").
    For "l1" the factor is exactly ``p^{-1/2}`` times the one for p = 1 (take equal coordinates), so the bound is
    divided by ``sqrt(p)`` here, although the paper states it without. With edge weights R is ``sum_e w_e phi``, and the
    bound is divided by the largest weight.

    Examples
    --------
    >>> from fedkin import Graph
    >>> compatibility_lower_bound(Graph.complete(range(5)), 9, n_params=1)
    0.25
    """
    if not 0 <= n_false_edges <= graph.n_edges:
        raise ParameterError(f"n_false_edges must lie between 0 and the {graph.n_edges} edges, got {n_false_edges!r}")
    if n_false_edges == 0:
        return 1.0
    bound = 1.0 / (2.0 * math.sqrt(min(int(graph.degree.max()), n_false_edges)))
    if isinstance(make_penalty(penalty), L1):
        bound /= math.sqrt(n_params)
    return bound / float(graph.weights.max())


@dataclass(frozen=True, eq=False)
class MinimumSignal:
    """Whether every false edge shows clearly enough to be dropped (eq. min_signal)."""

    edges: Index  # (|S|, 2), ends of edges with different true parameters, as positions in the federation
    signal: Array  # (|S|,), ``n_e dist^2``
    required: float  # ``4 chi2_p(level / |E|)``

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
    federation, graph, theta_star, loss
        As in `rho`; edges between different rows of ``theta_star`` are false.
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
    >>> fed = fedkin.Federation({"a": [[0.0]] * 50, "b": [[1.0]] * 50})
    >>> check = minimum_signal_check(fed, fedkin.Graph.complete("ab"), [[0.0], [1.0]], "mean")
    >>> check.signal.round(6).tolist(), round(check.required, 2), check.holds
    ([25.0], 15.37, True)
    """
    if not 0 < level < 1:
        raise ParameterError(f"level is the size of a test, between 0 and 1, got {level!r}")
    graph = graph.aligned(federation.sites)
    terms, theta = _at_truth(federation, theta_star, loss)
    false = graph.edges[_joins_different(graph, theta)]
    i, j = false.T
    information = federation.n_samples[:, None, None] * terms.hessians(theta)
    signal = np.empty(i.size)
    step = max(1, 2**20 // terms.n_params**2)
    for start in range(0, i.size, step):
        a, b = i[start : start + step], j[start : start + step]
        # (A^{-1} + B^{-1})^{-1} = A (A + B)^{-1} B, which is also right for singular A or B
        first, second, d = information[a], information[b], (theta[a] - theta[b])[:, :, None]
        middle = np.linalg.pinv(first + second, hermitian=True) @ (second @ d)
        signal[start : start + step] = (d * (first @ middle)).sum(axis=(1, 2)) / dispersion
    return MinimumSignal(false, signal, 4.0 * float(chdtri(terms.n_params, level / max(graph.n_edges, 1))))


def _at_truth(federation: Federation, theta_star: ArrayLike, loss: LossLike) -> tuple[SiteTerms, Array]:
    """The sites' mean losses, without a ridge, and ``theta_star`` as an array, or the error that it is none."""
    data, theta = RowData(federation, loss), np.asarray(theta_star, dtype=np.float64)
    if theta.shape != data.zeros.shape:
        raise ParameterError(f"theta_star has shape {theta.shape}, expected {data.zeros.shape}: a row for every site")
    return data.terms(data.zeros[0]), theta


def _joins_different(graph: Graph, theta: Array) -> Mask:
    """Which edges are false: those between different rows of ``theta (V, p)``."""
    return np.asarray((theta[graph.edges[:, 0]] != theta[graph.edges[:, 1]]).any(axis=1))


def _component_means(graph: Graph, values: Array) -> Array:
    """The projection onto ker(D): every row replaced by the mean over its connected component."""
    labels = graph.components()
    sizes = np.bincount(labels)
    return np.asarray((sum_groups(values, labels, sizes.size) / sizes[:, None])[labels])
