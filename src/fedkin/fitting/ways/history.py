"""How a fit came about, in plain values: what a report shows and a model directory keeps as ``history.json``."""

from __future__ import annotations

import hashlib
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedkin.core import Summaries
from fedkin.data import Federation, Schema, files_of
from fedkin.errors import ConvergenceWarning
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import prepare, well_posed_problem
from fedkin.graph import Graph
from fedkin.solvers import ProfiledProblem, lam_path

#: Dropped edges that are kept by name.
MOST_DROPPED = 20_000
#: Numbers in the duals of a problem whose path is worth solving for a picture, and sites whose groups are kept.
_MOST_DUALS, _MOST_SITES = 200_000, 2_000
_PATH_TOL, _PATH_ITER = 1e-5, 2_000


def with_history(
    model: FittedModel,
    federation: Federation | Summaries,
    graph: Graph | None,
    options: FitOptions,
    schema: Schema | None = None,
) -> FittedModel:
    """A fused model with its dropped edges and its path added to ``history``; others as they are.

    Parameters
    ----------
    model : FittedModel
        What `fit_federation` or `fit_summaries` made of the other arguments.
    federation, graph, options, schema
        As there.

    Notes
    -----
    The path is solved anew, at the levels that cross-validation tried, to a gap of 1e-5; only where that takes no
    longer than the fit itself, roughly.

    Examples
    --------
    >>> from fedkin.datasets import paper_design
    >>> from fedkin.fitting import FitOptions, fit_federation
    >>> design = paper_design(n_sites=10, n_samples=40, n_features=3, n_clusters=2, seed=0)
    >>> options = FitOptions(select="holm")
    >>> model = fit_federation(design.federation, design.graph, options)
    >>> sorted(with_history(model, design.federation, design.graph, options).history)
    ['choice', 'dropped', 'path']
    """
    if model.kin is not None:
        return model
    history = dict(model.history or {})
    if model.selection is not None:
        candidates = Graph.complete(model.sites) if graph is None else graph.aligned(model.sites)
        history["dropped"] = _dropped(candidates, model.graph)
    choice = history.get("choice")
    duals = model.graph.n_edges * model.coef[0].size
    if choice and duals <= _MOST_DUALS and model.n_sites <= _MOST_SITES:
        prepared = prepare(federation, options, schema)
        how = replace(options, ridge=choice.get("ridge", options.least_ridge))
        problem, _ = well_posed_problem(prepared, model.graph, how)
        if choice.get("fuse_intercept") is False:
            problem = ProfiledProblem(problem, prepared.units.intercepts).rest
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # a picture, beside a fit with a certificate
            path = lam_path(problem, choice["lams"], tol=_PATH_TOL, max_iter=_PATH_ITER)
        labels = [solution.clusters(model.graph).tolist() for solution in path.solutions]
        history["path"] = {"lams": path.lams.tolist(), "labels": labels}
    return replace(model, history=history)


def _dropped(candidates: Graph, kept: Graph) -> dict[str, Any]:
    V = candidates.n_sites
    gone = ~np.isin(candidates.edges @ [V, 1], kept.edges @ [V, 1])
    edges = candidates.edges[gone]
    return {"candidates": candidates.n_edges, "edges": edges.tolist() if len(edges) <= MOST_DROPPED else []}


def data_record(path: str | os.PathLike[str], rows: int) -> dict[str, Any]:
    """The name of a table and the digest of its bytes; of a directory or pattern, of files in order of their names."""
    digest, place = hashlib.sha256(), Path(path)
    files = sorted(one for one in place.iterdir() if one.is_file()) if place.is_dir() else files_of(place)
    for one in files:
        if not place.is_file():
            digest.update(f"{one.name}\0".encode())
        with one.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return {"name": place.name, "sha256": digest.hexdigest(), "rows": rows}
