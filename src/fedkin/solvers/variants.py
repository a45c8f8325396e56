"""Variants of the problem that the exact solver solves as it is: free parameters, and less shrinkage.

Parameters that no edge pulls at, such as intercepts, are minimised out. For a quadratic loss the minimum over some
parameters is a quadratic of the rest (a Schur complement); for others Newton finds it at every point (`ProfiledTerms`).
Values, duals and certificates are those of the whole objective.

A norm pulls at every edge with the same force, however far apart its ends are: groups are drawn towards each other.
`solve_debiased` solves the convex problem again with smaller weights on edges whose ends differ, by adaptive weights or
by a folded-concave penalty (MCP) in local linear approximation. Every step keeps its certificate.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from fedkin._base import Array, Index, Mask, check_choice, check_positive, check_whole
from fedkin.core import Penalty, Problem, QuadraticTerms, SiteTerms, Solution, damped_newton
from fedkin.errors import ParameterError, SolverError, argument
from fedkin.solvers.compiled import Backend
from fedkin.solvers.exact import scaled, solve, solve_fused

Debias = Literal["mcp", "adaptive"]

#: Weights below this share of what they were are left out: the edge is gone.
GONE = 1e-6
#: Share of a matrix above the Hessian that Newton takes where the Hessian may be 0.
WARY = 0.1
#: Curvature that has come down to this share of what it was: the parameter has nowhere to stop.
VANISHED = 1e-12


@dataclass(frozen=True, eq=False)
class Lift:
    """The best free parameters ``(V, f)`` of each site given the others: ``start - slope @ rest``."""

    free: Mask
    start: Array
    slope: Array

    def __call__(self, rest: Array) -> Array:
        """Return all parameters ``(V, p)`` for ``rest (V, p - f)``."""
        theta = np.empty((len(rest), self.free.size))
        theta[:, ~self.free] = rest
        theta[:, self.free] = self.start - np.matmul(self.slope, rest[:, :, None])[:, :, 0]
        return theta

    def take(self, sites: Index) -> Lift:
        return Lift(self.free, self.start[sites], self.slope[sites])


def minimised_out(terms: QuadraticTerms, free: Mask) -> tuple[QuadraticTerms, Lift]:
    """Return the minimum over the ``free (p,)`` parameters as a function of the others, and where it is taken."""
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


class ProfiledTerms(SiteTerms):
    """Minima of ``terms`` over the ``free (p,)`` parameters, as functions of the others.

    Hessians are Schur complements. The conjugate is that of the terms, with nothing pulling at the free parameters: so
    the gap is one of the whole objective, also where Newton left them a rounding error away from their best.
    """

    def __init__(self, terms: SiteTerms, free: Mask) -> None:
        self.terms, self.free = terms, free
        self.n_sites, self.n_params = terms.n_sites, int((~free).sum())
        self._last: tuple[Array, Array] | None = None

    @cached_property
    def start(self) -> Array:
        """The best free parameters ``(V, f)`` where all others are 0."""
        return self._best(np.zeros((self.n_sites, self.free.size)))

    def diverging(self) -> Mask:
        """Return the sites ``(V,)`` whose free parameters have no finite best value."""
        theta = np.zeros((self.n_sites, self.free.size))
        before = np.linalg.eigvalsh(self.terms.hessian_blocks(theta, self.free))[:, 0]
        theta[:, self.free] = self.start
        now = np.linalg.eigvalsh(self.terms.hessian_blocks(theta, self.free))[:, 0]
        # other losses may be flat where they please
        return np.asarray((now < VANISHED * before) & (self.terms.caution()[1] == 0))

    def __call__(self, rest: Array) -> Array:
        """Return all parameters ``(V, p)`` for ``rest (V, p - f)``."""
        last = self._last  # one point is asked about several times
        if last is not None and np.array_equal(last[0], rest):
            return last[1]
        theta = np.empty((len(rest), self.free.size))
        theta[:, ~self.free], theta[:, self.free] = rest, self.start
        theta[:, self.free] = self._best(theta)
        self._last = rest.copy(), theta
        return theta

    def _best(self, theta: Array) -> Array:
        """Return the best free parameters ``(V, f)``, from where ``theta (V, p)`` has them."""
        terms, free, wary = self.terms, self.free, np.where(self.terms.caution()[1] > 0, WARY, 0.0)[:, None, None]

        def at(own: Array, who: Index) -> Array:
            point = theta.copy()
            point[np.ix_(who, np.flatnonzero(free))] = own
            return point

        def value(own: Array, who: Index) -> Array:
            return terms.values(at(own, who))[who]

        def derivatives(own: Array, who: Index) -> tuple[Array, Array]:
            point = at(own, who)
            matrix = terms.hessian_blocks(point, free)
            if wary.any():
                matrix = (1.0 - wary) * matrix + wary * terms.cautious_hessians(point)[:, free][:, :, free]
            return terms.gradients(point)[who][:, free], matrix[who]

        return damped_newton(value, derivatives, theta[:, free])[0]

    def values(self, theta: Array) -> Array:
        return self.terms.values(self(theta))

    def gradients(self, theta: Array) -> Array:
        return self.terms.gradients(self(theta))[:, ~self.free]

    def hessians(self, theta: Array) -> Array:
        return schur_complement(self.terms.hessians(self(theta)), self.free)

    def cautious_hessians(self, theta: Array) -> Array:
        return schur_complement(self.terms.cautious_hessians(self(theta)), self.free)

    def caution(self) -> tuple[Array, Array]:
        return self.terms.caution()

    def lower_bounds(self) -> Array:
        return self.terms.lower_bounds()

    def young_gaps(self, theta: Array, s: Array, radius: float = np.inf) -> Array:
        pull = np.zeros((len(s), self.free.size))
        pull[:, ~self.free] = s
        return self.terms.young_gaps(self(theta), pull, radius)

    def take(self, sites: Index) -> ProfiledTerms:
        return ProfiledTerms(self.terms.take(sites), self.free)


def schur_complement(matrices: Array, free: Mask) -> Array:
    """Return what is left of ``matrices (V, p, p)`` for the other parameters once the free ones give way."""
    cross, block = matrices[:, free][:, :, ~free], matrices[:, free][:, :, free]
    # Hessians that may be 0 (Huber) are then those of the parameters alone
    regular = np.linalg.eigvalsh(block)[:, 0] > 0
    out = matrices[:, ~free][:, :, ~free].copy()
    cross = cross[regular]
    out[regular] -= np.swapaxes(cross, 1, 2) @ np.linalg.solve(block[regular], cross)
    return out


def profiled(terms: SiteTerms, free: Mask, sites: Sequence[Hashable]) -> tuple[SiteTerms, Lift | ProfiledTerms]:
    """Return the minimum over the ``free (p,)`` parameters as a function of the others, and where it is taken."""
    if isinstance(terms, QuadraticTerms):
        return minimised_out(terms, free)
    made = ProfiledTerms(terms, free)
    lost = made.diverging()
    if lost.any():
        others = f" and {lost.sum() - 1} others" if lost.sum() > 1 else ""
        raise SolverError(
            f"the intercept of site {sites[int(lost.argmax())]!r}{others} has no finite minimiser where no edge pulls "
            f"at it (one class only, all-zero counts); add {argument('ridge', 1e-3)} or so, or leave out "
            f"{argument('fuse_intercept')}"
        )
    return made, made


@dataclass(frozen=True, eq=False)
class RestProblem(Problem):
    """A problem without its ``free (p,)`` parameters; ``ridge`` is still that of all, ``sparsity`` that of the rest."""

    free: Mask | None = None

    @cached_property
    def n_params(self) -> int:
        assert self.free is not None
        return int((~self.free).sum())

    def _make_terms(self) -> SiteTerms:
        return self.profile[0]

    @cached_property
    def profile(self) -> tuple[SiteTerms, Lift | ProfiledTerms]:
        """The terms, and the function that gives all parameters for those that are left."""
        assert self.free is not None
        whole = Problem(self.federation, self.graph, self.loss, self.penalty, lam=self.lam, ridge=self.ridge)
        return profiled(whole.terms, self.free, self.graph.sites)


@dataclass(frozen=True, eq=False)
class ProfiledProblem:
    """A problem whose edges do not pull at the ``free (p,)`` parameters.

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
        if self.problem.radius is not None:
            raise ParameterError(
                f"a ball is one constraint on all parameters of a site, so none of them can be left to itself: leave "
                f"out {argument('fuse_intercept')} or {argument('radius', self.problem.radius)}"
            )

    @cached_property
    def rest(self) -> RestProblem:
        """The problem of the other parameters."""
        whole, sparsity = self.problem, self.problem.fused.sparsity
        described = (whole.federation, whole.graph, whole.loss, whole.penalty, whole.lam)
        return RestProblem(
            *described, 0.0 if sparsity is None else sparsity[:, ~self.free], whole.ridge, None, self.free
        )

    def lifted(self, solution: Solution) -> Solution:
        """Return a solution of `rest` with all parameters; nothing pulls at the free ones, so their duals are 0."""
        alpha = np.zeros((len(solution.alpha), self.free.size))
        alpha[:, ~self.free] = solution.alpha
        return replace(solution, theta=self.rest.profile[1](solution.theta), alpha=alpha)

    def solve(self, lam: float, tol: float = 1e-6, max_iter: int = 20_000) -> Solution:
        """Solve the problem at a level, as `fedkin.solve` does."""
        return self.lifted(solve(self.rest.with_lam(lam), tol, max_iter=max_iter))


# --- less shrinkage -------------------------------------------------------------------------------------------------


def solve_debiased(
    problem: Problem,
    how: Debias = "mcp",
    *,
    gamma: float = 2.0,
    steps: int = 5,
    tol: float = 1e-6,
    backend: Backend = "auto",
) -> tuple[Solution, ...]:
    """Solve ``problem``, then again with smaller weights on edges whose ends differ.

    Parameters
    ----------
    problem : Problem
        The convex problem.
    how : "mcp" or "adaptive"
        The minimax concave penalty (MCP) by local linear approximation, or one step of weights that are inverse to the
        differences.
    gamma : float
        An edge stops pulling when its ends differ by ``gamma`` times the reach of the penalty, which is how far all
        edges of a typical site together can move it.
    steps : int
        Most steps of the local linear approximation.
    tol, backend
        As in `solve`, for each step.

    Returns
    -------
    tuple of Solution
        The solution of ``problem``, and that of each step, each with the certificate of its own convex problem. The
        last one has edge duals of the edges that are left.

    Notes
    -----
    With t the norm of an edge's difference and r the reach, MCP multiplies its weight by ``max(1 - t / (gamma r), 0)``;
    the adaptive weight is ``min(r / t, 1)``. Steps end when no weight changes any more. Fan, Xue and Zou (2014) show
    that two steps are enough where groups stand well apart.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.solvers import solve_debiased
    >>> fed = fedkin.Federation({u: [[0.0 if u < 3 else 5.0]] for u in range(6)})
    >>> problem = fedkin.Problem(fed, fedkin.Graph.complete(range(6)), loss="mean", lam=0.05)
    >>> first, *_, last = solve_debiased(problem)
    >>> first.theta[[0, 5], 0].round(2).tolist(), last.theta[[0, 5], 0].round(2).tolist()
    ([0.9, 4.1], [0.0, 5.0])
    """
    check_choice("how", how, ("mcp", "adaptive"))
    check_positive("gamma", gamma)
    check_whole("steps", steps, least=1)
    found = [solve(problem, tol, backend=backend)]
    if problem.graph.n_edges == 0 or problem.lam == 0:
        return tuple(found)
    reach, factor = _reach(problem, found[0].theta), np.ones(problem.graph.n_edges)
    assert isinstance(problem.penalty, Penalty)
    i, j = problem.graph.edges.T
    for _ in range(steps if how == "mcp" else 1):
        size = problem.penalty.value(found[-1].theta[i] - found[-1].theta[j])
        new = np.maximum(1.0 - size / (gamma * reach), 0.0) if how == "mcp" else reach / np.maximum(size, reach)
        if np.allclose(new, factor, rtol=0.0, atol=GONE):
            break
        factor, kept = new, new > GONE
        graph = problem.graph.reweighted(np.where(kept, factor, 1.0) * problem.graph.weights).keep(kept)
        # what was computed from the rows serves again, unless more sites are alone now
        alone = bool(((graph.degree == 0) & (problem.graph.degree > 0)).any())
        objective = replace(problem, graph=graph).fused if alone else replace(problem.fused, graph=graph)
        found.append(scaled(solve_fused(objective, tol, backend=backend), problem.n_sites))
    return tuple(found)


def _reach(problem: Problem, theta: Array) -> float:
    """Return how far all edges of a typical site together can move it, in the penalty's norm."""
    graph = problem.graph
    i, j = graph.edges.T
    pull = np.bincount(i, graph.weights, graph.n_sites) + np.bincount(j, graph.weights, graph.n_sites)
    curvature = np.einsum("vii->i", problem.terms.hessians(theta)) / problem.n_sites
    floor = np.finfo(float).tiny
    # a dual of norm 1 moves a site by as much as its curvature allows, in each coordinate that it holds
    step = 1.0 / np.maximum(curvature, floor)
    norm = {"l1": step.sum(), "l2": float(np.sqrt((step**2).mean())), "linf": step.max()}
    assert isinstance(problem.penalty, Penalty)
    return max(problem.strength * float(pull.mean()) * float(norm.get(problem.penalty.name, step.mean())), floor)
