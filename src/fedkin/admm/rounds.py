"""The arithmetic of Fed-ADMM for any number of sites, and the loop of rounds.

With ``y_e`` the edge dual (``alpha`` in the code, inside the ball of radius ``L w_e``) and ``s_i`` the signed sum of
the duals around site i, a round is

    theta_i <- theta_i - eta_i (g_i + 2 s_i(t) - s_i(t-1))                 node step
    y_e     <- projection of y_e + (rho / 2) (theta_i - theta_j)           edge step

which is Algorithm 1 of the paper with its copies beta eliminated (docs/fed-admm.md has the algebra).

`run_rounds` is given three things and knows nothing else:

- a **shard** does the arithmetic: `fedkin.admm.Shard`;
- a **link** carries thetas: ``exchange(t, shard)`` tells others this shard's thetas of round t and returns theirs.
  `DirectLink` does so inside one process; `fedkin.federate.links` has those between machines;
- a **store** keeps the state after a round: ``save(t, shard, durable)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from scipy import sparse

from fedkin._base import Array, Index, Mask
from fedkin.admm.gradients import Gradients, SampleStream, SiteRows, no_memory
from fedkin.admm.plan import Average, RunPlan
from fedkin.core import SCALE_FLOOR, Penalty, build_terms, make_penalty
from fedkin.data import Federation
from fedkin.errors import ParameterError, SolverError

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

    One shard with all sites is the run inside one process; a shard of one site is a site in the field. An edge between
    two shards has a replica in both: each end computes the same step from the same two thetas, so the replicas hold the
    same bits and only thetas travel.

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


Wire = Literal["float64", "float32"]


class Link(Protocol):
    """What carries thetas between shards, and knows which round comes next and who is there."""

    def begin(self, shard: Shard) -> int | None:
        """Return the next round, None after the last; it may wait for it, and set where the shard stands."""

    def presence(self, t: int) -> tuple[Mask | None, Array | None]:
        """Return which hosted sites are there in round t, and with which probability; None for all, and for 1."""

    def exchange(self, t: int, shard: Shard) -> Mapping[int, Array] | None:
        """Tell others the shard's thetas of round t, and return theirs by position: who answered is there.

        None when the shard was set to the state of another round meanwhile.
        """

    def end(self, t: int, shard: Shard) -> None:
        """Round t is over; ends of an edge may compare its dual now."""


class RoundStore(Protocol):
    """What keeps the state of a shard."""

    def save(self, t: int, shard: Shard, durable: bool) -> None:
        """Keep the state after round t; a durable one survives a loss of power."""


class DirectLink:
    """The link of a shard that hosts all sites: nothing leaves the process.

    ``available`` and ``probability (R, V)`` are of the rounds after ``done``, where sites come and go.
    """

    def __init__(
        self, rounds: int, done: int = 0, available: Mask | None = None, probability: Array | None = None
    ) -> None:
        self.rounds, self.done, self._first = rounds, done, done + 1
        self._available, self._probability = available, probability

    def begin(self, shard: Shard) -> int | None:
        if shard.foreign.size:
            raise ParameterError("DirectLink is for shards that host all neighbours of their sites")
        return self.done + 1 if self.done < self.rounds else None

    def presence(self, t: int) -> tuple[Mask | None, Array | None]:
        k = t - self._first
        available, probability = self._available, self._probability
        return None if available is None else available[k], None if probability is None else probability[k]

    def exchange(self, t: int, shard: Shard) -> Mapping[int, Array]:
        return {}

    def end(self, t: int, shard: Shard) -> None:
        self.done = t


@dataclass(frozen=True)
class RoundConfig:
    """What `run_rounds` needs to know, apart from shard, link and store.

    - ``wire``: how thetas travel. Both ends of an edge must compute with the same numbers, so the shard's own are
      rounded.
    - ``names``: of the hosted sites that have their rows here; with them, parameters that diverge are an error in
      every round, told with a ``hint``.
    - ``constrained``: whether the parameter ball is a constraint of the problem. Where it only limits what counts,
      parameters that end at its border have diverged.
    - ``save_every``: rounds between durable saves; the ``last`` one is always saved, those between only with
      ``save_all``.
    - ``after``: called with the round and the largest change of a theta in it, after it is saved.
    """

    last: int
    wire: Wire = "float64"
    names: Sequence[str] | None = None
    hint: str = "the steps are too long"
    constrained: bool = False
    save_every: int | None = None
    save_all: bool = False
    after: Callable[[int, float], None] | None = None


def run_rounds(shard: Shard, link: Link, config: RoundConfig | None = None, store: RoundStore | None = None) -> None:
    """Do all rounds that the link begins; raises `SolverError` when parameters diverge."""
    after = None if config is None else config.after
    with np.errstate(over="ignore", invalid="ignore"):  # what diverges is told in words
        while (t := link.begin(shard)) is not None:
            shard.node_step(t, *link.presence(t))
            if config is not None:
                if config.wire == "float32":
                    shard.round_thetas()
                if config.names is not None:
                    _check(shard, t, config, config.names)
            thetas = link.exchange(t, shard)
            if thetas is None:
                continue
            if thetas:
                shard.take(thetas)
            shard.edge_step()
            link.end(t, shard)
            if config is not None and store is not None:
                durable = t == config.last or (config.save_every is not None and t % config.save_every == 0)
                if durable or config.save_all:
                    store.save(t, shard, durable)
            if after is not None:
                after(t, float(np.abs(shard.theta - shard.left).max(initial=0.0)))


def _check(shard: Shard, t: int, config: RoundConfig, names: Sequence[str]) -> None:
    """Raise `SolverError` when parameters are not finite, or end at the border of a ball that is no constraint."""
    theta, radius = shard.theta[shard.own], shard.plan.radius
    if not math.isfinite(np.add.reduce(theta, axis=None)) and not (finite := np.isfinite(theta)).all():
        name = names[int(np.argmin(finite.all(axis=1)))]
        raise SolverError(f"round {t}: the parameters of site {name!r} diverged: {config.hint}")
    if t == config.last and radius is not None and not config.constrained:
        size = np.sqrt((theta * theta).sum(axis=1))
        if (size > (1.0 - 1e-9) * radius).any():
            raise SolverError(
                f"the parameters of site {names[int(size.argmax())]!r} diverged to the border of their ball (radius "
                f"{radius:g}): {config.hint}; or state a larger radius"
            )


# --- shares of the certificate ----------------------------------------------------------------------------------------

# The gap of a federation is a sum of one term for each site, of its own rows, and one for each edge, of what both its
# ends know. So every site can work out its share alone, and all shares of a round make the certificate.

#: A share needs a matrix of as many rows and columns as there are parameters: with more of them there are none.
MOST_PARAMS = 300
_PART = 4  # shares are taken four times while the first digit of the round stays the same


def is_shared(t: int) -> bool:
    """Return whether sites take their shares after round t: the same at all of them, ever more seldom.

    Examples
    --------
    >>> [t for t in range(1000, 2000) if is_shared(t)]
    [1000, 1250, 1500, 1750]
    """
    step = int(10 ** math.floor(math.log10(t))) // _PART
    return t % max(step, 1) == 0


@dataclass(frozen=True)
class Share:
    """What a shard adds after a round; an edge to another shard counts half.

    ``value`` and ``zero`` are the objective at the shard's parameters and at 0, ``gap`` the duality gap (infinite where
    rows do not bound it), ``primal`` and ``dual`` squares of residuals, ``edges`` and ``sites`` how many there are.
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
    """Works out the shares of a shard that has the rows of its sites."""

    def __init__(self, shard: Shard) -> None:
        assert shard.gradients is not None
        rows = shard.gradients.rows
        self.shard, own = shard, {u: rows.of(u) for u in range(rows.starts.size)}
        self._terms = build_terms(Federation(own), rows.losses, rows.ridge)
        self._zero = float(self._terms.values(np.zeros((len(own), rows.ridge.size))).sum())

    def take(self, t: int) -> Share:
        """Return the share after round t, of the parameters and duals that the shard has now."""
        shard, plan = self.shard, self.shard.plan
        theta, balance, alpha, sparsity = shard.theta, shard.balance, shard.alpha, shard.sparsity
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
    """Return residuals and relative gap of a round, from the shares of all shards.

    Examples
    --------
    >>> together([Share(3, 1.0, 2.0, 0.1, 0.0, 4.0, 0.5, 1.0), Share(3, 1.0, 2.0, 0.1, 0.0, 0.0, 0.5, 1.0)])["gap"]
    0.1
    """
    total = {name: sum(getattr(share, name) for share in shares) for name in vars(shares[0])}
    floor = SCALE_FLOOR * abs(total["zero"]) + np.finfo(float).tiny
    return {
        "n_iter": float(shares[0].round),
        "primal_residual": math.sqrt(total["primal"] / max(total["edges"], 1.0)),
        "dual_residual": math.sqrt(total["dual"] / max(total["sites"], 1.0)),
        "gap": max(total["gap"], 0.0) / max(abs(total["value"]), floor),
    }
