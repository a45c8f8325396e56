"""Theorem 1: a bound on the error, for given noise and penalty level."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from fedkin._base import Array, check_choice
from fedkin.data import Federation
from fedkin.errors import ParameterError
from fedkin.graph import Graph
from fedkin.objective import DeviceTerms, LossLike, Penalty, build_terms, make_penalty, resolve_losses, sum_groups


def rho(federation: Federation, graph: Graph, theta_star: ArrayLike, loss: LossLike = "linear") -> float:
    """``rho = |V|^{-1/2} ||Pi_ker(D) Psi||_F`` (Theorem 1): the noise that agreement along the graph cannot remove.

    Parameters
    ----------
    federation : Federation
        The data.
    graph : Graph
        G; only its connected components matter.
    theta_star : array (V, p)
        True parameters, in the federation's order.
    loss : str, Loss or mapping {device: loss}
        Psi are the gradients of the devices' mean losses at ``theta_star``.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.stats.theory import rho
    >>> fed = fedkin.Federation({"a": [[1.0]], "b": [[-1.0]]})
    >>> truth = [[0.0], [0.0]]
    >>> rho(fed, fedkin.Graph.complete("ab"), truth, "mean"), rho(fed, fedkin.Graph.empty("ab"), truth, "mean")
    (0.0, 1.0)
    """
    psi = _gradients(federation, theta_star, loss)
    means = _component_means(graph.aligned(federation.devices), psi)
    return float(np.linalg.norm(means) / math.sqrt(federation.n_devices))


def theorem1_lambda(
    federation: Federation,
    graph: Graph,
    theta_star: ArrayLike,
    loss: LossLike = "linear",
    penalty: str | Penalty = "l1",
) -> float:
    """``lambda = |V|^{-1/2} R*{(D^+)' Psi}`` (Theorem 1), with ``R*`` the largest dual norm over the edges.

    Parameters
    ----------
    federation : Federation
        The data.
    graph : Graph
        G. With edge weights w, R is ``sum_e w_e phi`` and D becomes ``diag(w) D``.
    theta_star : array (V, p)
        True parameters, in the federation's order.
    loss : str, Loss or mapping {device: loss}
        Psi are the gradients of the devices' mean losses at ``theta_star``.
    penalty : str or Penalty
        The norm phi.

    Notes
    -----
    On the theorem's scale. The estimator that the theorem is about has the penalty level `objective_lam` of it, smaller
    by ``|V|^{1/2}``; with the number as it stands for ``lam``, the bound of the theorem can fail.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.stats.theory import objective_lam, theorem1_lambda
    >>> fed = fedkin.Federation({"a": [[1.0]], "b": [[-1.0]]})
    >>> lam = theorem1_lambda(fed, fedkin.Graph.complete("ab"), [[0.0], [0.0]], "mean")
    >>> round(lam, 4), round(objective_lam(lam, 2), 4)
    (0.7071, 0.5)
    """
    graph = graph.aligned(federation.devices)
    if graph.n_edges == 0:
        return 0.0
    from scipy import sparse
    from scipy.sparse.linalg import splu

    psi = _gradients(federation, theta_star, loss)
    # (D^+)' = D (D'D)^+. Differences do not see constants on components, so any solution x of D'D x = psi - mean will
    # do; asking for 0 at the first device of each component makes the matrix regular.
    labels = graph.components()
    grounded = np.zeros(graph.n_devices)
    grounded[np.unique(labels, return_index=True)[1]] = 1.0
    laplacian = graph.reweighted(graph.weights**2).laplacian() + sparse.diags_array(grounded)
    x = splu(sparse.csc_array(laplacian)).solve(psi - _component_means(graph, psi))
    rows = graph.weights[:, None] * (graph.incidence() @ x)
    return float(make_penalty(penalty).dual_norm(rows).max() / math.sqrt(federation.n_devices))


def objective_lam(lam: float, n_devices: int) -> float:
    """The ``lam`` of the objective that belongs to the theorem's lambda: ``lambda / |V|^{1/2}``.

    Parameters
    ----------
    lam : float
        Lambda on the scale of Theorem 1.
    n_devices : int
        |V|.

    Examples
    --------
    >>> from fedkin.stats.theory import objective_lam
    >>> objective_lam(0.5, 4)
    0.25
    """
    return lam / math.sqrt(n_devices)


def kappa(federation: Federation, theta_star: ArrayLike, loss: LossLike = "linear") -> float:
    """Smallest ``kappa >= 1`` with all Hessians' eigenvalues at ``theta_star`` in ``[1/kappa, kappa]`` (Condition 2.2).

    Parameters
    ----------
    federation : Federation
        The data.
    theta_star : array (V, p)
        True parameters. The condition asks for a ball around them; for losses that are not quadratic the value here is
        its centre's.
    loss : str, Loss or mapping {device: loss}
        What each device minimises.

    Returns
    -------
    float
        Infinite when some Hessian is singular.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.stats.theory import kappa
    >>> kappa(fedkin.Federation({"a": ([[2.0], [2.0]], [0.0, 1.0])}), [[0.0]])
    4.0
    """
    terms = terms_of(federation, loss)
    values = np.linalg.eigvalsh(terms.hessians(true_parameters(federation, theta_star, terms)))
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
    rho : float
        From `rho`.
    lam : float
        From `theorem1_lambda`, on the theorem's scale (any larger one will do, if the estimator uses it).
    n_false_edges : int
        |S|, edges between devices with different parameters.
    kappa : float
        From `kappa`.
    kappa_0 : float
        Lower bound on the compatibility factor, from `compatibility_lower_bound`.
    form : "proved" or "printed"
        The proof arrives at ``2 kappa^2 (rho^2 + 4 |S| lambda^2 / kappa_0^2)``; the theorem prints ``kappa_0`` without
        the square, which gives less for ``kappa_0 < 1``.

    Examples
    --------
    >>> from fedkin.stats.theory import theorem1_bound
    >>> theorem1_bound(rho=0.5, lam=0.5, n_false_edges=1, kappa=1.0, kappa_0=0.5)
    8.5
    """
    check_choice("form", form, ("proved", "printed"))
    factor = kappa_0**2 if form == "proved" else kappa_0
    return 2.0 * kappa**2 * (rho**2 + 4.0 * n_false_edges * lam**2 / factor)


def terms_of(federation: Federation, loss: LossLike) -> DeviceTerms:
    """The devices' mean losses, without a ridge."""
    losses = resolve_losses(loss, federation)
    return build_terms(federation, losses, np.zeros(losses[0].n_params(federation.n_features)))


def true_parameters(federation: Federation, theta_star: ArrayLike, terms: DeviceTerms) -> Array:
    """``theta_star`` as an array ``(V, p)``, or the error that it is none."""
    theta = np.asarray(theta_star, dtype=np.float64)
    expected = (federation.n_devices, terms.n_params)
    if theta.shape != expected:
        raise ParameterError(f"theta_star has shape {theta.shape}, expected {expected}: a row for every device")
    return theta


def _gradients(federation: Federation, theta_star: ArrayLike, loss: LossLike) -> Array:
    terms = terms_of(federation, loss)
    return terms.gradients(true_parameters(federation, theta_star, terms))


def _component_means(graph: Graph, values: Array) -> Array:
    """The projection onto ker(D): every row replaced by the mean over its connected component."""
    labels = graph.components()
    sizes = np.bincount(labels)
    return np.asarray((sum_groups(values, labels, sizes.size) / sizes[:, None])[labels])
