"""Quadratic models of the sites' losses at a point, how far each can be trusted, and what can go wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedkin._base import Array
from fedkin.core import FusedObjective, QuadraticTerms, SiteTerms
from fedkin.errors import SolverError, argument
from fedkin.graph import Graph

#: A model is trusted less when it misses by this share of its quadratic part, and more when by at most that one.
POOR, GOOD = 0.5, 0.1
#: Caution rises at least to this, and beyond the last number there is nothing to gain.
RAISED, HOPELESS = 0.1, 1e8
#: What slows the solver down: sizes of features that differ by more than this factor, and Gram matrices (in units of
#: their diagonals) with a larger condition number than this.
UNEVEN, COLLINEAR = 1e3, 1e6
#: Share of its mean curvature that a model gets in all directions where it is flat in some.
CURB = 1e-5
#: Hessians with more entries than this are not looked at.
ROOM = 20_000_000


@dataclass(frozen=True, eq=False)
class Expansion:
    """Second-order expansion of ``M_u`` around ``theta (V, p)``, with a cautious Hessian beside the Hessian."""

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
        """Return the model with that share ``(V,)`` of the cautious Hessian; above 1, with a multiple of it."""
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
        """Return the model's change to the target, linear and quadratic part, and how much more ``M_u`` changes."""
        step = target.theta - self.theta
        linear = np.einsum("vp,vp->v", self.gradients, step)
        quadratic = 0.5 * np.einsum("vp,vp->v", step, model.apply(step))
        with np.errstate(over="ignore", invalid="ignore"):
            true = target.values - self.values
        return linear, quadratic, np.where(np.isfinite(true), true - (linear + quadratic), np.inf)


def raised(caution: Array, error: Array, quadratic: Array) -> Array:
    """Return more caution for the sites whose models were too low, at least for the worst of them."""
    poor = error > POOR * quadratic
    poor[error.argmax()] = True
    return np.where(poor, np.maximum(10.0 * caution, RAISED), caution)


def lowered(caution: Array, error: Array, quadratic: Array, least: Array) -> Array:
    """Return less caution for the sites whose models were right, quadratically less in the end."""
    less = np.where(caution > RAISED, 0.1 * caution, np.minimum(0.1 * caution, caution**2))
    less = np.where(less < 1e-8, 0.0, less)
    return np.where(error <= GOOD * quadratic, np.maximum(less, least), caution)


def advice(objective: FusedObjective, theta: Array) -> str:
    """Return what helps where the iteration limit came first, given the parameters ``theta (V, p)`` that were found."""
    cures = []
    if theta.shape[0] * theta.shape[1] ** 2 <= ROOM:
        hessians = objective.terms.hessians(theta)
        diagonal = np.sqrt(np.einsum("vii->vi", hessians).clip(np.finfo(float).tiny))
        sizes = diagonal.mean(axis=0)
        if sizes.max() > UNEVEN * sizes.min():
            cures.append(f"standardise the features, whose sizes differ by a factor of {sizes.max() / sizes.min():.0e}")
        values = np.linalg.eigvalsh(hessians / (diagonal[:, :, None] * diagonal[:, None, :]))
        poor = values[:, 0] * COLLINEAR < values[:, -1]
        if poor.any():
            site = objective.graph.sites[int(poor.argmax())]
            who = f"site {site!r} and {poor.sum() - 1} others" if poor.sum() > 1 else f"site {site!r}"
            cures.append(f"drop features or add a small ridge (features of {who} are nearly collinear)")
    return ", ".join([*cures, "raise max_iter" if not cures else "or raise max_iter"])


def raise_if_not_finite(graph: Graph, values: Array, what: str) -> None:
    """Raise `SolverError` for the first site whose ``values (V,)`` or ``(V, ...)`` are not all finite."""
    bad = ~np.isfinite(values.reshape(graph.n_sites, -1)).all(axis=1)
    if bad.any():
        raise SolverError(
            f"the {what} of site {graph.sites[int(bad.argmax())]!r} is not finite; scale its features and offsets "
            "down, or check the functions of a custom loss"
        )


def raise_if_unbounded(objective: FusedObjective, before: Expansion, at: Expansion) -> None:
    """Raise when the last step ran along a direction in which a likelihood keeps losing curvature."""
    if objective.radius is not None:  # no parameters leave the ball
        return
    graph = objective.graph
    # one without a maximum nears its supremum exponentially: gaps vanish, but Newton's steps do not get shorter
    step = at.theta - before.theta
    moving = np.linalg.norm(step, axis=1) > 1e-3 * np.linalg.norm(at.theta, axis=1)
    # other losses may be flat where they please
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
    who, cure = f"the parameters of site {graph.sites[first]!r}", f"add {argument('ridge', 1e-3)} or so"
    if not lost[kin].all():
        cure += ", or connect the site to others with a larger lam"
    elif kin.sum() > 1:
        who += " and of all sites it is connected to"
    raise SolverError(
        f"{who} run away: the objective has no finite minimiser there (separable classes, all-zero counts); {cure}"
    )


def raise_if_no_descent(graph: Graph, values: Array, linear: Array, error: Array) -> None:
    """Raise when a short step changes a site's loss by ``error (V,)`` more than its gradient says, ``linear``."""
    wrong = (error > 0.25 * np.abs(linear)) & (error > 1e-11 * np.abs(values))
    if wrong.any():
        raise SolverError(
            f"the loss of site {graph.sites[int(wrong.argmax())]!r} does not fall as its gradient says, however "
            "short the step: check that the loss is convex, and its gradient_fn against value_fn"
        )
