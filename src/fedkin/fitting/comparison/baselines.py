"""What Fedkin has to beat, each as good as it can be made: every site alone, one model for all, site intercepts.

All are tuned by leaving out one row at a time: exactly for least squares (`ridge_paths`), by one Newton step for smooth
losses (`smooth_paths`). Losses that are no functions of linear predictors have nothing to tune.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np

from fedkin._base import Array
from fedkin.core import global_fit, local_fit, resolve_losses
from fedkin.data import Federation, Schema
from fedkin.errors import DegenerateSiteWarning
from fedkin.fitting.comparison.ridge_paths import HOLDS, SiteRows, own_ridges, pooled_ridge
from fedkin.fitting.comparison.smooth_paths import own_fits, pooled_fit, with_site_intercepts
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import Prepared, prepare
from fedkin.graph import Graph
from fedkin.losses import RowLoss

LOCAL, GLOBAL, INTERCEPTS = "Local", "Global", "Site intercepts"


def baseline_models(
    federation: Federation, options: FitOptions | None = None, schema: Schema | None = None
) -> dict[str, FittedModel]:
    """Models to compare with, fitted to the same rows.

    Parameters
    ----------
    federation : Federation
        Training rows, every site with at least one.
    options : FitOptions, optional
        Its loss and intercept are used; features are standardised, and ridges are tuned.
    schema : Schema, optional
        As in `fit_federation`.

    Returns
    -------
    dict {"Local" | "Global" | "Site intercepts": FittedModel}
        Local is a ridge fit at each site, tuned there; Global one ridge fit of all rows; Site intercepts the same with
        an intercept of its own for every site, held together as strongly as predicts best. There are no site intercepts
        without an intercept, or with one site.

    Examples
    --------
    >>> from fedkin.datasets import paper_design
    >>> from fedkin.fitting.comparison.baselines import baseline_models
    >>> design = paper_design(n_sites=6, n_samples=30, n_features=3, n_clusters=1, seed=0)
    >>> list(baseline_models(design.federation))
    ['Local', 'Global', 'Site intercepts']
    """
    options = FitOptions() if options is None else options
    prepared = prepare(federation, replace(options, standardize=True), schema)
    thetas = _thetas(prepared)
    alone, one_group = Graph.empty(federation.sites), np.zeros(federation.n_sites, dtype=np.int64)
    labels = {LOCAL: np.arange(federation.n_sites)}
    return {
        name: prepared.model(theta, alone, options, clusters=labels.get(name, one_group))
        for name, theta in thetas.items()
    }


def _thetas(prepared: Prepared) -> dict[str, Array]:
    fed, loss = prepared.rows, prepared.loss.rowwise
    resolve_losses(prepared.loss, fed)  # which checks the targets
    if loss is None or fed.y is None:
        return _untuned(prepared)
    weight = getattr(fed.rows, "weight", None)
    target, offset = fed.y.astype(np.float64), fed.offset
    if loss.quadratic and offset is not None:
        target, offset = target - offset, None
    rows = SiteRows(
        fed.X, target, np.ones(len(target)) if weight is None else weight, fed.starts, prepared.fit_intercept
    )
    several = prepared.fit_intercept and fed.n_sites > 1
    return _least_squares(rows, several) if loss.quadratic else _smooth(loss, rows, offset, several)


def _least_squares(rows: SiteRows, several: bool) -> dict[str, Array]:
    found = {LOCAL: own_ridges(rows), GLOBAL: pooled_ridge(rows)}
    return found | {INTERCEPTS: pooled_ridge(rows, HOLDS)} if several else found


def _smooth(loss: RowLoss, rows: SiteRows, offset: Array | None, several: bool) -> dict[str, Array]:
    pooled = pooled_fit(loss, rows, offset)
    found = {LOCAL: own_fits(loss, rows, offset), GLOBAL: np.tile(pooled, (rows.n_sites, 1))}
    return found | {INTERCEPTS: with_site_intercepts(loss, rows, offset, pooled)} if several else found


def _untuned(prepared: Prepared) -> dict[str, Array]:
    fed = prepared.rows
    with warnings.catch_warnings():
        # its rescue is as good as Local's, which is silent
        warnings.simplefilter("ignore", DegenerateSiteWarning)
        pooled = global_fit(fed, prepared.loss)
    return {LOCAL: local_fit(fed, prepared.loss).theta, GLOBAL: np.tile(pooled, (fed.n_sites, 1))}
