"""Folds: which rows belong to which, and the training and held-out parts of a problem."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedkin._base import Array, Index
from fedkin.data import Federation, shuffled_ranks
from fedkin.graph import Graph
from fedkin.objective import DeviceTerms, FusedObjective, Problem, QuadraticTerms, build_terms
from fedkin.solvers.backend import Resolved

#: Up to this many edge duals, numpy solves all folds as one problem with a copy of the graph each.
STACKED = 1_000_000


def deal_folds(device: Hashable, n: int, folds: int, seed: int, first: int = 0) -> Index:
    """Fold ``(n,)`` of each row of one device; -1 for a single row, which always trains.

    Parameters
    ----------
    device : hashable
        Its id, which decides with the seed how its rows are shuffled.
    n, folds, seed : int
        Numbers of rows and of folds, and the seed.
    first : int
        Rows of the devices before it: dealing goes on where they ended, as in `Federation.folds`.
    """
    if n < 2:
        return np.full(n, -1, dtype=np.int64)
    return np.asarray((first + shuffled_ranks(device, n, seed, "folds")) % folds, dtype=np.int64)


def assign_folds(federation: Federation, folds: int, seed: int) -> Index:
    """Fold ``(N,)`` of each row, cut within devices; -1 for the row of a device that has a single one."""
    fold_of = federation.folds(folds, seed)
    fold_of[(federation.n_samples < 2)[federation.device_index]] = -1
    return fold_of


def held_out_losses(
    federation: Federation,
    fold_of: Index,
    fits: Callable[[Federation], Iterable[Array]],
    loss: Callable[[Federation, Array], Array],
) -> Array:
    """Loss of every row under candidates that were fitted without its fold, ``(candidates, N)``.

    Parameters
    ----------
    federation : Federation
        All rows.
    fold_of : int array (N,)
        Their folds; rows below 0 always train, and have a loss of 0.
    fits : callable
        ``fits(rows)`` gives the parameters ``(V, p)`` of each candidate.
    loss : callable
        ``loss(rows, theta)`` gives the loss of each row.
    """
    columns = []
    for fold in range(int(fold_of.max()) + 1):
        held_out = fold_of == fold
        kept, rest = (federation.take(rows, allow_empty=True) for rows in (~held_out, held_out))
        columns.append((held_out, [loss(rest, theta) for theta in fits(kept)]))
    out = np.zeros((len(columns[0][1]), fold_of.size))
    for held_out, losses in columns:
        out[:, held_out] = losses
    return out


@dataclass(frozen=True, eq=False)
class Fold:
    """What one fold trains on, and what it holds out.

    Attributes
    ----------
    objective : FusedObjective
        Of the training rows.
    held_out : DeviceTerms
        Mean losses of the held-out rows, without ridge.
    seen : array
        Devices that have held-out rows, in the order of ``held_out``.
    """

    objective: FusedObjective
    held_out: DeviceTerms
    seen: Index


def cut_folds(problem: Problem, fold_of: Index, folds: list[int]) -> list[Fold]:
    """The `Fold` of each of these numbers.

    Parameters
    ----------
    problem : Problem
        The whole.
    fold_of : int array (N,)
        Fold of each row; rows of other folds than ``folds`` always train.
    folds : list of int
        Folds that have rows.
    """
    if isinstance(problem.terms, QuadraticTerms):
        return _folds_of_sums(problem, problem.terms, fold_of, folds)
    return [_fold_of_rows(problem, fold_of, fold) for fold in folds]


def _fold_of_rows(problem: Problem, fold_of: Index, fold: int) -> Fold:
    # losses see all rows, so that a class missing from a fold does not change the parameters
    loss = dict(zip(problem.federation.devices, problem.losses, strict=True))
    train = replace(problem, loss=loss, federation=problem.federation.take(fold_of != fold))
    return Fold(train.fused, *_part(problem, fold_of == fold))


def _part(problem: Problem, rows: NDArray[np.bool_]) -> tuple[DeviceTerms, Index]:
    """The terms of some rows, and the devices that have any."""
    part = problem.federation.take(rows, allow_empty=True)
    seen = np.flatnonzero(part.n_samples > 0)
    if seen.size < part.n_devices:
        part = part.subset([part.devices[u] for u in seen])
    return build_terms(part, [problem.losses[u] for u in seen], np.zeros(problem.n_params)), seen


def _folds_of_sums(problem: Problem, whole: QuadraticTerms, fold_of: Index, folds: list[int]) -> list[Fold]:
    """Gram statistics add up: each row is looked at once, and a fold trains on the sum of the others."""
    device = problem.federation.device_index
    numbers, parts, sums = np.unique(fold_of).tolist(), [], []
    for number in numbers:
        rows = fold_of == number
        count = np.bincount(device[rows], minlength=whole.n_devices).astype(np.float64)
        terms, seen = _part(problem, rows)
        assert isinstance(terms, QuadraticTerms)
        parts.append((terms, seen))
        sums.append((count, *_sums(whole, terms, seen, count[seen])))
    out = []
    for number, (held_out, seen) in zip(numbers, parts, strict=True):
        if number in folds:
            others = [own for other, own in zip(numbers, sums, strict=True) if other != number]
            count, A, b, c = (functools.reduce(np.add, column) for column in zip(*others, strict=True))
            training = _means(problem, whole.isotropic, count, A, b, c)
            out.append(Fold(replace(problem.fused, terms=training), held_out, seen))
    return out


def _sums(whole: QuadraticTerms, terms: QuadraticTerms, seen: Index, count: Array) -> tuple[Array, Array, Array]:
    """``count`` times the mean losses of the devices that were seen, and 0 for the others."""
    own = terms.A if terms.isotropic == whole.isotropic else terms.hessians(terms.b)
    scaled = tuple(_along(count, of) * of for of in (own, terms.b, terms.c))
    if seen.size == whole.n_devices:
        return scaled  # type: ignore[return-value]
    out = tuple(np.zeros_like(of) for of in (whole.A, whole.b, whole.c))
    for into, values in zip(out, scaled, strict=True):
        into[seen] = values
    return out  # type: ignore[return-value]


def _means(problem: Problem, isotropic: bool, count: Array, A: Array, b: Array, c: Array) -> QuadraticTerms:
    """Mean losses of ``count (V,)`` rows whose losses sum up to these, with the problem's ridge."""
    A = A / _along(count, A)
    ridge = np.broadcast_to(np.asarray(problem.ridge, dtype=np.float64), (problem.n_params,))
    if isotropic:
        A += ridge[0]
    else:
        A[:, np.arange(ridge.size), np.arange(ridge.size)] += ridge
    return QuadraticTerms(A, b / count[:, None], c / count)


def _along(values: Array, other: Array) -> Array:
    """``values (V,)`` with as many dimensions as ``other (V, ...)``."""
    return values.reshape(-1, *[1] * (other.ndim - 1))


@dataclass(frozen=True, eq=False)
class Batch:
    """Folds that are solved as one problem.

    Attributes
    ----------
    objective : FusedObjective
        The devices of the first fold, then those of the second, and so on.
    folds : tuple of Fold
    """

    objective: FusedObjective
    folds: tuple[Fold, ...]

    def scores(self, theta: Array) -> list[float]:
        """Held-out mean loss of each fold, for the parameters of all of them."""
        own = theta.reshape(len(self.folds), -1, theta.shape[1])
        return [float(fold.held_out.values(t[fold.seen]).mean()) for fold, t in zip(self.folds, own, strict=True)]


def in_batches(folds: list[Fold], backend: Resolved) -> list[Batch]:
    """Each fold on its own, but small quadratic ones together for numpy, which wastes its time on short arrays."""
    first = folds[0].objective
    size = len(folds) * first.graph.n_edges * first.terms.n_params
    terms = [fold.objective.terms for fold in folds]
    quadratic = [one for one in terms if isinstance(one, QuadraticTerms)]
    if backend == "numpy" and size <= STACKED and len(quadratic) == len(folds):
        return [_stacked(folds, quadratic)]
    return [Batch(fold.objective, (fold,)) for fold in folds]


def _stacked(folds: list[Fold], terms: list[QuadraticTerms]) -> Batch:
    """One problem with a copy of the graph for each fold."""
    first = folds[0].objective
    A, b, c = (np.concatenate([getattr(one, name) for one in terms]) for name in ("A", "b", "c"))
    n, copies = first.graph.n_devices, np.arange(len(folds))
    edges = (first.graph.edges + n * copies[:, None, None]).reshape(-1, 2)
    graph = Graph.from_indices(range(n * copies.size), edges, np.tile(first.graph.weights, copies.size))
    sparsity = None if first.sparsity is None else np.tile(first.sparsity, (copies.size, 1))
    return Batch(replace(first, terms=QuadraticTerms(A, b, c), graph=graph, sparsity=sparsity), tuple(folds))
