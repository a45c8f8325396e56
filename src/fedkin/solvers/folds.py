"""The folds of cross-validation within sites: what they train on and hold out, one by one or as one problem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.core import (
    FusedObjective,
    Problem,
    Quadratics,
    QuadraticTerms,
    Summaries,
    assign_folds,
    build_terms,
)
from fedkin.data import Federation
from fedkin.graph import Graph
from fedkin.solvers.compiled import Resolved

#: Up to this many edge duals, numpy solves all folds as one problem with a copy of the graph each.
STACKED = 1_000_000


class HeldOut(Protocol):
    """Losses of rows that are held out."""

    def values(self, theta: Array) -> Array:
        """Mean losses ``(V,)`` at ``theta (V, p)``."""


@dataclass(frozen=True, eq=False)
class Fold:
    """What one fold trains on, and mean losses (without ridge) of the rows it holds out, on the sites ``seen``."""

    objective: FusedObjective
    held_out: HeldOut
    seen: Index

    def score(self, theta: Array) -> float:
        """Mean over sites of what the rows held out lose by ``theta (V, p)``."""
        values = self.held_out.values(theta if self.seen.size == len(theta) else theta[self.seen])
        return float(values.sum()) / values.size


def cut_folds(problem: Problem, folds: int, seed: int) -> list[Fold]:
    """Every `Fold` that has rows; with few rows in all, some have none."""
    data = problem.federation
    if isinstance(data, Summaries):
        return _folds_of_sums(problem, data.sums)
    fold_of = assign_folds(data, folds, seed)
    if isinstance(problem.terms, QuadraticTerms):
        sums = Quadratics.from_rows(data, problem.losses, fold_of, folds)
        return _folds_of_sums(problem, sums, forward=data.ordered)
    used = [fold for fold in range(int(data.ordered), folds) if (fold_of == fold).any()]
    return [
        _fold_of_rows(problem, data, fold_of == fold, fold_of < fold if data.ordered else fold_of != fold)
        for fold in used
    ]


def _fold_of_rows(problem: Problem, federation: Federation, rows: Mask, trains: Mask) -> Fold:
    """The fold that holds these rows out, and which rows train."""
    # losses see all rows, so that a class missing from a fold does not change the parameters
    loss = dict(zip(federation.sites, problem.losses, strict=True))
    train = replace(problem, loss=loss, federation=federation.take(trains))
    part = federation.take(rows, allow_empty=True)
    seen = np.flatnonzero(part.n_samples > 0)
    if seen.size < part.n_sites:
        part = part.subset([part.sites[u] for u in seen])
    held_out = build_terms(part, [problem.losses[u] for u in seen], np.zeros(problem.n_params))
    return Fold(train.fused, held_out, seen)


def _folds_of_sums(problem: Problem, sums: Quadratics, *, forward: bool = False) -> list[Fold]:
    """Sums add up: each row is looked at once, and a fold trains on the sum of the others (of the earlier ones)."""
    ridge = np.broadcast_to(np.asarray(problem.ridge, dtype=np.float64), (problem.n_params,))
    out = []
    for fold in np.flatnonzero(sums.count[:, :-1].any(axis=0)).tolist()[int(forward) :]:
        seen = np.flatnonzero(sums.count[:, fold])
        training = sums.total(without=fold, forward=forward).terms(ridge=ridge)
        held_out = sums if seen.size == problem.n_sites else sums.take(seen)
        out.append(Fold(replace(problem.fused, terms=training), held_out.terms(fold), seen))
    return out


@dataclass(frozen=True, eq=False)
class Batch:
    """Folds that are solved as one problem: the sites of the first fold, then those of the second, and so on."""

    objective: FusedObjective
    folds: tuple[Fold, ...]

    def scores(self, theta: Array) -> list[float]:
        """Held-out mean loss of each fold, for the parameters of all of them."""
        own = theta.reshape(len(self.folds), -1, theta.shape[1])
        return [fold.score(t) for fold, t in zip(self.folds, own, strict=True)]


def in_batches(folds: list[Fold], backend: Resolved) -> list[Batch]:
    """Each fold on its own, but small quadratic ones together for numpy, which wastes its time on short arrays."""
    first = folds[0].objective
    size = len(folds) * first.graph.n_edges * first.terms.n_params
    terms = [fold.objective.terms for fold in folds]
    quadratic = [one for one in terms if isinstance(one, QuadraticTerms)]
    if backend == "numpy" and first.cliques is None and size <= STACKED and len(quadratic) == len(folds):
        return [_stacked(folds, quadratic)]
    return [Batch(fold.objective, (fold,)) for fold in folds]


def _stacked(folds: list[Fold], terms: list[QuadraticTerms]) -> Batch:
    """One problem with a copy of the graph for each fold."""
    first = folds[0].objective
    A, b, c = (np.concatenate([getattr(one, name) for one in terms]) for name in ("A", "b", "c"))
    n, copies = first.graph.n_sites, np.arange(len(folds))
    edges = (first.graph.edges + n * copies[:, None, None]).reshape(-1, 2)
    graph = Graph.from_indices(range(n * copies.size), edges, np.tile(first.graph.weights, copies.size))
    sparsity = None if first.sparsity is None else np.tile(first.sparsity, (copies.size, 1))
    return Batch(replace(first, terms=QuadraticTerms(A, b, c), graph=graph, sparsity=sparsity), tuple(folds))
