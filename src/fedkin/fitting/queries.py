"""The fit from summaries: at once for quadratic losses, else in rounds of queries and answers.

Kin asks once more, about its estimates from the first messages: two rounds in all, or as many as it is told.

For the fused estimator, proximal Newton between organiser and sites: the organiser minimises the fused objective in
which every site's loss is its quadratic expansion at the last point, and asks each site about the minimiser: its loss
and derivatives there, and its Young gap. Their sum with the edges' parts is the duality gap of the true objective: a
certificate from answers alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec.structs
import numpy as np

from fedkin._base import Array, Index, Say
from fedkin.core import (
    Message,
    Problem,
    Query,
    Summaries,
    ball_gap,
    check_shapes,
    decode,
    encode,
    refuse,
    solve_and_rest,
)
from fedkin.errors import ConvergenceWarning, DataError, ParameterError, UnknownSiteError, argument
from fedkin.fitting.fused import chosen_lam, note_light_ridge, used_graph, well_posed_problem
from fedkin.fitting.model import FusedFit
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import Estimate, Prepared
from fedkin.graph import Graph
from fedkin.solvers import solve

#: ``lam`` is chosen anew from the answers of rounds up to this one, if it is chosen at all.
LAST_CHOICE = 2
#: Models are minimised to this share of the gap that is wanted in the end, and further where that does not do.
MODEL_SHARE, FURTHER, FINEST = 1e-3, 1e-3, 1e-15
#: Where curvature has no bound (counts), no predictor moves by more than about this in a round: exp(10) is 22,026.
LONGEST_STEP = 10.0
#: Relative rises of the objective below this may be rounding.
ROUNDING = 1e-12
#: Sites are told that no minimiser is longer than this many times the longest of the parameters found.
RADIUS_FACTOR = 10.0


@dataclass(frozen=True, eq=False)
class Queries:
    """A query to each site, and the state of the fit behind them.

    ``queries[site]`` is what the site gets; the rest stays with the organiser.

    Attributes
    ----------
    round : int
        Round of messages that the answers will make, from 2 on.
    questions : tuple of V Query
        In the units of the sites' columns; the rest is in the solver's.
    graph : Graph
        The edges that are used.
    theta, zeta : array (V, p)
        The point that is asked about, and sparsity duals, if there are any.
    alpha : array (E, p) or (V, p)
        Edge duals; of large cliques, their sums at each site.
    lam, ridge : float, array (p,)
    give : array (V,)
        What it costs each site's ridge to be out of balance, so that its loss need not be.
    accuracy, gap : float
        Relative gap to which the models are minimised, and that of the point before, infinite where it is not known.
    best_theta, best_value : array (V, p), float
        The best point so far and the objective there, infinite where there is none yet.
    selection, notes : mapping
        Summary of the edge selection, and notes on sites.
    """

    round: int
    questions: tuple[Query, ...]
    graph: Graph
    theta: Array = field(repr=False)
    lam: float
    alpha: Array = field(repr=False)
    ridge: Array = field(repr=False)
    give: Array = field(repr=False)
    accuracy: float
    zeta: Array | None = field(default=None, repr=False)
    best_theta: Array | None = field(default=None, repr=False)
    best_value: float = np.inf
    gap: float = np.inf
    selection: Mapping[str, Any] | None = None
    notes: Mapping[Hashable, tuple[str, ...]] = field(default_factory=dict)

    @property
    def sites(self) -> tuple[Hashable, ...]:
        return tuple(question.site for question in self.questions)

    def __getitem__(self, site: Hashable) -> Query:
        for question in self.questions:
            if question.site == site:
                return question
        raise UnknownSiteError(f"site {site!r} is not asked anything")

    def to_plain(self) -> dict[str, Any]:
        """Return plain numbers and names, as a file holds them between two rounds; exact."""
        others = {name: getattr(self, name) for name in _KEPT}
        questions = [question.to_plain() for question in self.questions]
        notes = [(str(site), tuple(lines)) for site, lines in self.notes.items()]
        edges, weights = self.graph.edges, self.graph.weights
        return encode(_State(questions=questions, edges=edges, weights=weights, notes=notes, **others))

    @classmethod
    def from_plain(cls, plain: object) -> Queries:
        """Return what `to_plain` wrote; raise `DataError` with what is wrong."""
        what = "the file of questions"
        state = decode(plain, _State, what)
        if not state.questions or state.round < 2:
            refuse(what, "has no questions of a second round")
        asked = tuple(Query.from_plain(question) for question in state.questions)
        sites, p, edges = tuple(question.site for question in asked), asked[0].theta.size, len(state.weights)
        duals = len(asked) if len(state.alpha) == len(asked) else edges
        shapes = {"edges": (edges, 2), "theta": (len(asked), p), "alpha": (duals, p), "ridge": (p,)}
        shapes |= {name: (len(asked), p) for name in ("zeta", "best_theta") if getattr(state, name) is not None}
        alpha, links = state.alpha.reshape(-1, p), state.edges.reshape(-1, 2)
        check_shapes(msgspec.structs.replace(state, alpha=alpha, edges=links), shapes | {"give": (len(asked),)}, what)
        return cls(
            questions=asked,
            graph=Graph.from_indices(sites, links, state.weights),
            notes=dict(state.notes),
            **{name: getattr(state, name) for name in _KEPT} | {"alpha": alpha},
        )


class _State(Message, frozen=True):
    """`Queries` as a file holds them."""

    round: int
    questions: list[dict[str, Any]]
    lam: float
    edges: Index
    weights: Array
    theta: Array
    alpha: Array
    ridge: Array
    give: Array
    accuracy: float
    notes: list[tuple[str, tuple[str, ...]]]
    best_value: float = np.inf
    gap: float = np.inf
    zeta: Array | None = None
    best_theta: Array | None = None
    selection: dict[str, Any] | None = None


#: What is in a file as it is in `Queries`.
_KEPT = tuple(set(_State.__struct_fields__) - {"questions", "edges", "weights", "notes"})


def check_answers(queries: Queries, answers: Summaries) -> Summaries:
    """Return the answers in the order of the queries; raise `DataError` when they are to others."""
    if answers.gaps is None:
        raise DataError(f"these are first messages, but round {queries.round} needs the sites' answers")
    missing = [site for site in queries.sites if site not in answers]
    unasked = [site for site in answers if site not in queries.sites]
    if missing or unasked:
        words = f"the answer of site {missing[0]!r} is missing" if missing else f"site {unasked[0]!r} was not asked"
        raise DataError(f"round {queries.round}: {words}")
    for site in queries.sites:
        if not np.array_equal(answers[site].at, queries[site].theta):
            raise DataError(f"site {site!r} has answered another question than that of round {queries.round}")
    return answers.subset(queries.sites)


def make_queries(graph: Graph, number: int, theta: Array, pull: Array, point: Array, **state: Any) -> Queries:
    """Return queries about ``theta`` with balances ``pull``, in the units of the sites; ``point`` in the solver's."""
    radius = _radius(theta)
    asked = tuple(Query(site, number, theta[k], pull[k], radius) for k, site in enumerate(graph.sites))
    return Queries(number, asked, graph, point, **state)


def _radius(theta: Array) -> float:
    return RADIUS_FACTOR * max(1.0, float(np.sqrt((theta**2).sum(axis=1)).max()))


# --- the fused estimator ----------------------------------------------------------------------------------------


def next_fused(
    prepared: Prepared, graph: Graph | None, options: FitOptions, say: Say, queries: Queries | None
) -> Estimate | Queries:
    """Return the estimate once its gap is certified, or the next queries.

    Each round minimises the model of the last answers. A point at which the objective has risen is not taken: the next
    query is half way back to the best one. The certificate is unconditional where all designs have full rank; otherwise
    it holds for minimisers in the ball that the queries name.
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
        problem = problem.with_lam(chosen_lam(problem, options, say))
        start = prepared.summaries.sums.at
        point = _minimised(problem, options, MODEL_SHARE * options.tol, say)
        made = _queries(prepared, problem, point, 2, MODEL_SHARE * options.tol)
        value = problem.fused.value(start)
        return replace(made, best_theta=start, best_value=value, selection=selection, notes=notes)
    sparsity, lam = np.broadcast_to(prepared.columns.per_parameter(options.sparsity), queries.theta.shape), queries.lam
    how: dict[str, Any] = {"sparsity": sparsity, "ridge": queries.ridge}
    problem = Problem(prepared.summaries, queries.graph, prepared.loss, options.penalty, lam, **how)
    if queries.round <= LAST_CHOICE and options.lam == "cv":
        lam = chosen_lam(problem, options, say)
        problem = problem.with_lam(lam)
    value = problem.fused.value(queries.theta)
    gap, best = np.inf, (queries.best_theta, queries.best_value)
    if lam == queries.lam:
        gap = certified_gap(problem, queries, value)
        say(f"round {queries.round} of messages: relative gap {gap:.1e}")
        if gap <= options.tol:
            fused = FusedFit(options.penalty, lam, gap, queries.round, selection=queries.selection)
            groups = None if options.select is None else queries.graph.components()
            return Estimate(queries.theta, queries.graph, groups, None, fused, queries.notes)
    else:  # a value at another lam is that of another objective
        best = (None, np.inf)
    accuracy = queries.accuracy
    if best[0] is not None and value > best[1] + ROUNDING * abs(best[1]):
        say("the objective rose: going back half way")
        point = (0.5 * (best[0] + queries.theta), queries.alpha, queries.zeta)
    else:
        if gap > 0.5 * queries.gap:
            accuracy = max(FURTHER * accuracy, FINEST)
        point, best = _minimised(problem, options, accuracy, say), (queries.theta, value)
    made = _queries(prepared, problem, point, queries.round + 1, accuracy)
    kept: dict[str, Any] = {"selection": queries.selection, "notes": queries.notes}
    return replace(made, best_theta=best[0], best_value=best[1], gap=gap, **kept)


_Point = tuple[Array, Array, Array | None]  # parameters, edge duals, sparsity duals, in the solver's units


def _minimised(problem: Problem, options: FitOptions, accuracy: float, say: Say) -> _Point:
    say(f"solving at lam = {problem.lam:.4g}")
    # the true objective has a certificate of its own
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        solution = solve(problem, accuracy, max_iter=options.max_iter)
    theta, alpha, zeta = solution.theta, solution.alpha, None
    box = problem.fused.sparsity
    if box is not None:
        # what the edge duals leave to balance; the second part keeps k |theta| - zeta theta small
        rest = problem.terms.gradients(theta) + problem.fused.balance(alpha)
        steep = np.einsum("vpp->vp", problem.terms.hessians(theta))
        zeta = np.clip(steep * theta - rest, -box, box)
    return _within_reach(problem, theta), alpha, zeta


def _within_reach(problem: Problem, theta: Array) -> Array:
    """Return the minimiser of the model, or a point on the way there where that is too far to trust."""
    data = problem.federation
    assert isinstance(data, Summaries)
    rowwise = data.loss.rowwise
    if rowwise is not None and np.isfinite(rowwise.curvature_bound):
        return theta
    step = theta - data.sums.at
    scale = np.tile(data.column_scale, data.n_params // data.n_features)
    longest = float((np.abs(step) @ np.sqrt(scale)).max())
    return theta if longest <= LONGEST_STEP else data.sums.at + LONGEST_STEP / longest * step


def certified_gap(problem: Problem, queries: Queries, value: float) -> float:
    """Return the relative duality gap of the point that was asked about, from the answers.

    ``value`` is |V| times the objective there. An edge's part is ``r phi(d) - <alpha, d>``. A site's part is the
    smaller one of two bounds: its own Young gap, and what its ridge gives; or the ridge out of balance by all that is
    left, with the loss in perfect balance.
    """
    data, fused, theta = problem.federation, problem.fused, queries.theta
    assert isinstance(data, Summaries)
    assert data.gaps is not None
    total, balance = fused.edge_gap(theta, queries.alpha), fused.balance(queries.alpha)
    if fused.sparsity is not None and queries.zeta is not None:
        balance = balance + queries.zeta
        total += float((fused.sparsity * np.abs(theta) - queries.zeta * theta).sum())
    # the model's gradient at its own point is the true one
    residual = problem.terms.gradients(theta) + balance
    held, ridge = queries.ridge > 0, queries.ridge
    resting = 0.5 * (residual[:, held] ** 2) @ (1.0 / ridge[held])
    resting = resting + ball_gap(np.where(held, 0.0, residual), theta, _radius(theta))
    total += float(np.minimum(data.gaps + queries.give, resting).sum())
    return max(total, 0.0) / max(abs(value), np.finfo(float).tiny)


def _queries(prepared: Prepared, problem: Problem, point: _Point, number: int, accuracy: float) -> Queries:
    """Return the queries about a point, in the units of the sites."""
    theta, alpha, zeta = point
    ridge = np.broadcast_to(np.asarray(problem.ridge, dtype=np.float64), (problem.n_params,)).copy()
    balance = problem.fused.balance(alpha) + (0.0 if zeta is None else zeta)
    # what the model leaves out of balance is shared between loss and ridge as their curvatures are, so that a loss
    # with fewer rows than parameters gets nothing that its rows cannot balance
    left = problem.terms.gradients(theta) + balance
    u, _ = solve_and_rest(problem.terms.hessians(theta), left)
    balance = balance + ridge * (theta - u)
    T = prepared.site_map
    state = {"lam": problem.lam, "alpha": alpha, "ridge": ridge, "give": 0.5 * u**2 @ ridge, "accuracy": accuracy}
    pull = balance @ np.linalg.inv(T)
    return make_queries(problem.graph, number, theta @ T.T, pull, theta, **state, zeta=zeta)
