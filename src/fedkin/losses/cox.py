"""Define the Cox loss for censored survival times."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Index, Mask
from fedkin.losses.base import Loss, Maybe, given


class CoxLoss(Loss):
    """Cox proportional hazards loss: negative partial log-likelihood per row, with Efron's method for ties.

    Risk sets contain rows of the same site only, so every site has its own baseline hazard and there is no intercept.
    The target is the time, negative if censored. A row's contribution depends on the rows at risk, so the loss of a
    subset of rows uses their own risk sets and is not a part of the total.
    """

    name = "cox"
    canonical = True
    target = "survival"
    link = "log"
    ratio = "hazard ratio"
    metric = "partial log-loss"
    purpose = "times until an event"
    wanted = "times above 0, negative if censored"
    takes_intercept = False
    additive = False

    def refused(self, y: NDArray[Any]) -> Mask:
        return np.asarray(y == 0)

    def value(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> float:
        eta = log_hazards(theta, X, offset)
        risk = RiskSets.from_times(given(y))
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            top = eta.max(initial=0.0)
            weight = np.exp(eta - top)
            return float((np.log(risk.sums(weight[:, None])[:, 0]) + top).sum() - eta[risk.deaths].sum()) / len(X)

    def scores(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> Array:
        risk, means, _ = self._means(theta, X, y, offset)
        out = np.zeros_like(X, dtype=np.float64)
        out[risk.deaths] = risk.shared(means) - X[risk.deaths]
        return out

    def hessian(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> Array:
        _, means, expected = self._means(theta, X, y, offset)
        return np.asarray(((X * expected[:, None]).T @ X - means.T @ means) / len(X))

    def predict(self, theta: Array, X: Array, offset: Maybe = None) -> Array:
        """Return hazard ratios to the baseline."""
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(log_hazards(theta, X, offset)))

    def row_errors(self, y: Array, response: Array) -> Array:
        """Return each event's negative log partial likelihood among these rows, 0 for censored rows."""
        risk, ends = RiskSets.from_times(y), np.finfo(float)
        eta = np.log(np.clip(response, ends.tiny, ends.max))
        out, top = np.zeros(len(y)), eta.max(initial=0.0)
        at_risk = np.log(risk.sums(np.exp(eta - top)[:, None])) + top
        out[risk.deaths] = risk.shared(at_risk)[:, 0] - eta[risk.deaths]
        return out

    def score_weights(self, y: Array) -> Array:
        return np.asarray(y > 0, dtype=np.float64)

    def cumulative_hazard(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> tuple[Array, Array]:
        """Return times ``(T,)`` and Breslow's cumulative hazard at each, with Efron's ties, ``(T, 2 + q)``.

        Each entry also has the variance of the hazard for a known theta (Tsiatis 1981) and its gradient in theta. The
        last time is that of the last row.
        """
        times, (risk, means, _) = given(y), self._means(theta, X, y, offset)
        hazard = 1.0 / risk.sums(np.exp(log_hazards(theta, X, offset))[:, None])
        each = np.column_stack([hazard, hazard**2, -hazard * means])
        moments, last = np.unique(times[risk.deaths]), np.abs(times).max(initial=0.0)
        steps = np.zeros((len(moments), each.shape[1]))
        np.add.at(steps, risk.tie, each)
        steps = np.cumsum(steps, axis=0)
        if not moments.size or last > moments[-1]:
            moments, steps = (
                np.append(moments, last),
                np.vstack([steps, steps[-1:] if len(steps) else 0 * steps.sum(0)]),
            )
        return moments, steps

    def _means(self, theta: Array, X: Array, y: Maybe, offset: Maybe) -> tuple[RiskSets, Array, Array]:
        """Return the risk sets, the weighted means of their rows, and the cumulated hazard ``(n,)`` of every row."""
        eta, risk = log_hazards(theta, X, offset), RiskSets.from_times(given(y))
        weight = np.exp(eta - eta.max(initial=0.0))
        sums = risk.sums(weight[:, None] * np.column_stack([np.ones(len(X)), X]))
        return risk, sums[:, 1:] / sums[:, :1], weight * risk.cumulated(1.0 / sums[:, 0])


class RiskSets(NamedTuple):
    """Risk sets of a site's events with Efron's ties: for the l-th of d tied events, a share l / d is removed."""

    order: Index  # rows by time
    start: Index  # (D,) position in `order` of the first row at risk, for every event
    deaths: Index  # (D,) rows with an event, by time
    tie: Index  # (D,) number of its time
    gone: Array  # (D,) share of the tied events that is no longer at risk
    position: Index  # (n,) number of the last time with an event up to the row's own, plus 1

    @classmethod
    def from_times(cls, y: Array) -> RiskSets:
        """Sort times ``y (n,)``, negative if censored."""
        time = np.abs(y)
        order = np.argsort(time, kind="stable")
        deaths = order[y[order] > 0]
        times, first, tie, size = np.unique(time[deaths], return_index=True, return_inverse=True, return_counts=True)
        gone = (np.arange(len(deaths)) - first[tie]) / size[tie]
        start = np.searchsorted(time[order], times)[tie]
        return cls(order, start, deaths, tie, gone, np.searchsorted(times, time, side="right"))

    def sums(self, rows: Array) -> Array:
        """Return sums of ``rows (n, k)`` over the risk set of every event, ``(D, k)``."""
        after = np.cumsum(rows[self.order][::-1], axis=0)[::-1]
        return np.asarray(after[self.start] - self.gone[:, None] * self._tied(rows[self.deaths])[self.tie])

    def shared(self, each: Array) -> Array:
        """Return means over the events of one time, ``(D, k)``."""
        return np.asarray(self._tied(each)[self.tie] / np.bincount(self.tie)[self.tie, None])

    def cumulated(self, hazard: Array) -> Array:
        """Return the sum of ``hazard (D,)`` over all events at which a row is at risk, ``(n,)``."""
        each = np.concatenate([[0.0], np.bincount(self.tie, weights=hazard).cumsum()])
        out = each[self.position]
        out[self.deaths] -= np.bincount(self.tie, weights=self.gone * hazard)[self.tie]
        return np.asarray(out)

    def _tied(self, each: Array) -> Array:
        first = np.unique(self.tie, return_index=True)[1]
        return np.asarray(np.add.reduceat(each, first, axis=0)) if len(first) else each


def log_hazards(theta: Array, X: Array, offset: Maybe = None) -> Array:
    """Return the log hazard of every row relative to the baseline, ``(n,)``."""
    eta = X @ theta
    return np.asarray(eta if offset is None else eta + offset)
