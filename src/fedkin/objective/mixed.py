"""Terms put together: devices with different losses, and groups of devices that share one parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fedkin._base import Array, Index
from fedkin.objective.linalg import solve_and_rest, sum_groups
from fedkin.objective.quadratic import QuadraticTerms
from fedkin.objective.terms import DeviceTerms, ball_gap


class MixedTerms(DeviceTerms):
    """Devices of several kinds: ``parts`` are (devices, terms) that together cover ``0 .. V-1``."""

    def __init__(self, parts: Sequence[tuple[Index, DeviceTerms]]) -> None:
        self.parts = tuple(parts)
        self.n_devices = sum(devices.size for devices, _ in self.parts)
        self.n_params = self.parts[0][1].n_params

    def _gather(self, shape: tuple[int, ...], piece: Callable[[Index, DeviceTerms], Array]) -> Array:
        out = np.empty((self.n_devices, *shape))
        for devices, terms in self.parts:
            out[devices] = piece(devices, terms)
        return out

    def values(self, theta: Array) -> Array:
        return self._gather((), lambda u, terms: terms.values(theta[u]))

    def gradients(self, theta: Array) -> Array:
        return self._gather((self.n_params,), lambda u, terms: terms.gradients(theta[u]))

    def hessians(self, theta: Array) -> Array:
        return self._gather((self.n_params,) * 2, lambda u, terms: terms.hessians(theta[u]))

    def cautious_hessians(self, theta: Array) -> Array:
        return self._gather((self.n_params,) * 2, lambda u, terms: terms.cautious_hessians(theta[u]))

    def caution(self) -> tuple[Array, Array]:
        start = self._gather((), lambda u, terms: terms.caution()[0])
        return start, self._gather((), lambda u, terms: terms.caution()[1])

    def lower_bounds(self) -> Array:
        return self._gather((), lambda u, terms: terms.lower_bounds())

    def young_gaps(self, theta: Array, s: Array, radius: float = np.inf) -> Array:
        return self._gather((), lambda u, terms: terms.young_gaps(theta[u], s[u], radius))

    def take(self, devices: Index) -> DeviceTerms:
        place = np.full(self.n_devices, -1)
        place[devices] = np.arange(devices.size)
        parts = []
        for members, terms in self.parts:
            chosen = np.flatnonzero(place[members] >= 0)
            if chosen.size:
                parts.append((place[members[chosen]], terms.take(chosen)))
        return MixedTerms(parts)


class SummedTerms(DeviceTerms):
    """Groups of devices that share one parameter: ``M_g(theta) = sum of M_u(theta)`` over the group's devices."""

    def __init__(self, terms: DeviceTerms, labels: Index) -> None:
        self.terms, self.labels = terms, labels
        self.n_devices, self.n_params = int(labels.max()) + 1, terms.n_params

    def _sum(self, values: Array) -> Array:
        return sum_groups(values, self.labels, self.n_devices)

    def values(self, theta: Array) -> Array:
        return self._sum(self.terms.values(theta[self.labels]))

    def gradients(self, theta: Array) -> Array:
        return self._sum(self.terms.gradients(theta[self.labels]))

    def hessians(self, theta: Array) -> Array:
        return self._sum(self.terms.hessians(theta[self.labels]))

    def cautious_hessians(self, theta: Array) -> Array:
        return self._sum(self.terms.cautious_hessians(theta[self.labels]))

    def caution(self) -> tuple[Array, Array]:
        start, least = np.zeros(self.n_devices), np.zeros(self.n_devices)
        for total, own in zip((start, least), self.terms.caution(), strict=True):
            np.maximum.at(total, self.labels, own)
        return start, least

    def lower_bounds(self) -> Array:
        return self._sum(self.terms.lower_bounds())

    def young_gaps(self, theta: Array, s: Array, radius: float = np.inf) -> Array:
        # any split of s over a group's devices bounds its conjugate: each takes what balances it, and its curvature's
        # share of the rest
        own = theta[self.labels]
        gradients, hessians = self.terms.gradients(own), self.terms.hessians(own)
        u, rest = solve_and_rest(self._sum(hessians), self._sum(gradients) + s)
        shares = np.einsum("vij,vj->vi", hessians, u[self.labels])
        gaps = self._sum(self.terms.young_gaps(own, shares - gradients, radius))
        return np.asarray(gaps + ball_gap(rest, theta, radius))

    def take(self, devices: Index) -> DeviceTerms:
        raise NotImplementedError("groups are not taken apart")


def summed_terms(terms: DeviceTerms, labels: Index) -> DeviceTerms:
    """The terms of groups whose devices share one parameter; ``labels (V,)`` number the groups from 0."""
    if not isinstance(terms, QuadraticTerms):
        return SummedTerms(terms, labels)
    groups = int(labels.max()) + 1
    A, b, c = (sum_groups(values, labels, groups) for values in (terms.A, terms.b, terms.c))
    return QuadraticTerms(A, b, c)
