"""Where a fit begins that has an earlier one to go by."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkin._base import Array, Index
from fedkin.errors import DataError
from fedkin.graph import Graph
from fedkin.kin.options import Given
from fedkin.kin.result import Kin

#: What a fit may begin from: an earlier result, a graph of who seems alike, or a label for each site.
StartFrom = Kin | Graph | Mapping[Hashable, Any] | Sequence[Any] | Array

#: Spreads begin no lower: from nothing none of them would rise again.
LEAST_SPREAD = 1e-4
#: Where the variance of the slopes' means begins, which results do not keep.
RIDGE = 0.1


@dataclass(frozen=True, eq=False)
class Beginning:
    """What an earlier result says, for the sites of the next fit.

    Attributes
    ----------
    theta : array (V, p)
        Estimates in the user's units; the mean for a site that the earlier fit did not have.
    mean : array (p,)
    spread : array (p,)
        Variances between sites, in standardised units.
    parameters : array (p + 2,)
        As in `MixedModel`.
    """

    theta: Array
    mean: Array
    spread: Array
    parameters: Array

    @classmethod
    def of(cls, start: Kin, sites: Sequence[Hashable], names: Sequence[str]) -> Beginning | None:
        """The beginning for these sites; None where the earlier fit had other parameters."""
        if len(start.names) != len(names):
            return None
        place = {site: u for u, site in enumerate(start.sites)}
        mean = np.asarray(start.mean)
        theta = np.array([start.theta[place[one]] if one in place else mean for one in sites])
        spread = np.maximum(start.learned.spread, LEAST_SPREAD)
        noise = max(start.learned.noise, LEAST_SPREAD)
        return cls(theta, mean, spread, np.log(np.concatenate([spread, [RIDGE, noise]])))


def given_groups(start: StartFrom | None, sites: tuple[Hashable, ...], order: Index) -> Given | None:
    """The groups that a graph or labels suggest, sites in this order; None for an earlier result.

    Those of a graph are its connected components. Where edges join all sites, which chains of kept edges soon do, they
    are fine groups of sites with the same neighbours, for what sites say to merge.
    """
    if start is None or isinstance(start, Kin):
        return None
    if not isinstance(start, Graph):
        return Given(_numbers(start, sites)[order], fine=False)
    V, graph = len(sites), start.aligned(sites)
    parts = graph.components()
    if parts.max() > 0 or graph.n_edges == V * (V - 1) // 2:
        return Given(parts[order], fine=False)
    from fedkin.kin.sampler.neighbours import Neighbours
    from fedkin.kin.sampler.starts import kmeans, modularity_directions

    place = np.argsort(order)
    top, _ = modularity_directions(Neighbours.of(V, place[graph.edges], graph.weights / graph.weights.max()))
    return Given(kmeans(top, max(2, round(2 * V**0.5)), np.random.default_rng(0)), fine=True)


def _numbers(labels: Any, sites: tuple[Hashable, ...]) -> Index:
    """Labels of all sites as numbers ``(V,)``."""
    if isinstance(labels, Mapping):
        missing = [site for site in sites if site not in labels]
        if missing:
            raise DataError(f"start= has no label of site {missing[0]!r}: give every site one")
        labels = [labels[site] for site in sites]
    elif np.ndim(labels) != 1 or len(labels) != len(sites):
        raise DataError(f"start= takes a Kin, a Graph, or a label for each of the {len(sites)} sites")
    number = {label: k for k, label in enumerate(dict.fromkeys(labels))}
    return np.array([number[label] for label in labels], dtype=np.int64)
