"""Less shrinkage: adaptive weights, and a folded-concave penalty (MCP) by local linear approximation.

A norm pulls at every edge with the same force, however far apart its ends are: groups are drawn towards each other.
Both cures solve the convex problem again with smaller weights on edges whose ends differ, and every step keeps its
certificate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from fedkin._base import Array, check_choice, check_positive, check_whole
from fedkin.core import Penalty, Problem, Solution
from fedkin.solvers.compiled import Backend
from fedkin.solvers.exact import scaled, solve, solve_fused

Debias = Literal["mcp", "adaptive"]

#: Weights below this share of what they were are left out: the edge is gone.
GONE = 1e-6


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
