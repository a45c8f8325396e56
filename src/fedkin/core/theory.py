"""Compute the bounds of the paper's theorems for data with a known truth.

Theorem 1 states ``lambda = |V|^{-1/2} R*{(D^+)' Psi}``, but its proof uses ``lambda / |V|^{1/2}`` as a level of
the objective (eq. basic_ineq3 against eq. ob): `theorem1_lambda` is the theorem's number, `objective_lam` turns it into
the ``lam`` of `fedkin.Problem`. ``theta_star (V, p)`` are the true parameters in the federation's order.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse
from scipy.sparse.linalg import ArpackNoConvergence, eigsh, splu
from scipy.special import chdtri

from fedkin._base import Array, Index, Mask, check_choice, check_positive, check_whole
from fedkin.core.linalg import sum_groups
from fedkin.core.penalties import L1, Penalty, make_penalty
from fedkin.core.problem import Problem, Solution
from fedkin.core.quadratics import SiteTerms
from fedkin.core.sitedata import LossLike, RowData
from fedkin.data import Federation
from fedkin.errors import ParameterError
from fedkin.graph import Graph

__all__ = [
    "ConvergenceConstants", "MinimumSignal", "Sizes", "compatibility_lower_bound", "gamma_squared", "graph_fidelity",
    "kappa", "minimum_signal_check", "objective_lam", "rho", "score_bound", "theorem1_bound", "theorem1_lambda",
    "theorem2_bound", "theorem2_rate",
]  # fmt: skip

_DENSE = 1500  # all eigenvalues are computed up to this many sites


def rho(federation: Federation, graph: Graph, theta_star: ArrayLike, loss: LossLike = "linear") -> float:
    """Return ``rho = |V|^{-1/2} ||Pi_ker(D) Psi||_F`` (Theorem 1), the error that pooling cannot remove."""
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
    """Return ``lambda = |V|^{-1/2} R*{(D^+)' Psi}`` (Theorem 1), with Psi the gradients at ``theta_star``.

    ``R*`` is the largest dual norm over edges; with edge weights w, D becomes ``diag(w) D``. The bound can fail with
    the result itself as ``lam``: use `objective_lam`.
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
    """Convert the theorem's lambda to the ``lam`` of the objective: ``lambda / |V|^{1/2}``."""
    return lam / math.sqrt(n_sites)


def kappa(federation: Federation, theta_star: ArrayLike, loss: LossLike = "linear") -> float:
    """Return the smallest ``kappa >= 1`` with Hessian eigenvalues at ``theta_star`` in ``[1/kappa, kappa]``."""
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
    """Return the right-hand side of Theorem 1, a bound on ``||Theta_hat - Theta_star||_F^2 / |V|``.

    ``lam`` is that of `theorem1_lambda` or more, if the estimator uses it, and ``n_false_edges`` is |S|. The proof
    arrives at ``2 kappa^2 (rho^2 + 4 |S| lambda^2 / kappa_0^2)``; the theorem prints ``kappa_0`` without the square.
    """
    check_choice("form", form, ("proved", "printed"))
    factor = kappa_0**2 if form == "proved" else kappa_0
    return 2.0 * kappa**2 * (rho**2 + 4.0 * n_false_edges * lam**2 / factor)


@dataclass(frozen=True)
class Sizes:
    """Sample, graph and parameter counts of Theorem 2."""

    n_samples: int  # n, the smallest number of rows of a site
    n_sites: int  # |V|
    n_params: int  # p
    n_components: int  # K(E), connected components of the graph
    n_edges: int  # |E|
    n_false_edges: int  # |S|

    @classmethod
    def from_truth(cls, federation: Federation, graph: Graph, theta_star: ArrayLike) -> Sizes:
        """Count them in data with known true parameters ``theta_star (V, p)``."""
        graph, theta = graph.aligned(federation.sites), np.asarray(theta_star, dtype=np.float64)
        if theta.ndim != 2 or len(theta) != federation.n_sites:
            raise ParameterError(
                f"theta_star has shape {theta.shape}, expected a row for each of {federation.n_sites} sites"
            )
        n, false = int(federation.n_samples.min()), int(_joins_different(graph, theta).sum())
        return cls(n, federation.n_sites, theta.shape[1], graph.n_components, graph.n_edges, false)

    def unit(self, sigma: float) -> float:
        """Return ``sigma^2 p / (n |V|)``."""
        return sigma**2 * self.n_params / (self.n_samples * self.n_sites)


def theorem2_rate(sizes: Sizes, sigma: float = 1.0) -> float:
    """Return ``sigma^2 p (K + |S|) / (n |V|)``: the rate after Theorem 2; ``sigma`` is the size of the scores."""
    return sizes.unit(sigma) * (sizes.n_components + sizes.n_false_edges)


def theorem2_bound(
    sizes: Sizes,
    *,
    gamma_squared: float,
    kappa: float,
    kappa_0: float,
    xi: float = 0.05,
    sigma: float = 1.0,
) -> float:
    """Return the right-hand side of eq. thm_prop: a bound that holds with probability about ``1 - xi``.

    As printed, for phi = l1, with ``u = sigma^2 p / (n |V|)``, and with 1 for the theorem's two unspecified
    constants: ``2 kappa^2 {u K log(1/xi) + 4 / (kappa_0 gamma_G^2) u |S| log(|E|/xi)}``. Its proof starts from
    Theorem 1, whose own proof has ``kappa_0^2``.
    """
    if not 0 < xi < 1:
        raise ParameterError(f"xi is a probability between 0 and 1, got {xi!r}")
    unit, wrong = sizes.unit(sigma), 0.0
    if sizes.n_false_edges:
        wrong = 4 / (kappa_0 * gamma_squared) * unit * sizes.n_false_edges * math.log(sizes.n_edges / xi)
    return 2 * kappa**2 * (unit * sizes.n_components * math.log(1 / xi) + wrong)


#: ``GF = K(E0) / (K(E) + |E minus E0|)`` of a graph and the true one (after Theorem 2).
graph_fidelity = Graph.fidelity


def gamma_squared(graph: Graph) -> float:
    """Return ``gamma_G^2``, the smallest nonzero eigenvalue of ``D'D`` without weights (Theorem 2), if any."""
    laplacian, labels = graph.laplacian(weighted=False), graph.components()
    parts = (np.flatnonzero(labels == label) for label in np.flatnonzero(np.bincount(labels) > 1))
    return min((_second_eigenvalue(laplacian[members][:, members]) for members in parts), default=math.inf)


def _second_eigenvalue(laplacian: sparse.csr_array) -> float:
    """Return the second smallest eigenvalue of a Laplacian."""
    size = laplacian.shape[0]
    if size <= _DENSE:
        return float(np.linalg.eigvalsh(laplacian.toarray())[1])
    start = np.random.default_rng(0).standard_normal(size)
    try:  # fast on random graphs
        found = eigsh(laplacian, 2, v0=start, which="SA", maxiter=100, return_eigenvectors=False)
    except ArpackNoConvergence:  # paths, grids and maps, whose sparse factors are small
        found = eigsh(laplacian, 2, v0=start, sigma=-1e-6, return_eigenvectors=False)
    return float(found.max())


def compatibility_lower_bound(
    graph: Graph, n_false_edges: int, penalty: str | Penalty = "l1", *, n_params: int
) -> float:
    """Return the lower bound ``1 / (2 min(sqrt(d), sqrt(|T|)))`` on the compatibility factor (after Definition 1).

    d is the maximum degree; T are the false edges. For "l1" the factor is exactly ``p^{-1/2}`` times the one for p = 1
    (take equal coordinates), so the bound is divided by ``sqrt(p)``, although the paper states it without. With edge
    weights it is divided by the largest one.
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
    """Signal of every false edge, compared with the minimum needed to drop it (eq. min_signal)."""

    edges: Index  # (|S|, 2), ends of edges with different true parameters, as positions in the federation
    signal: Array  # (|S|,), ``n_e dist^2``
    required: float  # ``4 chi2_p(level / |E|)``

    @property
    def ratio(self) -> Array:
        """``signal / required``, at least 1 on every edge if the condition holds."""
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
) -> MinimumSignal:
    """Check the minimum-signal condition of Theorem 3 on every edge between different rows of ``theta_star``.

    ``n_e dist^2 = d' {(n_i H_i)^{-1} + (n_j H_j)^{-1}}^{-1} d`` with d the true difference and H_u the Hessian at the
    true parameter is the noncentrality of the Wald statistic at this ``level``.
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
        signal[start : start + step] = (d * (first @ middle)).sum(axis=(1, 2))
    return MinimumSignal(false, signal, 4.0 * float(chdtri(terms.n_params, level / max(graph.n_edges, 1))))


@dataclass(frozen=True)
class ConvergenceConstants:
    """Constants of Theorem 4 and Corollary 1 on the distance between the average of T rounds and the minimiser.

    Notes
    -----
    The theorem prints ``2 kappa^2 C_psi log(T) / T``, for T from `valid_from`. Its proof concerns the proximal step
    (``step=kappa`` in `fedkin.fed_admm`; the paper notes the equivalence) and, with the constants recomputed, gives
    ``(2 kappa / (|V| T)) {|V| kappa C_psi (1 + log T) / 2 + |E| (a^2 / rho + rho r_0^2 + 4 r_0 a)}`` for every T, where
    ``a`` is `dual_radius`: the proof takes duals of norm up to kappa_alpha, and then writes kappa_alpha for its square;
    strong convexity with ``1 / kappa`` gives a factor ``2 kappa`` where the proof has kappa; and iterates that begin at
    0 are within r_0 of the minimiser.
    """

    n_sites: int  # |V|
    n_edges: int  # |E|
    kappa: float  # Hessians have eigenvalues in [1 / kappa, kappa]
    c_psi: float  # C_psi, from `score_bound`
    kappa_alpha: float  # largest squared norm of an optimal dual, and at least lam |V| sup phi(a) / ||a||
    dual_radius: float  # lam |V| max w_e sup phi(a) / ||a||, which no dual exceeds
    radius: float  # r_0, of the ball of parameters
    rho: float  # of the augmented Lagrangian

    @classmethod
    def from_problem(
        cls, problem: Problem, radius: float, rho: float, solution: Solution | None = None
    ) -> ConvergenceConstants:
        """Compute the constants for a problem whose parameters lie in a ball, at the solution or at 0."""
        federation, p = problem.rows_for("Theorem 4"), problem.n_params
        directions = np.vstack([np.full(p, p**-0.5), np.eye(p)[0]])  # where l1 and the others are largest
        penalty, weights = make_penalty(problem.penalty), problem.graph.weights
        unit = problem.strength * float(penalty.value(directions).max())
        duals = unit * float(weights.max(initial=0.0))
        theta = np.zeros((problem.n_sites, p)) if solution is None else solution.theta
        squared = duals**2
        if solution is not None and solution.alpha is not None and len(solution.alpha) == problem.graph.n_edges:
            squared = float((solution.alpha**2).sum(axis=1).max(initial=0.0))
        return cls(
            n_sites=problem.n_sites,
            n_edges=problem.graph.n_edges,
            kappa=kappa(federation, theta, problem.loss),
            c_psi=score_bound(federation, radius, problem.loss),
            kappa_alpha=max(squared, unit),
            dual_radius=duals,
            radius=radius,
            rho=rho,
        )

    def bound(self, rounds: int, form: Literal["proved", "printed"] = "proved", *, availability: float = 1.0) -> float:
        """Bound ``E ||average of T rounds - minimiser||_F^2 / |V|`` (Theorem 4), for the smallest p_i (Corollary 1)."""
        check_choice("form", form, ("proved", "printed"))
        check_whole("rounds", rounds, least=1)
        if not 0 < availability <= 1:
            raise ParameterError(f"availability is a probability above 0, got {availability!r}")
        noise = self.kappa * self.c_psi / availability
        if form == "printed":
            enough = self.n_sites * noise * math.log(rounds) >= self._printed_edges
            return 2 * self.kappa * noise * math.log(rounds) / rounds if enough else math.inf
        a, r = self.dual_radius, self.radius
        edges = self.n_edges * (a**2 / self.rho + self.rho * r**2 + 4 * r * a)
        return 2 * self.kappa / rounds * (noise * (1 + math.log(rounds)) / 2 + edges / self.n_sites)

    def valid_from(self, *, availability: float = 1.0) -> int:
        """Return the smallest T that is "sufficiently large" for the printed bound."""
        exponent = self._printed_edges / (self.n_sites * self.kappa * self.c_psi / availability)
        if exponent > 700:
            raise ParameterError(f"the printed bound holds from T = exp({exponent:.0f}) on; use form='proved'")
        return max(2, math.ceil(math.exp(exponent)))

    def rounds_for(
        self, accuracy: float, form: Literal["proved", "printed"] = "proved", *, availability: float = 1.0
    ) -> int:
        """Return the number of rounds after which the bound stays at or below ``accuracy``."""
        check_positive("accuracy", accuracy)

        def enough(rounds: int) -> bool:
            return self.bound(rounds, form, availability=availability) <= accuracy

        # log(T) / T falls from T = 3 on
        high = low = 3 if form == "proved" else max(3, self.valid_from(availability=availability))
        while not enough(high):
            high *= 2
        return bisect_left(range(high + 1), True, lo=low, key=enough)

    @property
    def _printed_edges(self) -> float:
        """``|E| (8 kappa_alpha / rho + 2 r_0^2 rho + 4 r_0 kappa_alpha)``."""
        alpha, r = self.kappa_alpha, self.radius
        return self.n_edges * (8 * alpha / self.rho + 2 * r**2 * self.rho + 4 * r * alpha)


def score_bound(federation: Federation, radius: float, loss: LossLike = "linear") -> float:
    """Bound ``C_psi``: the largest mean of squared score norms of a site, over a ball of parameters (Theorem 4)."""
    check_positive("radius", radius)
    largest = 0.0
    for site, one in zip(federation.sites, RowData(federation, loss).losses, strict=True):
        rows = federation[site]
        length = np.linalg.norm(rows.X, axis=1)
        if one.location:
            squared = (radius + length) ** 2
        elif one.rowwise is None or one.n_outputs != 1:
            raise ParameterError(f"C_psi is available for losses of one linear predictor, not for {one.name}")
        else:
            y = np.asarray(rows.y, dtype=np.float64)
            shift = np.zeros_like(length) if rows.offset is None else rows.offset
            # slopes of convex losses are monotone: the largest is at an end of what the ball allows
            ends = [one.rowwise.slope_at((shift + side * radius * length)[:, None], y)[:, 0] for side in (-1, 1)]
            squared = length**2 * np.maximum(*(end**2 for end in ends))
        largest = max(largest, float(squared.mean()))
    return largest


def _at_truth(federation: Federation, theta_star: ArrayLike, loss: LossLike) -> tuple[SiteTerms, Array]:
    """Return the sites' mean losses, without a ridge, and ``theta_star`` as an array."""
    data, theta = RowData(federation, loss), np.asarray(theta_star, dtype=np.float64)
    if theta.shape != data.zeros.shape:
        raise ParameterError(f"theta_star has shape {theta.shape}, expected {data.zeros.shape}: a row for every site")
    return data.terms(data.zeros[0]), theta


def _joins_different(graph: Graph, theta: Array) -> Mask:
    return np.asarray((theta[graph.edges[:, 0]] != theta[graph.edges[:, 1]]).any(axis=1))


def _component_means(graph: Graph, values: Array) -> Array:
    """Return the projection onto ker(D): every row replaced by the mean over its connected component."""
    labels = graph.components()
    sizes = np.bincount(labels)
    return np.asarray((sum_groups(values, labels, sizes.size) / sizes[:, None])[labels])
