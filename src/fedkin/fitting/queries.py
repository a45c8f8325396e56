"""Fit from summaries: directly for quadratic losses, otherwise in rounds of queries and answers.

Kin asks once more, at its estimates from the first messages: two rounds in total, or as many as requested.

The fused estimator uses a proximal Newton method between organiser and sites. The organiser minimises the fused
objective with each site's loss replaced by its quadratic expansion at the last point. It then asks each site for its
loss, its derivatives and its Young gap at the minimiser. The gaps and the edges' terms add up to the duality gap of the
true objective: a certificate from answers alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from typing import Any

import msgspec.structs
import numpy as np

from fedkin._base import TINY, Array, Index, Say
from fedkin.core import (
    PlainMessage,
    Problem,
    Query,
    Summaries,
    ball_gap,
    check_shapes,
    from_plain,
    refuse,
    solve_and_rest,
    to_plain,
)
from fedkin.errors import ConvergenceWarning, DataError, ParameterError, UnknownSiteError, argument
from fedkin.fitting.fused import at_chosen_level, extras, note_light_ridge, used_graph, well_posed_problem
from fedkin.fitting.model import FusedFit
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import Estimate, Prepared
from fedkin.graph import Graph
from fedkin.solvers import solve

#: Last round in which penalty levels are chosen, if they are to be chosen and answers come by fold.
LAST_CHOICE = 2
#: Quadratic models are minimised to this share of the final gap, and further if that does not suffice.
MODEL_SHARE, FURTHER, FINEST = 1e-3, 1e-3, 1e-15
#: Approximate limit on changes of predictors per round if curvature is unbounded (counts): exp(10) is 22,026.
LONGEST_STEP = 10.0
#: Relative increases of the objective below this may be rounding.
ROUNDING = 1e-12
#: Bound on the norm of minimisers that sites are told, as a multiple of the largest norm found.
RADIUS_FACTOR = 10.0


class RoundState(PlainMessage, frozen=True):
    """State of a fit between two rounds of messages, in the solver's units."""

    theta: Array  # (V, p), the point that is asked about
    lam: float
    alpha: Array  # (E, p), edge duals; of large cliques (V, p), their sums at each site
    ridge: Array  # (p,)
    give: Array  # (V,), what it costs each site's ridge to be out of balance, so that its loss need not be
    accuracy: float  # relative gap to which the models are minimised
    zeta: Array | None = None  # (V, p), sparsity duals
    best_theta: Array | None = None  # (V, p), the best point so far
    best_value: float = np.inf  # the objective there
    gap: float = np.inf  # relative gap of the point before
    selection: dict[str, Any] | None = None  # summary of the edge selection
    notes: tuple[tuple[Any, tuple[str, ...]], ...] = ()  # on sites
    choice: dict[str, Any] | None = None  # what cross-validation saw


class Queries(PlainMessage, frozen=True):
    """A query to each site, and the state of the fit.

    ``queries[site]`` is sent to the site; the rest stays with the organiser.

    Attributes
    ----------
    questions : tuple of V Query
        Queries in the units of the sites' columns.
    edges : int array (E, 2)
        The edges that are used, by positions of the queries.
    weights : array (E,)
    state : RoundState
    """

    questions: tuple[Query, ...]
    edges: Index
    weights: Array
    state: RoundState

    @property
    def round(self) -> int:
        """Number of the round of messages, from 2 onwards."""
        return self.questions[0].round

    @property
    def gap(self) -> float:
        """Relative gap of the previous point, infinite if unknown."""
        return self.state.gap

    @property
    def sites(self) -> tuple[Hashable, ...]:
        return tuple(question.site for question in self.questions)

    @property
    def graph(self) -> Graph:
        """The edges in use."""
        return Graph.from_indices(self.sites, self.edges, self.weights)

    def __getitem__(self, site: Hashable) -> Query:
        for question in self.questions:
            if question.site == site:
                return question
        raise UnknownSiteError(f"site {site!r} has no query")

    def to_plain(self) -> dict[str, Any]:
        """Return plain values for a file between two rounds, without loss of precision."""
        return {**to_plain(self), "questions": [question.to_plain() for question in self.questions]}

    @classmethod
    def from_plain(cls, plain: object) -> Queries:
        """Read the output of `to_plain`; raise `DataError` if it is invalid."""
        what = "the file of queries"
        made = from_plain(plain, cls, what)
        if not made.questions:
            refuse(what, "has no queries")
        for question in made.questions:
            Query.from_plain(question.to_plain())  # for its checks
        state, V, p = made.state, len(made.questions), made.questions[0].theta.size
        duals = V if len(state.alpha) == V else len(made.weights)
        state = msgspec.structs.replace(state, alpha=state.alpha.reshape(-1, p))
        shapes = {"theta": (V, p), "alpha": (duals, p), "ridge": (p,), "give": (V,)}
        shapes |= {name: (V, p) for name in ("zeta", "best_theta") if getattr(state, name) is not None}
        check_shapes(state, shapes, what)
        edges = made.edges.reshape(-1, 2)
        if len(edges) != len(made.weights):
            refuse(what, f"has {len(edges)} edges with {len(made.weights)} weights")
        return msgspec.structs.replace(made, edges=edges, state=state)


def check_answers(queries: Queries, answers: Summaries) -> Summaries:
    """Return the answers in the order of the queries; raise `DataError` if they answer other queries."""
    if answers.gaps is None:
        raise DataError(f"these are first messages, but round {queries.round} needs the sites' answers")
    missing = [site for site in queries.sites if site not in answers]
    unasked = [site for site in answers if site not in queries.sites]
    if missing or unasked:
        words = f"the answer of site {missing[0]!r} is missing" if missing else f"site {unasked[0]!r} was not asked"
        raise DataError(f"round {queries.round}: {words}")
    for site in queries.sites:
        if not np.array_equal(answers[site].at, queries[site].theta):
            raise DataError(f"the answer of site {site!r} does not belong to the query of round {queries.round}")
    return answers.subset(queries.sites)


def make_queries(graph: Graph, number: int, theta: Array, pull: Array, state: RoundState) -> Queries:
    """Return queries about ``theta (V, p)`` with balances ``pull (V, p)``, in the units of the sites."""
    radius = _radius(theta)
    asked = tuple(Query(site, number, theta[k], pull[k], radius) for k, site in enumerate(graph.sites))
    return Queries(asked, graph.edges, graph.weights, state)


def _radius(theta: Array) -> float:
    return RADIUS_FACTOR * max(1.0, float(np.sqrt((theta**2).sum(axis=1)).max()))


# --- the fused estimator ----------------------------------------------------------------------------------------


def next_fused(
    prepared: Prepared, graph: Graph | None, options: FitOptions, say: Say, queries: Queries | None
) -> Estimate | Queries:
    """Return the estimate once its gap is certified, or the next queries.

    Each round minimises the quadratic model of the last answers. If the objective has increased, the next query is half
    way back to the best point. The certificate is unconditional if all designs have full rank; otherwise it holds for
    minimisers in the ball that the queries name.
    """
    for name, given in (
        (argument("refit"), options.refit),
        (argument("debias"), options.debias != "none"),
        (argument("fuse_intercept"), options.fuse_intercept is False),
        (argument("ridge", "cv"), options.ridge == "cv"),
    ):
        if given:
            raise ParameterError(f"{name} needs the rows of the {prepared.loss.name} loss: leave it out")
    if queries is None:
        used, selection, notes = used_graph(prepared, graph, options, say)
        problem, reasons = well_posed_problem(prepared, used, options)
        note_light_ridge(notes, reasons)
        problem, choice = at_chosen_level(problem, options, say)
        start, accuracy = prepared.summaries.sums.at, MODEL_SHARE * options.tol
        kept: dict[str, Any] = {"selection": selection, "notes": tuple(notes.items()), "choice": choice}
        if np.array_equal(start, problem.fused.inside(start)):
            kept |= {"best_theta": start, "best_value": problem.fused.value(start)}
        return _queries(prepared, problem, _minimised(problem, options, accuracy, say), 2, accuracy, **kept)
    state, choice, used = queries.state, queries.state.choice, queries.graph
    how = {**extras(prepared.columns, used, options, choice), "ridge": state.ridge}
    before = problem = Problem(prepared.summaries, used, prepared.loss, options.penalty, state.lam, **how)
    by_fold = bool(prepared.summaries.sums.count[:, :-1].any())
    if queries.round <= LAST_CHOICE and options.lam == "cv" and by_fold:
        problem, choice = at_chosen_level(before, options, say)
    value = problem.fused.value(state.theta)
    gap, best = np.inf, (state.best_theta, state.best_value)
    levels = [(one or {}).get("sparsity") for one in (choice, state.choice)]
    if problem.lam == before.lam and levels[0] == levels[1]:
        gap = certified_gap(problem, state, value)
        say(f"round {queries.round} of messages: relative gap {gap:.1e}")
        if gap <= options.tol:
            fused = FusedFit(options.penalty, problem.lam, gap, queries.round, selection=state.selection)
            history = None if choice is None else {"choice": choice}
            return Estimate(state.theta, used, fused=fused, notes=dict(state.notes), history=history)
    else:  # a value at another level is that of another objective
        best = (None, np.inf)
    accuracy = state.accuracy
    if best[0] is not None and value > best[1] + ROUNDING * abs(best[1]):
        say("the objective rose: going back half way")
        point = (0.5 * (best[0] + state.theta), state.alpha, state.zeta)
    else:
        if gap > 0.5 * state.gap:
            accuracy = max(FURTHER * accuracy, FINEST)
        point, best = _minimised(problem, options, accuracy, say), (state.theta, value)
    kept = {"best_theta": best[0], "best_value": best[1], "gap": gap}
    kept |= {"selection": state.selection, "notes": state.notes, "choice": choice}
    return _queries(prepared, problem, point, queries.round + 1, accuracy, **kept)


_Point = tuple[Array, Array, Array | None]  # parameters, edge duals, sparsity duals, in the solver's units


def _minimised(problem: Problem, options: FitOptions, accuracy: float, say: Say) -> _Point:
    say(f"solving at lam = {problem.lam:.4g}")
    # the true objective is certified separately
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        solution = solve(problem, accuracy, max_iter=options.max_iter)
    theta, alpha, zeta = solution.theta, solution.alpha, None
    if problem.fused.box is not None:
        # what the edge duals leave to balance; without a ball, the second part keeps k |theta| - zeta theta small
        rest = problem.terms.gradients(theta) + problem.fused.balance(alpha)
        steep = np.einsum("vpp->vp", problem.terms.hessians(theta)) if problem.radius is None else 0.0
        zeta = problem.fused.site_duals(theta, steep * theta - rest)
    return _within_reach(problem, theta), alpha, zeta


def _within_reach(problem: Problem, theta: Array) -> Array:
    """Return the minimiser of the model, or a point on the way to it if the step is too long."""
    data = problem.federation
    assert not data.has_rows
    rowwise = data.loss.rowwise
    if rowwise is not None and np.isfinite(rowwise.curvature_bound):
        return theta
    step = theta - data.sums.at
    scale = np.tile(data.column_scale, data.n_params // data.n_features)
    longest = float((np.abs(step) @ np.sqrt(scale)).max())
    if longest <= LONGEST_STEP:
        return theta
    return problem.fused.inside(data.sums.at + LONGEST_STEP / longest * step)


def certified_gap(problem: Problem, state: RoundState, value: float) -> float:
    """Return the relative duality gap of the queried point, from the answers.

    ``value`` is |V| times the objective at that point. An edge contributes ``r phi(d) - <alpha, d>``. A site
    contributes the smaller of two bounds: its Young gap plus its ridge term, or the ridge term alone if it absorbs the
    whole imbalance and the loss is in balance.
    """
    data, fused, theta = problem.federation, problem.fused, state.theta
    assert not data.has_rows and data.gaps is not None
    total, balance = fused.edge_gap(theta, state.alpha), fused.balance(state.alpha)
    if state.zeta is not None:
        balance = balance + state.zeta
        total += fused.site_slack(theta, state.zeta)
    # the model's gradient at its own point is the true one
    residual = problem.terms.gradients(theta) + balance
    held, ridge = state.ridge > 0, state.ridge
    resting = 0.5 * (residual[:, held] ** 2) @ (1.0 / ridge[held])
    resting = resting + ball_gap(np.where(held, 0.0, residual), theta, problem.radius or _radius(theta))
    total += float(np.minimum(data.gaps + state.give, resting).sum())
    return max(total, 0.0) / max(abs(value), TINY)


def _queries(prepared: Prepared, problem: Problem, point: _Point, number: int, accuracy: float, **kept: Any) -> Queries:
    """Return the queries about a point, in the units of the sites."""
    theta, alpha, zeta = point
    ridge = np.broadcast_to(np.asarray(problem.ridge, dtype=np.float64), (problem.n_params,)).copy()
    balance = problem.fused.balance(alpha) + (0.0 if zeta is None else zeta)
    # what the model leaves out of balance is shared between loss and ridge as their curvatures are, so that a loss
    # with fewer rows than parameters gets nothing that its rows cannot balance
    left = problem.terms.gradients(theta) + balance
    u, _ = solve_and_rest(problem.terms.hessians(theta), left)
    balance = balance + ridge * (theta - u)
    state = RoundState(theta, problem.lam, alpha, ridge, 0.5 * u**2 @ ridge, accuracy, zeta, **kept)
    # to the parameters of the columns that sites summed up
    T = np.eye(problem.n_params) if prepared.data is prepared.original else prepared.columns.A
    return make_queries(problem.graph, number, theta @ T.T, balance @ np.linalg.inv(T), state)
