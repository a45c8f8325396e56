"""Times until an event, some of them censored."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Index, Mask
from fedkin.losses.base import Loss, Maybe, given


class CoxLoss(Loss):
    """Minus the partial log-likelihood of proportional hazards over the number of rows, ties by Efron's method.

    The risk sets of a site are its own rows, so every site has its own baseline hazard and there is no intercept. The
    target is the time, with a minus sign where it is censored. A row's part depends on the rows at risk: the loss of
    some of the rows is that of their own risk sets, not a share of the whole.
    """

    name = "cox"
    target = "survival"
    link = "log"
    ratio = "hazard ratio"
    metric = "partial log-loss"
    purpose = "times until an event"
    wanted = "times above 0, with a minus sign where they are censored"
    takes_intercept = False
    additive = False

    def refused(self, y: NDArray[Any]) -> Mask:
        return np.asarray(y == 0)

    def value(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> float:
        eta = log_hazards(theta, X, offset)
        risk = RiskSets.of(given(y))
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            top = eta.max(initial=0.0)
            weight = np.exp(eta - top)
            return float((np.log(risk.sums(weight[:, None])[:, 0]) + top).sum() - eta[risk.deaths].sum()) / len(X)

    def gradient(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> Array:
        return np.asarray(self.scores(theta, X, y, offset).mean(axis=0))

    def scores(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> Array:
        risk, means, _ = self._means(theta, X, y, offset)
        out = np.zeros_like(X, dtype=np.float64)
        out[risk.deaths] = risk.shared(means) - X[risk.deaths]
        return out

    def hessian(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> Array:
        _, means, expected = self._means(theta, X, y, offset)
        return np.asarray(((X * expected[:, None]).T @ X - means.T @ means) / len(X))

    def predict(self, theta: Array, X: Array, offset: Maybe = None) -> Array:
        """Return hazards over the baseline."""
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(log_hazards(theta, X, offset)))

    def row_errors(self, y: Array, response: Array) -> Array:
        """Return minus each event's part of the log partial likelihood among these rows, 0 where they are censored."""
        risk, ends = RiskSets.of(y), np.finfo(float)
        eta = np.log(np.clip(response, ends.tiny, ends.max))
        out, top = np.zeros(len(y)), eta.max(initial=0.0)
        at_risk = np.log(risk.sums(np.exp(eta - top)[:, None])) + top
        out[risk.deaths] = risk.shared(at_risk)[:, 0] - eta[risk.deaths]
        return out

    def scored(self, y: Array) -> Array:
        return np.asarray(y > 0, dtype=np.float64)

    def cumulative_hazard(self, theta: Array, X: Array, y: Maybe, offset: Maybe = None) -> tuple[Array, Array]:
        """Return Breslow's estimate with Efron's ties; the last time is that of the last row."""
        times, risk = given(y), RiskSets.of(given(y))
        hazard = 1.0 / risk.sums(np.exp(log_hazards(theta, X, offset))[:, None])[:, 0]
        steps = np.cumsum(np.bincount(risk.tie, weights=hazard))
        moments, last = np.unique(times[risk.deaths]), np.abs(times).max(initial=0.0)
        if not moments.size or last > moments[-1]:
            moments, steps = np.append(moments, last), np.append(steps, steps[-1:] if steps.size else 0.0)
        return moments, np.asarray(steps, dtype=np.float64)

    def _means(self, theta: Array, X: Array, y: Maybe, offset: Maybe) -> tuple[RiskSets, Array, Array]:
        """Return the risk sets, the weighted means of their rows, and the cumulated hazard ``(n,)`` of every row."""
        eta, risk = log_hazards(theta, X, offset), RiskSets.of(given(y))
        weight = np.exp(eta - eta.max(initial=0.0))
        sums = risk.sums(weight[:, None] * np.column_stack([np.ones(len(X)), X]))
        return risk, sums[:, 1:] / sums[:, :1], weight * risk.cumulated(1.0 / sums[:, 0])


class RiskSets(NamedTuple):
    """Which rows of a site are at risk at every event, for Efron's ties: the l-th of d events counts l / d as gone."""

    order: Index  # rows by time
    start: Index  # (D,) position in `order` of the first row at risk, for every event
    deaths: Index  # (D,) rows with an event, by time
    tie: Index  # (D,) number of its time
    gone: Array  # (D,) share of those who die at that time that is no longer at risk
    position: Index  # (n,) number of the last time with an event up to the row's own, plus 1

    @classmethod
    def of(cls, y: Array) -> RiskSets:
        """Sort times ``y (n,)``, negative where they are censored."""
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
    """Return the logarithm of the hazard of every row over the baseline, ``(n,)``."""
    eta = X @ theta
    return np.asarray(eta if offset is None else eta + offset)
