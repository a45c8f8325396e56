"""What a model with kin can be asked beyond predictions: intervals, contrasts, and models for new sites."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike

from fedkin._base import Array, Index, check_choice
from fedkin.core import Summary
from fedkin.data import Rows, columns_of
from fedkin.errors import DataError, ParameterError
from fedkin.fitting.model.new_rows import class_numbers, feature_matrix, is_table, offset_column
from fedkin.kin import Contrast, Joined, Kin, Kind, Predicted, Sites, predicted

if TYPE_CHECKING:
    from fedkin.fitting.model.model import FittedModel


@dataclass(frozen=True, eq=False)
class NewSite:
    """A site that was not part of the fit.

    Attributes
    ----------
    model : FittedModel
        Of this site alone: it predicts, has intervals, and can be saved.
    probability : array (V,)
        That it is kin with each site of the fit.
    groups : array (K,)
        Probability of each group that is resolved; the rest is the probability that it belongs to none of them. Empty
        where none are.
    """

    model: FittedModel
    probability: Array
    groups: Array


class KinAnswers:
    """Questions to the `kin` of a `FittedModel`."""

    @property
    def _model(self) -> FittedModel:
        return cast("FittedModel", self)

    def _asked(self, what: str) -> Kin:
        if self._model.kin is None:
            raise ParameterError(
                f'a fused model has no {what}: fit with method="kin" (or see fedkin.fitting.naive_confint)'
            )
        return self._model.kin

    def confint(self, level: float = 0.95, kind: Kind = "average") -> Array:
        """Intervals ``(V, p, 2)`` of the sites' parameters, intercept first; see `Kin.confint`."""
        return self._asked("intervals").confint(level, kind)

    def summary(
        self,
        level: float = 0.95,
        *,
        site: Hashable | None = None,
        group: int | None = None,
        kind: Kind = "average",
    ) -> str:
        """The result, a site or a group as text; see `Kin.summary`."""
        return self._asked("summary").summary(level, site=site, group=group, kind=kind)

    def contrast(
        self,
        one: Sites,
        other: Sites | None = None,
        *,
        weights: Mapping[str, float] | None = None,
        kind: Kind = "average",
    ) -> Contrast:
        """How sites or groups differ; see `Kin.contrast`."""
        return self._asked("contrasts").contrast(one, other, weights=weights, kind=kind)

    def predict_interval(
        self,
        X: object,
        site: object = None,
        offset: ArrayLike | None = None,
        *,
        level: float = 0.95,
        target: Literal["mean", "observation"] = "mean",
    ) -> Predicted:
        """Predictions with intervals, for the mean response or for new observations.

        Parameters
        ----------
        X, site, offset
            As in `predict`.
        level : float in (0, 1)
            Probability that the intervals promise, on average over sites.
        target : "mean" or "observation"
            New observations have noise of their own (linear and Poisson losses). Of classes, the mean is the
            probability of the second one, as in `predict_proba`, and intervals are of the probabilities that are
            possible: what is possible is skewed where it is near 0 or 1, so their mean may lie in one of the tails.
            The interval ends at the mean then, and is as probable as others, with tails that are not equal.

        Examples
        --------
        >>> from fedkin.datasets import paper_design
        >>> from fedkin.fitting import fit_federation
        >>> design = paper_design(n_sites=8, n_samples=30, n_features=2, n_clusters=2, seed=0)
        >>> found = fit_federation(design.federation).predict_interval([[1.0, 0.0]], 3)
        >>> bool(found.low < found.mean < found.high)
        True
        """
        check_choice("target", target, ("mean", "observation"))
        kin = self._asked("intervals")
        rows, position, shift = self._model._checked_rows(X, site, offset)
        if self._model.fit_intercept:
            rows = np.column_stack([np.ones(len(rows)), rows])
        ends = np.empty((3, len(rows)))
        for u in np.unique(position).tolist():
            own = position == u
            shifts = None if shift is None else shift[own]
            given = kin, rows[own], kin.theta[u], kin.covariance[u], float(kin.noise[u])
            found = predicted(*given, level=level, target=target, offset=shifts)
            ends[:, own] = found.mean, found.low, found.high
        if self._model.classes is not None:  # to the last digit what predict_proba gives, which rounds elsewhere
            mean = self._model.predict_proba(X, site, offset)[:, 1]
            ends = np.stack([mean, np.minimum(ends[1], mean), np.maximum(ends[2], mean)])
        return Predicted(*ends)

    def _open_predictor(self, rows: Array, position: Index) -> Array:
        """Covariances ``(n, k, k)`` of the predictors of rows ``(n, q)`` of sites, by their number ``(n,)``."""
        kin = self._asked("covariances")
        if self._model.fit_intercept:
            rows = np.column_stack([np.ones(len(rows)), rows])
        k, width = self._model.coef.shape[1], rows.shape[1]
        made = np.empty((len(rows), k, k))
        for u in np.unique(position).tolist():
            own = position == u
            blocks = kin.covariance[u].reshape(k, width, k, width).transpose(0, 2, 1, 3)
            made[own] = np.einsum("nklq,nq->nkl", np.einsum("np,klpq->nklq", rows[own], blocks), rows[own])
        return made

    def join(self, site: object = None, *, name: Hashable = "new site") -> NewSite:
        """A model for a site that was not part of the fit.

        Parameters
        ----------
        site : Rows, (X, y), table, Summary or None
            Its labelled rows, with the features of the model (a table has them, the target and an offset among its
            columns); its summary, made as those of the fit were; or None before it has any.
        name : id
            What to call it.

        Returns
        -------
        NewSite

        Notes
        -----
        Without rows the site is expected to be like the others: its model is their mean, and its intervals are as wide
        as sites differ. That mean gives every site the same weight, however many rows it has. Where large sites differ
        from small ones, and the new one is large, one model for all rows may predict better until the site has rows of
        its own.

        Examples
        --------
        >>> from fedkin.datasets import paper_design
        >>> from fedkin.fitting import fit_federation
        >>> design = paper_design(n_sites=12, n_samples=40, n_features=5, n_clusters=2, signal=2, seed=0)
        >>> model = fit_federation(design.federation.subset(range(1, 12)))
        >>> new = model.join(design.federation[0], name="zero")
        >>> new.model.sites, bool(new.groups.max() > 0.9)
        (('zero',), True)
        """
        kin = self._asked("models for new sites")
        joined, n = _joined(self._model, kin, site)
        blocks = joined.theta.reshape(1, self._model.coef.shape[1], -1)
        first = int(self._model.fit_intercept)
        target = kin.learned.units.target
        known = replace(
            kin.part(np.zeros(1, dtype=np.int64)),
            sites=(name,),
            n_samples=np.array([n]),
            theta=joined.theta[None],
            covariance=joined.covariance[None],
            noise=np.array([kin.learned.noise * target**2]),
        )
        known = replace(
            known, learned=replace(known.learned, precision=joined.precision[None], score=joined.score[None])
        )
        model = replace(
            self._model.part([self._model.sites[0]]),
            sites=(name,),
            coef=blocks[:, :, first:],
            intercept=blocks[:, :, 0] if first else np.zeros(blocks.shape[:2]),
            n_samples=np.array([n]),
            graph=type(self._model.graph).empty([name]),
            notes={},
            kin=known,
        )
        count = int(kin.groups.max()) + 1 if kin.resolved else 0
        groups = np.array([joined.probability[kin.groups == k].mean() for k in range(count)])
        return NewSite(model, joined.probability, groups)


def _joined(model: FittedModel, kin: Kin, site: object) -> tuple[Joined, int]:
    if site is None:
        return kin.join(None), 0
    if isinstance(site, Summary):
        from fedkin.fitting.model.units import ColumnUnits

        if model.schema is None or not model.schema.agreed:
            return kin.join(site), int(site.count.sum())
        A, shift = ColumnUnits.of_schema(model.schema, model.loss, model.fit_intercept).affine()
        # the summary is in the units that the sites have agreed on
        back: Array = np.asarray(np.linalg.inv(A), dtype=np.float64)
        there = kin.in_units(back, -back @ shift, site.parameter_names)
        found = there.join(site)
        theta, covariance = A @ found.theta + shift, A @ found.covariance @ A.T
        return replace(found, theta=theta, covariance=covariance), int(site.count.sum())
    rows = _labelled(model, site)
    if model.fit_intercept:
        rows = replace(rows, X=np.column_stack([np.ones(len(rows.X)), rows.X]))
    return kin.join(rows), len(rows.X)


def _labelled(model: FittedModel, site: Any) -> Rows:
    """Rows of a new site with its target as the loss wants it."""
    X: Any
    y: Any
    weight = None
    if isinstance(site, Rows):
        X, y, offset, weight = site.X, site.y, site.offset, site.weight
    elif isinstance(site, tuple) and len(site) == 2:
        (X, y), offset = site, None
    elif is_table(site):
        columns = columns_of(site)
        X, y, offset = columns, columns.get(model.target_name or ""), columns.get(model.offset_name or "")
    else:
        raise DataError(f"a new site comes with Rows, (X, y), a table, a Summary or nothing, got {type(site).__name__}")
    rows = feature_matrix(X, model.feature_names, model.schema)
    if model.loss.needs_target:
        if y is None:
            raise DataError(f"the rows of the new site have no target {model.target_name or 'y'!r}")
        y = np.asarray(y)
        y = y.astype(np.float64) if model.classes is None else class_numbers(y, model.classes)
        if len(y) != len(rows):
            raise DataError(f"the new site has {len(rows)} rows, but {len(y)} targets")
    return Rows(rows, y, offset_column(offset, len(rows), needed=model.offset_name is not None), weight)
