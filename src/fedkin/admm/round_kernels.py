"""The rounds of Fed-ADMM as compiled loops (numba), for one shard that hosts every site.

Batches and steps are those of `fedkin.admm.rounds`. Sums are taken in a different order, so results agree up to
rounding, not bitwise. A round has two loops, over sites and over edges; each works on a range and releases the GIL, so
threads can share a large round.

Conventions: ``s (T, V, p)`` holds the sums of duals as one share per thread. The site loop of round t reads and
clears them (and adds them to their average on behalf of round t - 1), the edge loop fills them again.
"""

from __future__ import annotations

import math
import zlib
from collections import namedtuple
from contextlib import closing
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from fedkin._base import Array, Mask, available_threads
from fedkin._compiling import kernel, load
from fedkin.admm.availability import FLOYD_LIMIT, site_roots
from fedkin.admm.rounds import TAIL_POWER, Shard, averaging_weight
from fedkin.core import make_penalty
from fedkin.losses import COMPILED_LOSSES, Loss, MeanLoss
from fedkin.solvers import Crew

L1, L2, LINF = 0, 1, 2
PENALTIES = {"l1": L1, "l2": L2, "linf": LINF}
MEAN = -1
LOSSES: dict[type[Loss], int] = {MeanLoss: MEAN, **{kind: k for k, kind in enumerate(COMPILED_LOSSES)}}
TAIL, PAPER, LAST = 0, 1, 2
AVERAGES = {"tail": TAIL, "paper": PAPER, "last": LAST}
PLAIN, SAGA, SVRG = 0, 1, 2
GRADIENTS = {"plain": PLAIN, "saga": SAGA, "svrg": SVRG}

#: Multiplications in a round from which on threads share it.
THREADING_PAYS = 3e6
_GOLDEN = 0x9E3779B97F4A7C15


#: Codes of loss, gradient and average, rounds between snapshots, the loss's parameter, radius of the ball or infinity.
RoundRule = namedtuple("RoundRule", "loss gradient average snapshot_every parameter ball")
#: Rows of all sites ``X (N, p)``, ``y (N,)``, ``offset (N,)``; where each begins, how many it has and draws; what its
#: draws begin with. Arrays that are not needed are empty, here and below.
Samples = namedtuple("Samples", "X y offset starts counts batch roots")
#: Step sizes ``start, growth, damping (V,)``, ``ridge (p,)`` and ``sparsity (V, p)``.
RoundSteps = namedtuple("RoundSteps", "start growth damping ridge sparsity")
#: Code of the penalty, rho, ``ends (E, 2)`` and radii ``(E,)`` of the dual balls.
RoundEdges = namedtuple("RoundEdges", "penalty rho ends radius")
#: What rounds change: the state of a shard, with the sums of duals as shares ``s (T, V, p)``.
RoundArrays = namedtuple(
    "RoundArrays", "theta alpha s before average average_balance table anchor_gradient anchor_theta stale looked"
)


@kernel
def _mix(word: Any) -> Any:
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@kernel
def _draw(state: Any, n: int, size: int, chosen: Any) -> None:
    """Draw the rows that `fedkin.admm.availability.draw_batches` draws, for at most FLOYD_LIMIT or all of them."""
    if size == n:
        for k in range(size):
            chosen[k] = k
        return
    for k in range(size):
        last = n - size + k
        high = _mix(state + np.uint64(k + 1) * np.uint64(_GOLDEN)) >> np.uint64(32)
        drawn = np.int64((high * np.uint64(last + 1)) >> np.uint64(32))
        taken = False
        for earlier in range(k):
            taken |= chosen[earlier] == drawn
        chosen[k] = last if taken else drawn


def _slopes(first: int = 0) -> Any:
    """Return the compiled slope ``(loss, parameter, eta, y)`` of the losses with this code or a higher one."""
    slope = njit(nogil=True, error_model="numpy")(COMPILED_LOSSES[first].slope)
    if first + 1 == len(COMPILED_LOSSES):
        return njit(nogil=True)(lambda loss, parameter, eta, y: slope(eta, y, parameter))
    others = _slopes(first + 1)
    return njit(nogil=True)(
        lambda loss, parameter, eta, y: slope(eta, y, parameter) if loss == first else others(loss, parameter, eta, y)
    )


_slope = _slopes()
#: numba's cache does not see that a slope in another file has changed: loops that call them are compiled for these.
_CODES = [kind.slope.__code__ for kind in COMPILED_LOSSES]
_SLOPES = zlib.crc32(repr([(code.co_code, code.co_consts, code.co_names) for code in _CODES]).encode())


@kernel
def _weight(average: int, t: int) -> float:
    if average == LAST:
        return 1.0
    return 1.0 / t if average == PAPER else (TAIL_POWER + 1.0) / (TAIL_POWER + t)


@kernel
def add_to_average(weight: Any, balance: Any, average_balance: Any) -> None:
    """Finish the averages that `sites_loop` would update in the next round, after the last round of a stretch."""
    for i in range(balance.shape[0]):
        for c in range(balance.shape[1]):
            average_balance[i, c] += weight * (balance[i, c] - average_balance[i, c])


def _sites_loop(slopes: int) -> Any:
    @kernel
    def sites_loop(
        lo: int, hi: int, first: int, k: int, presence: Any, rule: Any, samples: Any, steps: Any, state: Any
    ) -> None:
        """Take the node steps of the sites ``lo .. hi - 1`` in round ``t = first + k``.

        ``presence`` holds availability and probabilities, ``(R, V)`` from round ``first`` onwards, or is empty.
        """
        assert slopes >= 0
        t, (available, probability) = first + k, presence
        last_weight = 0.0 if k == 0 else _weight(rule.average, t - 1)  # of the present sums of duals in their average
        X, y, offset, starts, counts, batch, roots = samples
        start, growth, damping, ridge, sparsity = steps
        theta, _, s, before, average, average_balance, table, anchor_gradient, anchor_theta, stale, looked = state
        loss, gradient, parameter, ball = rule.loss, rule.gradient, rule.parameter, rule.ball
        mean, weight = loss == MEAN, _weight(rule.average, t)
        p, counter = theta.shape[1], np.uint64(t) * np.uint64(_GOLDEN)
        g, moved, balance = np.empty(p), np.empty(p), np.empty(p)
        chosen, change = np.empty(batch.max(), dtype=np.int64), np.empty(batch.max())
        for i in range(lo, hi):
            here = available.size == 0 or available[k, i]
            chance = 1.0 if probability.size == 0 else probability[k, i]
            n, b, start_row = counts[i], batch[i], starts[i]
            g[:] = 0.0
            if gradient == SVRG:
                stale[i] |= (t - 1) % rule.snapshot_every == 0
                if here and stale[i]:
                    for row in range(start_row, start_row + n):
                        if mean:
                            for c in range(p):
                                g[c] += parameter * (theta[i, c] - X[row, c]) / n
                        else:
                            eta = offset[row] if offset.size else 0.0
                            for c in range(p):
                                eta += X[row, c] * theta[i, c]
                            d = _slope(loss, parameter, eta, y[row]) / n
                            for c in range(p):
                                g[c] += d * X[row, c]
                    anchor_gradient[i], anchor_theta[i], g[:] = g, theta[i], 0.0
                    stale[i] = False
                    looked[i] += n
            if here:
                looked[i] += 2 * b if gradient == SVRG else b
                _draw(_mix(roots[i] + counter), n, b, chosen)
                # all slopes first: the two passes over the batch are loops that vectorise
                for m in range(0 if mean else b):
                    row = start_row + chosen[m]
                    known = offset[row] if offset.size else 0.0
                    eta, old = known, 0.0
                    for c in range(p):
                        eta += X[row, c] * theta[i, c]
                    new = _slope(loss, parameter, eta, y[row])
                    if gradient == SAGA:
                        old, table[row, 0] = table[row, 0], new
                    elif gradient == SVRG:
                        for c in range(p):
                            known += X[row, c] * anchor_theta[i, c]
                        old = _slope(loss, parameter, known, y[row])
                    change[m] = (new - old) / b
                for m in range(b):
                    row, d = start_row + chosen[m], change[m]
                    for c in range(p):
                        if not mean:
                            g[c] += d * X[row, c]
                        elif gradient == SAGA:
                            score = parameter * (theta[i, c] - X[row, c])
                            g[c] += (score - table[row, c]) / b
                            table[row, c] = score
                        else:
                            origin = anchor_theta[i, c] if gradient == SVRG else X[row, c]
                            g[c] += parameter * (theta[i, c] - origin) / b
                for c in range(p if gradient != PLAIN else 0):
                    d = g[c]
                    g[c] += anchor_gradient[i, c]
                    if gradient == SAGA:
                        anchor_gradient[i, c] += d * b / n
                for c in range(p):
                    g[c] = (g[c] + ridge[c] * theta[i, c]) / chance
            eta = 1.0 / (start[i] / chance + growth[i] * t + damping[i])
            # one loop per array or two: these vectorise, a single one does not
            for c in range(p):
                balance[c] = s[0, i, c]
                s[0, i, c] = 0.0
            for m in range(1, s.shape[0]):
                for c in range(p):
                    balance[c] += s[m, i, c]
                    s[m, i, c] = 0.0
            for c in range(p):
                average_balance[i, c] += last_weight * (balance[c] - average_balance[i, c])
            for c in range(p):
                moved[c] = theta[i, c] - eta * (g[c] + 2.0 * balance[c] - before[i, c])
            for c in range(p):
                before[i, c] = balance[c]
            if sparsity.size:
                for c in range(p):
                    bound = eta * sparsity[i, c]
                    moved[c] -= min(max(moved[c], -bound), bound)
            if ball < np.inf:
                length = 0.0
                for c in range(p):
                    length += moved[c] * moved[c]
                length = math.sqrt(length)
                if length > ball:
                    for c in range(p):
                        moved[c] *= ball / length
            for c in range(p):
                average[i, c] += weight * ((theta[i, c] if rule.average == PAPER else moved[c]) - average[i, c])
            for c in range(p):
                theta[i, c] = moved[c]

    return sites_loop


sites_loop = _sites_loop(_SLOPES)


@kernel
def edges_loop(lo: int, hi: int, share: int, edges: Any, state: Any) -> None:
    """Take the edge steps of the edges ``lo .. hi - 1``; their duals are added to a share of s."""
    penalty, ends, radius = edges.penalty, edges.ends, edges.radius
    theta, alpha, s = state.theta, state.alpha, state.s
    p, half = theta.shape[1], 0.5 * edges.rho
    moved = np.empty(p)
    for e in range(lo, hi):
        i, j, bound, size = ends[e, 0], ends[e, 1], radius[e], 0.0
        for c in range(p):
            moved[c] = alpha[e, c] + half * (theta[i, c] - theta[j, c])
        if penalty == L1:
            for c in range(p):
                moved[c] = min(max(moved[c], -bound), bound)
        elif penalty == L2:
            for c in range(p):
                size += moved[c] * moved[c]
            size = math.sqrt(size)
            if size > bound:
                for c in range(p):
                    moved[c] *= bound / size
        else:
            for c in range(p):
                size += abs(moved[c])
            if size > bound:
                ordered = np.sort(np.abs(moved))
                # the threshold of the l1 ball is the largest of (sum of the k largest - bound) / k
                threshold, total = -np.inf, 0.0
                for k in range(p):
                    total += ordered[p - 1 - k]
                    threshold = max(threshold, (total - bound) / (k + 1))
                for c in range(p):
                    left = max(abs(moved[c]) - threshold, 0.0)
                    moved[c] = left if moved[c] >= 0.0 else -left
        for c in range(p):
            alpha[e, c] = moved[c]
        for c in range(p):
            s[share, i, c] += moved[c]
        for c in range(p):
            s[share, j, c] -= moved[c]


def _rounds_loop(slopes: int) -> Any:
    @kernel
    def rounds_loop(
        first: int, count: int, presence: Any, rule: Any, samples: Any, steps: Any, edges: Any, state: Any
    ) -> None:
        """Run the rounds ``first .. first + count - 1`` on one thread."""
        assert slopes >= 0
        for k in range(count):
            sites_loop(0, state.theta.shape[0], first, k, presence, rule, samples, steps, state)
            edges_loop(0, state.alpha.shape[0], 0, edges, state)

    return rounds_loop


rounds_loop = _rounds_loop(_SLOPES)


class CompiledRounds:
    """Compiled rounds that update the arrays of a shard with all sites in place.

    By default, ``threads`` is the number of cores if a round is long enough.
    """

    def __init__(self, shard: Shard, threads: int | None = None) -> None:
        assert shard.gradients is not None
        plan, rows, steps = shard.plan, shard.gradients.rows, shard.plan.steps
        self.plan, self.shard = plan, shard
        work = float(rows.batch.sum() + plan.edges.shape[0]) * rows.ridge.size
        self.threads = threads or (available_threads() if work > THREADING_PAYS else 1)
        loss = rows.losses[0]
        ball = np.inf if plan.radius is None else float(plan.radius)
        codes = LOSSES[type(loss)], GRADIENTS[plan.gradient], AVERAGES[plan.average], plan.snapshot_every
        self._rule = RoundRule(*codes, loss.parameter, ball)
        none, data = np.empty(0), rows.data
        y, offset = (none if given is None else given for given in (data.y, data.offset))
        samples = (data.X, y, offset, rows.starts, rows.counts, rows.batch, site_roots(rows.keys, plan.seed))
        self._samples = Samples(*map(_readable, samples))
        sparsity = np.empty((0, 0)) if plan.sparsity is None else plan.sparsity
        self._steps = RoundSteps(*map(_readable, (steps.start, steps.growth, steps.damping, rows.ridge, sparsity)))
        ends, radius = _readable(plan.edges.astype(np.int32)), _readable(plan.edge_radius)
        self._edges = RoundEdges(PENALTIES[plan.penalty.name], float(plan.rho), ends, radius)
        self._shares = np.zeros((self.threads, *self.shard.balance.shape))

    def __call__(self, first: int, count: int, available: Mask | None = None, probability: Array | None = None) -> None:
        """Run ``count`` rounds from ``first``; presence and probabilities ``(count, V)`` for intermittent sites."""
        shard, s, kept = self.shard, self._shares, self.shard.gradients
        assert kept is not None
        s[0], s[1:] = shard.balance, 0.0
        here = np.empty((0, 0), dtype=np.bool_) if available is None else np.ascontiguousarray(available)
        chance = np.empty((0, 0)) if probability is None else np.ascontiguousarray(probability)
        of_shard = (shard.theta, shard.alpha, s, shard.balance_before, shard.average, shard.average_balance)
        state = RoundArrays(*of_shard, kept.table, kept.anchor_gradient, kept.anchor_theta, kept.stale, kept.looked)
        rules, edges = ((here, chance), self._rule, self._samples, self._steps), self._edges
        if self.threads == 1:
            load(rounds_loop, first, count, *rules, edges, state)
            rounds_loop(first, count, *rules, edges, state)
        else:
            with closing(Crew(self.threads)) as crew:
                sites, duals = crew.split(shard.sites.size), crew.split(shard.alpha.shape[0])
                for k in range(count):

                    def node_steps(_: int, lo: int, hi: int, k: int = k) -> None:
                        sites_loop(lo, hi, first, k, *rules, state)

                    crew.run(node_steps, sites)
                    crew.run(lambda n, lo, hi: edges_loop(lo, hi, n, edges, state), duals)
        np.sum(s, axis=0, out=shard.balance)
        weight = averaging_weight(self.plan.average, first + count - 1)
        # by a kernel, like those of the other rounds: bits must not depend on where stretches of rounds end
        add_to_average(weight, shard.balance, shard.average_balance)


def _readable(array: NDArray[Any]) -> NDArray[Any]:
    """Return a C-ordered, read-only view: one type of argument, whether rows are read-only or not."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def unsupported(shard: Shard) -> str | None:
    """Return why compiled rounds do not support this run, or None if they do."""
    assert shard.gradients is not None
    plan, rows = shard.plan, shard.gradients.rows
    loss = rows.losses[0]
    if shard.gradients.streams:
        return "it cannot draw from streams"
    if any(other is not loss for other in rows.losses):
        return "it needs the same loss on every site"
    if type(loss) not in LOSSES:
        return f"it has no {loss.name} loss, only {', '.join(kind.name for kind in LOSSES)}"
    if ((rows.batch > FLOYD_LIMIT) & (rows.batch < rows.counts)).any():
        return f"it cannot draw batches of more than {FLOYD_LIMIT} rows"
    if plan.penalty.name not in PENALTIES or type(plan.penalty) is not type(make_penalty(plan.penalty.name)):
        return f"it has no {plan.penalty.name} penalty"
    return None
