"""One model of the models that sites have: the other way round from `FittedModel.part`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedkin._base import Array, Index, count
from fedkin.errors import DataError, ParameterError
from fedkin.fitting.model.model import FittedModel
from fedkin.graph import Graph

#: Largest difference, in units of scaled columns, up to which neighbours are called equal after rounds.
SAME = 1e-4


def join_parts(parts: Sequence[FittedModel], graph: Graph, *, tested: bool = False) -> FittedModel:
    """The model of all sites of some models that were found in the same rounds.

    Parameters
    ----------
    parts : sequence of FittedModel
        With different sites.
    graph : Graph
        Whose sites are those of the parts, and whose edges were used.
    tested : bool
        Whether edges between sites that differ were dropped from the graph. Then groups are the sites that edges
        join; otherwise those that edges join along which parameters differ by at most `SAME`: rounds end close to
        equal, not equal.

    Raises
    ------
    DataError
        When two parts have a site in common, or other columns, loss, penalty or ``lam``.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.fitting import FitOptions, fit_federation, join_parts
    >>> fed = fedkin.Federation({u: [[float(u > 1)]] for u in range(4)})
    >>> model = fit_federation(fed, None, FitOptions(loss="mean", lam=0.02, select="none"))
    >>> join_parts([model.part([u]) for u in range(4)], model.graph).groups()
    ((0, 1), (2, 3))
    """
    if not parts:
        raise ParameterError("there is no model to join")
    first = parts[0]
    for part in parts:
        for name in ("feature_names", "fit_intercept", "classes", "penalty", "lam", "schema"):
            if getattr(part, name) != getattr(first, name):
                raise DataError(
                    f"the models of {first.sites[0]!r} and {part.sites[0]!r} differ in {name.replace('_', ' ')}: "
                    "they are not of the same rounds"
                )
    sites = tuple(site for part in parts for site in part.sites)
    if len(set(sites)) < len(sites) or set(sites) != set(graph.sites):
        raise DataError(
            f"the parts have {count(len(sites), 'site')}, and the graph {graph.n_sites}: they must be the same, "
            "each of them once"
        )
    order = [sites.index(site) for site in graph.sites]
    coef = np.concatenate([part.coef for part in parts])[order]
    intercept = np.concatenate([part.intercept for part in parts])[order]
    return replace(
        first,
        sites=graph.sites,
        coef=coef,
        intercept=intercept,
        clusters=graph.components() if tested else near_groups(_theta(first, coef, intercept), graph),
        n_samples=np.concatenate([part.n_samples for part in parts])[order],
        graph=graph,
        notes={site: lines for part in parts for site, lines in part.notes.items()},
    )


def near_groups(theta: Array, graph: Graph) -> Index:
    """Labels ``(V,)`` of sites joined by edges along which ``theta (V, ...)`` differs by at most `SAME`."""
    ends = graph.edges
    apart = np.abs(theta[ends[:, 0]] - theta[ends[:, 1]]).reshape(len(ends), -1).max(axis=1, initial=0.0)
    return graph.keep(apart <= SAME).components()


def _theta(like: FittedModel, coef: Array, intercept: Array) -> Array:
    """Parameters on scaled columns, up to what is the same for all sites."""
    scale, mean = np.ones(like.n_features), np.zeros(like.n_features)
    if like.schema is not None:
        scale, mean = like.schema.scale, like.schema.mean if like.fit_intercept else mean
    scaled = coef / scale if like.loss.location else coef * scale
    return np.concatenate([scaled, (intercept + coef @ mean)[:, :, None]], axis=2)
