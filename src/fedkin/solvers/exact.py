"""The exact solver: a minimiser of the fused objective with a duality gap as its certificate.

Quadratic losses go straight to the primal-dual core. For the others a sequence of quadratic models is minimised by
the same core (proximal Newton), each from where the last one ended, with a line search on the true objective.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedkin.errors import ConvergenceWarning, ParameterError, SolverError
from fedkin.problem import FusedObjective, Problem, Solution, Status
from fedkin.solvers.fuse import fuse_exactly
from fedkin.solvers.pdhg import PrimalDual, initial_rho, iterate
from fedkin.solvers.radius import MinimizerBall
from fedkin.terms import DeviceTerms, QuadraticTerms, RowTerms

Array = NDArray[np.float64]

#: The relative gap is never relative to less than this share of the objective at theta = 0.
SCALE_FLOOR = 1e-6


def solve(
    problem: Problem,
    tol: float = 1e-6,
    *,
    max_iter: int = 20_000,
    warm_start: Solution | None = None,
) -> Solution:
    """Minimise the objective of ``problem`` and certify the result.

    Parameters
    ----------
    problem : Problem
    tol : float
        Relative duality gap to reach.
    max_iter : int
        Limit on primal-dual iterations, all Newton steps together.
    warm_start : Solution, optional
        Of a similar problem (another ``lam``, other rows) on the same graph.

    Returns
    -------
    Solution
        ``solution.gap`` is an upper bound on the relative suboptimality. Ctrl-C ends the iteration with what was found so far
        and the status "interrupted".

    Raises
    ------
    SolverError
        When the objective has no finite minimiser (separable classes without a ridge, for example).

    Notes
    -----
    The gap is relative to ``max(|F(theta)|, 1e-6 |F(0)|)``. With singular designs (fewer rows than parameters on a device) the dual
    is finite only on a ball; ``solution.radius`` then says for which ball the certificate holds (see `fedkin.solvers.radius`).

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_devices=10, n_samples=30, n_features=3, n_clusters=2, seed=0)
    >>> solution = fedkin.solve(fedkin.Problem(design.federation, design.graph, lam=0.01))
    >>> solution.status, solution.gap <= 1e-6
    ('converged', True)
    """
    if not tol > 0:
        raise ParameterError(f"tol must be positive, got {tol!r}")
    solution = solve_fused(problem.fused, tol, max_iter=max_iter, warm_start=warm_start)
    return scaled(solution, problem.n_devices)


def scaled(solution: Solution, n_devices: int) -> Solution:
    """A solution of the fused objective on the public scale (1/|V| of it)."""
    trace = {**solution.trace, "objective": solution.trace["objective"] / n_devices}
    return Solution(
        solution.theta,
        solution.objective / n_devices,
        solution.gap,
        solution.status,
        solution.n_iter,
        trace,
        solution.alpha,
        solution.message,
        solution.radius,
    )


def solve_fused(
    objective: FusedObjective,
    tol: float,
    *,
    max_iter: int = 20_000,
    warm_start: Solution | None = None,
    quiet: bool = False,
) -> Solution:
    """`solve` on arrays; the objective is |V| times the public one. ``quiet`` leaves out the convergence warning."""
    search = _Search(objective, tol, max_iter, quiet)
    terms = objective.terms
    theta, alpha, zeta = _start(objective, warm_start)
    try:
        if isinstance(terms, QuadraticTerms):
            if warm_start is None:
                theta = _component_start(objective, terms, theta)
            search.run_quadratic(terms, theta, alpha, zeta)
        else:
            search.run_newton(terms, theta, alpha, zeta)
    except KeyboardInterrupt:
        search.status = "interrupted"
    return search.finish()


@dataclass
class _Search:
    """The state of one solve: the best certified pair so far and how it was reached."""

    objective: FusedObjective
    tol: float
    max_iter: int
    quiet: bool = False
    status: Status = "iteration_limit"
    n_iter: int = 0
    best: PrimalDual | None = None
    best_value: float = np.inf
    best_gap: float = np.inf
    best_radius: float = np.inf
    rows: list[tuple[int, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        zero = np.zeros((self.objective.terms.n_devices, self.objective.terms.n_params))
        self.floor = SCALE_FLOOR * abs(self.objective.value(zero)) + np.finfo(float).tiny
        self.ball = MinimizerBall(self.objective) if self.objective.terms.needs_radius() else None

    def relative(self, gap: float, value: float) -> float:
        return max(gap, 0.0) / max(abs(value), self.floor)

    def certify(self, pair: PrimalDual) -> bool:
        """Take the pair's gap, keep the best, and say whether it is good enough."""
        value = self.objective.value(pair.theta)
        radius = np.inf if self.ball is None else self.ball.radius(pair.theta, value)
        gap = self.objective.gap(pair.theta, pair.alpha, pair.zeta, pair.balance, radius)
        relative = self.relative(gap, value)
        self.rows.append((self.n_iter, value, relative))
        if self.best is None or relative < self.best_gap:
            self.best, self.best_value, self.best_gap, self.best_radius = pair, value, relative, radius
        return relative <= self.tol

    def run_quadratic(self, terms: QuadraticTerms, theta: Array, alpha: Array, zeta: Array | None) -> None:
        rho = initial_rho(self.objective, terms)
        for pair in iterate(self.objective, terms, theta, alpha, zeta, rho, _check_schedule):
            self.n_iter = pair.n_iter
            if self.certify(pair):
                self.status = "converged"
                return
            if pair.n_iter >= self.max_iter:
                return

    def run_newton(self, terms: DeviceTerms, theta: Array, alpha: Array, zeta: Array | None) -> None:
        rho: Array | None = None
        value = self.objective.value(theta)
        damping = 0.0
        for _ in range(200):
            model = _quadratic_model(terms, theta, damping)
            rho = initial_rho(self.objective, model) if rho is None else rho
            pair = self._minimize_model(model, theta, alpha, zeta, rho)
            alpha, zeta, rho = pair.alpha, pair.zeta, pair.rho
            step, new_value = _line_search(self.objective, model, theta, pair.theta, value)
            if step == 0.0:
                if damping > 1e6:
                    return
                damping = max(10.0 * damping, 1e-6)
                continue
            damping = 0.0 if step == 1.0 else damping
            theta, value = theta + step * (pair.theta - theta), new_value
            _raise_if_unbounded(theta, self.objective)
            certified = PrimalDual(theta, alpha, zeta, pair.balance, rho, self.n_iter)
            if self.certify(certified):
                self.status = "converged"
                return
            if self.n_iter >= self.max_iter:
                return

    def _minimize_model(
        self, model: QuadraticTerms, theta: Array, alpha: Array, zeta: Array | None, rho: Array
    ) -> PrimalDual:
        """Minimise the quadratic model to a tenth of the decrease it offers."""
        local = FusedObjective(
            model, self.objective.graph, self.objective.penalty, self.objective.strength, self.objective.sparsity
        )
        scale = max(abs(self.objective.value(theta)), self.floor)
        enough = 0.2 * self.tol * scale
        before = local.value(theta)
        done = self.n_iter
        for pair in iterate(local, model, theta, alpha, zeta, rho, _check_schedule):
            self.n_iter = done + pair.n_iter
            radius = 10.0 * max(1.0, float(np.abs(pair.theta).max())) if model.needs_radius() else np.inf
            gap = local.gap(pair.theta, pair.alpha, pair.zeta, pair.balance, radius)
            if gap <= max(0.1 * (before - local.value(pair.theta)), enough) or self.n_iter >= self.max_iter:
                return pair
        raise AssertionError("iterate never ends by itself")

    def finish(self) -> Solution:
        if self.best is None:
            raise KeyboardInterrupt
        theta, value, gap = self.best.theta, self.best_value, self.best_gap
        fused = fuse_exactly(self.objective, theta, self.best.alpha)
        if fused is not None:
            fused_value = self.objective.value(fused)
            pair = self.best
            fused_gap = self.objective.gap(fused, pair.alpha, pair.zeta, pair.balance, self.best_radius)
            fused_gap = self.relative(fused_gap, fused_value)
            if fused_gap <= max(gap, self.tol):
                theta, value, gap = fused, fused_value, fused_gap
        message = _message(self.status, gap, self.tol, self.n_iter)
        if self.status == "iteration_limit" and not self.quiet:
            warnings.warn(message, ConvergenceWarning, stacklevel=4)
        columns = np.array(self.rows, dtype=np.float64).reshape(-1, 3).T
        trace = dict(zip(("n_iter", "objective", "gap"), columns, strict=True))
        radius = None if self.ball is None or self.ball.proven else self.best_radius
        return Solution(theta, value, gap, self.status, self.n_iter, trace, self.best.alpha, message, radius)


def _check_schedule(done: int) -> int:
    """Check often in the beginning, every tenth of the way later."""
    return 10 if done < 100 else done // 10


def _start(objective: FusedObjective, warm_start: Solution | None) -> tuple[Array, Array, Array | None]:
    terms, graph = objective.terms, objective.graph
    shape, edges = (terms.n_devices, terms.n_params), (graph.n_edges, terms.n_params)
    zeta = None if objective.sparsity is None else np.zeros(shape)
    if warm_start is None:
        return np.zeros(shape), np.zeros(edges), zeta
    if warm_start.theta.shape != shape or warm_start.alpha.shape != edges:
        raise ParameterError(
            f"the warm start has theta {warm_start.theta.shape} and alpha {warm_start.alpha.shape}, "
            f"this problem needs {shape} and {edges}; warm starts must come from the same graph"
        )
    return warm_start.theta, objective.penalty.project(warm_start.alpha, objective.edge_radius), zeta


def _component_start(objective: FusedObjective, terms: QuadraticTerms, theta: Array) -> Array:
    """Each device's own minimiser where it exists: closer than 0 for weak penalties, as good as any for strong ones."""
    return np.where(terms.singular[:, None], theta, terms.minimizers())


def _quadratic_model(terms: DeviceTerms, theta: Array, damping: float) -> QuadraticTerms:
    A = terms.hessians(theta)
    diagonal = np.arange(terms.n_params)
    trace = np.einsum("vii->v", A) / terms.n_params
    # a Hessian may vanish (saturated classes, Huber outliers): keep the model bounded below
    lift = 1e-10 * max(float(trace.max()), 1e-300) + damping * np.maximum(trace, 1e-3 * float(trace.max()))
    A = A.copy()
    A[:, diagonal, diagonal] += np.broadcast_to(lift, trace.shape)[:, None]
    if damping == 0.0 and isinstance(terms, RowTerms) and np.isfinite(terms.loss.curvature_bound()):
        flat = trace <= 1e-3 * float(trace.max())
        if flat.any():
            A[flat] = terms.majorizer(theta)[flat]
    gradient = terms.gradients(theta)
    b = np.einsum("vij,vj->vi", A, theta) - gradient
    return QuadraticTerms(A, b, np.zeros(terms.n_devices))


def _line_search(
    objective: FusedObjective, model: QuadraticTerms, theta: Array, target: Array, value: float
) -> tuple[float, float]:
    """Largest step of 1, 1/2, 1/4, ... that decreases the objective enough; 0 when there is none."""
    direction = target - theta
    slope = objective.terms.gradients(theta)
    # the decrease that the convex model promises for a full step
    promised = float((slope * direction).sum()) + objective.penalty_value(target) - objective.penalty_value(theta)
    step = 1.0
    resolution = 1e-14 * abs(value)
    for _ in range(40):
        with np.errstate(over="ignore", invalid="ignore"):
            new = objective.value(theta + step * direction)
        if np.isfinite(new) and new <= value + 1e-4 * step * min(promised, 0.0) + resolution:
            return step, new
        step *= 0.5
    return 0.0, value


def _raise_if_unbounded(theta: Array, objective: FusedObjective) -> None:
    worst = int(np.abs(theta).max(axis=1).argmax())
    if not np.isfinite(theta).all() or np.abs(theta).max() > 1e8:
        device = objective.graph.devices[worst]
        raise SolverError(
            f"the parameters of device {device!r} run away: the objective has no finite minimiser there (separable classes, "
            "all-zero counts or collinear columns); add ridge=1e-3 or so, or connect the device to others with a larger lam"
        )


def _message(status: Status, gap: float, tol: float, n_iter: int) -> str:
    if status == "converged":
        return f"converged: relative gap {gap:.1e} after {n_iter} iterations"
    if status == "interrupted":
        return f"interrupted after {n_iter} iterations at relative gap {gap:.1e}; pass this solution as warm_start to go on"
    return (
        f"stopped at the limit of {n_iter} iterations with relative gap {gap:.1e} > {tol:.1e}; raise max_iter, "
        "standardise the features, or add a small ridge"
    )

