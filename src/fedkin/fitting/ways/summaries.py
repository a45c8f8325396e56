"""The fit from summaries: at once for quadratic losses, else in rounds of questions and answers.

Kin asks once more, about its estimates from the first messages: two rounds in all, or as many as it is told.

For the fused estimator, proximal Newton between organiser and sites: the organiser minimises the fused objective in
which every site's loss is its quadratic expansion at the last point, and asks each site about the minimiser: its loss
and derivatives there, and its Young gap. Their sum with the edges' parts is the duality gap of the true objective: a
certificate from answers alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedkin._base import Array, Say
from fedkin.core import Problem, Query, Summaries, ball_gap, solve_and_rest
from fedkin.data import Schema
from fedkin.errors import ConvergenceWarning, DataError, ParameterError, SolverError
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import FitOptions
from fedkin.fitting.preparation import Prepared, note_light_ridge, prepare_fit, well_posed_problem
from fedkin.fitting.ways.asks import Asks
from fedkin.fitting.ways.federation import fused_model, silent, used_graph
from fedkin.fitting.ways.kin import kin_asks, model_of_kin, with_covariates
from fedkin.fitting.ways.levels import chosen_lam
from fedkin.graph import Graph
from fedkin.kin import Covariates, find_kin, hint_of
from fedkin.solvers import solve

#: Answers to the questions of a round, from all sites.
Answer = Callable[[Asks], Summaries]

#: ``lam`` is chosen anew from the answers of rounds up to this one, if it is chosen at all.
LAST_CHOICE = 2
#: Models are minimised to this share of the gap that is wanted in the end, and further where that does not do.
MODEL_SHARE, FURTHER, FINEST = 1e-3, 1e-3, 1e-15
#: Where curvature has no bound (counts), no predictor moves by more than about this in a round: exp(10) is 22,026.
LONGEST_STEP = 10.0
#: Relative rises of the objective below this may be rounding.
ROUNDING = 1e-12
#: A minimiser is assumed to be at most this many times as long as the parameters found (singular designs only).
RADIUS_FACTOR = 10.0


def fit_summaries(
    summaries: Summaries,
    graph: Graph | None = None,
    options: FitOptions | None = None,
    progress: Say | None = None,
    schema: Schema | None = None,
    *,
    covariates: Covariates | None = None,
    answer: Answer | None = None,
    max_rounds: int = 30,
) -> FittedModel:
    """Fit a model for every site from what the sites said about their rows, as `fit_federation` would from the rows.

    Parameters
    ----------
    summaries : Summaries
        The first message of every site.
    graph, options, progress
        As in `fit_federation`. Whether there is an intercept, how classes are numbered and how rows are cut into folds
        is what the sites agreed on before they summed up; ``options.cv_folds`` and ``options.seed`` are theirs.
    schema : Schema, optional
        By which the sites prepared their rows. Then nothing is standardised once more, and the model keeps it.
    covariates : mapping, array or pandas table, optional
        As in `fit_federation`.
    answer : callable, optional
        Gives the sites' answers to `Asks`. Quadratic losses (linear, mean) need none.
    max_rounds : int
        Most rounds of messages, the first among them.

    Returns
    -------
    FittedModel
        In the units of the schema's columns, or of those that the sites summed up.

    Notes
    -----
    *Quadratic losses.* The result is that of the rows up to rounding: coefficients agree to 1e-10 on ordinary designs.
    A Gram matrix squares the condition number of the features, so of nearly collinear ones fewer digits agree (about
    16 minus twice the digits of the condition number). Sites with fewer rows than parameters are treated alike in both.

    *Other losses.* Kin expands them at the sites' own estimates, then at its own, ``options.messages`` times in all.

    *Other losses, fused.* Edges are tested with the sites' own estimates, ``lam`` is cross-validated on quadratic
    expansions in the first two rounds and then stays. `SummaryFit` says how the rounds go on.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_sites=20, n_samples=60, n_features=10, n_clusters=2, seed=0)
    >>> summaries = fedkin.summarise(design.federation.with_intercept())
    >>> fit_summaries(summaries, design.graph).n_clusters
    2
    """
    hint = hint_of(graph, covariates, summaries.sites)
    fit, said = SummaryFit(hint, options, schema, progress=progress), summaries
    for _ in range(max_rounds):
        found = fit.step(said)
        if isinstance(found, FittedModel):
            return with_covariates(found, covariates)
        if answer is None:
            raise ParameterError(
                f"the {summaries.loss.name} loss needs more than one message per site: give answer=, which asks the "
                "sites again, or use SummaryFit"
            )
        said = answer(found)
    raise SolverError(
        f"the gap is {fit.gap:.1e} after {max_rounds} rounds of messages, not {fit.options.tol:.1e}: add ridge=0.001"
    )


class SummaryFit:
    """A fit from summaries, one round of messages after the other.

    Parameters
    ----------
    graph : Graph, optional
        Candidate edges; all pairs of sites without it.
    options : FitOptions, optional
        How to fit; the same in all rounds.
    schema : Schema, optional
        By which the sites prepared their rows.
    asks : Asks, optional
        The last questions, to go on where another process ended.
    progress : callable, optional
        Called with a line of text before each step.

    Notes
    -----
    With kin, ``options.messages`` rounds are taken, or one for quadratic losses. What follows is about the fused
    estimator. Each round minimises the model of the last answers. A point at which the objective has risen is not
    taken: the next question is half way back to the best one. The fit ends when the certified relative gap is at most
    ``options.tol``. The certificate is unconditional where all designs have full rank; otherwise it holds for
    minimisers in the ball that the questions name.

    Examples
    --------
    >>> import numpy as np, fedkin
    >>> from fedkin.core import site_answer
    >>> rng = np.random.default_rng(0)
    >>> rows = {u: (rng.normal(size=(50, 2)), rng.integers(0, 2, 50)) for u in "abc"}
    >>> fed = fedkin.Federation(rows)
    >>> fit, said = SummaryFit(options=FitOptions(method="fused", standardize=False)), fedkin.summarise(fed, "logistic")
    >>> while isinstance(found := fit.step(said), Asks):
    ...     parts = [site_answer(found[u], fed[u], said.loss, feature_names=fed.feature_names) for u in fed]
    ...     said = fedkin.Summaries.stack(parts)
    >>> found.gap <= 1e-6
    True
    """

    def __init__(
        self,
        graph: Graph | None = None,
        options: FitOptions | None = None,
        schema: Schema | None = None,
        asks: Asks | None = None,
        progress: Say | None = None,
    ) -> None:
        self.graph, self.options, self.asks = graph, FitOptions() if options is None else options, asks
        self.schema = schema
        self.say = progress or silent

    @property
    def round(self) -> int:
        """Rounds of messages so far, the one that is asked for included."""
        return 1 if self.asks is None else self.asks.round

    @property
    def gap(self) -> float:
        """Relative duality gap of the last point that was certified; infinite before."""
        return np.inf if self.asks is None else self.asks.gap

    def step(self, summaries: Summaries) -> Asks | FittedModel:
        """What follows from the messages of one round: the next questions, or the model."""
        if self.options.solver != "exact":
            raise ParameterError(
                f"solver={self.options.solver!r} needs rows; summaries are solved directly: leave it out"
            )
        if self.asks is not None:
            summaries = _answers_to(self.asks, summaries)
        if self.options.chosen == "kin":
            return self._kin_step(summaries)
        options = replace(self.options, cv_folds=summaries.folds, seed=summaries.seed)
        prepared = prepare_fit(summaries, options, self.schema)
        if summaries.loss.quadratic:
            return _from_messages(fused_model(prepared, self.graph, options, self.say), summaries, 1)
        for name, given in (
            ("refit=", options.refit),
            ("debias=", options.debias != "none"),
            ("fuse_intercept=", options.fuse_intercept is False),
            ('ridge="cv"', options.ridge == "cv"),
        ):
            if given:
                raise ParameterError(f"{name} needs the rows of the {summaries.loss.name} loss: leave it out")
        if self.asks is None:
            found: Asks | FittedModel = self._first(prepared, options)
        else:
            found = self._next(prepared, options, self.asks)
        if isinstance(found, Asks):
            self.asks = found
        return found

    def _kin_step(self, summaries: Summaries) -> Asks | FittedModel:
        """Kin from these messages; unless they say everything, questions about its estimates for the next round."""
        prepared = prepare_fit(summaries, self.options, self.schema)
        data = prepared.federation
        assert isinstance(data, Summaries)
        self.say(f"finding kin from message {self.round} of every site")
        found = find_kin(data, self.graph, seed=self.options.seed)
        if summaries.loss.quadratic or self.round >= self.options.messages:
            model = model_of_kin(found, prepared, self.graph, self.options)
            return _from_messages(model, summaries, 1 if summaries.loss.quadratic else self.round)
        self.asks = kin_asks(data, found.theta, self.round + 1)
        return self.asks

    def _first(self, prepared: Prepared, options: FitOptions) -> Asks:
        used, selection, notes = used_graph(prepared, self.graph, options, self.say)
        problem, reasons = well_posed_problem(prepared, used, options)
        note_light_ridge(notes, reasons, stacklevel=4)
        problem = problem.with_lam(chosen_lam(problem, options, self.say))
        accuracy = MODEL_SHARE * options.tol
        point = self._minimised(problem, options, accuracy)
        assert isinstance(prepared.federation, Summaries)
        start = prepared.federation.sums.at
        return replace(
            _asks(prepared, problem, point, 2, accuracy),
            best_theta=start,
            best_value=problem.fused.value(start),
            selection=selection,
            notes=notes,
        )

    def _next(self, prepared: Prepared, options: FitOptions, asks: Asks) -> Asks | FittedModel:
        data = prepared.federation
        assert isinstance(data, Summaries)
        shape = asks.theta.shape
        problem = Problem(
            data,
            asks.graph,
            prepared.loss,
            options.penalty,
            asks.lam,
            sparsity=np.broadcast_to(prepared.units.per_feature(options.sparsity), shape),
            ridge=asks.ridge,
        )
        lam = asks.lam
        if asks.round <= LAST_CHOICE and options.lam == "cv":
            lam = chosen_lam(problem, options, self.say)
        problem = problem.with_lam(lam)
        value = problem.fused.value(asks.theta)
        gap = np.inf
        if lam == asks.lam:
            gap = certified_gap(problem, asks, value)
            self.say(f"round {asks.round} of messages: relative gap {gap:.1e}")
            if gap <= options.tol:
                return self._model(prepared, options, asks, gap)
        # a value at another lam is that of another objective
        best = (asks.best_theta, asks.best_value) if lam == asks.lam else (None, np.inf)
        accuracy = asks.accuracy
        if best[0] is not None and value > best[1] + ROUNDING * abs(best[1]):
            self.say("the objective rose: going back half way")
            point = _Point(0.5 * (best[0] + asks.theta), asks.alpha, asks.zeta)
        else:
            if gap > 0.5 * asks.gap:
                accuracy = max(FURTHER * accuracy, FINEST)
            point, best = self._minimised(problem, options, accuracy), (asks.theta, value)
        return replace(
            _asks(prepared, problem, point, asks.round + 1, accuracy),
            best_theta=best[0],
            best_value=best[1],
            gap=gap,
            selection=asks.selection,
            notes=asks.notes,
        )

    def _minimised(self, problem: Problem, options: FitOptions, accuracy: float) -> _Point:
        self.say(f"solving at lam = {problem.lam:.4g}")
        with warnings.catch_warnings():
            # the true objective has a certificate of its own
            warnings.simplefilter("ignore", ConvergenceWarning)
            solution = solve(problem, accuracy, max_iter=options.max_iter)
        theta, alpha, zeta = solution.theta, solution.alpha, None
        box = problem.fused.sparsity
        if box is not None:
            # what the edge duals leave to balance; the second part keeps k |theta| - zeta theta small
            rest = problem.terms.gradients(theta) + problem.fused.balance(alpha)
            steep = np.einsum("vpp->vp", problem.terms.hessians(theta))
            zeta = np.clip(steep * theta - rest, -box, box)
        return _Point(_within_reach(problem, theta), alpha, zeta)

    def _model(self, prepared: Prepared, options: FitOptions, asks: Asks, gap: float) -> FittedModel:
        found = {"clusters": asks.graph.components()} if options.select is not None else {}
        model = prepared.model(
            asks.theta,
            asks.graph,
            options,
            lam=asks.lam,
            gap=gap,
            n_iter=asks.round,
            selection=asks.selection,
            notes=asks.notes,
            **found,
        )
        assert isinstance(prepared.original, Summaries)
        return _from_messages(model, prepared.original, asks.round)


@dataclass(frozen=True, eq=False)
class _Point:
    """Parameters and duals, in the solver's units."""

    theta: Array
    alpha: Array
    zeta: Array | None


def _within_reach(problem: Problem, theta: Array) -> Array:
    """The minimiser of the model, or a point on the way there where that is too far to trust."""
    data = problem.federation
    assert isinstance(data, Summaries)
    rowwise = data.loss.rowwise
    if rowwise is not None and np.isfinite(rowwise.curvature_bound):
        return theta
    step = theta - data.sums.at
    scale = np.tile(data.column_scale, data.n_params // data.n_features)
    longest = float((np.abs(step) @ np.sqrt(scale)).max())
    return theta if longest <= LONGEST_STEP else data.sums.at + LONGEST_STEP / longest * step


def _answers_to(asks: Asks, answers: Summaries) -> Summaries:
    """The answers in the order of the questions; raises `DataError` when they are to others."""
    if answers.gaps is None:
        raise DataError(f"these are first messages, but round {asks.round} needs the sites' answers")
    missing = [site for site in asks.sites if site not in answers]
    unasked = [site for site in answers if site not in asks.sites]
    if missing or unasked:
        words = f"the answer of site {missing[0]!r} is missing" if missing else f"site {unasked[0]!r} was not asked"
        raise DataError(f"round {asks.round}: {words}")
    for site in asks.sites:
        if not np.array_equal(answers[site].at, asks[site].theta):
            raise DataError(f"site {site!r} has answered another question than that of round {asks.round}")
    return answers.subset(asks.sites)


def certified_gap(problem: Problem, asks: Asks, value: float) -> float:
    """Relative duality gap of the point that was asked about, from the answers: the problem is made of them.

    ``value`` is |V| times the objective there. An edge's part is ``r phi(d) - <alpha, d>``. A site's part is the
    smaller one of two bounds: its own Young gap, and what its ridge gives; or the ridge out of balance by all that is
    left, with the loss in perfect balance.
    """
    data, fused, theta = problem.federation, problem.fused, asks.theta
    assert isinstance(data, Summaries)
    assert data.gaps is not None
    total, balance = fused.edge_gap(theta, asks.alpha), fused.balance(asks.alpha)
    if fused.sparsity is not None and asks.zeta is not None:
        balance = balance + asks.zeta
        total += float((fused.sparsity * np.abs(theta) - asks.zeta * theta).sum())
    # the model's gradient at its own point is the true one
    residual = problem.terms.gradients(theta) + balance
    held, ridge = asks.ridge > 0, asks.ridge
    resting = 0.5 * (residual[:, held] ** 2) @ (1.0 / ridge[held])
    radius = RADIUS_FACTOR * max(1.0, float(np.sqrt((theta**2).sum(axis=1)).max()))
    resting = resting + ball_gap(np.where(held, 0.0, residual), theta, radius)
    total += float(np.minimum(data.gaps + asks.give, resting).sum())
    return max(total, 0.0) / max(abs(value), np.finfo(float).tiny)


def _asks(prepared: Prepared, problem: Problem, point: _Point, number: int, accuracy: float) -> Asks:
    """The questions about a point, in the units of the sites."""
    ridge = np.broadcast_to(np.asarray(problem.ridge, dtype=np.float64), (problem.n_params,)).copy()
    balance = problem.fused.balance(point.alpha)
    if point.zeta is not None:
        balance = balance + point.zeta
    # what the model leaves out of balance is shared between loss and ridge as their curvatures are, so that a loss
    # with fewer rows than parameters gets nothing that its rows cannot balance
    left = problem.terms.gradients(point.theta) + balance
    u, _ = solve_and_rest(problem.terms.hessians(point.theta), left)
    balance = balance + ridge * (point.theta - u)
    T = prepared.site_parameters()
    theta, pull = point.theta @ T.T, balance @ np.linalg.inv(T)
    radius = RADIUS_FACTOR * max(1.0, float(np.sqrt((theta**2).sum(axis=1)).max()))
    sites = prepared.federation.sites
    return Asks(
        number,
        tuple(Query(site, number, theta[k], pull[k], radius) for k, site in enumerate(sites)),
        problem.lam,
        problem.graph,
        point.theta,
        point.alpha,
        ridge,
        give=0.5 * u**2 @ ridge,
        accuracy=accuracy,
        zeta=point.zeta,
    )


def _from_messages(model: FittedModel, summaries: Summaries, rounds: int) -> FittedModel:
    origin: dict[str, Any] = {"from": "summaries", "rounds": rounds}
    promised = [one for one in summaries.privacy or () if one is not None]
    if promised:
        worst = {name: max(getattr(one, name) for one in promised) for name in ("epsilon", "delta")}
        origin["privacy"] = {**worst, "sites": len(promised)}
    return replace(model, origin=origin)
