"""Expand site losses to second order for Newton's method, and profile out unpenalised parameters.

Parameters without an edge penalty, such as intercepts, are profiled out. For a quadratic loss, the minimum over some
parameters is a quadratic in the rest (a Schur complement); for other losses it is found by Newton's method
(`ProfiledTerms`). Values, duals and certificates are those of the full objective.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.core import (
    FusedObjective,
    Problem,
    QuadraticTerms,
    SiteTerms,
    Solution,
    damped_newton,
)
from fedkin.errors import ParameterError, SolverError, argument
from fedkin.graph import Graph

#: Shares of the quadratic part: a model with a larger error is trusted less, one with a smaller error more.
POOR, GOOD = 0.5, 0.1
#: Caution rises at least to this, and beyond the last number there is nothing to gain.
RAISED, HOPELESS = 0.1, 1e8
#: Share of the mean curvature added in all directions to a model that is flat in some direction.
CURB = 1e-5


@dataclass(frozen=True, eq=False)
class Expansion:
    """Second-order expansion of ``M_u`` around ``theta (V, p)``, with both the Hessian and a cautious Hessian."""

    terms: SiteTerms
    theta: Array

    @cached_property
    def values(self) -> Array:
        return self.terms.values(self.theta)

    @cached_property
    def gradients(self) -> Array:
        return self.terms.gradients(self.theta)

    @cached_property
    def hessians(self) -> Array:
        return self.terms.hessians(self.theta)

    @cached_property
    def cautious(self) -> Array:
        return self.terms.cautious_hessians(self.theta)

    def model(self, caution: Array) -> QuadraticTerms:
        """Return the model with this share ``(V,)`` of the cautious Hessian, or a multiple of it above 1."""
        A = self.hessians.copy()
        wary = caution > 0
        if wary.any():
            share = caution[wary, None, None]
            A[wary] = np.maximum(1.0 - share, 0.0) * A[wary] + share * self.cautious[wary]
        model = self._quadratic(A)
        if model.singular.any():
            # where a model is flat, nothing but a ball certifies it, and slowly: curb steps there instead
            bad, one = model.singular, np.eye(self.terms.n_params)
            A[bad] += (CURB * np.einsum("vii->v", A[bad]) / self.terms.n_params)[:, None, None] * one
            model = self._quadratic(A)
        return model

    def _quadratic(self, A: Array) -> QuadraticTerms:
        b = np.einsum("vij,vj->vi", A, self.theta) - self.gradients
        return QuadraticTerms(A, b, np.zeros(self.terms.n_sites))

    def compare(self, model: QuadraticTerms, target: Expansion) -> tuple[Array, Array, Array]:
        """Return the model's change to the target, linear and quadratic part, and the excess change of ``M_u``."""
        step = target.theta - self.theta
        linear = np.einsum("vp,vp->v", self.gradients, step)
        quadratic = 0.5 * np.einsum("vp,vp->v", step, model.apply(step))
        with np.errstate(over="ignore", invalid="ignore"):
            true = target.values - self.values
        return linear, quadratic, np.where(np.isfinite(true), true - (linear + quadratic), np.inf)


def raised(caution: Array, error: Array, quadratic: Array) -> Array:
    """Increase caution for sites whose models were too low, at least for the worst of them."""
    poor = error > POOR * quadratic
    poor[error.argmax()] = True
    return np.where(poor, np.maximum(10.0 * caution, RAISED), caution)


def lowered(caution: Array, error: Array, quadratic: Array, least: Array) -> Array:
    """Decrease caution for sites whose models were accurate, quadratically in the end."""
    less = np.where(caution > RAISED, 0.1 * caution, np.minimum(0.1 * caution, caution**2))
    less = np.where(less < 1e-8, 0.0, less)
    return np.where(error <= GOOD * quadratic, np.maximum(less, least), caution)


def raise_if_not_finite(graph: Graph, values: Array, what: str) -> None:
    """Raise `SolverError` for the first site whose ``values (V,)`` or ``(V, ...)`` are not all finite."""
    bad = ~np.isfinite(values.reshape(graph.n_sites, -1)).all(axis=1)
    if bad.any():
        raise SolverError(
            f"the {what} of site {graph.sites[int(bad.argmax())]!r} is not finite; scale its features and offsets "
            "down, or check the functions of a custom loss"
        )


def raise_if_unbounded(objective: FusedObjective, before: Expansion, at: Expansion) -> None:
    """Raise an error if the last step followed a direction in which a likelihood keeps losing curvature."""
    if objective.radius is not None:  # no parameters leave the ball
        return
    graph = objective.graph
    # without a maximum, the supremum is approached exponentially: gaps vanish, but Newton steps do not shrink
    step = at.theta - before.theta
    moving = np.linalg.norm(step, axis=1) > 1e-3 * np.linalg.norm(at.theta, axis=1)
    # other losses may be flat anywhere
    moving &= at.terms.caution()[1] == 0
    if not moving.any():
        return

    def along(hessians: Array) -> Array:
        return np.asarray(np.einsum("vp,vpq,vq->v", step, hessians, step))

    now, at_zero = along(at.hessians), along(at.terms.hessians(np.zeros_like(step)))
    lost = moving & (now < 1e-6 * at_zero) & (now < 0.6 * along(before.hessians))
    if not lost.any():
        return
    first, labels = int(lost.argmax()), graph.components()
    kin = labels == labels[first]
    who, hint = f"the parameters of site {graph.sites[first]!r}", f"add {argument('ridge', 1e-3)} or so"
    if not lost[kin].all():
        hint += ", or connect the site to others with a larger lam"
    elif kin.sum() > 1:
        who += " and of all sites it is connected to"
    raise SolverError(
        f"{who} diverge: the objective has no finite minimiser there (separable classes, all-zero counts); {hint}"
    )


def raise_if_no_descent(graph: Graph, values: Array, linear: Array, error: Array) -> None:
    """Raise an error if a short step changes a site's loss by ``error (V,)`` more than its gradient predicts."""
    wrong = (error > 0.25 * np.abs(linear)) & (error > 1e-11 * np.abs(values))
    if wrong.any():
        raise SolverError(
            f"the loss of site {graph.sites[int(wrong.argmax())]!r} does not decrease as its gradient "
            "predicts, even for short steps: check that the loss is convex and that gradient_fn matches value_fn"
        )


# --- parameters that are profiled out ---------------------------------------------------------------------------------

#: Share of the upper bound on the Hessian that Newton's method adds where the Hessian may be 0.
WARY = 0.1
#: A parameter whose curvature falls below this share of the initial one has no finite minimiser.
VANISHED = 1e-12


@dataclass(frozen=True, eq=False)
class Lift:
    """Optimal free parameters ``(V, f)`` of each site given the others: ``start - slope @ rest``."""

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
    """Return the minimum over the ``free (p,)`` parameters as a function of the others, with the minimiser."""
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

    Gaps are those of the full objective, even if Newton's method leaves the free parameters slightly off their optimum.
    """

    def __init__(self, terms: SiteTerms, free: Mask) -> None:
        self.terms, self.free = terms, free
        self.n_sites, self.n_params = terms.n_sites, int((~free).sum())
        self._last: tuple[Array, Array] | None = None

    @cached_property
    def start(self) -> Array:
        """Optimal free parameters ``(V, f)`` if all others are 0."""
        return self._best(np.zeros((self.n_sites, self.free.size)))

    def diverging(self) -> Mask:
        """Return the mask ``(V,)`` of sites whose free parameters have no finite optimum."""
        theta = np.zeros((self.n_sites, self.free.size))
        before = np.linalg.eigvalsh(self.terms.hessian_blocks(theta, self.free))[:, 0]
        theta[:, self.free] = self.start
        now = np.linalg.eigvalsh(self.terms.hessian_blocks(theta, self.free))[:, 0]
        # other losses may be flat where they please
        return np.asarray((now < VANISHED * before) & (self.terms.caution()[1] == 0))

    def __call__(self, rest: Array) -> Array:
        """Return all parameters ``(V, p)`` for ``rest (V, p - f)``."""
        last = self._last  # one point is evaluated several times
        if last is not None and np.array_equal(last[0], rest):
            return last[1]
        theta = np.empty((len(rest), self.free.size))
        theta[:, ~self.free], theta[:, self.free] = rest, self.start
        theta[:, self.free] = self._best(theta)
        self._last = rest.copy(), theta
        return theta

    def _best(self, theta: Array) -> Array:
        """Return the optimal free parameters ``(V, f)``, starting from ``theta (V, p)``."""
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
    """Return the Schur complements of ``matrices (V, p, p)`` for the other parameters."""
    cross, block = matrices[:, free][:, :, ~free], matrices[:, free][:, :, free]
    # Hessians that may be 0 (Huber) are then those of the parameters alone
    regular = np.linalg.eigvalsh(block)[:, 0] > 0
    out = matrices[:, ~free][:, :, ~free].copy()
    cross = cross[regular]
    out[regular] -= np.swapaxes(cross, 1, 2) @ np.linalg.solve(block[regular], cross)
    return out


def profiled(terms: SiteTerms, free: Mask, sites: Sequence[Hashable]) -> tuple[SiteTerms, Lift | ProfiledTerms]:
    """Return the minimum over the ``free (p,)`` parameters as a function of the others, with the minimiser."""
    if isinstance(terms, QuadraticTerms):
        return minimised_out(terms, free)
    made = ProfiledTerms(terms, free)
    lost = made.diverging()
    if lost.any():
        others = f" and {lost.sum() - 1} others" if lost.sum() > 1 else ""
        raise SolverError(
            f"the intercept of site {sites[int(lost.argmax())]!r}{others} has no finite minimiser without an edge "
            f"penalty (one class only, all-zero counts); add {argument('ridge', 1e-3)} or so, or omit "
            f"{argument('fuse_intercept')}"
        )
    return made, made


@dataclass(frozen=True, eq=False)
class ProfiledProblem(Problem):
    """Problem in the other parameters than the ``free (p,)`` ones, which have no edge penalty and are profiled out."""

    free: Mask = field(default_factory=lambda: np.zeros(0, dtype=bool), repr=False)
    profile: tuple[SiteTerms, Lift | ProfiledTerms] = field(default=None, repr=False)  # type: ignore[assignment]

    @classmethod
    def from_problem(cls, problem: Problem, free: Mask) -> ProfiledProblem:
        """Profile the ``free (p,)`` parameters out of a problem."""
        if problem.radius is not None:
            raise ParameterError(
                f"a ball constrains all parameters of a site together, so none can be left unpenalised: "
                f"omit {argument('fuse_intercept')} or {argument('radius', problem.radius)}"
            )
        sparsity, profile = problem.fused.sparsity, profiled(problem.terms, free, problem.graph.sites)
        given = {item.name: getattr(problem, item.name) for item in fields(Problem)}
        given["sparsity"] = 0.0 if sparsity is None else sparsity[:, ~free]
        return cls(**given, free=free, profile=profile)

    @property
    def n_params(self) -> int:
        return int((~self.free).sum())

    @property
    def terms(self) -> SiteTerms:
        return self.profile[0]

    def lifted(self, solution: Solution) -> Solution:
        """Extend a solution to all parameters; the duals of the free ones are 0."""
        alpha = np.zeros((len(solution.alpha), self.free.size))
        alpha[:, ~self.free] = solution.alpha
        return replace(solution, theta=self.profile[1](solution.theta), alpha=alpha)
