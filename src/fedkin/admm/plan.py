"""The plan of a run, which makes its shards: checked arguments, steps and rho from the sites' curvature."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fedkin._base import Array, Index, check_choice, check_positive, check_whole, count
from fedkin.admm.curvature import Curvature
from fedkin.admm.gradients import GRADIENT_KINDS, GradientKind, Gradients, SampleStream, SiteRows
from fedkin.admm.sampling import check_seed, site_keys
from fedkin.admm.shard import AVERAGES, Average, Shard, StepRule, UpdateRule
from fedkin.core import Penalty, Problem, Solution
from fedkin.errors import DataError, ParameterError, UnknownSiteError

BatchSize = int | Sequence[int] | None

#: kappa = 1 / (GROWTH * weakest curvature). With GROWTH of 2 or more the rate 1/T would be lost.
GROWTH = 1.5
#: Variance-reduced steps are this many times shorter than the smoothness of a batch would allow.
REDUCED_CAUTION = 2.0
#: rho is so many times the mean curvature, divided by the mean degree: where steps stay long, and where noise makes
#: them short.
STILL_RHO, NOISY_RHO = 4.0, 1.0


@dataclass(frozen=True)
class Settings:
    """How to run Fed-ADMM; see `fedkin.fed_admm`."""

    batch_size: BatchSize = None
    rho: float | Literal["auto"] = "auto"
    step: float | Literal["auto", "literal"] = "auto"
    kappa: float | None = None
    average: Average | None = None
    gradient: GradientKind = "plain"
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.rho != "auto":
            check_positive("rho", self.rho)
        if self.step not in ("auto", "literal"):
            check_positive("step", self.step)
        if self.kappa is not None:
            check_positive("kappa", self.kappa)
            if self.step != "literal":
                raise ParameterError(
                    "kappa belongs to step='literal'; for proximal steps with e(t) = kappa/t give step=kappa"
                )
        check_choice("average", self.average, (None, *AVERAGES))
        check_choice("gradient", self.gradient, GRADIENT_KINDS)


@dataclass(frozen=True, eq=False)
class Plan:
    """All that the sites of a run agree on, and what is planned for V of them; the only maker of shards.

    ``rows``, ``steps`` and ``sparsity (V, p)`` are of the V sites, whose positions are ``sites`` (by default all of
    the federation); ``edges (E, 2)`` and ``edge_radius (E,)`` are of the whole federation.
    """

    rows: SiteRows
    edges: Index
    edge_radius: Array
    penalty: Penalty
    rho: float
    steps: StepRule
    seed: int
    gradient: GradientKind
    snapshot_every: int
    average: Average
    sparsity: Array | None = None
    radius: float | None = None
    sites: Index | None = None

    @property
    def n_sites(self) -> int:
        return int(self.rows.starts.size)

    @property
    def n_params(self) -> int:
        return int(self.rows.ridge.size)

    def shard(
        self,
        sites: Index | None = None,
        *,
        theta: Array | None = None,
        alpha: Array | None = None,
        without: Sequence[int] = (),
        rowless: bool = False,
        table: Array | None = None,
        streams: Mapping[int, SampleStream] | None = None,
    ) -> Shard:
        """The shard that hosts the sites at these positions (increasing; by default all that are planned for).

        ``theta (B, p)`` and the duals ``alpha (E, p)`` of all edges start at 0 by default. Edges of sites in
        ``without`` are dropped. A ``rowless`` shard has no gradients, as for a central machine or a replica.
        ``table (N, width)`` is SAGA's memory, where several shards share it like they share the rows.
        """
        planned = np.arange(self.n_sites) if self.sites is None else self.sites
        here = planned if sites is None else sites
        which = np.searchsorted(planned, here)
        touching = np.isin(self.edges, here).any(axis=1) & ~np.isin(self.edges, list(without)).any(axis=1)
        start, growth, damping = (part[which] for part in vars(self.steps).values())
        sparsity = None if self.sparsity is None else self.sparsity[which]
        rule = UpdateRule(self.penalty, self.rho, StepRule(start, growth, damping), sparsity, self.radius, self.average)
        gradients = None
        if not rowless:
            rows = self.rows if which.size == planned.size else self.rows.take(which)
            own = {k: streams[int(u)] for k, u in enumerate(here) if int(u) in streams} if streams else {}
            every = self.snapshot_every
            gradients = Gradients(rows, self.seed, self.gradient, snapshot_every=every, table=table, streams=own)
        at = np.zeros((here.size, self.n_params)) if theta is None else theta
        duals = None if alpha is None else alpha[touching]
        return Shard(here, self.edges[touching], self.edge_radius[touching], rule, gradients, at, duals)


def plan_run(
    problem: Problem,
    settings: Settings,
    rows: SiteRows,
    curvature: Curvature,
    *,
    noisy: bool,
    absent: bool = False,
    caution: float = 1.0,
) -> Plan:
    """Everything that the sites of a run agree on.

    ``noisy``: anything is random (batches, streams or absence). ``absent``: sites come and go, so noise stays also
    where ``gradient`` removes that of the batches. ``caution``: automatic steps are so many times shorter at first.
    """
    reduced = settings.gradient != "plain" and not absent
    degree = problem.graph.degree.astype(np.float64) if problem.strength > 0 else np.zeros(problem.n_sites)
    still = reduced or not noisy
    factor = STILL_RHO if still else NOISY_RHO
    rho = factor * curvature_per_edge(curvature, degree) if settings.rho == "auto" else float(settings.rho)
    average: Average = settings.average or ("last" if still else "tail")
    assert isinstance(problem.penalty, Penalty)
    objective = problem.fused
    return Plan(
        rows=rows,
        edges=problem.graph.edges,
        edge_radius=objective.edge_radius,
        penalty=problem.penalty,
        rho=rho,
        steps=_steps(settings, rows, curvature, rho * degree, still, caution),
        seed=settings.seed,
        gradient=settings.gradient,
        snapshot_every=2 * int(np.ceil(np.mean(rows.counts / rows.batch))),
        average=average,
        sparsity=objective.sparsity,
        radius=problem.radius,
    )


def curvature_per_edge(curvature: Curvature, degree: Array) -> float:
    """Mean curvature divided by the mean degree of the sites that have neighbours: the scale of rho."""
    linked = degree[degree > 0]
    return float(curvature.mean.mean()) / (float(linked.mean()) if linked.size else 1.0)


def _steps(
    settings: Settings, rows: SiteRows, curvature: Curvature, damping: Array, still: bool, caution: float
) -> StepRule:
    nothing = np.zeros_like(damping)
    if settings.step == "literal":
        kappa = settings.kappa or 1.0 / (GROWTH * float(curvature.weakest.mean()))
        return StepRule(nothing, np.full_like(damping, 1.0 / kappa), nothing)
    if settings.step != "auto":
        return StepRule(nothing, np.full_like(damping, 1.0 / settings.step), damping)
    start = curvature.of_batches(rows, worst=settings.gradient != "plain")
    if settings.gradient != "plain":
        # Gazagnadou, Gower and Salmon (2019), "Optimal mini-batch and step sizes for SAGA"
        n, b = rows.counts.astype(np.float64), np.minimum(rows.batch, rows.counts).astype(np.float64)
        memory = (n - b) / (b * np.maximum(n - 1.0, 1.0)) * curvature.worst_row + curvature.weakest * n / (4.0 * b)
        start = REDUCED_CAUTION * np.maximum(start, memory)
    return StepRule(caution * start, nothing if still else GROWTH * curvature.weakest, damping)


# --- what the user gives ---


def site_rows(problem: Problem, batch_size: BatchSize, streaming: set[Hashable]) -> SiteRows:
    """The rows of all sites and their batch sizes, checked."""
    federation = problem.rows_for("Fed-ADMM")
    if federation.weight is not None:
        raise ParameterError("Fed-ADMM draws rows and takes no weights: leave weight= out, or use the exact solver")
    counts = federation.n_samples
    batch = _batches(batch_size, counts, federation.sites, streaming)
    y = federation.y
    ridge = np.broadcast_to(np.asarray(problem.ridge, dtype=np.float64), (problem.n_params,)).copy()
    return SiteRows(
        replace(federation.rows, y=None if y is None else np.asarray(y, dtype=np.float64)),
        federation.starts[:-1],
        counts,
        site_keys(federation.sites),
        problem.losses,
        batch,
        ridge,
    )


def _batches(batch_size: BatchSize, counts: Index, sites: Sequence[Hashable], streaming: set[Hashable]) -> Index:
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


def sample_streams(problem: Problem, streams: Mapping[Any, Iterable[Any]] | None) -> dict[int, SampleStream]:
    """Streams by site number."""
    out = {}
    for site, samples in (streams or {}).items():
        if site not in problem.federation:
            raise UnknownSiteError(f"streams names site {site!r}, which the federation does not have")
        if not isinstance(samples, Iterable):
            raise DataError(
                f"the stream of site {site!r} must be an iterable of samples, got {type(samples).__name__}"
            )
        out[problem.federation.index[site]] = SampleStream(site, samples, problem.federation.n_features)
    return out


def starting_point(problem: Problem, warm_start: Solution | None) -> tuple[Array, Array | None]:
    """Theta ``(V, p)`` and edge duals ``(E, p)`` to start from."""
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
        # duals of edges that have these sums; those that are too large come back into their balls
        (i, j), slopes = problem.graph.edges.T, alpha / (cliques.weights * cliques.totals[cliques.labels])[:, None]
        alpha = problem.graph.weights[:, None] * (slopes[i] - slopes[j])
    return warm_start.theta, problem.penalty.project(alpha, problem.fused.edge_radius)
