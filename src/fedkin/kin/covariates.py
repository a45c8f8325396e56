"""What is known about sites beside their rows, as a graph of who is near whom."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.spatial import cKDTree

from fedkin._base import Array, Index
from fedkin.errors import DataError
from fedkin.graph import Graph

#: Covariates of sites: a row of numbers (or one number, or a label) for each, or an array in the order of the sites.
Covariates = Mapping[Hashable, Any] | Sequence[Any] | Array


def covariate_graph(covariates: Covariates, devices: tuple[Hashable, ...]) -> Graph:
    """Edges between sites that are near each other in what is known about them.

    Labels (text) join all sites that have the same one. Numbers are standardised, and each site is joined to its
    nearest others, the square root of their number; those equally far are all joined.

    Examples
    --------
    >>> from fedkin.kin.covariates import covariate_graph
    >>> covariate_graph({"a": "north", "b": "south", "c": "north"}, ("a", "b", "c")).n_edges
    1
    >>> covariate_graph([[0.0, 1.0], [0.1, 1.0], [5.0, 7.0], [5.0, 7.1]], tuple(range(4))).n_edges
    5
    """
    values = _in_order(covariates, devices)
    if values.dtype.kind in "OUS":
        if values.ndim != 1:
            raise DataError("covariates are numbers, or one label for each site: give tables of labels as numbers")
        return Graph.clusters([str(one) for one in values.tolist()], devices)
    table = values.reshape(len(devices), -1).astype(np.float64)
    if not np.isfinite(table).all():
        missing = devices[int(np.flatnonzero(~np.isfinite(table).all(axis=1))[0])]
        raise DataError(f"a covariate of site {missing!r} is missing: leave the covariate out, or fill it")
    scale = table.std(axis=0)
    used = scale > 1e-12 * np.abs(table).max(axis=0, initial=0.0)
    if not used.any():
        raise DataError("covariates are the same for all sites: they cannot tell who is alike")
    return Graph.from_indices(devices, _nearest(table[:, used] / scale[used]))


def _in_order(covariates: Covariates, devices: tuple[Hashable, ...]) -> Any:
    """One row for each site."""
    if isinstance(covariates, Mapping):
        missing = [device for device in devices if device not in covariates]
        if missing:
            raise DataError(f"there are no covariates of site {missing[0]!r}")
        return np.array([covariates[device] for device in devices])
    values = np.asarray(covariates)
    if len(values) != len(devices):
        raise DataError(f"covariates have {len(values)} rows, and there are {len(devices)} sites")
    return values


def _nearest(points: Array) -> Index:
    """Pairs ``(E, 2)`` of points of which one is among the nearest of the other."""
    V = len(points)
    near = min(V - 1, max(2, round(V**0.5)))
    tree = cKDTree(points)
    far = np.asarray(tree.query(points, k=near + 1)[0])[:, -1]
    found = tree.query_ball_point(points, far * (1 + 1e-12))
    pairs = {(min(u, v), max(u, v)) for u, others in enumerate(found) for v in others if u != v}
    return np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
