"""Rows to predict, each with the model of its site."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import numpy as np

from fedkin._base import Array, Index, check_choice, count, listed
from fedkin.data import site_id, site_ids
from fedkin.errors import DataError, argument
from fedkin.fitting.inputs import Unseen, is_each
from fedkin.kin import Predicted, predicted
from fedkin.kin.inference import Interval

if TYPE_CHECKING:
    from fedkin.fitting.model import FittedModel


def site_positions(model: FittedModel, site: object, n: int, unseen: Unseen = "raise") -> Index:
    """Return the position of each row's site, or ``V + k`` for the k-th of the model's `unseen_models`.

    ``site`` is one id, an id per row, or None for a model of one site.
    """
    check_choice("unseen", unseen, get_args(Unseen))
    V, kin = model.n_sites, model.kin
    places = {} if kin is None else dict(kin.within or ())

    def found(one: object) -> int:
        at = model.find_site(one) if unseen == "population" else model.position(one)
        if at is None and kin is not None and (district := places.get(site_id(one))) is not None:
            return V + 1 + kin.districts.get(district, -1)
        return V if at is None else at

    if site is None:
        if V == 1:
            return np.zeros(n, dtype=np.int64)
        raise DataError(
            f"the model has {V} sites, so it needs the site of each row: {argument('site')} one of "
            f"{listed(model.sites)}, or a list with an id per row"
        )
    if not is_each(site):
        return np.full(n, found(site))
    ids = site_ids(site)
    if len(ids) != n:
        raise DataError(f"site has {len(ids)} ids, but X has {count(n, 'row')}: give one id per row, or one for all")
    known = {one: found(one) for one in dict.fromkeys(ids)}
    return np.fromiter((known[one] for one in ids), dtype=np.int64, count=n)


@dataclass(frozen=True, eq=False)
class SiteRows:
    """Checked rows for a model: features ``X (n, q)``, the position of each row's site, and any offset."""

    model: FittedModel
    X: Array
    position: Index
    offset: Array | None

    def by_site(self) -> Iterator[tuple[Index, FittedModel, int, Array | None]]:
        """Yield the numbers of each site's rows, the model with its parameters, its number there, and the offsets."""
        order = np.argsort(self.position, kind="stable")
        starts = np.flatnonzero(np.diff(self.position[order], prepend=-1))
        V = self.model.n_sites
        for own in np.split(order, starts[1:]) if len(order) else ():
            u = int(self.position[own[0]])
            model, at = (self.model, u) if u < V else (self.model.unseen_models[u - V], 0)
            yield own, model, at, None if self.offset is None else self.offset[own]

    def predictors(self) -> Array:
        """Return linear predictors ``(n, k)`` at the estimates."""
        coef, intercept = self.model.coef, self.model.intercept
        if (self.position >= self.model.n_sites).any():
            coef = np.concatenate([coef, *(one.coef for one in self.model.unseen_models)])
            intercept = np.concatenate([intercept, *(one.intercept for one in self.model.unseen_models)])
        eta = np.einsum("nq,nkq->nk", self.X, coef[self.position]) + intercept[self.position]
        return np.asarray(eta if self.offset is None else eta + self.offset[:, None])

    def averaged_predictors(self) -> Array:
        """Return predictors ``(n, k)`` whose response is averaged over the uncertainty of kin's parameters."""
        eta, loss = self.predictors(), self.model.loss
        if self.model.kin is None or loss.rowwise is None or loss.quadratic:  # predictors average as parameters do
            return eta
        X, k = self.model.with_ones(self.X), eta.shape[1]
        width, covariance = X.shape[1], np.empty((len(X), k, k))
        for own, model, u, _ in self.by_site():
            assert model.kin is not None
            blocks = model.kin.posterior_covariance(u).reshape(k, width, k, width).transpose(0, 2, 1, 3)
            covariance[own] = np.einsum("nklq,nq->nkl", np.einsum("np,klpq->nklq", X[own], blocks), X[own])
        return loss.rowwise.averaged_predictor(eta, covariance)

    def responses(self) -> Array:
        """Return mean responses: ``(n,)``, ``(n, C)`` for several classes, ``(n, q)`` for the mean loss."""
        loss = self.model.loss
        if loss.rowwise is not None:
            return loss.rowwise.response(self.averaged_predictors())
        out = np.empty((len(self.X), self.model.n_features) if loss.location else len(self.X))
        X = self.model.with_ones(self.X)
        for own, model, u, offset in self.by_site():
            out[own] = loss.predict(model.theta(u), X[own], offset)
        return out

    def probabilities(self) -> Array:
        """Return probabilities ``(n, C)`` of the classes."""
        mean = self.responses()
        return np.column_stack([1.0 - mean, mean]) if mean.ndim == 1 else mean

    def intervals(self, level: float, interval: Interval) -> Predicted:
        """Return means with intervals, which kin has."""
        ends, ones = np.empty((3, len(self.X))), self.model.with_ones(self.X)
        for own, model, u, offset in self.by_site():
            kin = model.kin
            assert kin is not None
            given = kin, ones[own], kin.theta[u], kin.covariance[u], float(kin.noise[u])
            found = predicted(*given, level=level, interval=interval, offset=offset)
            ends[:, own] = found.mean, found.low, found.high
        if self.model.classes is not None:  # exactly what predict_proba returns, up to the last digit
            mean = self.probabilities()[:, 1]
            ends = np.stack([mean, np.minimum(ends[1], mean), np.maximum(ends[2], mean)])
        return Predicted(*ends)

    def survival(self, times: Array, level: float | None) -> Array:
        """Return survival probabilities ``(n, T)``, or ``(3, n, T)`` with the ends of intervals."""
        out = np.empty((1 if level is None else 3, len(self.X), times.size))
        for own, model, u, offset in self.by_site():
            assert model.baseline is not None
            X = model.with_ones(self.X[own])
            how = () if level is None else (model.the_kin("intervals").covariance[u], level)
            hazard = model.loss.predict(model.theta(u), X, offset)
            out[:, own] = model.baseline.survival(u, times, hazard, X, *how)
        return out[0] if level is None else out
