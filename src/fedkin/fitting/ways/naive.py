"""Intervals that pretend that groups were known: what not to report after groups were chosen by the same rows."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array, check_level
from fedkin.core import local_fit
from fedkin.data import Federation
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import prepare


def naive_confint(model: FittedModel, federation: Federation, level: float = 0.95) -> Array:
    """Intervals of each site's parameters from the pooled rows of its group, as if the groups had been given.

    Parameters
    ----------
    model : FittedModel
        A fused model: its groups are taken as they are.
    federation : Federation
        The rows that it was fitted on.
    level : float in (0, 1)
        What the intervals would cover if the groups were the true ones and had not been chosen.

    Returns
    -------
    array (V, p, 2)
        Intercept first, in the units of the features; the same for all sites of a group.

    Notes
    -----
    They ignore that edges were selected with the same rows, that groups may be wrong, and the penalty's shrinkage, so
    they cover less than they say. `Kin.confint` averages over groupings instead.

    Examples
    --------
    >>> from fedkin.datasets import paper_design
    >>> from fedkin.fitting import FitOptions, fit_federation, naive_confint
    >>> design = paper_design(n_sites=6, n_samples=60, n_features=2, n_clusters=2, signal=2, seed=0)
    >>> model = fit_federation(design.federation, design.graph, FitOptions(method="fused"))
    >>> naive_confint(model, design.federation).shape
    (6, 3, 2)
    """
    from scipy.special import ndtri  # slow to load

    check_level(level)
    options = FitOptions(model.loss, fit_intercept=model.fit_intercept, standardize=False)
    rows = prepare(federation.subset(model.sites), options).rows
    pooled = Federation.from_arrays(rows.X, rows.y, model.clusters[rows.site_index], offset=rows.offset)
    fit = local_fit(pooled, model.loss)
    place = np.array([fit.sites.index(label) for label in model.clusters.tolist()])
    half = ndtri(0.5 + level / 2) * np.sqrt(np.einsum("kjj->kj", fit.covariance))
    return np.asarray(np.stack([fit.theta - half, fit.theta + half], axis=2)[place])
