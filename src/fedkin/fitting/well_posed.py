"""The problem of a fit, with a light ridge where it would have no minimiser."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array
from fedkin.data import Federation
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import Prepared
from fedkin.graph import Graph
from fedkin.losses import LOGIT_SIZE
from fedkin.objective import Problem
from fedkin.stats import local_fit

Reasons = dict[Hashable, str]  # device: why its parameters had to be held back

COLLINEAR = "collinear features"
_SEPARATED = "separated classes, a class that is missing, or no counts"


def well_posed_problem(prepared: Prepared, graph: Graph, options: FitOptions) -> tuple[Problem, Reasons]:
    """The problem, with a light ridge where it would have no minimiser, and what to say about that."""
    shape = (graph.n_devices, prepared.per_feature(0.0).size)
    problem = Problem(
        prepared.federation,
        graph,
        prepared.loss,
        options.penalty,
        sparsity=np.broadcast_to(prepared.per_feature(options.sparsity), shape),
        ridge=prepared.per_feature(options.ridge),
    )
    # edges with a penalty leave only common directions free: a component has a minimiser when its pooled loss has one
    groups = graph if options.lam != 0 else Graph.empty(graph.devices)
    reasons = _without_minimiser(prepared, groups.components(), options)
    if not reasons:
        return problem, {}
    # least squares along a collinear direction is only as steep as one device's ridge makes it
    rowwise = prepared.loss.rowwise
    alone = Graph.empty(graph.devices) if rowwise is not None and rowwise.minimiser == "always" else groups
    return with_light_ridge(problem, alone, list(reasons)), reasons


def with_light_ridge(problem: Problem, groups: Graph, devices: list[Hashable]) -> Problem:
    """A 25th of one row's worth of ridge for all devices, intercept included; the rule of `LocalFit`."""
    fed = problem.federation
    rows = np.bincount(groups.components(), weights=fed.n_samples)[groups.components()]
    fewest = min(rows[fed.index[device]] for device in devices)
    scale = (fed.X**2).mean(axis=0)
    scale[scale == 0] = 1.0
    light = np.tile(scale, problem.n_params // fed.n_features) / (LOGIT_SIZE * fewest)
    return replace(problem, ridge=np.asarray(problem.ridge) + light)


def rescue_warning(devices: list[Hashable], reasons: Reasons) -> str:
    """What to tell the user about devices whose parameters nothing held back."""
    shown = ", ".join(repr(device) for device in devices[:5])
    more = f" and {len(devices) - 5} more" if len(devices) > 5 else ""
    return (
        f"nothing holds the parameters of device {shown}{more} back ({reasons[devices[0]]}): a ridge of 1/25 of a row "
        "was added. Join such devices to others, or give ridge= yourself"
    )


def _without_minimiser(prepared: Prepared, labels: NDArray[np.int64], options: FitOptions) -> Reasons:
    """Devices in groups whose pooled loss has no unique minimiser, and why."""
    fed, loss = prepared.federation, prepared.loss.rowwise
    if loss is None or loss.minimiser == "unknown":
        return {}
    assert fed.y is not None
    if loss.minimiser == "always":
        return {} if options.ridge > 0 or options.sparsity > 0 else _with_collinear_features(fed, labels)
    group = labels[fed.device_index]
    if options.ridge > 0 or options.sparsity > 0:
        # only the intercept is free: it has nowhere to stop when a class, or every count, is missing
        diverges = np.flatnonzero(loss.constant_diverges(fed.y, group)) if prepared.fit_intercept else ()
        bad: dict[Hashable, str] = {int(label): _SEPARATED for label in diverges}
    else:
        fit = local_fit(Federation.from_arrays(fed.X, fed.y, group, offset=fed.offset), loss)
        bad = {
            label: COLLINEAR if "design of rank" in fit.notes[label] else _SEPARATED
            for label in (fit.devices[u] for u in np.flatnonzero(fit.rescued))
        }
    return {device: bad[label] for device, label in zip(fed.devices, labels.tolist(), strict=True) if label in bad}


def _with_collinear_features(federation: Federation, labels: NDArray[np.int64]) -> Reasons:
    """Devices in groups of several whose pooled features are collinear; a device alone has its shortest solution."""
    several = np.flatnonzero(np.bincount(labels) > 1)
    bad = {
        int(label)
        for label in several
        if np.linalg.matrix_rank(_pooled_gram(federation, labels == label), hermitian=True) < federation.n_features
    }
    return {
        device: COLLINEAR for device, label in zip(federation.devices, labels.tolist(), strict=True) if label in bad
    }


def _pooled_gram(federation: Federation, members: NDArray[np.bool_]) -> Array:
    rows = federation.X[members[federation.device_index]]
    size = np.sqrt((rows**2).mean(axis=0))
    rows = rows / np.where(size > 0, size, 1.0)
    return np.asarray(rows.T @ rows)
