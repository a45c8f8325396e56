"""Minimise the fused objective exactly, with a duality gap as the certificate.

Quadratic losses use an `Iteration` directly. Other losses use proximal Newton: each quadratic model is minimised by
such iterations, warm-started from the last one, with a line search on the true objective.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import numpy as np

from fedkin._base import Array, check_positive, check_whole
from fedkin.cluster import On, engine_of
from fedkin.core import FusedObjective, Problem, QuadraticTerms, SiteTerms, Solution, Status, gap_scale
from fedkin.errors import ConvergenceWarning, ParameterError, argument
from fedkin.solvers.cliques import CliqueIteration
from fedkin.solvers.compiled import Backend, CompiledIteration, uses_kernels
from fedkin.solvers.newton import (
    HOPELESS,
    POOR,
    Expansion,
    lowered,
    raise_if_no_descent,
    raise_if_not_finite,
    raise_if_unbounded,
    raised,
)
from fedkin.solvers.pdhg import (
    Iteration,
    MinimizerBall,
    NumpyIteration,
    PrimalDual,
    check_after,
    far_from_fused,
    fused_components,
    fused_parameters,
    initial_rho,
)
from fedkin.solvers.shards import Sharding

#: A loss below this share of its value at theta = 0 may be unbounded below.
VANISHED = 1e-10
#: Share of the decrease promised by the quadratic models that a step must keep.
SUFFICIENT = 0.1
#: A step that lowers the objective by more than this share, or by a hundred times the tolerance, is not the last one.
EARLY = 0.03
#: Relative changes of the objective below this may be rounding.
ROUNDING = 1e-13
#: With more edge duals than this, fusing whole components would need too much memory for what it is worth.
LARGE = 10_000_000
#: Fusing sites exactly shrinks a gap by up to this factor; before that, trying it is a waste of time.
FUSING_HELPS = 3000.0
#: Components are not fused where that would cost more than this share of the objective.
NEARLY = 1e-2


def solve(
    problem: Problem,
    tol: float = 1e-6,
    *,
    max_iter: int = 20_000,
    warm_start: Solution | None = None,
    backend: Backend = "auto",
    on: On = "local",
) -> Solution:
    """Minimise the objective of ``problem`` and certify the result.

    Parameters
    ----------
    problem : Problem
        What to minimise.
    tol : float
        Relative duality gap to reach.
    max_iter : int
        Limit on the total number of primal-dual iterations over all Newton steps.
    warm_start : Solution, optional
        Solution of a similar problem (another ``lam``, other rows) on the same graph.
    backend : "auto", "numpy" or "numba"
        Iterations in numpy or in compiled kernels; by default kernels if the penalty has them.
    on : "local", "ray", "ray://host:port" or RayEngine
        Where iterations on edges run: in threads of this process, or in shards on a Ray cluster (docs/cluster.md).
        Large cliques are always sorted here.

    Returns
    -------
    Solution
        ``solution.gap`` is an upper bound on the relative suboptimality. Ctrl-C stops the solver and returns the best
        solution so far with the status "interrupted".

    Raises
    ------
    SolverError
        When the objective has no finite minimiser (separable classes without a ridge, for example).

    Notes
    -----
    The gap is relative to ``max(|F(theta)|, 1e-6 |F(0)|)``. For singular designs (fewer rows than parameters at a site)
    without regular neighbours, it needs a ball that contains a minimiser. For quadratic losses, or with sparsity
    everywhere, such a ball is proven; otherwise ``solution.radius`` gives the ball for which the certificate holds (see
    `fedkin.solvers.pdhg`).

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_sites=10, n_samples=30, n_features=3, n_clusters=2, seed=0)
    >>> solution = fedkin.solve(fedkin.Problem(design.federation, design.graph, lam=0.01))
    >>> solution.status, solution.gap <= 1e-6
    ('converged', True)
    """
    check_positive("tol", tol)
    check_whole("max_iter", max_iter, least=1)
    if not isinstance(warm_start, Solution | None):
        raise ParameterError(f"warm_start must be a Solution, as solve returns it, got {warm_start!r}")
    solution = solve_fused(problem.fused, tol, max_iter=max_iter, warm_start=warm_start, backend=backend, on=on)
    return scaled(solution, problem.n_sites)


def scaled(solution: Solution, n_sites: int) -> Solution:
    """Return a solution of the fused objective on the public scale (1/|V| of it)."""
    trace = {**solution.trace, "objective": solution.trace["objective"] / n_sites}
    return replace(solution, objective=solution.objective / n_sites, trace=trace)


def solve_fused(
    objective: FusedObjective,
    tol: float,
    *,
    max_iter: int = 20_000,
    warm_start: Solution | None = None,
    quiet: bool = False,
    fuse_components: bool = True,
    certify: bool = True,
    backend: Backend = "auto",
    on: On = "local",
) -> Solution:
    """Solve on arrays, as `solve` does; the objective is |V| times the public one.

    Without ``fuse_components``, fused sites may be only approximately equal. Without ``certify``, Newton also stops
    after a step that lowers the objective by less than ``tol``.
    """
    compiled, engine = uses_kernels(backend, objective), engine_of(on)
    start = _start(objective, warm_start)
    search = Search(objective, tol, max_iter, start, compiled, certify=certify, fuse_components=fuse_components)
    if engine is not None and objective.cliques is None and objective.graph.n_edges:
        if not compiled:
            raise ParameterError(f"{argument('on', on)} needs compiled kernels: leave out {argument('backend')}")
        search.sharding = Sharding(engine, objective.graph)
    try:
        search.run(warm=warm_start is not None)
    except KeyboardInterrupt:
        search.status = "interrupted"
    finally:
        if search.sharding is not None:
            search.sharding.close()
    return search.finish(quiet)


def uninterrupted(solution: Solution) -> Solution:
    """Return the solution, or raise KeyboardInterrupt if it was interrupted, to end a sequence of solves."""
    if solution.status == "interrupted":
        raise KeyboardInterrupt
    return solution


def _start(objective: FusedObjective, warm_start: Solution | None) -> PrimalDual:
    """Return initial parameters and duals; their balance is computed later."""
    terms = objective.terms
    shape, duals = (terms.n_sites, terms.n_params), objective.dual_shape
    theta, alpha, zeta = np.zeros(shape), np.zeros(duals), None if objective.box is None else np.zeros(shape)
    if warm_start is not None:
        if warm_start.theta.shape != shape or warm_start.alpha.shape != duals:
            raise ParameterError(
                f"the warm start has theta {warm_start.theta.shape} and alpha {warm_start.alpha.shape}, "
                f"this problem needs {shape} and {duals}; warm starts must come from the same graph"
            )
        theta, alpha = objective.inside(warm_start.theta), objective.project(warm_start.alpha)
        # the site duals are what the edge duals leave to balance
        if zeta is not None:
            zeta = objective.site_duals(theta, -(terms.gradients(theta) + objective.balance(alpha)))
    return PrimalDual(theta, alpha, zeta, np.zeros(shape), np.ones(1))


class Search:
    """State of one solve: the best certified pair so far and the iterations that led to it."""

    def __init__(
        self,
        objective: FusedObjective,
        tol: float,
        max_iter: int,
        start: PrimalDual,
        compiled: bool,
        *,
        certify: bool,
        fuse_components: bool,
    ) -> None:
        self.objective, self.tol, self.max_iter, self.compiled = objective, tol, max_iter, compiled
        terms, theta = objective.terms, start.theta
        values = terms.c if isinstance(terms, QuadraticTerms) else terms.values(np.zeros_like(theta))
        raise_if_not_finite(objective.graph, values, "loss at theta = 0")
        self.at_zero = float(values.sum())
        self.ball = MinimizerBall(objective)
        self.status: Status = "iteration_limit"
        self.n_iter = 0
        self.rows: list[tuple[int, float, float]] = []
        #: Whether the gap has to show that it is done; and how much closer models are minimised for that.
        self.certify, self.strict = certify, 1.0
        #: Whether sites that are fused at the optimum must be exactly equal.
        self.exactly_fused = fuse_components
        self.lower = -np.inf
        #: The shards on a cluster that take the steps, if any.
        self.sharding: Sharding | None = None
        #: Whether a certificate needed to know a ball that holds a minimiser.
        self.conditional = False
        # result of an interruption before the first check: nothing is certified yet
        self.best = _Certified(start, np.nan, np.inf, None)

    def run(self, warm: bool) -> None:
        terms, pair = self.objective.terms, self.best.pair
        if isinstance(terms, QuadraticTerms):
            self._run_quadratic(terms, pair if warm else None)
            return
        self._run_newton(terms, pair, warm)
        if self.exactly_fused:
            if self.objective.cliques is None:  # cliques fuse as they go
                pair = self.best.pair
                fused = fused_parameters(self.objective, pair.theta, pair.alpha, pair.zeta)
                self._fuse(self.objective.inside(fused))
            self.fuse_components()

    def scale(self, value: float) -> float:
        return gap_scale(value, self.at_zero)

    def take(self, found: _Certified, only: bool = False) -> None:
        """Record a certified pair; keep it if it is good enough, better than the best so far, or the ``only`` one."""
        self.rows.append((self.n_iter, found.value, found.gap))
        if found.radius is None:
            self.lower = max(self.lower, found.value - found.gap * self.scale(found.value))
        if found.gap <= self.tol:
            self.status = "converged"
        if only or self.status == "converged" or found.value < self.best.value or not np.isfinite(self.best.gap):
            self.best = found

    def _certified(self, pair: PrimalDual, value: float | None = None) -> _Certified:
        value = self.objective.value(pair.theta) if value is None else value
        radius, proven = self.ball.radius(pair.theta, value) if self.conditional else (np.inf, True)
        gap, conditional = self.objective.gap(pair.theta, pair.alpha, pair.zeta, pair.balance, radius)
        if conditional and not self.conditional:
            self.conditional = True
            return self._certified(pair, value)
        assumed = radius if conditional and not proven else None
        return _Certified(pair, value, max(gap, 0.0) / self.scale(value), assumed)

    def _run_quadratic(self, terms: QuadraticTerms, start: PrimalDual | None) -> None:
        iteration = self._start_iteration(self.objective, terms, initial_rho(self.objective, terms), start)
        try:
            while self.status != "converged" and self.n_iter < self.max_iter:
                ahead = check_after(self.n_iter, self.rows, self.tol)
                iteration.advance(min(ahead, self.max_iter - self.n_iter))
                self._certify_iteration(iteration)
            self._fetch(iteration)
        except KeyboardInterrupt:
            if iteration.n_iter:
                self._certify_iteration(iteration)
                self._fetch(iteration)
            self.status = "interrupted"
        finally:
            iteration.close()
        if self.exactly_fused:
            self.fuse_components()

    def _start_iteration(
        self, objective: FusedObjective, terms: QuadraticTerms, rho: Array, start: PrimalDual | None
    ) -> Iteration:
        if objective.cliques is not None:
            return CliqueIteration(objective, terms, rho, start)
        if self.sharding is not None:
            return self.sharding.iteration(objective, terms, rho, start)
        return (CompiledIteration if self.compiled else NumpyIteration)(objective, terms, rho, start)

    def _fetch(self, iteration: Iteration) -> None:
        """Fetch the best pair, which is where the iteration stands, perhaps in shards elsewhere."""
        self.best = replace(self.best, pair=iteration.pair(self.best.current))

    def _certify_iteration(self, iteration: Iteration) -> None:
        """Certify the iteration's pair, with fused sites where that helps; earlier pairs are lost."""
        self.n_iter = iteration.n_iter
        found = self._certificate(iteration, iteration.inside())
        near = found.gap <= FUSING_HELPS * self.tol or self.n_iter >= self.max_iter
        if near and (self.exactly_fused or found.gap > self.tol):
            theta = iteration.fused()
            if iteration.regular:
                value, pair = iteration.certificate(theta)[0], found.pair
            else:
                pair = iteration.pair(theta)
                value = self.objective.value(pair.theta)
            found = self._or_fused(found, replace(found, pair=pair, current=theta), value)
        self.take(found, only=True)

    def _certificate(self, iteration: Iteration, theta: Array | None) -> _Certified:
        if not iteration.regular:
            return replace(self._certified(iteration.pair(theta)), current=theta)
        value, gap = iteration.certificate(theta)
        return _Certified(self.best.pair, value, max(gap, 0.0) / self.scale(value), current=theta)

    def _run_newton(self, terms: SiteTerms, pair: PrimalDual, warm: bool) -> None:
        caution, least = terms.caution()
        caution = least if warm else caution
        at, penalty = Expansion(terms, pair.theta), self.objective.penalty_value(pair.theta)
        tuned: Array | float = 1.0
        while self.n_iter < self.max_iter and caution.max() < HOPELESS:
            raise_if_not_finite(self.objective.graph, at.gradients, "gradient")
            model = at.model(caution)
            # tuning carries over to the next model, even though its curvature may differ
            rho = initial_rho(self.objective, model)
            pair = self._minimize_model(model, at, pair, tuned * rho)
            tuned = pair.rho / rho
            target = Expansion(terms, pair.theta)
            linear, quadratic, error = at.compare(model, target)
            new_penalty = self.objective.penalty_value(pair.theta)
            promised = penalty - new_penalty - float((linear + quadratic).sum())
            # an exact minimiser of the model promises at least the quadratic part, an inexact one may not
            allowed = max((1.0 - SUFFICIENT) * promised, POOR * float(quadratic.sum()))
            if not float(error.sum()) <= allowed + ROUNDING * self.scale(float(at.values.sum()) + penalty):
                caution = raised(caution, error, quadratic)
                if caution.max() >= HOPELESS:
                    raise_if_no_descent(self.objective.graph, at.values, linear, error)
                continue
            caution = lowered(caution, error, quadratic, least)
            before, at, penalty = at, target, new_penalty
            value = float(at.values.sum()) + penalty
            if value <= VANISHED * self.at_zero:
                raise_if_unbounded(self.objective, before, at)
            decrease = promised - float(error.sum())
            early = max(min(EARLY, 100.0 * self.tol), 10.0 * self.tol)
            if decrease > early * self.scale(value) and self.n_iter < self.max_iter:
                # far from the end for certain, and a certificate takes as long as the step itself
                self.take(_Certified(pair, value, np.inf, None))
                continue
            self.take(self._certified(pair, value))
            if decrease <= self.tol * self.scale(value):
                if not self.certify:
                    self.status = "converged"
                # only the certificate can still improve, through the models' duals
                self.strict *= 0.1
            if self.status == "converged" or self.n_iter >= self.max_iter:
                raise_if_unbounded(self.objective, before, at)
                return

    def _minimize_model(self, model: QuadraticTerms, at: Expansion, start: PrimalDual, rho: Array) -> PrimalDual:
        """Minimise the quadratic model to within a tenth of its possible decrease."""
        local = replace(self.objective, terms=model)
        before = local.value(at.theta)
        enough = 0.2 * self.strict * self.tol * self.scale(float(at.values.sum()))
        done = self.n_iter
        iteration = self._start_iteration(local, model, rho, replace(start, theta=at.theta))
        try:
            while True:
                iteration.advance(check_after(iteration.n_iter))
                self.n_iter = done + iteration.n_iter
                inside = iteration.inside()
                value, gap = _value_and_gap(local, iteration, inside)
                wanted = max(0.1 * (before - value), enough)
                if gap <= wanted or self.n_iter >= self.max_iter:
                    return iteration.pair(inside)
                if gap <= FUSING_HELPS * wanted:
                    theta = iteration.fused()
                    value, gap = _value_and_gap(local, iteration, theta)
                    if gap <= max(0.1 * (before - value), enough):
                        return iteration.pair(theta)
        finally:
            iteration.close()

    def fuse_components(self) -> None:
        """Fuse whole components if that lowers the objective; duals alone do not show full fusion."""
        objective, theta = self.objective, self.best.pair.theta
        rows, p = objective.dual_shape
        if self.status != "converged" or objective.strength == 0 or rows * p > LARGE:
            return
        if isinstance(objective.terms, QuadraticTerms) and far_from_fused(objective.terms, objective.graph, theta):
            return
        fused = fused_components(objective, theta, min(FUSING_HELPS * self.tol, NEARLY) * self.scale(self.best.value))
        if fused is not theta:
            self._fuse(fused)

    def _fuse(self, theta: Array) -> None:
        """Replace the best parameters by ``theta``, with the same duals, if that costs less than the tolerance."""
        other = replace(self.best, pair=replace(self.best.pair, theta=theta))
        self.best = self._or_fused(self.best, other, self.objective.value(theta))

    def _or_fused(self, found: _Certified, other: _Certified, value: float) -> _Certified:
        """Return ``other`` parameters with this value instead of those found, if that costs less than the tolerance."""
        # duals bound the objective from below for any parameters, so only the value is needed
        lower = found.value - found.gap * self.scale(found.value)
        gap = max(value - lower, 0.0) / self.scale(value)
        return replace(other, value=value, gap=gap) if gap <= max(found.gap, self.tol) else found

    def finish(self, quiet: bool) -> Solution:
        best = self.best
        if np.isnan(best.value):
            best = replace(best, value=self.objective.value(self.best.pair.theta))
        # duals of another pair may give a better bound for the best parameters
        other = (best.value - self.lower) / self.scale(best.value)
        if other < best.gap:
            best = replace(best, gap=max(other, 0.0), radius=None)
        message = ending(self.status, best.gap, self.tol, self.n_iter)
        if self.status == "iteration_limit":
            message += "; standardise features, drop collinear ones or add a small ridge, or raise max_iter"
            if not quiet:
                warnings.warn(message, ConvergenceWarning, stacklevel=4)
        columns = np.array(self.rows, dtype=np.float64).reshape(-1, 3).T
        trace = dict(zip(("n_iter", "objective", "gap"), columns, strict=True))
        theta, alpha = self.best.pair.theta, self.best.pair.alpha
        return Solution(theta, best.value, best.gap, self.status, self.n_iter, trace, alpha, message, best.radius)


@dataclass(frozen=True)
class _Certified:
    """A pair with its objective value and relative gap."""

    pair: PrimalDual
    value: float
    gap: float
    radius: float | None = None  # if the gap depends on an unproven one
    current: Array | None = None  # parameters of the iteration instead of its own, until its pair is fetched


def _value_and_gap(objective: FusedObjective, iteration: Iteration, theta: Array | None = None) -> tuple[float, float]:
    if iteration.regular:
        return iteration.certificate(theta)
    pair = iteration.pair(theta)
    radius = 10.0 * max(1.0, float(np.abs(pair.theta).max()))
    gap, _ = objective.gap(pair.theta, pair.alpha, pair.zeta, pair.balance, radius)
    return objective.value(pair.theta), gap


def ending(status: Status, gap: float, tol: float, n_iter: int) -> str:
    """Format the message that reports how a solve ended."""
    if status == "converged":
        return f"converged: relative gap {gap:.1e} after {n_iter} iterations"
    if status == "interrupted":
        return f"interrupted after {n_iter} iterations with relative gap {gap:.1e}; continue with it as warm_start"
    return f"stopped at the limit of {n_iter} iterations with relative gap {gap:.1e}, above the tolerance {tol:.1e}"
