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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse

from fedkin._base import Array, Index, Mask
from fedkin.admm.gradients import Gradients, SiteRows, no_memory
from fedkin.admm.plan import Average, RunPlan
from fedkin.admm.streams import SampleStream
from fedkin.core import Penalty, make_penalty

#: Weight of round t in the tail average grows like t ** TAIL_POWER.
TAIL_POWER = 3.0


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
    """Return the share of round t's parameters in the running average after round t."""
    if average == "last":
        return 1.0
    return 1.0 / t if average == "paper" else (TAIL_POWER + 1.0) / (TAIL_POWER + t)


def node_update(
    theta: Array, direction: Array, eta: Array, sparsity: Array | None = None, radius: float | None = None
) -> Array:
    """Return ``theta - eta * direction`` after the soft threshold of the sparsity term and the parameter ball.

    ``theta``, ``direction`` (gradient plus pull of the edges) and ``sparsity`` are ``(B, p)``, ``eta`` is ``(B,)``.
    """
    moved = theta - eta[:, None] * direction
    if sparsity is not None:
        bound = eta[:, None] * sparsity
        moved = moved - np.clip(moved, -bound, bound)
    if radius is None:
        return moved
    largest = np.maximum.reduce(np.absolute(moved), axis=None, initial=0.0)
    if largest * math.sqrt(moved.shape[1]) < radius:  # no row can be longer than the radius; False also for NaN
        return moved
    with np.errstate(over="ignore"):
        length = np.sqrt((moved * moved).sum(axis=1))
    if np.isinf(length).any() and np.isfinite(moved).all():
        moved = make_penalty("l2").project(moved, radius)  # which knows how to shorten such numbers
        length = np.sqrt((moved * moved).sum(axis=1))
    return np.asarray(moved * np.divide(radius, length, out=np.ones_like(length), where=length > radius)[:, None])


def edge_update(alpha: Array, difference: Array, rho: float, radius: Array, penalty: Penalty) -> Array:
    """Return the dual ``(E, p)`` after one edge step; ``difference`` is ``theta_i - theta_j``.

    The threshold of the paper's prox is ``2 L w_e / rho`` because both end points move; in terms of the dual that is
    a ball of radius ``L w_e`` and half of rho.
    """
    return penalty.project(alpha + (0.5 * rho) * difference, radius)


class Shard:
    """Some sites of a plan (all, by default) and every edge that touches them.

    ``sites (B,)`` are increasing positions; edges of sites in ``without`` are left out. ``streams`` are by
    position. Sites whose rows are elsewhere get the penalty's part of the step only.

    ``foreign`` are the neighbours hosted elsewhere, increasing; ``boundary`` the hosted sites that have such a
    neighbour: the thetas that others need.
    """

    def __init__(
        self,
        plan: RunPlan,
        sites: Index | None = None,
        *,
        without: Sequence[int] = (),
        streams: Mapping[int, SampleStream] | None = None,
    ) -> None:
        self.plan, self.sites = plan, plan.sites if sites is None else sites
        which = np.searchsorted(plan.sites, self.sites)
        edges = plan.edges
        touching = np.isin(edges, self.sites).any(axis=1) & ~np.isin(edges, list(without)).any(axis=1)
        self.steps = plan.steps if sites is None else plan.steps.take(which)
        self.sparsity = None if plan.sparsity is None else plan.sparsity[which]
        #: The hosted sites whose rows are here: all, or these numbers.
        self.own: slice | Index = slice(None)
        self.gradients = self._make_gradients(which, streams or {})
        theta = plan.theta[which]
        self._all_theta = theta.copy()
        self._host(edges[touching], plan.edge_radius[touching])
        zero = np.zeros((self.edges.shape[0], theta.shape[1]))
        self.alpha = zero if plan.alpha is None else plan.alpha[touching]
        self.balance = self._balance()
        self.balance_before, self.average_balance = self.balance.copy(), self.balance.copy()
        #: The running average of the thetas, and the thetas before the last node step, ``(B, p)``.
        self.average, self.left = theta.copy(), theta.copy()
        self._weight = 1.0

    def _make_gradients(self, which: Index, streams: Mapping[int, SampleStream]) -> Gradients | None:
        plan, rows, here = self.plan, self.plan.rows, self.sites
        if plan.with_rows is not None:
            own = np.flatnonzero(np.isin(here, plan.with_rows))
            self.own = slice(None) if own.size == here.size else own
            here = here[own]
            which = np.searchsorted(plan.with_rows, here)
        if rows is None or not here.size:
            return None
        rows = rows if which.size == rows.starts.size else rows.take(which)
        near = {k: streams[int(u)] for k, u in enumerate(here) if int(u) in streams} if streams else {}
        return Gradients(rows, plan.seed, plan.gradient, snapshot_every=plan.snapshot_every, streams=near)

    def _host(self, edges: Index, edge_radius: Array) -> None:
        """Set up everything that depends on which edges there are."""
        sites, p = self.sites, self._all_theta.shape[1]
        self.edges, self.edge_radius = edges, edge_radius
        hosted = np.isin(edges, sites)
        self.foreign: Index = np.unique(edges[~hosted])
        self.boundary: Index = np.unique(edges[hosted & ~hosted[:, ::-1]])
        self._place = np.concatenate([sites, self.foreign])
        self._row: dict[int, int] | None = None
        order = np.argsort(self._place)
        ends = order[np.searchsorted(self._place, edges, sorter=order)]
        self._heads, self._tails = np.ascontiguousarray(ends[:, 0]), np.ascontiguousarray(ends[:, 1])
        self._sum_duals = _signed_sums(ends, sites.size)
        # of one site the same sums in the same order; numpy would sum a single column in pairs
        self._signs = np.where(ends[:, :1] == 0, 1.0, -1.0) if sites.size == 1 and p > 1 else None
        # hosted sites first, then the neighbours' last known thetas
        self._all_theta = np.concatenate([self._all_theta[: sites.size], np.zeros((self.foreign.size, p))])
        #: Parameters ``(B, p)`` of the hosted sites.
        self.theta = self._all_theta[: sites.size]

    def restart(self, plan: RunPlan, without: Sequence[int] = ()) -> None:
        """Begin anew with another plan of the same sites; edges of sites in ``without`` are left out."""
        Shard.__init__(self, plan, None if self.sites is self.plan.sites else self.sites, without=without)

    def pull(self) -> Array:
        """Return ``2 s(t) - s(t-1)``, ``(B, p)``: all that a node step needs to know of a site's edges."""
        return 2.0 * self.balance - self.balance_before

    def node_step(self, t: int, available: Mask | None = None, probability: Array | None = None) -> None:
        """Move the hosted thetas in round ``t = 1, 2, ...``.

        Sites that are not ``available (B,)``, or whose rows are elsewhere, get the penalty's part of the step only;
        gradients of the others are divided by the ``probability (B,)`` with which they are there.
        """
        self.left, direction = self.theta.copy(), self.pull()
        if self.gradients is not None:
            own = self.own
            gradient = self.gradients(t, self.left[own], None if available is None else available[own])
            direction[own] += gradient if probability is None else gradient / probability[own][:, None]
        self.theta[:] = self._moved(direction, t, probability)
        self._weight = averaging_weight(self.plan.average, t)

    def _moved(self, direction: Array, t: int, probability: Array | None) -> Array:
        return node_update(self.left, direction, self.steps.eta(t, probability), self.sparsity, self.plan.radius)

    def penalty_step(self, t: int, probability: Array | None = None) -> Array:
        """Return where all hosted sites would be after the last node step had they been absent, ``(B, p)``."""
        return self._moved(self.pull(), t, probability)

    def give(self) -> dict[int, Array]:
        """Return copies of the thetas ``(p,)`` of the hosted sites that other shards need, by position."""
        return dict(zip(self.boundary.tolist(), self.theta[np.searchsorted(self.sites, self.boundary)], strict=True))

    def take(self, thetas: Mapping[int, Array]) -> None:
        """Learn thetas by position: of foreign neighbours, or of hosted sites that moved elsewhere."""
        if self._row is None:
            self._row = {u: k for k, u in enumerate(self._place.tolist())}
        for u, theta in thetas.items():
            if (row := self._row.get(u)) is not None:
                self._all_theta[row] = theta

    def differences(self) -> Array:
        """Return ``theta_i - theta_j (E, p)`` of the touching edges, with the thetas of neighbours as last learned."""
        difference = self._all_theta.take(self._heads, axis=0)
        difference -= self._all_theta.take(self._tails, axis=0)
        return difference

    def edge_step(self) -> None:
        """Move the dual of every touching edge, given the thetas at both ends."""
        plan = self.plan
        self.alpha = edge_update(self.alpha, self.differences(), plan.rho, self.edge_radius, plan.penalty)
        self.balance_before = self.balance
        self.balance = self._balance()
        # the paper averages theta(0), ..., theta(t-1)
        taken = self.left if plan.average == "paper" else self.theta
        self.average = self.average + self._weight * (taken - self.average)
        self.average_balance = self.average_balance + self._weight * (self.balance - self.average_balance)

    def _balance(self) -> Array:
        """Return the signed sums ``(B, p)`` of the duals around each hosted site, edge by edge."""
        if self._signs is not None:
            return np.add.reduce(self._signs * self.alpha, axis=0, initial=0.0, keepdims=True)
        return np.asarray(self._sum_duals @ self.alpha)

    def round_thetas(self) -> None:
        """Round own thetas to float32, where that is what travels: both ends of an edge must use the same."""
        if self.gradients is not None:
            self.theta[self.own] = self.theta[self.own].astype(np.float32)

    def take_rows(self, rows: SiteRows, start: Array) -> None:
        """Draw from other rows of the same sites from now on; steps do not become longer than ``1 / start (B,)``.

        For plain gradients, which remember nothing of rows.
        """
        assert self.gradients is not None and self.plan.gradient == "plain"
        looked, self.gradients = self.gradients.looked, Gradients(rows, self.plan.seed)
        self.gradients.looked = looked
        self.steps = replace(self.steps, start=np.maximum(self.steps.start, start))

    def take_duals(self, alpha: Array) -> None:
        """Replace the edge duals ``(E, p)``."""
        self.alpha = alpha.copy()
        self.balance = self._balance()

    def take_pull(self, theta: Array, pull: Array) -> None:
        """Set theta and the pull of edges that are elsewhere, both ``(B, p)``."""
        self.theta[:] = theta
        self.balance = self.balance_before = pull.copy()  # 2 s - s is s, to the bit

    def drop(self, gone: Iterable[int]) -> None:
        """Remove the edges to foreign sites that have left for good; their duals count as 0 from now on.

        It may be done at any time, also between a node step and the edge step.
        """
        kept = ~np.isin(self.edges, list(gone)).any(axis=1)
        alpha, known = self.alpha[kept], dict(zip(self._place.tolist(), self._all_theta, strict=True))
        self._host(self.edges[kept], self.edge_radius[kept])
        self.take({u: known[u] for u in self._place.tolist()})
        self.take_duals(alpha)
        self.balance_before = self.balance.copy()

    def state(self) -> ShardState:
        """Return everything that changes, as it is now; only compiled rounds write to these arrays later."""
        memory = no_memory(self.theta) if self.gradients is None else self.gradients.memory()
        # every step makes new arrays of these, except of theta
        numbers = (self.balance, self.balance_before, self.average, self.average_balance, self.alpha)
        return ShardState(self.theta.copy(), *numbers, *memory)

    def restore(self, state: ShardState) -> None:
        """Go back to a `state`."""
        self.theta[:] = state.theta
        for name in ("balance", "balance_before", "average", "average_balance", "alpha"):
            setattr(self, name, getattr(state, name).copy())
        if self.gradients is not None:
            self.gradients.restore((state.table, state.anchor_gradient, state.anchor_theta, state.stale, state.looked))


def _signed_sums(ends: Index, n_sites: int) -> sparse.csr_array:
    """Return the matrix ``(B, E)`` with +1 at an edge's first and -1 at its second end, columns sorted in every row."""
    n_edges = ends.shape[0]
    site, edge, sign = ends.reshape(-1), np.repeat(np.arange(n_edges), 2), np.tile([1.0, -1.0], n_edges)
    here = site < n_sites
    matrix = sparse.csr_array((sign[here], (site[here], edge[here])), shape=(n_sites, n_edges))
    matrix.sort_indices()
    return matrix
