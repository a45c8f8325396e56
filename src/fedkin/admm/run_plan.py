"""Plan a run: check arguments, and choose steps and rho from the curvature of the sites' losses.

A `RunPlan` is made once, by `plan_run` from a problem or by `fedkin.federate` from a contract. Shards are built from
it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedkin._base import TINY, Array, Index, check_choice, check_positive, check_whole, count
from fedkin.admm.availability import Availability, check_seed, site_keys
from fedkin.admm.gradients import GRADIENT_KINDS, GradientKind, SiteRows
from fedkin.core import Penalty, Problem, QuadraticTerms, SiteTerms, Solution, damped_newton
from fedkin.errors import ParameterError, argument
from fedkin.losses import by_loss

BatchSize = int | Sequence[int] | None
Average = Literal["tail", "paper", "last"]
Wire = Literal["float64", "float32"]  #: number format of thetas in messages
AVERAGES = ("tail", "paper", "last")

#: kappa = 1 / (GROWTH * weakest curvature). With GROWTH of 2 or more the rate 1/T would be lost.
GROWTH = 1.5
#: Variance-reduced steps are this many times shorter than the smoothness of a batch allows.
REDUCED_CAUTION = 2.0
#: rho is so many times the mean curvature, divided by the mean degree: where steps stay long, and where noise makes
#: them short.
STILL_RHO, NOISY_RHO = 4.0, 1.0
#: Lower bound on a site's curvature, as a share of its largest one.
WEAKEST_SHARE = 0.02
_FIT_STEPS, _FIT_DAMPING = 8, 0.02


@dataclass(frozen=True, eq=False)
class StepRule:
    """Step sizes of B sites: ``1 / eta_i(t) = start_i / p_i(t) + growth_i * t + damping_i``.

    ``start`` keeps the first rounds stable (0 in the paper's rule), ``growth`` is ``1 / kappa``, and ``damping`` of
    ``rho * |N_i|`` makes it the proximal step, 0 the literal one.
    """

    start: Array
    growth: Array
    damping: Array

    def eta(self, t: int, probability: Array | None = None) -> Array:
        """Return the steps ``(B,)`` in round ``t = 1, 2, ...``, given the probabilities ``(B,)`` of being available."""
        start = self.start if probability is None else self.start / probability
        return np.asarray(1.0 / (start + self.growth * t + self.damping))

    def take(self, which: Index) -> StepRule:
        """Return the step sizes of some of the sites."""
        return StepRule(self.start[which], self.growth[which], self.damping[which])


@dataclass(frozen=True, eq=False)
class RunPlan:
    """Plan of a run: the settings shared by all sites, and the data of B of them.

    - ``sites (B,)``: increasing positions in the federation; ``theta (B, p)``: where they start;
    - ``edges (E, 2)``: pairs ``(i, j)``, ``i > j``, of positions, with ``edge_radius (E,)``, ``strength * w_e``;
      ``alpha (E, p)``: the duals to start from, 0 by default;
    - ``rows``: of all of ``sites``, or of those in ``with_rows``; None where others have the rows (a central machine);
    - ``sparsity (B, p)`` weighs ``|theta|``; ``radius`` is that of the parameter ball;
    - ``wire`` is the number format in which thetas travel; both ends of an edge use the rounded numbers.
    """

    sites: Index
    theta: Array
    edges: Index
    edge_radius: Array
    penalty: Penalty
    rho: float
    steps: StepRule
    rows: SiteRows | None
    rounds: int = 1
    seed: int = 0
    gradient: GradientKind = "plain"
    snapshot_every: int = 1
    average: Average = "tail"
    sparsity: Array | None = None
    radius: float | None = None
    alpha: Array | None = None
    with_rows: Index | None = None
    availability: Availability | None = None
    wire: Wire = "float64"

    @property
    def n_sites(self) -> int:
        return int(self.sites.size)

    @property
    def n_params(self) -> int:
        return int(self.theta.shape[1])

    def part(self, sites: Index) -> RunPlan:
        """Return the plan of some of the sites, increasing, with every edge that touches them."""
        which, near = np.searchsorted(self.sites, sites), np.isin(self.edges, sites).any(axis=1)
        with_rows = self.sites if self.with_rows is None else self.with_rows
        own = np.flatnonzero(np.isin(with_rows, sites))
        return replace(
            self,
            sites=sites,
            theta=self.theta[which],
            edges=self.edges[near],
            edge_radius=self.edge_radius[near],
            steps=self.steps.take(which),
            rows=None if self.rows is None or not own.size else self.rows.take(own),
            sparsity=None if self.sparsity is None else self.sparsity[which],
            alpha=None if self.alpha is None else self.alpha[near],
            with_rows=with_rows[own],
        )


def plan_run(
    problem: Problem,
    rounds: int = 1,
    batch_size: BatchSize = None,
    *,
    rho: float | Literal["auto"] = "auto",
    step: float | Literal["auto", "literal"] = "auto",
    kappa: float | None = None,
    average: Average | None = None,
    gradient: GradientKind = "plain",
    seed: int = 0,
    availability: Availability | None = None,
    streaming: Collection[Hashable] = (),
    warm_start: Solution | None = None,
    noisy: bool | None = None,
) -> RunPlan:
    """Plan a run of all sites of a problem; `fedkin.fed_admm` explains the arguments.

    ``streaming`` sites get new samples in every round. ``noisy`` states whether anything is random; by default, whether
    batches are smaller than the rows or sites are intermittent. Intermittent sites are noisy even if ``gradient``
    removes the noise of the batches.
    """
    check_whole("rounds", rounds, least=1)
    check_seed(seed)
    check_steps(rho, step, kappa, average, gradient)
    if gradient != "plain" and streaming:
        raise ParameterError(f"gradient={gradient!r} rereads rows, but streams provide new ones; use gradient='plain'")
    rows = site_rows(problem, batch_size, streaming)
    theta, alpha = checked_start(problem, warm_start)
    curvature = local_curvature(problem.terms, rows)
    if noisy is None:
        noisy = availability is not None or bool(streaming) or bool((rows.batch < rows.counts).any())
    still = not noisy or (gradient != "plain" and availability is None)
    degree = problem.graph.degree.astype(np.float64) if problem.strength > 0 else np.zeros(problem.n_sites)
    if rho == "auto":
        linked = degree[degree > 0]
        rho = float(curvature.mean.mean()) / (float(linked.mean()) if linked.size else 1.0)
        rho *= STILL_RHO if still else NOISY_RHO
    damping, nothing = float(rho) * degree, np.zeros_like(degree)
    if step == "literal":
        kappa = kappa or 1.0 / (GROWTH * float(curvature.weakest.mean()))
        steps = StepRule(nothing, np.full_like(damping, 1.0 / kappa), nothing)
    elif step != "auto":
        steps = StepRule(nothing, np.full_like(damping, 1.0 / step), damping)
    else:
        growth = nothing if still else GROWTH * curvature.weakest
        steps = StepRule(curvature.first_steps(rows, gradient), growth, damping)
    assert isinstance(problem.penalty, Penalty)
    return RunPlan(
        sites=np.arange(problem.n_sites),
        theta=theta,
        edges=problem.graph.edges,
        edge_radius=problem.fused.edge_radius,
        penalty=problem.penalty,
        rho=float(rho),
        steps=steps,
        rows=rows,
        rounds=rounds,
        seed=seed,
        gradient=gradient,
        snapshot_every=2 * int(np.ceil(np.mean(rows.counts / rows.batch))),
        average=average or ("last" if still else "tail"),
        sparsity=problem.fused.sparsity,
        radius=problem.radius,
        alpha=alpha,
        availability=availability,
    )


def check_steps(
    rho: object = "auto",
    step: object = "auto",
    kappa: object = None,
    average: object = None,
    gradient: object = "plain",
) -> None:
    """Raise `ParameterError` unless these arguments are valid for `fedkin.fed_admm`."""
    if rho != "auto":
        check_positive("rho", rho)
    if step not in ("auto", "literal"):
        check_positive("step", step)
    if kappa is not None:
        check_positive("kappa", kappa)
    if kappa is not None and step != "literal":
        raise ParameterError("kappa belongs to step='literal'; for proximal steps with e(t) = kappa/t give step=kappa")
    check_choice("average", average, (None, *AVERAGES))
    check_choice("gradient", gradient, GRADIENT_KINDS)


def site_rows(problem: Problem, batch_size: BatchSize, streaming: Collection[Hashable] = ()) -> SiteRows:
    """Return the rows of all sites and their batch sizes, checked."""
    federation = problem.rows_for("Fed-ADMM")
    if federation.weight is not None:
        hint = f"leave {argument('weight')} out, or use the exact solver"
        raise ParameterError(f"Fed-ADMM draws rows and does not support weights: {hint}")
    counts, y = federation.n_samples, federation.y
    return SiteRows(
        replace(federation.rows, y=None if y is None else np.asarray(y, dtype=np.float64)),
        federation.starts[:-1],
        counts,
        site_keys(federation.sites),
        problem.losses,
        _batches(batch_size, counts, federation.sites, streaming),
        np.broadcast_to(np.asarray(problem.ridge, dtype=np.float64), (problem.n_params,)).copy(),
    )


def _batches(batch_size: BatchSize, counts: Index, sites: Sequence[Hashable], streaming: Collection[Hashable]) -> Index:
    if batch_size is None:
        return counts.copy()
    if np.ndim(batch_size) == 0:
        check_whole("batch_size", batch_size, least=1)
    given = np.asarray(batch_size)
    if given.ndim > 1 or (given.ndim == 1 and given.size != counts.size) or given.dtype.kind not in "iu":
        raise ParameterError(
            f"batch_size must be a whole number or one for each of the {counts.size} sites, got {batch_size!r}"
        )
    batch = np.broadcast_to(given, counts.shape).astype(np.int64)
    if (batch < 1).any():
        raise ParameterError(
            f"batch_size must be at least 1, got {batch.min()} for site {sites[int(batch.argmin())]!r}"
        )
    for u in np.flatnonzero(batch > counts).tolist():
        if sites[u] not in streaming:
            raise ParameterError(
                f"batch_size is {batch[u]}, but site {sites[u]!r} has only {count(counts[u], 'row')}; give a "
                f"batch_size of at most {counts.min()}, one number per site, or None for all rows"
            )
    return batch


def checked_start(problem: Problem, warm_start: Solution | None) -> tuple[Array, Array | None]:
    """Return theta ``(V, p)`` and edge duals ``(E, p)`` to start from."""
    shape, edges = (problem.n_sites, problem.n_params), problem.fused.dual_shape
    if warm_start is None:
        return np.zeros(shape), None
    if warm_start.theta.shape != shape or warm_start.alpha.shape != edges:
        raise ParameterError(
            f"the warm start has theta {warm_start.theta.shape} and alpha {warm_start.alpha.shape}, "
            f"this problem needs {shape} and {edges}; warm starts must come from the same graph"
        )
    assert isinstance(problem.penalty, Penalty)
    alpha, cliques = warm_start.alpha, problem.fused.cliques
    if cliques is not None:
        # edge duals with these sums; those that are too large are projected onto their balls
        (i, j), slopes = problem.graph.edges.T, alpha / (cliques.weights * cliques.totals[cliques.labels])[:, None]
        alpha = problem.graph.weights[:, None] * (slopes[i] - slopes[j])
    return warm_start.theta, problem.penalty.project(alpha, problem.fused.edge_radius)


@dataclass(frozen=True, eq=False)
class Curvature:
    """Curvatures ``(V,)`` of the sites' mean losses, at 0 and near their own minimisers.

    - ``weakest``: smallest eigenvalue of the Hessian near the minimiser, at least `WEAKEST_SHARE` of the largest;
    - ``mean``: mean eigenvalue there;
    - ``strongest``: largest eigenvalue met;
    - ``row``: curvature of a single row's loss, averaged with itself as the weight;
    - ``worst_row``: the largest of them.
    """

    weakest: Array
    mean: Array
    strongest: Array
    row: Array
    worst_row: Array

    def of_batches(self, rows: SiteRows, worst: bool = False) -> Array:
        """Return the smoothness ``(V,)`` of a random batch, between `strongest` (all rows) and `row` (one row).

        This is the expected smoothness of Gower et al. (2019, "SGD: general analysis and improved rates") for batches
        without replacement, proven with the worst row.
        """
        n = rows.counts.astype(np.float64)
        b = np.minimum(rows.batch, rows.counts).astype(np.float64)
        one = self.worst_row if worst else self.row
        return np.asarray((n * (b - 1.0) * self.strongest + (n - b) * one) / (b * np.maximum(n - 1.0, 1.0)))

    def first_steps(self, rows: SiteRows, gradient: GradientKind) -> Array:
        """Return 1 / (the longest first step) ``(V,)`` that the gradient estimator allows."""
        start = self.of_batches(rows, worst=gradient != "plain")
        if gradient == "plain":
            return start
        # Gazagnadou, Gower and Salmon (2019), "Optimal mini-batch and step sizes for SAGA"
        n, b = rows.counts.astype(np.float64), np.minimum(rows.batch, rows.counts).astype(np.float64)
        memory = (n - b) / (b * np.maximum(n - 1.0, 1.0)) * self.worst_row + self.weakest * n / (4.0 * b)
        return np.asarray(REDUCED_CAUTION * np.maximum(start, memory))


def local_curvature(terms: SiteTerms, rows: SiteRows) -> Curvature:
    """Measure the curvatures of the sites' mean losses ``terms``, whose rows are ``rows``."""
    zero = np.zeros((terms.n_sites, terms.n_params))
    fit = zero if isinstance(terms, QuadraticTerms) else _rough_fit(terms)
    smallest, largest, mean = _spectrum(terms, fit)
    typical, worst = _row_curvature(rows, fit)
    if fit is not zero:
        largest = np.maximum(largest, _spectrum(terms, zero)[1])
        typical, worst = (np.maximum(*pair) for pair in zip((typical, worst), _row_curvature(rows, zero), strict=True))
    # losses without rows of their own: the trace is the mean curvature of a row, if rows are alike
    unknown = ~np.isfinite(worst)
    typical, worst = (np.maximum(np.where(unknown, mean * terms.n_params, each), largest) for each in (typical, worst))
    weakest = np.maximum(smallest, WEAKEST_SHARE * largest)
    return Curvature(weakest + TINY, mean + TINY, largest + TINY, typical + TINY, worst + TINY)


def _spectrum(terms: SiteTerms, theta: Array) -> tuple[Array, Array, Array]:
    if isinstance(terms, QuadraticTerms) and terms.isotropic:
        return terms.A, terms.A, terms.A
    hessians = terms.hessians(theta)
    values = np.linalg.eigvalsh(hessians)
    mean = np.asarray(np.einsum("vii->v", hessians), dtype=np.float64) / terms.n_params
    return np.asarray(values[:, 0], dtype=np.float64), np.asarray(values[:, -1], dtype=np.float64), mean


def _rough_fit(terms: SiteTerms) -> Array:
    def value(theta: Array, who: Index) -> Array:
        return np.nan_to_num(terms.take(who).values(theta), nan=np.inf, posinf=np.inf)

    def derivatives(theta: Array, who: Index) -> tuple[Array, Array]:
        part = terms.take(who)
        hessians = part.hessians(theta)
        lift = _FIT_DAMPING * np.einsum("vii->v", hessians) / terms.n_params + TINY
        return part.gradients(theta), hessians + lift[:, None, None] * np.eye(terms.n_params)

    with np.errstate(over="ignore", invalid="ignore"):
        return damped_newton(value, derivatives, np.zeros((terms.n_sites, terms.n_params)), max_iter=_FIT_STEPS)[0]


def _row_curvature(rows: SiteRows, theta: Array) -> tuple[Array, Array]:
    """Return typical and largest curvature of one row on each site, infinite where the loss has no rows of its own."""
    typical, worst = (np.full(rows.starts.size, np.inf) for _ in range(2))
    for members, loss in by_loss(rows.losses):
        counts = rows.counts[members]
        first = np.cumsum(counts) - counts
        each = loss.row_curvatures(theta[np.repeat(members, counts)], *rows.data.take(rows.numbers(members)).arrays)
        if each is not None:
            total = np.maximum(np.add.reduceat(each, first), TINY)
            # the trace of E(curvature^2 x x' / ...) over that of the Hessian, which emphasises steep rows
            typical[members] = np.add.reduceat(each * each, first) / total
            worst[members] = np.maximum.reduceat(each, first)
    return typical + rows.ridge.max(), worst + rows.ridge.max()
