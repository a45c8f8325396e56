"""Models for sites that were not part of the fit."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedkin._base import Array
from fedkin.core import Summary
from fedkin.data import Federation, Rows, columns_of, raise_findings
from fedkin.errors import DataError
from fedkin.fitting.inputs import class_numbers, is_table, offset_column, schema_columns, survival_target
from fedkin.fitting.survival import Baselines
from fedkin.graph import Graph
from fedkin.kin import Joined

if TYPE_CHECKING:
    from fedkin.fitting.model import FittedModel


@dataclass(frozen=True, eq=False)
class NewSite:
    """A site that was not part of the fit.

    Attributes
    ----------
    model : FittedModel
        The model of this site alone; it predicts, has intervals, and can be saved.
    probability : array (V,)
        Probability that it is alike with each site of the fit.
    groups : array (K,)
        Probability of each resolved group; the remainder is the probability that it belongs to none. Empty without
        groups.
    """

    model: FittedModel
    probability: Array
    groups: Array


def join_site(fitted: FittedModel, site: object, name: Hashable, within: Hashable) -> NewSite:
    """Return a model for a new site; see `FittedModel.join`."""
    kin, n = fitted.kin, 0
    assert kin is not None
    if site is None:
        joined = kin.join(None, within)
    elif isinstance(site, Summary):
        joined, n = _joined_summary(fitted, site, within), int(site.count.sum())
    else:
        rows = _labelled(fitted, site)
        joined, n = kin.join(replace(rows, X=fitted.with_ones(rows.X)), within), len(rows.X)
    blocks, first = joined.theta.reshape(1, fitted.coef.shape[1], -1), int(fitted.fit_intercept)
    part = kin.part(np.zeros(1, dtype=np.int64))
    known = replace(
        part,
        sites=(name,),
        n_samples=np.array([n]),
        theta=joined.theta[None],
        covariance=joined.covariance[None],
        noise=np.array([kin.learned.noise * kin.learned.units.target**2]),
        learned=replace(part.learned, precision=joined.precision[None], score=joined.score[None], one=0.0),
    )
    baseline = fitted.baseline
    if baseline is not None and n and not isinstance(site, Summary):
        alone = Federation({name: rows}, fitted.feature_names)
        baseline = Baselines.from_rows(fitted.loss, blocks[:, 0], alone, baseline.at)
    elif baseline is not None:
        baseline = baseline.pooled()
    model = replace(
        fitted.part([fitted.sites[0]]),
        coef=blocks[:, :, first:],
        intercept=blocks[:, :, 0] if first else np.zeros(blocks.shape[:2]),
        kin=known,
        baseline=baseline,
        **about_new(fitted, name, n),
    )
    n_groups = int(kin.groups.max()) + 1 if kin.resolved else 0
    groups = np.array([joined.probability[kin.groups == k].mean() for k in range(n_groups)])
    return NewSite(model, joined.probability, groups)


def about_new(fitted: FittedModel, name: Hashable, n: int) -> dict[str, Any]:
    """Return the attributes of a model of one new site with n rows."""
    codes = None if fitted.site_codes is None else ((),)
    graph = Graph.empty([name])
    return {"sites": (name,), "n_samples": np.array([n]), "graph": graph, "notes": {}, "site_codes": codes}


def _joined_summary(fitted: FittedModel, site: Summary, within: Hashable) -> Joined:
    kin = fitted.kin
    assert kin is not None
    if fitted.schema is None or not fitted.schema.agreed:
        return kin.join(site, within)
    columns = schema_columns(fitted.schema, fitted.loss, fitted.fit_intercept)
    # the summary is in the units that the sites agreed on
    back: Array = np.asarray(np.linalg.inv(columns.A), dtype=np.float64)
    found = kin.in_units(back, -back @ columns.shift, site.parameter_names).join(site, within)
    return replace(found, theta=columns.theta(found.theta), covariance=columns.covariance(found.covariance))


def _labelled(model: FittedModel, site: Any) -> Rows:
    """Return the rows of a new site, with its target in the form that the loss needs."""
    parts: Any
    if isinstance(site, Rows):
        parts = site.X, site.y, site.offset, site.weight
    elif isinstance(site, tuple) and len(site) == 2:
        parts = *site, None, None
    elif is_table(site):
        table = columns_of(site)
        y = table.get(model.target_name or "")
        if y is not None and model.schema is not None and model.schema.event is not None:
            raise_findings(model.schema.check(table))
            y = model.schema.target_of(table)
        parts = table, y, table.get(model.offset_name or ""), None
    else:
        kind = type(site).__name__
        raise DataError(f"a new site must be given as Rows, (X, y), a table, a Summary or nothing, got {kind}")
    X, y, offset, weight = parts
    rows, _ = model.features_of(X)
    if model.loss.target is not None:
        if y is None:
            raise DataError(f"the rows of the new site have no target {model.target_name or 'y'!r}")
        y = np.asarray(y)
        if model.loss.target == "survival" and (y.dtype.names or y.ndim == 2):
            y = survival_target(y)
        y = y.astype(np.float64) if model.classes is None else class_numbers(y, model.classes)
        if len(y) != len(rows):
            raise DataError(f"the new site has {len(rows)} rows, but {len(y)} targets")
    return Rows(rows, y, offset_column(offset, len(rows), needed=model.offset_name is not None), weight)
