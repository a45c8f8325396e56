"""The arithmetic of Fed-ADMM, for any number of sites: node step, exchange of thetas, edge step.

A shard hosts some sites and every edge that touches one of them. One shard with all sites is the run inside one
process; a shard of one site is a site in the field. An edge between two shards has a replica in both: each end
computes the same step from the same two thetas, so the replicas hold the same bits and only thetas travel.

With ``y_e`` the edge dual (``alpha`` in the code, inside the ball of radius ``L w_e``) and ``s_i`` the signed sum of
the duals around site i, a round is

    theta_i <- theta_i - eta_i (g_i + 2 s_i(t) - s_i(t-1))                 node step
    y_e     <- projection of y_e + (rho / 2) (theta_i - theta_j)           edge step

which is Algorithm 1 of the paper with its copies beta eliminated (docs/fed-admm.md has the algebra).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import sparse

from fedkin._base import Array, Index, Mask
from fedkin.admm.gradients import Gradients, no_memory
from fedkin.core import Penalty, make_penalty

Average = Literal["tail", "paper", "last"]
AVERAGES = ("tail", "paper", "last")

#: Weight of round t in the tail average grows like t ** TAIL_POWER.
TAIL_POWER = 3.0


@dataclass(frozen=True, eq=False)
class StepRule:
    """Step sizes of the hosted sites: ``1 / eta_i(t) = start_i / p_i(t) + growth_i * t + damping_i``.

    ``start`` keeps the first rounds stable (0 in the paper's rule), ``growth`` is ``1 / kappa``, and ``damping`` of
    ``rho * |N_i|`` makes it the proximal step, 0 the literal one.
    """

    start: Array
    growth: Array
    damping: Array

    def eta(self, t: int, probability: Array | None = None) -> Array:
        """Steps ``(B,)`` in round ``t = 1, 2, ...``, given the probabilities ``(B,)`` of being available."""
        start = self.start if probability is None else self.start / probability
        return np.asarray(1.0 / (start + self.growth * t + self.damping))


@dataclass(frozen=True, eq=False)
class UpdateRule:
    """How the hosted sites and their edges move.

    ``sparsity (B, p)`` weighs ``|theta|``, ``radius`` is that of the parameter ball.
    """

    penalty: Penalty
    rho: float
    steps: StepRule
    sparsity: Array | None = None
    radius: float | None = None
    average: Average = "tail"


@dataclass(eq=False)
class ShardState:
    """Everything of a shard that changes from round to round: numbers of B hosted sites and E edges.

    ``alpha`` is ``(E, p)``, what belongs to sites ``(B, p)``.

    ``table`` is SAGA's memory, a line for each row of the hosted sites, ``anchor_gradient`` the mean gradient of the
    table or of SVRG's snapshot ``anchor_theta``; all are empty where not used. ``stale (B,)``: whose snapshot is due;
    ``looked (B,)``: rows that each site has looked at.

    ``vars(state)`` gives the arrays by name, ``ShardState(**arrays)`` makes a state of them. The neighbours' thetas are
    no part of it: every round brings them anew before they are used.
    """

    theta: Array
    balance: Array
    balance_before: Array
    average: Array
    average_balance: Array
    alpha: Array
    table: Array
    anchor_gradient: Array
    anchor_theta: Array
    stale: Mask
    looked: Index


def averaging_weight(average: Average, t: int) -> float:
    """Share of round t's parameters in the running average after round t."""
    if average == "last":
        return 1.0
    return 1.0 / t if average == "paper" else (TAIL_POWER + 1.0) / (TAIL_POWER + t)


def node_update(
    theta: Array,
    direction: Array,
    eta: Array,
    sparsity: Array | None = None,
    radius: float | None = None,
) -> Array:
    """``theta - eta * direction``, then the soft threshold of the sparsity term, then the parameter ball.

    ``theta``, ``direction`` (gradient plus pull of the edges) and ``sparsity`` are ``(B, p)``, ``eta`` is ``(B,)``.
    """
    moved = theta - eta[:, None] * direction
    if sparsity is not None:
        bound = eta[:, None] * sparsity
        moved = moved - np.clip(moved, -bound, bound)
    if radius is not None and not _plainly_inside(moved, radius):
        with np.errstate(over="ignore"):
            length = np.sqrt((moved * moved).sum(axis=1))
        if np.isinf(length).any() and np.isfinite(moved).all():
            moved = make_penalty("l2").project(moved, radius)  # which knows how to shorten such numbers
            length = np.sqrt((moved * moved).sum(axis=1))
        moved = moved * np.divide(radius, length, out=np.ones_like(length), where=length > radius)[:, None]
    return moved


def _plainly_inside(theta: Array, radius: float) -> bool:
    """Whether no row can be longer than the radius, by its largest number; False where only the length can tell."""
    return bool(np.maximum.reduce(np.absolute(theta), axis=None, initial=0.0) * math.sqrt(theta.shape[1]) < radius)


def edge_update(alpha: Array, difference: Array, rho: float, radius: Array, penalty: Penalty) -> Array:
    """The dual ``(E, p)`` after one edge step; ``difference`` is ``theta_i - theta_j``.

    The threshold of the paper's prox is ``2 L w_e / rho`` because both end points move; in terms of the dual that is
    a ball of radius ``L w_e`` and half of rho.
    """
    return penalty.project(alpha + (0.5 * rho) * difference, radius)


class Shard:
    """Some sites and every edge that touches them.

    ``sites (B,)`` are increasing positions in the federation, ``edges (E, 2)`` every edge ``(i, j)``, ``i > j``, with
    a hosted end, in the federation's order, ``edge_radius (E,)`` is ``strength * w_e``. Without ``gradients`` (a
    central machine, replicas of neighbours) sites get the penalty's part of the step only. ``alpha (E, p)`` starts at
    0.

    ``foreign`` are the neighbours hosted elsewhere, increasing; ``boundary`` the hosted sites that have such a
    neighbour: the thetas that others need.

    Two sites that hold one number each, 0 and 2, in one shard:

    >>> import numpy as np
    >>> from fedkin.admm import SiteRows, Gradients, Shard, StepRule, UpdateRule, site_keys
    >>> from fedkin.data import Rows
    >>> from fedkin.losses import MeanLoss
    >>> from fedkin.core import L1
    >>> one = np.ones(2, dtype=np.int64)
    >>> loss = MeanLoss()
    >>> X = np.array([[0.0], [2.0]])
    >>> rows = SiteRows(Rows(X), np.array([0, 1]), one, site_keys("ab"), (loss, loss), one, np.zeros(1))
    >>> steps = StepRule(np.full(2, 1.0), np.zeros(2), np.full(2, 1.0))
    >>> rule = UpdateRule(L1(), 1.0, steps, average="last")
    >>> gradients = Gradients(rows, 0)
    >>> shard = Shard(np.array([0, 1]), np.array([[1, 0]]), np.array([0.2]), rule, gradients, np.zeros((2, 1)))
    >>> for t in range(1, 100):
    ...     shard.node_step(t)
    ...     shard.edge_step()
    >>> shard.theta.round(6).ravel().tolist()
    [0.2, 1.8]
    """

    def __init__(
        self,
        sites: Index,
        edges: Index,
        edge_radius: Array,
        rule: UpdateRule,
        gradients: Gradients | None,
        theta: Array,
        alpha: Array | None = None,
    ) -> None:
        self.sites, self.rule, self.gradients = sites, rule, gradients
        self._all_theta = theta.copy()
        self._host(edges, edge_radius)
        self.alpha = np.zeros((edges.shape[0], theta.shape[1])) if alpha is None else alpha.copy()
        self.balance = self._balance()
        self.balance_before = self.balance.copy()
        self.average = theta.copy()
        self.average_balance = self.balance.copy()
        self._weight = 1.0
        self._left = theta

    def _host(self, edges: Index, edge_radius: Array) -> None:
        """Set up everything that depends on which edges there are."""
        sites = self.sites
        self.edges, self.edge_radius = edges, edge_radius
        hosted = np.isin(edges, sites)
        self.foreign: Index = np.unique(edges[~hosted])
        self.boundary: Index = np.unique(edges[hosted & ~hosted[:, ::-1]])
        self._place, self._all_foreign = np.concatenate([sites, self.foreign]), self.foreign.tobytes()
        self._order = np.argsort(self._place)
        ends = self._order[np.searchsorted(self._place, edges, sorter=self._order)]
        self._heads, self._tails = np.ascontiguousarray(ends[:, 0]), np.ascontiguousarray(ends[:, 1])
        self._boundary_here = np.searchsorted(sites, self.boundary)
        self._sum_duals = _signed_sums(ends, sites.size)
        # of one site the same sums in the same order; numpy would sum a single column in pairs
        alone = sites.size == 1 and self._all_theta.shape[1] > 1
        self._signs = np.where(ends[:, :1] == 0, 1.0, -1.0) if alone else None
        # hosted sites first, then the neighbours' last known thetas
        self._all_theta = np.concatenate(
            [self._all_theta[: sites.size], np.zeros((self.foreign.size, self._all_theta.shape[1]))]
        )
        #: Parameters ``(B, p)`` of the hosted sites, and ``(F, p)`` of the foreign ones as last learned.
        self.theta, self._foreign_theta = self._all_theta[: sites.size], self._all_theta[sites.size :]

    # --- the three verbs ---

    def pull(self) -> Array:
        """``2 s(t) - s(t-1)``, shape ``(B, p)``: all that a node step needs to know of a site's edges."""
        return 2.0 * self.balance - self.balance_before

    def node_step(
        self,
        t: int,
        available: Mask | None = None,
        probability: Array | None = None,
    ) -> None:
        """Move the hosted thetas in round ``t = 1, 2, ...``.

        Sites that are not ``available (B,)`` get the penalty's part of the step only; gradients of the others are
        divided by the ``probability (B,)`` with which they are there.
        """
        theta, rule = self.theta, self.rule
        direction = self.pull()
        if self.gradients is not None:
            gradient = self.gradients(t, theta, available)
            direction = direction + (gradient if probability is None else gradient / probability[:, None])
        moved = node_update(theta, direction, rule.steps.eta(t, probability), rule.sparsity, rule.radius)
        self._weight = averaging_weight(rule.average, t)
        if rule.average == "paper":
            self._left = theta.copy()
        self.theta[:] = moved

    def give(self) -> tuple[Index, Array]:
        """Positions and thetas of the hosted sites that other shards need, as they are now."""
        return self.boundary, self.theta.take(self._boundary_here, axis=0)

    def take(self, positions: Index, theta: Array) -> None:
        """Learn thetas ``(len(positions), p)``: of foreign neighbours, or of hosted sites that moved elsewhere."""
        if positions.tobytes() == self._all_foreign:  # in nearly every round of a site in the field
            self._foreign_theta[:] = theta
            return
        place = self._order[
            np.minimum(np.searchsorted(self._place, positions, sorter=self._order), self._order.size - 1)
        ]
        known = self._place[place] == positions
        self._all_theta[place[known]] = theta[known]

    def differences(self) -> Array:
        """``theta_i - theta_j (E, p)`` of the touching edges, with the thetas of neighbours as last learned."""
        difference = self._all_theta.take(self._heads, axis=0)
        difference -= self._all_theta.take(self._tails, axis=0)
        return difference

    def edge_step(self) -> None:
        """Move the dual of every touching edge, given the thetas at both ends."""
        self.alpha = edge_update(self.alpha, self.differences(), self.rule.rho, self.edge_radius, self.rule.penalty)
        self.balance_before = self.balance
        self.balance = self._balance()
        # the paper averages theta(0), ..., theta(t-1)
        taken = self._left if self.rule.average == "paper" else self.theta
        self.average = self.average + self._weight * (taken - self.average)
        self.average_balance = self.average_balance + self._weight * (self.balance - self.average_balance)

    def _balance(self) -> Array:
        """Signed sums ``(B, p)`` of the duals around each hosted site, edge by edge."""
        if self._signs is not None:
            return np.add.reduce(self._signs * self.alpha, axis=0, initial=0.0, keepdims=True)
        return np.asarray(self._sum_duals @ self.alpha)

    def round_thetas(self) -> None:
        """Round the hosted thetas to float32, where that is what travels: both ends of an edge must use the same."""
        self.take(self.sites, self.theta.astype(np.float32).astype(np.float64))

    def take_duals(self, alpha: Array) -> None:
        """Replace the edge duals ``(E, p)``."""
        self.alpha = alpha.copy()
        self.balance = self._balance()

    def drop(self, gone: Iterable[int]) -> None:
        """Remove the edges to foreign sites that have left for good; their duals count as 0 from now on.

        It may be done at any time, also between a node step and the edge step.
        """
        kept = ~np.isin(self.edges, list(gone)).any(axis=1)
        alpha, known = self.alpha[kept], dict(zip(self._place.tolist(), self._all_theta, strict=True))
        self._host(self.edges[kept], self.edge_radius[kept])
        self._all_theta[:] = [known[u] for u in self._place.tolist()]
        self.take_duals(alpha)
        self.balance_before = self.balance.copy()

    # --- state ---

    def state(self) -> ShardState:
        """Everything that changes, as it is now; only compiled rounds write to these arrays later."""
        memory = no_memory(self.theta) if self.gradients is None else self.gradients.memory()
        # every step makes new arrays of these, except of theta
        numbers = (self.balance, self.balance_before, self.average, self.average_balance, self.alpha)
        return ShardState(self.theta.copy(), *numbers, *memory)

    def restore(self, state: ShardState) -> None:
        """Go back to a `state`."""
        self.theta[:] = state.theta
        self.balance, self.balance_before = state.balance.copy(), state.balance_before.copy()
        self.average, self.average_balance = state.average.copy(), state.average_balance.copy()
        self.alpha = state.alpha.copy()
        if self.gradients is not None:
            self.gradients.restore((state.table, state.anchor_gradient, state.anchor_theta, state.stale, state.looked))


def _signed_sums(ends: Index, n_sites: int) -> sparse.csr_array:
    """The matrix ``(B, E)`` with +1 at an edge's first and -1 at its second end, columns sorted in every row."""
    n_edges = ends.shape[0]
    site = ends.reshape(-1)
    edge = np.repeat(np.arange(n_edges), 2)
    sign = np.tile([1.0, -1.0], n_edges)
    here = site < n_sites
    matrix = sparse.csr_array((sign[here], (site[here], edge[here])), shape=(n_sites, n_edges))
    matrix.sort_indices()
    return matrix
