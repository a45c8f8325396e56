"""Quadratic models of the devices' losses at a point, and how far each of them can be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedkin._base import Array
from fedkin.objective import DeviceTerms, QuadraticTerms

#: A model is trusted less when it misses by this share of its quadratic part, and more when by at most that one.
POOR, GOOD = 0.5, 0.1
#: Caution rises at least to this, and beyond the last number there is nothing to gain.
RAISED, HOPELESS = 0.1, 1e8


@dataclass(frozen=True, eq=False)
class Expansion:
    """Second-order expansion of ``M_u`` around ``theta``, with a cautious Hessian beside the Hessian.

    Attributes
    ----------
    terms : DeviceTerms
    theta : array (V, p)
    """

    terms: DeviceTerms
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
        """The model with that share ``(V,)`` of the cautious Hessian; above 1, with a multiple of it."""
        A = self.hessians.copy()
        wary = caution > 0
        if wary.any():
            share = caution[wary, None, None]
            A[wary] = np.maximum(1.0 - share, 0.0) * A[wary] + share * self.cautious[wary]
        b = np.einsum("vij,vj->vi", A, self.theta) - self.gradients
        return QuadraticTerms(A, b, np.zeros(self.terms.n_devices))

    def compare(self, model: QuadraticTerms, target: Expansion) -> tuple[Array, Array, Array]:
        """The model's change from here to the target, linear and quadratic part, and how much more ``M_u`` changes."""
        step = target.theta - self.theta
        linear = np.einsum("vp,vp->v", self.gradients, step)
        quadratic = 0.5 * np.einsum("vp,vp->v", step, model.apply(step))
        with np.errstate(over="ignore", invalid="ignore"):
            true = target.values - self.values
        return linear, quadratic, np.where(np.isfinite(true), true - (linear + quadratic), np.inf)


def raised(caution: Array, error: Array, quadratic: Array) -> Array:
    """More caution for the devices whose models were too low, at least for the worst of them."""
    poor = error > POOR * quadratic
    poor[error.argmax()] = True
    return np.where(poor, np.maximum(10.0 * caution, RAISED), caution)


def lowered(caution: Array, error: Array, quadratic: Array, least: Array) -> Array:
    """Less caution for the devices whose models were right, quadratically less in the end."""
    less = np.where(caution > RAISED, 0.1 * caution, np.minimum(0.1 * caution, caution**2))
    less = np.where(less < 1e-8, 0.0, less)
    return np.where(error <= GOOD * quadratic, np.maximum(less, least), caution)
