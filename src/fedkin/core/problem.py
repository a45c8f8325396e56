"""Define `Problem` (from data), `FusedObjective` (on arrays) and `Solution`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse

from fedkin._base import TINY, Array, Index, check_nonnegative, check_positive, count, html_card
from fedkin.core.linalg import sum_groups
from fedkin.core.penalties import Penalty, make_penalty
from fedkin.core.quadratics import QuadraticTerms, SiteTerms
from fedkin.core.sitedata import LossLike, RowData, site_data
from fedkin.core.summaries import Summaries
from fedkin.data import Federation
from fedkin.errors import DataError, ParameterError, UnknownSiteError
from fedkin.graph import Cliques, Graph
from fedkin.losses import Loss

Status = Literal["converged", "iteration_limit", "interrupted"]


#: The relative gap is never relative to less than this share of the objective at theta = 0.
_SCALE_FLOOR = 1e-6
#: Parameters whose squared length exceeds this share of the squared radius are on the boundary of the ball.
BORDER = 1.0 - 1e-9
_EUCLIDEAN = make_penalty("l2")


def gap_scale(value: float, zero: float) -> float:
    """Return the scale of relative gaps, from the objective at the solution and at theta = 0."""
    return max(abs(value), _SCALE_FLOOR * abs(zero) + TINY)


class Rerouting:
    """Redistribution of dual forces from singular sites to their regular neighbours.

    A dual force in a direction that a site's rows do not determine makes its conjugate infinite. A neighbour with a
    regular design absorbs it at almost no cost; without one, the gap needs a ball that contains a minimiser.
    """

    def __init__(self, terms: QuadraticTerms, graph: Graph) -> None:
        bad = terms.singular
        first = bad[graph.edges[:, 0]]
        self._edges = np.flatnonzero(first != bad[graph.edges[:, 1]])
        first = first[self._edges]
        self._here = np.where(first, *graph.edges[self._edges].T)  # their singular ends
        self._sign = np.where(first, -1.0, 1.0)[:, None]
        m, self._terms = self._edges.size, terms
        self._summed: Any = sparse.csr_array((np.ones(m), (self._here, np.arange(m))), shape=(graph.n_sites, m))
        incidence: Any = graph.incidence()
        self._transposed: Any = sparse.csr_array(incidence[self._edges].T)
        self.serves = m > 0  # whether any singular site has a regular neighbour

    def __call__(self, objective: FusedObjective, alpha: Array, balance: Array) -> tuple[Array, Array]:
        """Return feasible duals without such forces, and their balance.

        Duals first move as far as their balls allow. What is left moves them further; then all shrink into their balls.
        """
        penalty, limit = objective.penalty, objective.edge_radius[self._edges, None]
        here, sign = self._here, self._sign
        pull, size = self._pull(penalty, balance)
        y = alpha[self._edges]
        used = sign * np.sign(pull[here]) * y if penalty.separable else penalty.dual_norm(y)[:, None]
        room = (limit - used).clip(0.0)
        moved = sign * pull[here] * _share(room, np.maximum(self._summed @ room, size)[here])
        balance = balance + self._transposed @ moved
        pull, size = self._pull(penalty, balance)
        total = self._summed @ limit
        rest = sign * pull[here] * _share(limit, total[here])
        shrunk = 1.0 / (1.0 + float(_share(size, total).max()))
        alpha = alpha.copy()
        alpha[self._edges] += moved + rest
        return shrunk * alpha, shrunk * np.asarray(balance + self._transposed @ rest)

    def _pull(self, penalty: Penalty, balance: Array) -> tuple[Array, Array]:
        """Return forces ``(V, p)`` in directions that the rows of singular sites do not determine, and their sizes."""
        pull = self._terms.unseen(balance)
        return pull, np.abs(pull) if penalty.separable else penalty.dual_norm(pull)[:, None]


class CliqueRerouting:
    """Rerouting on cliques: forces at singular sites go to all regular sites of the clique, by weight."""

    def __init__(self, terms: QuadraticTerms, cliques: Cliques) -> None:
        self._terms, self._cliques = terms, cliques
        regular = np.where(terms.singular, 0.0, cliques.weights)
        total = np.asarray(np.bincount(cliques.labels, regular)[cliques.labels], dtype=np.float64)
        self._share = _share(regular, total)[:, None]
        self._served = terms.singular & (total > 0)
        self.serves = bool(self._served.any())  # whether any singular site is in a clique with a regular one

    def __call__(self, objective: FusedObjective, alpha: Array, balance: Array) -> tuple[Array, Array]:
        """Return sums ``(V, p)`` of duals without such forces, shrunk where they would be too large."""
        labels, pull = self._cliques.labels, self._terms.unseen(balance) * self._served[:, None]
        moved = self._share * sum_groups(pull, labels, self._cliques.sizes.size)[labels] - pull
        excess = self._cliques.congestion(alpha + moved) / max(objective.strength, TINY)
        # all coordinates shrink alike: a site's unseen directions mix them
        shrunk = 1.0 / np.maximum(excess.max(axis=1), 1.0)[labels, None]
        return shrunk * (alpha + moved), shrunk * (balance + moved)


def _share(part: Array, whole: Array) -> Array:
    """Return ``part / whole``, or 0 if ``whole`` is 0."""
    part, whole = np.broadcast_arrays(part, whole)
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


@dataclass(frozen=True, eq=False)
class FusedObjective:
    """|V| times the objective: ``sum_u M_u(theta_u) + sum_e r_e phi(theta_i - theta_j) + sum_uc k_uc |theta_uc|``.

    The sparsity term and the ball share one dual per site, with conjugate ``radius ||zeta - clip(zeta, -k, k)||_2``.
    """

    terms: SiteTerms
    graph: Graph  # sites in the order of the terms
    penalty: Penalty
    strength: float  # lam * |V|, so that r_e = strength * w_e
    sparsity: Array | None = None  # the k above, (V, p)
    radius: float | None = None  # of the ball that every theta_u is in
    cliques_from: int = 5_000  # edges: fewer are quicker than sorting

    @cached_property
    def edge_radius(self) -> Array:
        """Radii ``r_e`` of the edge duals' balls, shape ``(E,)``."""
        return self.strength * self.graph.weights

    @cached_property
    def cliques(self) -> Cliques | None:
        """The graph as cliques, if solvers can work without edges; else None.

        This requires a separable penalty, matching sparsity and no ball. Duals ``alpha (V, p)`` are then sums by site.
        """
        separable = self.penalty.separable or self.terms.n_params == 1
        if not separable or self.graph.n_edges < self.cliques_from or self.radius is not None:
            return None
        cliques = self.graph.cliques
        if cliques is None:
            return None
        if self.sparsity is not None:
            even = self.sparsity / cliques.weights[:, None]
            first = even[cliques.order[cliques.starts[:-1]]][cliques.labels]
            if not np.allclose(even, first, rtol=1e-13, atol=0.0):
                return None
        return cliques

    @property
    def dual_shape(self) -> tuple[int, int]:
        """Shape of the duals ``alpha``."""
        rows = self.graph.n_edges if self.cliques is None else self.graph.n_sites
        return rows, self.terms.n_params

    def balance(self, alpha: Array) -> Array:
        """Return ``D' alpha (V, p)``, the sum of the duals at each site."""
        return alpha if self.cliques is not None else self.graph.balance(alpha)

    def project(self, alpha: Array) -> Array:
        """Return duals inside their balls, close to ``alpha``."""
        if self.cliques is None:
            return self.penalty.project(alpha, self.edge_radius)
        excess = self.cliques.congestion(alpha) / max(self.strength, TINY)
        return np.asarray(alpha / np.maximum(excess, 1.0)[self.cliques.labels])

    @cached_property
    def _rerouting(self) -> Rerouting | CliqueRerouting | None:
        terms = self.terms
        if not isinstance(terms, QuadraticTerms) or not terms.singular.any():
            return None
        made = Rerouting(terms, self.graph) if self.cliques is None else CliqueRerouting(terms, self.cliques)
        return made if made.serves else None

    def differences(self, theta: Array) -> Array:
        """Return ``theta_i - theta_j`` for every edge, shape ``(E, p)``."""
        return np.asarray(self.graph.incidence() @ theta)

    def penalty_value(self, theta: Array) -> float:
        """Return the edge penalty plus sparsity."""
        if self.cliques is not None:
            total = self.strength * float(self.cliques.variation(theta).sum())
        else:
            total = float(self.edge_radius @ self.penalty.value(self.differences(theta)))
        if self.sparsity is not None:
            total += float((self.sparsity * np.abs(theta)).sum())
        return total

    def penalty_by_component(self, theta: Array) -> Array:
        """Return the edge penalty of each connected component."""
        if self.cliques is not None:
            return self.strength * self.cliques.variation(theta)
        labels = self.graph.components()
        saved = self.edge_radius * self.penalty.value(self.differences(theta))
        # an edge counts for the component of either of its ends
        return np.bincount(labels[self.graph.edges[:, 0]], saved, int(labels.max()) + 1).astype(np.float64)

    @cached_property
    def box(self) -> Array | None:
        """Bounds ``k (V, p)`` of the sparsity term, 0 if there is only a ball; None if sites have no dual."""
        if self.sparsity is None and self.radius is not None:
            return np.zeros((self.terms.n_sites, self.terms.n_params))
        return self.sparsity

    def inside(self, theta: Array) -> Array:
        """Return the parameters ``(V, p)`` of the ball that are nearest to ``theta``; equal rows stay equal."""
        return theta if self.radius is None else _EUCLIDEAN.project(theta, self.radius)

    def site_duals(self, theta: Array, pull: Array) -> Array | None:
        """Return site duals ``zeta (V, p)`` that balance as much of ``pull`` as possible at ``theta``."""
        if self.box is None:
            return None
        zeta = np.clip(pull, -self.box, self.box)
        if self.radius is not None:
            length = np.einsum("vp,vp->v", theta, theta)
            outward = np.einsum("vp,vp->v", pull - zeta, theta).clip(0.0)
            zeta += _share(np.where(length > BORDER * self.radius**2, outward, 0.0), length)[:, None] * theta
        return zeta

    def site_slack(self, theta: Array, zeta: Array) -> float:
        """Return the contribution of sparsity and ball to the duality gap; ``theta`` is in the ball."""
        if self.box is None:
            return 0.0
        slack = float((self.box * np.abs(theta) - zeta * theta).sum())
        if self.radius is not None:
            slack += self.radius * float(_EUCLIDEAN.value(zeta - np.clip(zeta, -self.box, self.box)).sum())
        return slack

    def value(self, theta: Array) -> float:
        """Return the objective at ``theta (V, p)``, which should be in the ball."""
        return float(self.terms.values(theta).sum()) + self.penalty_value(theta)

    def gap(
        self, theta: Array, alpha: Array, zeta: Array | None, balance: Array, radius: float = np.inf
    ) -> tuple[float, bool]:
        """Return the duality gap, an upper bound on ``value(theta) - min value``, and whether it needed the radius.

        Duals are feasible, ``balance (V, p)`` is ``D' alpha + zeta``, and the ball of that ``radius`` must contain a
        minimiser. Better duals from `Rerouting` are used where available.
        """
        slack = self._slack(theta)
        site_part = 0.0 if zeta is None else self.site_slack(theta, zeta)

        def bound(alpha: Array, balance: Array) -> tuple[float, bool]:
            sites, conditional = self._site_gaps(theta, balance, radius if self.radius is None else self.radius)
            return sites + slack(alpha) + site_part, conditional

        found = bound(alpha, balance)
        if self._rerouting is None:
            return found
        return min(found, bound(*self._rerouting(self, alpha, balance)))

    def gap_of_sums(self, theta: Array, gradients: Array, balance: Array, radius: float = np.inf) -> tuple[float, bool]:
        """Return `gap` for edge duals of which only the sums ``balance (V, p)`` are known, as of averaged ones.

        ``gradients (V, p)`` are the gradients of the losses at theta; they determine the site duals.
        """
        # sum_e <alpha_e, theta_i - theta_j> = <D' alpha, theta>, so no loop over edges is needed
        slack = self.penalty_value(theta) - float((balance * theta).sum())
        if self.sparsity is not None:
            zeta = np.clip(-(gradients + balance), -self.sparsity, self.sparsity)
            balance = balance + zeta
            slack -= float((zeta * theta).sum())
        if self.radius is not None:
            return float(self.terms.gaps_in_ball(theta, balance, self.radius).sum()) + slack, False
        sites, conditional = self._site_gaps(theta, balance, radius)
        return sites + slack, conditional

    def _site_gaps(self, theta: Array, balance: Array, radius: float) -> tuple[float, bool]:
        """Return the sites' share of the gap, and whether that depends on an assumed ball."""
        sites = self.terms.young_gaps(theta, balance)
        unbounded = ~np.isfinite(sites)
        if unbounded.any() and np.isfinite(radius):
            sites[unbounded] = self.terms.young_gaps(theta, balance, radius)[unbounded]
        return float(sites.sum()), bool(unbounded.any()) and self.radius is None

    def edge_gap(self, theta: Array, alpha: Array) -> float:
        """Return the edges' share of the duality gap: ``sum_e r_e phi(d_e) - <alpha_e, d_e>``, d the differences."""
        return self._slack(theta)(alpha)

    def _slack(self, theta: Array) -> Callable[[Array], float]:
        """Return `edge_gap` as a function of the duals."""
        if self.cliques is not None:
            penalty = self.strength * float(self.cliques.variation(theta).sum())
            return lambda alpha: max(penalty - float((alpha * theta).sum()), 0.0)
        d = self.differences(theta)
        size = self.edge_radius * self.penalty.value(d)
        # summed edge by edge before adding up, so that the small difference of large sums is accurate
        return lambda alpha: float((size - np.einsum("ep,ep->e", alpha, d)).sum())


@dataclass(frozen=True, eq=False)
class Problem:
    """M-estimation on a graph: ``F(Theta) = (1/|V|) sum_u M_u(theta_u) + lam sum_e w_e phi(theta_i - theta_j)``.

    Parameters
    ----------
    federation : Federation or Summaries
        Rows of the sites, or their summaries.
    graph : Graph
        Over the same sites, in any order.
    loss : str, Loss or mapping {site: loss}
        A name in `fedkin.losses.LOSSES` or an object. Summaries carry their own.
    penalty : str or Penalty
        "l1", "l2" or "linf".
    lam : float
        The penalty level of F above, at least 0.
    sparsity : float, mapping {site: float} or array (V,) or (V, p)
        Level of the extra term ``(1/|V|) sum_u lam_u ||theta_u||_1``.
    ridge : float or array (p,)
        Level of the extra term ``(1/|V|) sum_u sum_c ridge_c theta_uc^2 / 2``.
    radius : float, optional
        Radius r of the paper's parameter space: the minimum is over parameters with ``||theta_u||_2 <= r`` on every
        site. By default there is no such constraint.

    Examples
    --------
    Two sites with one observation each, 0 and 2, pulled together by ``lam``:

    >>> import fedkin
    >>> fed = fedkin.Federation({"a": [[0.0]], "b": [[2.0]]})
    >>> problem = fedkin.Problem(fed, fedkin.Graph.complete(["a", "b"]), loss="mean", lam=0.1)
    >>> fedkin.solve(problem).theta.round(3).ravel().tolist()
    [0.2, 1.8]
    """

    federation: Federation | Summaries
    graph: Graph
    loss: LossLike = "linear"
    penalty: str | Penalty = "l1"
    lam: float = 0.0
    sparsity: float | Mapping[Hashable, float] | ArrayLike = 0.0
    ridge: float | ArrayLike = 0.0
    radius: float | None = None
    data: RowData | Summaries = field(default=None, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        check_nonnegative("lam", self.lam)
        data = self.data  # of a problem that this one was made from, if it has the same rows and loss
        if not isinstance(data, RowData) or data.rows is not self.federation or data.given_loss is not self.loss:
            object.__setattr__(self, "data", site_data(self.federation, self.loss))
        object.__setattr__(self, "loss", getattr(self.data, "given_loss", self.data.loss))  # summaries know theirs
        object.__setattr__(self, "penalty", make_penalty(self.penalty))
        object.__setattr__(self, "graph", self.graph.aligned(self.federation.sites))
        if self.radius is not None:
            check_positive("radius", self.radius)

    @property
    def n_sites(self) -> int:
        return self.federation.n_sites

    @property
    def losses(self) -> tuple[Loss, ...]:
        """One loss per site, in site order."""
        return self.data.losses

    @property
    def n_params(self) -> int:
        """Length p of each site's parameter."""
        return self.losses[0].n_params(self.federation.n_features)

    @property
    def strength(self) -> float:
        """Penalty level ``lam * |V|`` on the scale of the solvers, which sum the losses."""
        return self.lam * self.n_sites

    @cached_property
    def terms(self) -> SiteTerms:
        """Mean losses of the sites on arrays, shared with problems that differ in other respects."""
        ridge, p = np.asarray(self.ridge, dtype=np.float64), self.losses[0].n_params(self.federation.n_features)
        if ridge.shape not in ((), (p,)):
            raise ParameterError(f"ridge has shape {ridge.shape}, expected a number or ({p},)")
        if not (np.isfinite(ridge) & (ridge >= 0)).all():
            raise ParameterError(f"ridge must be finite and at least 0, got {self.ridge!r}")
        alone = self.graph.degree == 0 if self.lam > 0 else None  # None: all sites, whose minimisers must be exact
        return self.data.shared_terms(np.broadcast_to(ridge, (p,)), alone)

    @cached_property
    def fused(self) -> FusedObjective:
        """Objective on arrays, in the form that solvers use."""
        assert isinstance(self.penalty, Penalty)
        return FusedObjective(self.terms, self.graph, self.penalty, self.strength, self._sparsity_matrix(), self.radius)

    def objective(self, theta: Array) -> float:
        """Return ``F(theta)`` for ``theta (V, p)``."""
        return self.fused.value(np.asarray(theta, dtype=np.float64)) / self.n_sites

    def rows_for(self, purpose: str) -> Federation:
        """Return the rows, or raise an error that ``purpose`` needs rows."""
        if not self.data.in_memory:
            raise DataError(f"{purpose} needs rows, but the problem has summaries only: build it from a Federation")
        return self.data.rows

    def _repr_html_(self) -> str:
        facts = {
            "data": repr(self.federation),
            "graph": repr(self.graph),
            "loss": ", ".join(dict.fromkeys(loss.name for loss in self.losses)),
            "penalty": f"{self.fused.penalty.name}, lam {self.lam:.4g}",
            "parameters": f"{self.n_params} at each of {count(self.n_sites, 'site')}",
        }
        return html_card("Problem", facts)

    def with_lam(self, lam: float) -> Problem:
        """Return the same problem at another ``lam``, sharing everything computed from the rows."""
        return replace(self, lam=lam)

    def _sparsity_matrix(self) -> Array | None:
        shape = (self.n_sites, self.n_params)
        if isinstance(self.sparsity, Mapping):
            for site in self.sparsity:
                if site not in self.federation:
                    raise UnknownSiteError(f"sparsity names site {site!r}, which the federation does not have")
            values = np.array([float(self.sparsity.get(site, 0.0)) for site in self.federation.sites])
        else:
            values = np.asarray(self.sparsity, dtype=np.float64)
        values = values[:, None] if values.ndim == 1 else values
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ParameterError("sparsity must be finite and at least 0")
        try:
            matrix = np.broadcast_to(values, shape)
        except ValueError:
            raise ParameterError(
                f"sparsity has shape {values.shape}, expected a number, ({shape[0]},) or {shape}"
            ) from None
        return matrix.copy() if matrix.any() else None


@dataclass(frozen=True, eq=False)
class Solution:
    """Solution found by a solver, with its optimality certificate.

    Attributes
    ----------
    theta : array (V, p)
        Parameters, a row per site of the problem's federation.
    objective : float
        ``F(theta)`` on the public scale.
    gap : float
        Relative duality gap: ``(F(theta) - min F) / max(|F(theta)|, floor)`` is at most this.
    status : "converged" | "iteration_limit" | "interrupted"
    n_iter : int
    trace : mapping name -> array
        ``n_iter``, ``objective`` and ``gap`` at each check.
    alpha : array (E, p) or (V, p)
        Edge duals, needed for a warm start; for large cliques, their sums by site.
    message : str
        How the solver ended, and what to do if it did not converge.
    radius : float or None
        None when the certificate is unconditional; otherwise it holds for minimisers in a ball of this radius.
    """

    theta: Array = field(repr=False)
    objective: float
    gap: float
    status: Status
    n_iter: int
    trace: Mapping[str, Array] = field(repr=False)
    alpha: Array = field(repr=False)
    message: str = ""
    radius: float | None = None

    def _repr_html_(self) -> str:
        facts = {
            "status": self.message or self.status,
            "objective": f"{self.objective:.6g}",
            "relative gap": f"{self.gap:.1e}",
            "parameters": f"{self.theta.shape[1]} at each of {count(len(self.theta), 'site')}",
        }
        return html_card("Solution", facts)

    def clusters(self, graph: Graph) -> Index:
        """Return group labels ``(V,)``: sites joined by edges of ``graph`` share a group if their parameters are equal.

        Parameters must be bitwise equal, as solvers return them for fused sites.
        """
        return graph.equal_groups(self.theta)
