"""Parameters that no edge pulls at, such as intercepts: minimised out, which leaves a problem of the others.

For a quadratic loss the minimum over some parameters is a quadratic of the rest (a Schur complement), so the rest of
the solvers does not notice: values, duals and certificates are those of the whole objective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.errors import ParameterError
from fedkin.objective import FoldSums, Problem, QuadraticTerms, Solution, Summaries, assign_folds
from fedkin.solvers.crossvalidation import LamChoice, Rule, choose_level
from fedkin.solvers.exact import solve
from fedkin.solvers.folds import Fold
from fedkin.solvers.grids import checked_grid, lam_grid


@dataclass(frozen=True, eq=False)
class Lift:
    """The best free parameters ``(V, f)`` of each site given the others: ``start - slope @ rest``."""

    free: Mask
    start: Array
    slope: Array

    def __call__(self, rest: Array) -> Array:
        """All parameters ``(V, p)`` for ``rest (V, p - f)``."""
        theta = np.empty((len(rest), self.free.size))
        theta[:, ~self.free] = rest
        theta[:, self.free] = self.start - np.matmul(self.slope, rest[:, :, None])[:, :, 0]
        return theta

    def take(self, sites: Index) -> Lift:
        """That of some sites."""
        return Lift(self.free, self.start[sites], self.slope[sites])


def minimised_out(terms: QuadraticTerms, free: Mask) -> tuple[QuadraticTerms, Lift]:
    """The minimum over the ``free (p,)`` parameters as a function of the others, and where it is taken.

    Examples
    --------
    >>> import numpy as np
    >>> terms = QuadraticTerms(np.array([[[2.0, 1.0], [1.0, 3.0]]]), np.array([[2.0, 1.0]]), np.zeros(1))
    >>> rest, lift = minimised_out(terms, np.array([True, False]))
    >>> rest.A.tolist(), lift(np.zeros((1, 1))).tolist()
    ([[[2.5]]], [[1.0, 0.0]])
    """
    A, b = terms.hessians(terms.b), terms.b
    inverse = np.linalg.inv(A[:, free][:, :, free])
    slope, start = inverse @ A[:, free][:, :, ~free], np.matmul(inverse, b[:, free, None])[:, :, 0]
    cross = A[:, ~free][:, :, free]
    left = QuadraticTerms(
        A[:, ~free][:, :, ~free] - cross @ slope,
        b[:, ~free] - np.matmul(cross, start[:, :, None])[:, :, 0],
        terms.c - 0.5 * (b[:, free] * start).sum(axis=1),
    )
    return left, Lift(free, start, slope)


@dataclass(frozen=True, eq=False)
class ProfiledProblem:
    """A problem with a quadratic loss whose edges do not pull at the ``free (p,)`` parameters.

    Examples
    --------
    >>> import numpy as np, fedkin
    >>> X = np.column_stack([np.ones(4), [0.0, 1.0, 2.0, 3.0]])
    >>> fed = fedkin.Federation({"a": (X, X[:, 1]), "b": (X, X[:, 1] + 5.0)}, ["(intercept)", "x"])
    >>> problem = fedkin.Problem(fed, fedkin.Graph.complete(["a", "b"]), lam=1.0)
    >>> ProfiledProblem(problem, np.array([True, False])).solve(1.0).theta.round(6).tolist()
    [[0.0, 1.0], [5.0, 1.0]]
    """

    problem: Problem
    free: Mask

    def __post_init__(self) -> None:
        if not all(loss.quadratic for loss in self.problem.losses):
            raise ParameterError(
                f"the {self.problem.losses[0].name} loss is not quadratic: only least squares can leave intercepts "
                "unfused; leave fuse_intercept= out"
            )

    @cached_property
    def _all(self) -> tuple[QuadraticTerms, Lift]:
        ridge = np.broadcast_to(np.asarray(self.problem.ridge, dtype=np.float64), (self.problem.n_params,))
        return minimised_out(self._sums(2, 0).total().terms(ridge=ridge), self.free)

    @cached_property
    def rest(self) -> Problem:
        """The problem of the other parameters."""
        problem, (terms, _) = self.problem, self._all
        data = problem.federation
        n = np.asarray(data.n_samples if isinstance(data, Summaries) else data.weight_sums, dtype=np.float64)
        sums = FoldSums(
            np.zeros_like(terms.b),
            np.column_stack([0 * n, n]),
            np.column_stack([0 * n, n * terms.c]),
            np.stack([0 * terms.b, -n[:, None] * terms.b], axis=1),
            np.stack([0 * terms.A, n[:, None, None] * terms.A], axis=1),
        )
        names = tuple(name for name, free in zip(data.feature_names, self.free.tolist(), strict=True) if not free)
        squares = np.einsum("vii->vi", sums.hessian[:, 1])
        federation = Summaries(data.devices, problem.losses[0], names, 0, sums, 0 * squares, squares)
        sparsity = problem.fused.sparsity
        return replace(
            problem,
            federation=federation,
            ridge=0.0,
            sparsity=0.0 if sparsity is None else sparsity[:, ~self.free],
        )

    def lifted(self, solution: Solution) -> Solution:
        """A solution of `rest` with all parameters; nothing pulls at the free ones, so their duals are 0."""
        alpha = np.zeros((len(solution.alpha), self.free.size))
        alpha[:, ~self.free] = solution.alpha
        return replace(solution, theta=self._all[1](solution.theta), alpha=alpha)

    def solve(self, lam: float, tol: float = 1e-6, max_iter: int = 20_000) -> Solution:
        """The solution at a level, as `fedkin.solve` has it."""
        return self.lifted(solve(self.rest.with_lam(lam), tol, max_iter=max_iter))

    def choose(
        self,
        lams: Sequence[float] | None = None,
        *,
        folds: int = 5,
        rule: Rule = "min",
        seed: int = 0,
        tol: float = 1e-4,
        n_jobs: int | None = None,
    ) -> LamChoice:
        """The level that cross-validation chooses, as `cross_validate_lam` does; intercepts are those of training."""
        problem, sums = self.problem, self._sums(folds, seed)
        ridge = np.broadcast_to(np.asarray(problem.ridge, dtype=np.float64), (problem.n_params,))
        forward = not isinstance(problem.federation, Summaries) and problem.federation.ordered
        cut = []
        for fold in np.flatnonzero(sums.count[:, :-1].any(axis=0)).tolist()[int(forward) :]:
            seen = np.flatnonzero(sums.count[:, fold])
            training, lift = minimised_out(sums.total(without=fold, forward=forward).terms(ridge=ridge), self.free)
            held_out = _HeldOut(sums.take(seen).terms(fold), lift.take(seen))
            cut.append(Fold(replace(self.rest.fused, terms=training), held_out, seen))
        grid = lam_grid(self.rest) if lams is None else checked_grid(lams)
        return choose_level(cut, grid, rule, tol=tol, n_jobs=n_jobs, abandon=lams is None)

    def _sums(self, folds: int, seed: int) -> FoldSums:
        data = self.problem.federation
        if isinstance(data, Summaries):
            return data.sums
        return FoldSums.of_rows(data, self.problem.losses, assign_folds(data, folds, seed), folds)


class _HeldOut:
    """Losses of rows that are held out, as functions of the parameters that edges pull at."""

    def __init__(self, terms: QuadraticTerms, lift: Lift) -> None:
        self._terms, self._lift = terms, lift

    def values(self, theta: Array) -> Array:
        """Mean losses ``(V,)``."""
        return self._terms.values(self._lift(theta))
