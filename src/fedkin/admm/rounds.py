"""Compute the steps of Fed-ADMM for any number of sites, and run the loop of rounds.

With ``y_e`` the edge dual (``alpha`` in the code, inside the ball of radius ``L w_e``) and ``s_i`` the signed sum of
the duals around site i, a round is

    theta_i <- theta_i - eta_i (g_i + 2 s_i(t) - s_i(t-1))                 node step
    y_e     <- projection of y_e + (rho / 2) (theta_i - theta_j)           edge step

which is Algorithm 1 of the paper with its copies beta eliminated (docs/fused.md has the algebra).

`run_rounds` depends on two objects only: a **shard** does the arithmetic (`fedkin.admm.Shard`), and a **link** carries
thetas. `fedkin.admm.links` has the links inside one program, `fedkin.federate.links` those between machines.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from fedkin._base import Array, Index, Mask
from fedkin.admm.gradients import Gradients, SampleStream, SiteRows
from fedkin.admm.run_plan import Average, RunPlan
from fedkin.core import Penalty, build_terms, gap_scale, make_penalty
from fedkin.data import Federation

#: Weight of round t in the tail average grows like t ** TAIL_POWER.
TAIL_POWER = 3.0
#: State of a shard: arrays by name.
State = Mapping[str, NDArray[Any]]
#: Arrays of a shard that change in every round, of its B sites ``(B, p)`` and, ``alpha``, of its E edges ``(E, p)``.
ROUND_ARRAYS = ("theta", "balance", "balance_before", "average", "average_balance", "alpha")


def averaging_weight(average: Average, t: int) -> float:
    """Return the share of round t's parameters in the running average after round t."""
    if average == "last":
        return 1.0
    return 1.0 / t if average == "paper" else (TAIL_POWER + 1.0) / (TAIL_POWER + t)


def edge_update(alpha: Array, difference: Array, rho: float, radius: Array, penalty: Penalty) -> Array:
    """Return the dual ``(E, p)`` after one edge step; ``difference`` is ``theta_i - theta_j``.

    The threshold of the paper's prox is ``2 L w_e / rho`` because both endpoints move; for the dual this means a ball
    of radius ``L w_e`` and half of rho.
    """
    return penalty.project(alpha + (0.5 * rho) * difference, radius)


class Shard:
    """Shard of a plan: its sites and every edge that touches them.

    A run inside one process has one shard with all sites; in a deployment, a shard has one site. An edge between two
    shards has a replica in both. Each end computes the same step from the same two thetas, so the replicas stay bitwise
    equal and only thetas are sent.

    ``sites (B,)`` are increasing positions; edges of sites in ``without`` are left out. ``streams`` are by
    position. Sites whose rows are elsewhere take only the penalty part of the step.

    ``foreign`` are the neighbours hosted elsewhere, increasing.
    """

    def __init__(
        self, plan: RunPlan, *, without: Sequence[int] = (), streams: Mapping[int, SampleStream] | None = None
    ) -> None:
        self.plan, self.sites, self.steps = plan, plan.sites, plan.steps
        #: The hosted sites whose rows are here: all, or these numbers.
        self.own: slice | Index = slice(None)
        if plan.with_rows is not None and plan.with_rows.size < plan.sites.size:
            self.own = np.searchsorted(plan.sites, plan.with_rows)
        self.gradients: Gradients | None = None
        if plan.rows is not None:
            how = plan.seed, plan.gradient, plan.snapshot_every
            self.gradients = Gradients(plan.rows, *how, streams=streams)
        self._all_theta = plan.theta.copy()
        kept = ~np.isin(plan.edges, list(without)).any(axis=1)
        self._host(plan.edges[kept], plan.edge_radius[kept])
        zero = np.zeros((self.edges.shape[0], plan.n_params))
        self.alpha = zero if plan.alpha is None else plan.alpha[kept]
        self.balance = self._balance()
        self.balance_before, self.average_balance = self.balance.copy(), self.balance.copy()
        #: The running average of the thetas, and the thetas before the last node step, ``(B, p)``.
        self.average, self.left = plan.theta.copy(), plan.theta.copy()
        self._weight = 1.0

    def _host(self, edges: Index, edge_radius: Array) -> None:
        sites, p = self.sites, self._all_theta.shape[1]
        self.edges, self.edge_radius = edges, edge_radius
        hosted = np.isin(edges, sites)
        self.foreign: Index = np.unique(edges[~hosted])
        self._place = np.concatenate([sites, self.foreign])
        self._row: dict[int, int] | None = None
        order = np.argsort(self._place)
        ends = order[np.searchsorted(self._place, edges, sorter=order)]
        self._heads, self._tails = np.ascontiguousarray(ends[:, 0]), np.ascontiguousarray(ends[:, 1])
        # +1 at an edge's first and -1 at its second end, columns sorted in every row
        site, edge, sign = ends.reshape(-1), np.repeat(np.arange(len(ends)), 2), np.tile([1.0, -1.0], len(ends))
        here = site < sites.size
        self._sum_duals = sparse.csr_array((sign[here], (site[here], edge[here])), shape=(sites.size, len(ends)))
        self._sum_duals.sort_indices()
        # of one site the same sums in the same order; numpy would sum a single column in pairs
        self._signs = np.where(ends[:, :1] == 0, 1.0, -1.0) if sites.size == 1 and p > 1 else None
        # hosted sites first, then the neighbours' last known thetas
        self._all_theta = np.concatenate([self._all_theta[: sites.size], np.zeros((self.foreign.size, p))])
        #: Parameters ``(B, p)`` of the hosted sites.
        self.theta = self._all_theta[: sites.size]

    def restart(self, plan: RunPlan, without: Sequence[int] = ()) -> None:
        """Restart with another plan of the same sites, without the edges of sites in ``without``."""
        Shard.__init__(self, plan, without=without)

    def pull(self) -> Array:
        """Return the edges' contribution ``2 s(t) - s(t-1)`` to a node step, ``(B, p)``."""
        return 2.0 * self.balance - self.balance_before

    def node_step(self, t: int, available: Mask | None = None, probability: Array | None = None) -> None:
        """Move the hosted thetas in round ``t = 1, 2, ...``.

        Sites that are not ``available (B,)``, or whose rows are elsewhere, take only the penalty part of the step.
        Gradients of the others are divided by their availability ``probability (B,)``.
        """
        self.left, direction = self.theta.copy(), self.pull()
        if self.gradients is not None:
            own = self.own
            gradient = self.gradients(t, self.left[own], None if available is None else available[own])
            direction[own] += gradient if probability is None else gradient / probability[own][:, None]
        self.theta[:] = self._moved(direction, t, probability)
        if self.plan.wire == "float32" and self.gradients is not None:  # both ends of an edge use the same numbers
            self.theta[self.own] = self.theta[self.own].astype(np.float32)
        self._weight = averaging_weight(self.plan.average, t)

    def _moved(self, direction: Array, t: int, probability: Array | None) -> Array:
        """Return ``theta - eta * direction`` after the soft threshold of the sparsity term and the parameter ball."""
        eta, radius = self.steps.eta(t, probability), self.plan.radius
        moved = self.left - eta[:, None] * direction
        if self.plan.sparsity is not None:
            bound = eta[:, None] * self.plan.sparsity
            moved = moved - np.clip(moved, -bound, bound)
        if radius is None:
            return moved
        largest = np.maximum.reduce(np.absolute(moved), axis=None, initial=0.0)
        if largest * math.sqrt(moved.shape[1]) < radius:  # no row is longer than the radius; False also for NaN
            return moved
        with np.errstate(over="ignore"):
            length = np.sqrt((moved * moved).sum(axis=1))
        if np.isinf(length).any() and np.isfinite(moved).all():
            moved = make_penalty("l2").project(moved, radius)  # which knows how to shorten such numbers
            length = np.sqrt((moved * moved).sum(axis=1))
        return np.asarray(moved * np.divide(radius, length, out=np.ones_like(length), where=length > radius)[:, None])

    def penalty_step(self, t: int, probability: Array | None = None) -> Array:
        """Return the thetas of hosted sites after the last node step had they been absent, ``(B, p)``."""
        return self._moved(self.pull(), t, probability)

    def take(self, thetas: Mapping[int, Array]) -> None:
        """Store received thetas by position: of foreign neighbours, or of hosted sites updated elsewhere."""
        if self._row is None:
            self._row = {u: k for k, u in enumerate(self._place.tolist())}
        for u, theta in thetas.items():
            if (row := self._row.get(u)) is not None:
                self._all_theta[row] = theta

    def differences(self) -> Array:
        """Return ``theta_i - theta_j (E, p)`` of the shard's edges, with the neighbours' last received thetas."""
        difference = self._all_theta.take(self._heads, axis=0)
        difference -= self._all_theta.take(self._tails, axis=0)
        return difference

    def edge_step(self) -> None:
        """Update the dual of every edge of the shard, given the thetas at both ends."""
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

    def take_rows(self, rows: SiteRows, start: Array) -> None:
        """Replace the rows of the sites; steps are at most ``1 / start (B,)`` from now on.

        This requires plain gradients, which store nothing about rows.
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
        """Set theta and the dual force of edges hosted elsewhere, both ``(B, p)``."""
        self.theta[:] = theta
        self.balance = self.balance_before = pull.copy()  # 2 s - s is s, to the bit

    def drop(self, gone: Iterable[int]) -> None:
        """Remove the edges to foreign sites that have left permanently; their duals become 0.

        This is possible at any time, also between a node step and the edge step.
        """
        kept = ~np.isin(self.edges, list(gone)).any(axis=1)
        alpha, known = self.alpha[kept], dict(zip(self._place.tolist(), self._all_theta, strict=True))
        self._host(self.edges[kept], self.edge_radius[kept])
        self.take({u: known[u] for u in self._place.tolist()})
        self.take_duals(alpha)
        self.balance_before = self.balance.copy()

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the mutable state; only compiled rounds write to these arrays later.

        The neighbours' thetas are not part of it, because every round receives them before they are used.
        """
        # every step makes new arrays of these, except of theta
        state = {name: getattr(self, name) for name in ROUND_ARRAYS} | {"theta": self.theta.copy()}
        return state if self.gradients is None else state | self.gradients.state()

    def restore(self, state: State) -> None:
        """Restore a `state`; other arrays in it are ignored."""
        self.theta[:] = state["theta"]
        for name in ROUND_ARRAYS[1:]:
            setattr(self, name, state[name].copy())
        if self.gradients is not None:
            self.gradients.restore(state)


class Link(ABC):
    """Base class of links, which exchange thetas between shards and know the next round and the available sites.

    ``rounds`` is the last round, ``done`` the number of finished ones. A link that cannot go on raises an error in
    `begin`, `exchange` or `end`: it ends the loop, and the state after round ``done`` is where the next process starts.
    """

    def __init__(self, rounds: int, done: int = 0) -> None:
        self.rounds, self.done = rounds, done

    def begin(self, shard: Shard) -> int | None:
        """Return the next round, or None after the last; this may wait, and may set the state of the shard."""
        return self.done + 1 if self.done < self.rounds else None

    def presence(self, t: int) -> tuple[Mask | None, Array | None]:
        """Return availability and probability of hosted sites in round t; None for all sites and for probability 1."""
        return None, None

    @abstractmethod
    def exchange(self, t: int, shard: Shard) -> Mapping[int, Array] | None:
        """Send the shard's thetas of round t, and return received thetas by position; sites that answer are available.

        Return None if the shard was set to the state of another round meanwhile.
        """

    def end(self, t: int, shard: Shard) -> None:
        """Finish round t; the ends of an edge may now compare its dual."""
        self.done = t


def run_rounds(
    shard: Shard,
    link: Link,
    *,
    begun: Callable[[], None] | None = None,
    stepped: Callable[[int], None] | None = None,
    ended: Callable[[int], None] | None = None,
) -> None:
    """Run all rounds that the link starts.

    The functions are called in each round: before its gradients are computed, before its thetas are sent, and at its
    end. An error in one of them, or in the link, ends the run.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # what diverges is told in words
        while (t := link.begin(shard)) is not None:
            if begun is not None:
                begun()
            shard.node_step(t, *link.presence(t))
            if stepped is not None:
                stepped(t)
            thetas = link.exchange(t, shard)
            if thetas is None:
                continue
            if thetas:
                shard.take(thetas)
            shard.edge_step()
            link.end(t, shard)
            if ended is not None:
                ended(t)


# --- shares of the certificate ----------------------------------------------------------------------------------------

# The gap of a federation is a sum of one term per site, from its own rows, and one per edge, from what both ends know.
# So every site can compute its share alone, and all shares of a round make the certificate.

#: A share needs a p x p matrix; with more parameters than this, no shares are computed.
MOST_PARAMS = 300
_PART = 4  # shares are computed four times while the first digit of the round number stays the same


def is_shared(t: int) -> bool:
    """Return whether sites compute their shares after round t: ever more rarely, and in the same rounds everywhere."""
    step = int(10 ** math.floor(math.log10(t))) // _PART
    return t % max(step, 1) == 0


@dataclass(frozen=True)
class Share:
    """Contribution of a shard to the certificate after a round; an edge to another shard counts half.

    ``value`` and ``zero`` are the objective at the shard's parameters and at 0, ``gap`` the duality gap (infinite if
    the rows do not bound it), ``primal`` and ``dual`` squares of residuals, ``edges`` and ``sites`` how many there are.
    """

    round: int
    value: float
    zero: float
    gap: float
    primal: float
    dual: float
    edges: float
    sites: float


class ShareTaker:
    """Calculator of the shares of a shard that has the rows of its sites."""

    def __init__(self, shard: Shard) -> None:
        assert shard.gradients is not None
        rows = shard.gradients.rows
        self.shard, own = shard, {u: rows.of(u) for u in range(rows.starts.size)}
        self._terms = build_terms(Federation(own), rows.losses, rows.ridge)
        self._zero = float(self._terms.values(np.zeros((len(own), rows.ridge.size))).sum())

    def take(self, t: int) -> Share:
        """Return the share after round t, at the shard's current parameters and duals."""
        shard, plan = self.shard, self.shard.plan
        theta, balance, alpha, sparsity = shard.theta, shard.balance, shard.alpha, plan.sparsity
        difference = shard.differences()
        whole = np.where(np.isin(shard.edges, shard.sites).all(axis=1), 1.0, 0.5)
        penalties = shard.edge_radius * plan.penalty.value(difference)
        moved = edge_update(alpha, difference, plan.rho, shard.edge_radius, plan.penalty) - alpha
        value, gap = float(whole @ penalties), float(whole @ (penalties - (alpha * difference).sum(axis=1)))
        residual = self._terms.gradients(theta) + balance
        if sparsity is not None:
            zeta = np.clip(-residual, -sparsity, sparsity)
            size = float((sparsity * np.abs(theta)).sum())
            balance, residual = balance + zeta, residual + zeta
            value, gap = value + size, gap + size - float((zeta * theta).sum())
        with np.errstate(over="ignore", invalid="ignore"):
            ball = plan.radius
            gaps = self._terms.young_gaps(theta, balance)
            gaps = gaps if ball is None else np.minimum(gaps, self._terms.gaps_in_ball(theta, balance, ball))
        return Share(
            t,
            value + float(self._terms.values(theta).sum()),
            self._zero,
            gap + float(gaps.sum()),
            float(whole @ (moved**2).sum(axis=1)) / plan.rho**2,
            float((residual**2).sum()),
            float(whole.sum()),
            float(shard.sites.size),
        )


def together(shares: Sequence[Share]) -> dict[str, float]:
    """Return residuals and relative gap of a round, from the shares of all shards."""
    total = {name: sum(getattr(share, name) for share in shares) for name in vars(shares[0])}
    return {
        "n_iter": float(shares[0].round),
        "primal_residual": math.sqrt(total["primal"] / max(total["edges"], 1.0)),
        "dual_residual": math.sqrt(total["dual"] / max(total["sites"], 1.0)),
        "gap": max(total["gap"], 0.0) / gap_scale(total["value"], total["zero"]),
    }
