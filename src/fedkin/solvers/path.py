"""Compute the level of full fusion (`lam_max`), grids of levels, warm-started paths, and debiased estimates.

Sites stay fused at a point with gradients g if some edge duals y with ``dual_norm(y_e) <= L w_e`` balance them, ``D' y
= -g``: a network flow. The smallest congestion L is the largest value of ``-<g, theta> / sum_e w_e phi(theta_i -
theta_j)``.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import breadth_first_order, maximum_flow
from scipy.sparse.linalg import cg, spsolve

from fedkin._base import TINY, Array, Index, Mask, check_choice, check_positive, check_whole
from fedkin.core import FusedObjective, Penalty, Problem, QuadraticTerms, Solution, sum_groups, summed_terms
from fedkin.errors import ConvergenceWarning, ParameterError
from fedkin.graph import Graph
from fedkin.solvers.compiled import Backend, run_side_by_side, threads_for
from fedkin.solvers.exact import scaled, solve, solve_fused, uninterrupted

#: A path is divided into this many stretches with at least so many levels each.
STRETCHES, SHORTEST_STRETCH = 4, 3
#: Relative gap of the fused solution, whose gradients determine `lam_max`.
FUSED_GAP = 1e-10
#: Sum of the capacities out of the source: maximum flows are computed in 32-bit integers.
FLOW_UNITS = 2**30
#: Laplace equations on graphs of up to this many sites are solved directly.
FEW_SITES = 1000


@dataclass(frozen=True, eq=False)
class LamPath:
    """Solutions along decreasing penalty levels.

    Attributes
    ----------
    lams : array (m,)
        From `lam_max` downwards.
    solutions : tuple of Solution
    """

    lams: Array
    solutions: tuple[Solution, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.solutions)

    def __iter__(self) -> Iterator[tuple[float, Solution]]:
        return iter(zip(self.lams.tolist(), self.solutions, strict=True))


def lam_path(
    problem: Problem,
    lams: Sequence[float] | Array | None = None,
    *,
    n_lams: int = 20,
    ratio: float = 1e-3,
    tol: float = 1e-6,
    max_iter: int = 20_000,
    backend: Backend = "auto",
) -> LamPath:
    """Solve along a decreasing sequence of penalty levels, each warm-started from its neighbour.

    Parameters
    ----------
    problem : Problem
        Its own ``lam`` does not matter.
    lams : sequence of float, optional
        Levels, sorted in decreasing order; by default ``n_lams`` levels from `lam_max` down to ``ratio * lam_max``.
    n_lams, ratio
        See `lams`.
    tol, max_iter, backend
        For each solution, as in `solve`.

    Returns
    -------
    LamPath
        Ctrl-C stops the whole path.

    Examples
    --------
    >>> import fedkin
    >>> fed = fedkin.Federation({"a": [[0.0]], "b": [[2.0]]})
    >>> problem = fedkin.Problem(fed, fedkin.Graph.complete(["a", "b"]), loss="mean")
    >>> path = fedkin.lam_path(problem, [0.5, 0.25])
    >>> [solution.theta.round(2).ravel().tolist() for lam, solution in path]
    [[1.0, 1.0], [0.5, 1.5]]
    """
    check_positive("tol", tol)
    check_whole("max_iter", max_iter, least=1)
    grid = lam_grid(problem, n_lams, ratio) if lams is None else checked_grid(lams)
    objective = problem.fused
    strengths = grid * problem.n_sites

    def solved(part: Index) -> list[Solution]:
        found = dict(path_stretch(objective, part, strengths, tol, max_iter, backend))
        return [found[k] for k in part.tolist()]

    tasks = [partial(solved, part) for part in stretches_of(grid.size)]
    done = run_side_by_side(tasks, threads_for(objective, backend), "levels of lam")
    solutions = list(itertools.chain.from_iterable(done))
    warn_of_limits([solution.message for solution in solutions if solution.status == "iteration_limit"], grid.size)
    return LamPath(grid, tuple(scaled(solution, problem.n_sites) for solution in solutions))


def warn_of_limits(messages: list[str], n_solves: int, stacklevel: int = 3) -> None:
    """Issue one warning for all solves that stopped at the iteration limit, given their messages."""
    if messages:
        text = f"{len(messages)} of {n_solves} penalty levels did not converge. The first one {messages[0]}"
        warnings.warn(text, ConvergenceWarning, stacklevel=stacklevel)


def stretches_of(n_levels: int) -> list[Index]:
    """Return the positions of a path's levels, divided into independent stretches."""
    # the same on any number of cores: so are the results
    return np.array_split(np.arange(n_levels), min(STRETCHES, -(-n_levels // SHORTEST_STRETCH)))


def path_stretch(
    objective: FusedObjective,
    part: Index,
    strengths: Array,
    tol: float,
    max_iter: int,
    backend: Backend,
    *,
    fuse_components: bool = True,
) -> Iterator[tuple[int, Solution]]:
    """Solve along consecutive positions in the decreasing ``strengths (m,)``, each from the previous solutions."""
    known: list[tuple[float, Solution]] = []
    # near the top solutions change abruptly: go there from below. Elsewhere go down, where steps are shorter.
    ahead = (part[::-1] if part[0] == 0 else part).tolist()
    for k in ahead:
        at = replace(objective, strength=float(strengths[k]))
        solution = solve_fused(
            at,
            tol,
            max_iter=max_iter,
            warm_start=_predicted(known, at),
            quiet=True,
            fuse_components=fuse_components,
            certify=fuse_components,
            backend=backend,
        )
        yield k, uninterrupted(solution)
        known = [*known[-1:], (at.strength, solution)]


def _predicted(known: list[tuple[float, Solution]], at: FusedObjective) -> Solution | None:
    """Extrapolate a start linearly from the last two solutions."""
    if not known:
        return None
    strength, last = known[-1]
    if len(known) == 1 or not known[0][0] > strength > at.strength:
        # duals grow with the strength
        return last if not strength > 0 else replace(last, alpha=last.alpha * (at.strength / strength))
    before, other = known[0]
    step = (strength - at.strength) / (before - strength)
    theta, alpha = last.theta + step * (last.theta - other.theta), last.alpha + step * (last.alpha - other.alpha)
    return replace(last, theta=theta, alpha=alpha)


# --- levels ----------------------------------------------------------------------------------------------------------


def lam_max(problem: Problem, tol: float = 1e-3) -> float:
    """Return the smallest ``lam`` at which all sites of each connected component are fused.

    Parameters
    ----------
    problem : Problem
        Its own ``lam`` does not matter.
    tol : float
        Relative tolerance: the result is at least the exact value and at most ``1 + tol`` times it. Trees, the l1
        penalty and models with one parameter are solved exactly.

    Notes
    -----
    With ``sparsity`` the result is an upper bound.

    Examples
    --------
    >>> import fedkin
    >>> fed = fedkin.Federation({"a": [[0.0]], "b": [[2.0]]})
    >>> problem = fedkin.Problem(fed, fedkin.Graph.complete(["a", "b"]), loss="mean")
    >>> round(fedkin.lam_max(problem), 3)
    0.5
    """
    check_positive("tol", tol)
    objective = problem.fused
    return least_congestion(objective.graph, objective.penalty, fused_gradients(objective), tol) / problem.n_sites


def fused_solution(objective: FusedObjective) -> Array:
    """Return the solution with every component fused, ``(V, p)``, giving sites equal weight."""
    labels = objective.graph.components()
    first = np.unique(labels, return_index=True)[1]
    sparsity = None if objective.sparsity is None else sum_groups(objective.sparsity, labels, first.size)
    # each component under the name of its first site
    graph, terms = Graph.empty([objective.graph.sites[u] for u in first]), summed_terms(objective.terms, labels)
    pooled = replace(objective, terms=terms, graph=graph, strength=0.0, sparsity=sparsity)
    return uninterrupted(solve_fused(pooled, FUSED_GAP, quiet=True)).theta[labels]


def fused_gradients(objective: FusedObjective) -> Array:
    """Return gradients at the fused solution (with sparsity duals added), which sum to zero over each component."""
    theta = fused_solution(objective)
    gradient = objective.terms.gradients(theta)
    labels = objective.graph.components()
    groups = int(labels.max()) + 1
    if objective.sparsity is not None:
        gradient = gradient + objective.sparsity * np.sign(theta)
        free = np.where(np.abs(theta) > 0, 0.0, objective.sparsity)
        shares = free / np.maximum(sum_groups(free, labels, groups), TINY)[labels]
        gradient = gradient - shares * sum_groups(gradient, labels, groups)[labels]
    # remove rounding errors
    return np.asarray(gradient - (sum_groups(gradient, labels, groups) / np.bincount(labels)[:, None])[labels])


def lam_grid(problem: Problem, n_lams: int = 20, ratio: float = 1e-3, tol: float = 0.01) -> Array:
    """Return ``n_lams`` levels from `lam_max` (up to ``tol``) down to ``ratio * lam_max``; only 0 if that is 0."""
    check_whole("n_lams", n_lams, least=1)
    if not 0 < ratio < 1:
        raise ParameterError(f"ratio must lie between 0 and 1, got {ratio!r}")
    top = lam_max(problem, tol)
    return top * np.geomspace(1.0, ratio, n_lams) if top > 0 else np.zeros(1)


def checked_grid(lams: Sequence[float] | Array) -> Array:
    """Return penalty levels in decreasing order."""
    try:
        grid = np.asarray(lams, dtype=np.float64)
    except (TypeError, ValueError):
        grid = np.empty(0)
    if grid.ndim != 1 or grid.size == 0 or not (np.isfinite(grid) & (grid >= 0)).all():
        raise ParameterError(f"lams must be a list of finite numbers of at least 0, got {lams!r}")
    return np.sort(grid)[::-1]


def least_congestion(graph: Graph, penalty: Penalty, gradient: Array, tol: float, flow_size: int = 300_000) -> float:
    """Return the smallest L such that some y with ``dual_norm(y_e) <= L w_e`` has ``D' y = -gradient``, up to ``tol``.

    Graphs with more than ``flow_size`` sites and edges use the first-order method, which needs no maximum flows.
    """
    if graph.n_edges == 0 or not np.abs(gradient).max() > 0:
        return 0.0
    separate = penalty.separable or gradient.shape[1] == 1
    if separate and graph.cliques is not None:
        return float(graph.cliques.congestion(gradient).max())
    # the cut around a single site, and the flow of an electrical network
    i, j = graph.edges.T
    carrying = np.bincount(i, graph.weights, graph.n_sites) + np.bincount(j, graph.weights, graph.n_sites)
    size = penalty.dual_norm(gradient)
    lower = float(np.max(np.divide(size, carrying, out=np.zeros_like(size), where=carrying > 0)))
    electrical = _repaired(graph, np.zeros((graph.n_edges, gradient.shape[1])), gradient)
    upper = _congestion(graph, penalty, electrical)
    if upper <= (1.0 + tol) * lower or _is_forest(graph):
        return upper
    if separate and graph.n_sites + graph.n_edges <= flow_size:
        return _by_maximum_flow(graph, gradient, (np.abs(electrical) / graph.weights[:, None]).max(axis=0), lower)
    return _by_first_order(graph, penalty, gradient, lower, upper, tol)


def _congestion(graph: Graph, penalty: Penalty, flow: Array) -> float:
    return float(np.max(penalty.dual_norm(flow) / graph.weights))


def _is_forest(graph: Graph) -> bool:
    return graph.n_edges == graph.n_sites - graph.n_components


def _repaired(graph: Graph, flow: Array, gradient: Array) -> Array:
    """Return the flow nearest to ``flow`` (in squares over the weights) with ``D' flow = -gradient``."""
    missing = graph.balance(flow) + gradient
    # the residual sums to 0 over each component only up to rounding; without correction there is no solution
    labels = graph.components()
    missing -= (sum_groups(missing, labels, graph.n_components) / np.bincount(labels)[:, None])[labels]
    potential = _potential(graph, missing, 1e-14 * float(np.abs(gradient).sum()))
    return np.asarray(flow - graph.weights[:, None] * np.asarray(graph.incidence() @ potential))


def _potential(graph: Graph, missing: Array, rounding: float) -> Array:
    """Return a solution ``(V, p)`` of the Laplace equation with that right-hand side, up to ``rounding``."""
    laplacian, potential = graph.laplacian(weighted=True), np.zeros_like(missing)
    if _is_forest(graph) or graph.n_sites <= FEW_SITES:
        # grounded at the first site of each component; forests have no fill-in
        labels = graph.components()
        free = np.setdiff1d(np.arange(graph.n_sites), np.unique(labels, return_index=True)[1])
        potential[free] = spsolve(laplacian[free][:, free].tocsc(), missing[free]).reshape(free.size, -1)
        return potential
    diagonal = laplacian.diagonal()
    jacobi = sparse.diags_array(np.divide(1.0, diagonal, out=np.ones_like(diagonal), where=diagonal > 0))
    for column in range(missing.shape[1]):
        if np.abs(missing[:, column]).max() > 0:
            right = missing[:, column]
            potential[:, column], _ = cg(laplacian, right, rtol=1e-10, atol=rounding, maxiter=10_000, M=jacobi)
    return potential


def _by_maximum_flow(graph: Graph, gradient: Array, upper: Array, lower: float) -> float:
    """Return the largest ``|g(S)| / w(edges that leave S)`` over sets S of sites and over coordinates."""
    # ``upper (p,)`` bounds the coordinates' congestions, ``lower`` the result
    for column in np.argsort(-upper):
        if upper[column] > lower:
            lower = _densest_cut(graph, gradient[:, column], lower)
    # capacities are rounded to whole units
    return lower * (1.0 + (graph.n_sites + graph.n_edges) / FLOW_UNITS)


def _densest_cut(graph: Graph, gradient: Array, lower: float) -> float:
    """Return the largest of `_by_maximum_flow` for one coordinate, or ``lower`` if larger (Dinkelbach's iteration)."""
    i, j = graph.edges.T
    while True:
        inside = _minimum_cut(graph, gradient, lower)
        leaving = float(graph.weights[inside[i] != inside[j]].sum())
        ratio = -float(gradient[inside].sum()) / leaving if leaving > 0 else 0.0
        if not ratio > lower * (1.0 + 1e-12):
            return lower
        lower = ratio


def _minimum_cut(graph: Graph, gradient: Array, level: float) -> Mask:
    """Return sites S ``(V,)`` with the largest ``-g(S) - level * w(edges that leave S)``."""
    n = graph.n_sites
    source, sink, everyone = np.full(n, n), np.full(n, n + 1), np.arange(n)
    i, j = graph.edges.T
    capacity = np.concatenate([level * graph.weights, level * graph.weights, -gradient, gradient]).clip(0)
    units = np.rint(capacity * (FLOW_UNITS / gradient.clip(0).sum())).clip(max=FLOW_UNITS).astype(np.int32)
    places = (np.concatenate([i, j, source, everyone]), np.concatenate([j, i, everyone, sink]))
    network = sparse.csr_array((units, places), shape=(n + 2, n + 2))
    residual = network - maximum_flow(network, n, n + 1).flow
    residual.data[residual.data < 0] = 0
    residual.eliminate_zeros()
    inside = np.zeros(n + 2, dtype=bool)
    inside[breadth_first_order(residual, n, return_predecessors=False)] = True
    return inside[:n]


def _by_first_order(graph: Graph, penalty: Penalty, gradient: Array, lower: float, upper: float, tol: float) -> float:
    """Run Dinkelbach's iteration from below, with repaired flows from above."""
    # ||theta + gradient||^2 / 2 is fused at 0 from the same level on, and far cheaper than the problem itself
    proximity = QuadraticTerms(np.ones(graph.n_sites), -gradient, 0.5 * (gradient**2).sum(axis=1))
    solution = None
    for _ in range(30):
        at = FusedObjective(proximity, graph, penalty, lower)
        # a relative error of tol in the level changes the value only by its square
        gap = 0.1 * min(tol, 0.1) ** 2
        solution = uninterrupted(solve_fused(at, gap, max_iter=5_000, warm_start=solution, quiet=True))
        upper = min(upper, _congestion(graph, penalty, _repaired(graph, solution.alpha, gradient)))
        variation = float(graph.weights @ penalty.value(at.differences(solution.theta)))
        if upper <= (1.0 + tol) * lower or not variation > 1e-12 * float(np.abs(gradient).sum()):
            break
        raised = -float((gradient * solution.theta).sum()) / variation
        if raised <= lower * (1.0 + 1e-6):
            break
        lower = raised
    return upper


# --- less shrinkage -------------------------------------------------------------------------------------------------

#: Maximum number of steps of the local linear approximation.
MOST_STEPS = 5
#: Edges whose weight falls below this share of the original are removed.
GONE = 1e-6

Debias = Literal["mcp", "adaptive"]


def solve_debiased(
    problem: Problem,
    how: Debias = "mcp",
    *,
    gamma: float = 2.0,
    tol: float = 1e-6,
) -> tuple[Solution, ...]:
    """Solve ``problem``, then repeatedly with smaller weights on edges whose ends differ, to reduce shrinkage bias.

    Parameters
    ----------
    problem : Problem
        The convex problem.
    how : "mcp" or "adaptive"
        The minimax concave penalty (MCP), or one step of adaptive weights inversely proportional to the differences.
    gamma : float
        An edge has no effect once its ends differ by ``gamma`` times the reach of the penalty.
    tol : float
        As in `solve`, for each step.

    Returns
    -------
    tuple of Solution
        The solution of ``problem`` and of each step, each with the certificate of its own convex problem. The last one
        has duals for the remaining edges only.

    Notes
    -----
    With t the norm of an edge's difference and r the reach (how far all edges of a typical site together can move it),
    MCP multiplies the weight by ``max(1 - t / (gamma r), 0)``; the adaptive weight is ``min(r / t, 1)``. Two steps
    suffice when groups are well separated (Fan, Xue and Zou, 2014).

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
    found = [solve(problem, tol)]
    if problem.graph.n_edges == 0 or problem.lam == 0:
        return tuple(found)
    reach, factor = _reach(problem, found[0].theta), np.ones(problem.graph.n_edges)
    assert isinstance(problem.penalty, Penalty)
    i, j = problem.graph.edges.T
    for _ in range(MOST_STEPS if how == "mcp" else 1):
        size = problem.penalty.value(found[-1].theta[i] - found[-1].theta[j])
        new = np.maximum(1.0 - size / (gamma * reach), 0.0) if how == "mcp" else reach / np.maximum(size, reach)
        if np.allclose(new, factor, rtol=0.0, atol=GONE):
            break
        factor, kept = new, new > GONE
        graph = problem.graph.reweighted(np.where(kept, factor, 1.0) * problem.graph.weights).keep(kept)
        # results computed from the rows are reused, unless more sites are isolated now
        objective = replace(problem, graph=graph).fused
        found.append(scaled(solve_fused(objective, tol), problem.n_sites))
    return tuple(found)


def _reach(problem: Problem, theta: Array) -> float:
    """Return how far all edges of a typical site together can move it, in the penalty's norm."""
    graph = problem.graph
    i, j = graph.edges.T
    pull = np.bincount(i, graph.weights, graph.n_sites) + np.bincount(j, graph.weights, graph.n_sites)
    curvature = np.einsum("vii->i", problem.terms.hessians(theta)) / problem.n_sites
    floor = TINY
    # a dual of norm 1 moves a site by as much as its curvature allows, in each coordinate that it holds
    step = 1.0 / np.maximum(curvature, floor)
    norm = {"l1": step.sum(), "l2": float(np.sqrt((step**2).mean())), "linf": step.max()}
    assert isinstance(problem.penalty, Penalty)
    return max(problem.strength * float(pull.mean()) * float(norm.get(problem.penalty.name, step.mean())), floor)
