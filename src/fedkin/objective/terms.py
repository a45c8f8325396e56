"""The devices' mean losses as functions of the stacked parameters ``theta (V, p)``.

Everything that a solver or a certificate needs of the data is here, vectorised over devices: values, gradients,
Hessians and the Fenchel-Young gap ``M_u(theta_u) + M_u*(-s_u) + <s_u, theta_u>``, a device's share of a duality gap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from fedkin.data import Federation, Rows
from fedkin.losses import Loss, RowLoss, by_loss, weighted_gram

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Eigenvalues of a matrix with unit diagonal below this share of the largest one count as zero.
RANK_TOLERANCE = 1e-10
#: Pivots of a Cholesky factor above this are far from those of singular matrices.
SAFE_PIVOT = 1e-3
#: Share of the cautious Hessian where the Hessian itself may vanish in directions in which the gradient does not.
LEAST_CAUTION = 1e-6


class DeviceTerms(ABC):
    """Mean losses of V devices, each a convex function on R^p."""

    n_devices: int
    n_params: int

    @abstractmethod
    def values(self, theta: Array) -> Array:
        """``M_u(theta_u)``, shape ``(V,)``."""

    @abstractmethod
    def gradients(self, theta: Array) -> Array:
        """Shape ``(V, p)``."""

    @abstractmethod
    def hessians(self, theta: Array) -> Array:
        """Shape ``(V, p, p)``."""

    def cautious_hessians(self, theta: Array) -> Array:
        """Matrices ``(V, p, p)`` of quadratic models at ``theta`` that can be trusted farther away than Hessians."""
        return self.hessians(theta)

    def caution(self) -> tuple[Array, Array]:
        """Shares ``(V,)`` of the cautious Hessians that Newton's method begins with, and that it should always keep."""
        return np.zeros(self.n_devices), np.zeros(self.n_devices)

    def lower_bounds(self) -> Array:
        """Numbers ``(V,)`` that ``M_u`` never falls below, minus infinity where none is known."""
        return np.full(self.n_devices, -np.inf)

    @abstractmethod
    def young_gaps(self, theta: Array, s: Array, radius: float = np.inf) -> Array:
        """Upper bounds ``(V,)`` on ``M_u(theta_u) + <s_u, theta_u> - min_v (M_u(v) + <s_u, v>)``.

        The minimum is over v in the ball of that ``radius``. Without one, a device is infinite when its minimum is not
        finite (a residual outside the range of a singular design), or when no bound was found.
        """

    @abstractmethod
    def take(self, devices: Index) -> DeviceTerms:
        """The terms of some devices, in that order."""


class QuadraticTerms(DeviceTerms):
    """``M_u(theta) = theta' A_u theta / 2 - b_u' theta + c_u``.

    Parameters
    ----------
    A : array (V, p, p), or (V,) when every ``A_u`` is a multiple of the identity
    b : array (V, p)
    c : array (V,)
    """

    def __init__(self, A: Array, b: Array, c: Array) -> None:
        self.A, self.b, self.c = A, b, c
        #: What solvers worked out from the matrices and may use again.
        self.shared: dict[str, Array] = {}
        self.isotropic = A.ndim == 1
        self.n_devices, self.n_params = b.shape

    def apply(self, theta: Array) -> Array:
        """``A_u theta_u``, shape ``(V, p)``."""
        if self.isotropic:
            return self.A[:, None] * theta
        return np.asarray(np.matmul(self.A, theta[:, :, None])[:, :, 0])

    def values(self, theta: Array) -> Array:
        return np.asarray(((0.5 * self.apply(theta) - self.b) * theta).sum(axis=1) + self.c)

    def gradients(self, theta: Array) -> Array:
        return self.apply(theta) - self.b

    def hessians(self, theta: Array) -> Array:
        if self.isotropic:
            return self.A[:, None, None] * np.eye(self.n_params)
        return self.A

    @cached_property
    def mean_curvature(self) -> Array:
        """Mean diagonal of the matrices, ``(p,)``."""
        if self.isotropic:
            return np.full(self.n_params, self.A.mean())
        return np.asarray(np.einsum("vii->i", self.A) / self.n_devices)

    @cached_property
    def typical_size(self) -> float:
        """How large the parameters are that devices would have on their own, roughly."""
        curvature = max(float(self.mean_curvature.mean()), np.finfo(float).tiny)
        return float(np.abs(self.b).max(initial=0.0)) / curvature

    def resolvent(self, weight: Array) -> Callable[[Array], Array]:
        """The map ``v -> (A_u + diag(weight_u))^{-1} v_u`` for positive ``weight (V, p)``."""
        if self.isotropic:
            scale = 1.0 / (self.A[:, None] + weight)
            return lambda v: v * scale
        shifted = self.A.copy()
        diagonal = np.arange(self.n_params)
        shifted[:, diagonal, diagonal] += weight
        inverse = np.linalg.inv(shifted)
        return lambda v: np.asarray(np.matmul(inverse, v[:, :, None])[:, :, 0])

    @cached_property
    def _inverse(self) -> tuple[Array, NDArray[np.bool_]]:
        if self.isotropic:
            inverse = np.divide(1.0, self.A, out=np.zeros_like(self.A), where=self.A > 0)
            return inverse, np.asarray(self.A <= 0)
        return generalized_inverse(self.A)

    @property
    def singular(self) -> NDArray[np.bool_]:
        """Devices whose minimiser is not unique, ``(V,)``."""
        return self._inverse[1]

    def minimizers(self) -> Array:
        """Each device's own minimiser (the shortest one in standardised units where it is not unique), ``(V, p)``."""
        return self._solve(self.b)

    def _solve(self, v: Array) -> Array:
        inverse = self._inverse[0]
        if self.isotropic:
            return inverse[:, None] * v
        return np.asarray(np.matmul(inverse, v[:, :, None])[:, :, 0])

    def lower_bounds(self) -> Array:
        return self.values(self.minimizers())

    def young_gaps(self, theta: Array, s: Array, radius: float = np.inf) -> Array:
        residual = self.gradients(theta) + s
        step = self._solve(residual)
        gaps = 0.5 * np.einsum("vp,vp->v", residual, step)
        bad = self.singular
        if bad.any():
            left = residual[bad] - self.apply(step)[bad]
            gaps[bad] += _ball_gap(left, theta[bad], radius)
        return np.asarray(gaps)

    def take(self, devices: Index) -> QuadraticTerms:
        return QuadraticTerms(self.A[devices], self.b[devices], self.c[devices])


@dataclass(frozen=True)
class RowBlock:
    """Devices ``(B,)`` with the same number of rows, and these: ``X (B, n, q)``, ``y (B, n)``, ``offset (B, n)``."""

    devices: Index
    rows: Rows


def row_blocks(federation: Federation, devices: Index) -> tuple[RowBlock, ...]:
    """Devices grouped by their number of rows, so that linear algebra runs on whole blocks."""
    sizes = federation.n_samples[devices]
    blocks = []
    for size in np.unique(sizes):
        members = devices[sizes == size]
        rows = (federation.starts[members][:, None] + np.arange(size)).reshape(-1)
        contiguous = rows.size > 0 and bool((np.diff(rows) == 1).all())
        where = slice(int(rows[0]), int(rows[-1]) + 1) if contiguous else rows
        shape = (members.size, int(size))

        def fold(array: Array, shape: tuple[int, int] = shape) -> Array:
            return array.reshape(*shape, *array.shape[1:])

        blocks.append(RowBlock(members, federation.rows.take(where).map(fold)))
    return tuple(blocks)


class RowTerms(DeviceTerms):
    """Mean losses that see rows through linear predictors (generalised linear models), with an optional ridge.

    Parameters
    ----------
    loss : RowLoss
    blocks : sequence of RowBlock
        Together they cover devices ``0 .. V-1``.
    ridge : array (p,)
        Adds ``sum_c ridge_c theta_c^2 / 2`` to each device.
    """

    def __init__(self, loss: RowLoss, blocks: Sequence[RowBlock], ridge: Array) -> None:
        self.loss, self.blocks, self.ridge = loss, tuple(blocks), ridge
        self.n_devices = sum(block.devices.size for block in self.blocks)
        self.n_params = ridge.size

    def _predictors(self, block: RowBlock, theta: Array) -> Array:
        k = self.loss.n_outputs
        weights = theta[block.devices].reshape(block.devices.size, k, -1)
        eta = np.matmul(block.rows.X, np.swapaxes(weights, 1, 2))
        return np.asarray(eta if block.rows.offset is None else eta + block.rows.offset[:, :, None])

    def _targets(self, block: RowBlock) -> Array:
        assert block.rows.y is not None
        return block.rows.y

    def _back(self, block: RowBlock, slope: Array) -> Array:
        """Mean of ``slope (x) x`` over a device's rows, ``(B, p)``."""
        mean = np.matmul(np.swapaxes(slope, 1, 2), block.rows.X) / block.rows.X.shape[1]
        return np.asarray(mean).reshape(block.devices.size, -1)

    def values(self, theta: Array) -> Array:
        out = 0.5 * (theta**2) @ self.ridge
        for block in self.blocks:
            eta = self._predictors(block, theta)
            out[block.devices] += self.loss.value_at(eta, self._targets(block)).mean(axis=1)
        return np.asarray(out)

    def gradients(self, theta: Array) -> Array:
        out = theta * self.ridge
        for block in self.blocks:
            slope = self.loss.slope_at(self._predictors(block, theta), self._targets(block))
            out[block.devices] += self._back(block, slope)
        return out

    def hessians(self, theta: Array) -> Array:
        return self._grams(theta, self.loss.curvature_at)

    def cautious_hessians(self, theta: Array) -> Array:
        return self._grams(theta, self.loss.cautious_at)

    def caution(self) -> tuple[Array, Array]:
        bounded = bool(np.isfinite(self.loss.curvature_bound()))
        start = 0.0 if self.loss.strictly_convex and bounded else 1.0
        least = 0.0 if self.loss.strictly_convex else LEAST_CAUTION
        return np.full(self.n_devices, start), np.full(self.n_devices, least)

    def lower_bounds(self) -> Array:
        out = np.empty(self.n_devices)
        for block in self.blocks:
            y = self._targets(block)
            # a function is never below minus its conjugate at 0
            out[block.devices] = -self.loss.conjugate_at(np.zeros((*y.shape, self.loss.n_outputs)), y).mean(axis=1)
        return out

    def _grams(self, theta: Array, weights_at: Callable[[Array, Array], Array]) -> Array:
        out = np.empty((self.n_devices, self.n_params, self.n_params))
        for block in self.blocks:
            weights = weights_at(self._predictors(block, theta), self._targets(block))
            out[block.devices] = weighted_gram(block.rows.X, weights)
        diagonal = np.arange(self.n_params)
        out[:, diagonal, diagonal] += self.ridge
        return out

    def young_gaps(self, theta: Array, s: Array, radius: float = np.inf) -> Array:
        out = np.empty(self.n_devices)
        for block in self.blocks:
            out[block.devices] = self._block_gaps(block, theta, s[block.devices], radius)
        return out

    def _block_gaps(self, block: RowBlock, theta: Array, s: Array, radius: float) -> Array:
        # With a dual point a per row and t for the ridge, M*(X'a/n + t) <= mean m*(a) + t' ridge^-1 t / 2. The slopes
        # at theta and t = ridge theta make that tight but miss -s by the residual. Moving them by -W X u and -ridge u,
        # where (X'WX/n + ridge) u = residual, balances it; the Fenchel-Young sum at the moved point is the gap.
        y, own = self._targets(block), theta[block.devices]
        eta = self._predictors(block, theta)
        slope = self.loss.slope_at(eta, y)
        weights = self.loss.repair_at(eta, y)
        residual = self._back(block, slope) + own * self.ridge + s
        gram = weighted_gram(block.rows.X, weights)
        diagonal = np.arange(self.n_params)
        gram[:, diagonal, diagonal] += self.ridge
        u, left = _solve_and_rest(gram, residual)
        shift = np.matmul(block.rows.X, np.swapaxes(u.reshape(u.shape[0], self.loss.n_outputs, -1), 1, 2))
        a = slope - np.matmul(weights, shift[..., None])[..., 0]
        rows = self.loss.value_at(eta, y) + self.loss.conjugate_at(a, y) - (a * eta).sum(axis=-1)
        moved = np.maximum(rows.mean(axis=1), 0.0) + 0.5 * (u**2) @ self.ridge + _ball_gap(left, own, radius)
        # the slopes may leave the conjugate's domain: then move only the ridge's part, and charge the rest to the ball
        held = self.ridge > 0
        resting = 0.5 * (residual[:, held] ** 2) @ (1.0 / self.ridge[held])
        resting = resting + _ball_gap(np.where(held, 0.0, residual), own, radius)
        return np.asarray(np.minimum(moved, resting))

    def take(self, devices: Index) -> RowTerms:
        place = np.full(self.n_devices, -1)
        place[devices] = np.arange(devices.size)
        blocks = []
        for block in self.blocks:
            chosen = place[block.devices] >= 0
            blocks.append(RowBlock(place[block.devices[chosen]], block.rows.take(chosen)))
        return RowTerms(self.loss, [block for block in blocks if block.devices.size], self.ridge)


class LossTerms(DeviceTerms):
    """Mean losses given only as functions (`UserLoss`), one device after the other."""

    def __init__(self, federation: Federation, devices: Index, losses: Sequence[Loss], ridge: Array) -> None:
        ids = [federation.devices[u] for u in devices]
        self.rows = [federation[u] for u in ids]
        self.losses, self.ridge = tuple(losses), ridge
        self.n_devices, self.n_params = devices.size, ridge.size

    def values(self, theta: Array) -> Array:
        own = [loss.value(t, *rows.arrays) for loss, t, rows in zip(self.losses, theta, self.rows, strict=True)]
        return np.asarray(own + 0.5 * (theta**2) @ self.ridge)

    def gradients(self, theta: Array) -> Array:
        own = [loss.gradient(t, *rows.arrays) for loss, t, rows in zip(self.losses, theta, self.rows, strict=True)]
        return np.stack(own) + theta * self.ridge

    def hessians(self, theta: Array) -> Array:
        own = [loss.hessian(t, *rows.arrays) for loss, t, rows in zip(self.losses, theta, self.rows, strict=True)]
        return np.stack(own) + np.diag(self.ridge)

    def cautious_hessians(self, theta: Array) -> Array:
        hessians, gradients = self.hessians(theta), self.gradients(theta)
        # nothing is known but the derivatives: curb the step to about the length of theta
        size, steepness = np.linalg.norm(theta, axis=1), np.linalg.norm(gradients, axis=1)
        curb = np.maximum(np.einsum("vii->v", hessians) / self.n_params, steepness / (1.0 + size))
        return np.asarray(hessians + curb[:, None, None] * np.eye(self.n_params))

    def caution(self) -> tuple[Array, Array]:
        return np.ones(self.n_devices), np.full(self.n_devices, LEAST_CAUTION)

    def young_gaps(self, theta: Array, s: Array, radius: float = np.inf) -> Array:
        residual = self.gradients(theta) + s
        modulus = np.array([loss.strong_convexity for loss in self.losses]) + self.ridge.min()
        square = np.einsum("vp,vp->v", residual, residual)
        strong = np.divide(square, 2 * modulus, out=np.full(self.n_devices, np.inf), where=modulus > 0)
        return np.asarray(np.minimum(strong, _ball_gap(residual, theta, radius)))

    def take(self, devices: Index) -> LossTerms:
        part = object.__new__(LossTerms)
        part.rows = [self.rows[u] for u in devices]
        part.losses = tuple(self.losses[u] for u in devices)
        part.ridge, part.n_devices, part.n_params = self.ridge, devices.size, self.n_params
        return part


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
        u, rest = _solve_and_rest(self._sum(hessians), self._sum(gradients) + s)
        shares = np.einsum("vij,vj->vi", hessians, u[self.labels])
        gaps = self._sum(self.terms.young_gaps(own, shares - gradients, radius))
        return np.asarray(gaps + _ball_gap(rest, theta, radius))

    def take(self, devices: Index) -> DeviceTerms:
        raise NotImplementedError("groups are not taken apart")


def summed_terms(terms: DeviceTerms, labels: Index) -> DeviceTerms:
    """The terms of groups whose devices share one parameter; ``labels (V,)`` number the groups from 0."""
    if not isinstance(terms, QuadraticTerms):
        return SummedTerms(terms, labels)
    groups = int(labels.max()) + 1
    A, b, c = (sum_groups(values, labels, groups) for values in (terms.A, terms.b, terms.c))
    return QuadraticTerms(A, b, c)


def sum_groups(values: Array, labels: Index, groups: int) -> Array:
    """Sums of ``values (V, ...)`` over each group, ``(groups, ...)``, in the order of the devices."""
    # a sparse product: several times quicker than np.add.at
    members = sparse.csr_array((np.ones(labels.size), (labels, np.arange(labels.size))), shape=(groups, labels.size))
    return np.asarray(members @ values.reshape(labels.size, -1)).reshape(groups, *values.shape[1:])


def build_terms(federation: Federation, losses: Sequence[Loss], ridge: Array) -> DeviceTerms:
    """The terms of a federation: one kind per distinct loss, Gram statistics where the loss is quadratic.

    Parameters
    ----------
    federation : Federation
        Rows of V devices.
    losses : sequence of Loss
        One per device.
    ridge : array (p,)
        Adds ``sum_c ridge_c theta_c^2 / 2`` to each device.
    """
    parts = [(devices, _terms_of_kind(federation, devices, loss, ridge)) for devices, loss in by_loss(losses)]
    return parts[0][1] if len(parts) == 1 else MixedTerms(parts)


def _terms_of_kind(federation: Federation, devices: Index, loss: Loss, ridge: Array) -> DeviceTerms:
    if not loss.quadratic and loss.rowwise is None:
        return LossTerms(federation, devices, [loss] * devices.size, ridge)
    place = np.full(federation.n_devices, -1)
    place[devices] = np.arange(devices.size)
    blocks = [RowBlock(place[b.devices], b.rows) for b in row_blocks(federation, devices)]
    if loss.quadratic:
        return _quadratic_terms(loss, blocks, devices.size, ridge)
    assert loss.rowwise is not None
    return RowTerms(loss.rowwise, blocks, ridge)


def _quadratic_terms(loss: Loss, blocks: Sequence[RowBlock], n_devices: int, ridge: Array) -> QuadraticTerms:
    p, even = ridge.size, bool((ridge == ridge[:1]).all())
    A, b, c = np.empty(0), np.empty((n_devices, p)), np.empty(n_devices)
    for block in blocks:
        matrices, b[block.devices], c[block.devices] = loss.quadratic_terms(*block.rows.arrays)
        if matrices.ndim == 1 and not even:
            matrices = matrices[:, None, None] * np.eye(p)
        if not A.size:
            A = np.empty((n_devices, *matrices.shape[1:]))
        A[block.devices] = matrices
    if A.ndim == 1:
        A += ridge[0]
    else:
        diagonal = np.arange(p)
        A[:, diagonal, diagonal] += ridge
    return QuadraticTerms(A, b, c)


def _ball_gap(left: Array, theta: Array, radius: float) -> Array:
    """Bound ``<left, theta> + radius * |left|`` on what an unbalanced direction may cost, 0 where nothing is left."""
    size = np.sqrt(np.einsum("vp,vp->v", left, left))
    if not np.isfinite(radius):
        return np.where(size > 0, np.inf, 0.0)
    return np.asarray(np.einsum("vp,vp->v", left, theta) + radius * size)


def generalized_inverse(matrices: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Generalised inverses ``G_u (V, p, p)`` of semi-definite matrices, and which of these are singular ``(V,)``.

    ``A G A = A`` and ``G A G = G`` up to directions that count as zero. They are Moore-Penrose inverses in the units in
    which ``A`` has unit diagonal, so that the units of the features do not matter.
    """
    scaled, scale = _unit_diagonal(matrices)
    singular = np.zeros(len(matrices), dtype=bool)
    try:
        inverse = np.linalg.inv(scaled)
        size = np.linalg.norm(scaled, axis=(1, 2)) * np.linalg.norm(inverse, axis=(1, 2))
        poor = ~(size < 0.1 / RANK_TOLERANCE)  # NaN counts as poor
    except np.linalg.LinAlgError:
        inverse, poor = np.empty_like(scaled), np.ones(len(matrices), dtype=bool)
    if poor.any():
        values, vectors = np.linalg.eigh(scaled[poor])
        kept = values > RANK_TOLERANCE * np.maximum(values[:, -1:], np.finfo(float).tiny)
        roots = np.divide(1.0, values, out=np.zeros_like(values), where=kept)
        inverse[poor] = np.matmul(vectors * roots[:, None, :], np.swapaxes(vectors, 1, 2))
        singular[poor] = ~kept.all(axis=1)
    return np.asarray(inverse / (scale[:, :, None] * scale[:, None, :])), singular


def _solve_and_rest(matrices: Array, v: Array) -> tuple[Array, Array]:
    """``A_u^- v_u`` and the part of ``v_u`` outside the range of ``A_u``, both ``(V, p)``."""
    scaled, scale = _unit_diagonal(matrices)
    if _surely_regular(scaled):
        return np.asarray(np.linalg.solve(scaled, (v / scale)[:, :, None])[:, :, 0] / scale), np.zeros_like(v)
    inverse, singular = generalized_inverse(matrices)
    solution = np.matmul(inverse, v[:, :, None])[:, :, 0]
    rest = np.zeros_like(v)
    rest[singular] = v[singular] - np.matmul(matrices[singular], solution[singular, :, None])[:, :, 0]
    return np.asarray(solution), rest


def _unit_diagonal(matrices: Array) -> tuple[Array, Array]:
    """``matrices (V, p, p)`` scaled to a unit diagonal, and the scale ``(V, p)`` (1 for zeros on the diagonal)."""
    diagonal = np.einsum("vii->vi", matrices)
    scale = np.sqrt(np.where(diagonal > 0, diagonal, 1.0))
    return np.asarray(matrices / (scale[:, :, None] * scale[:, None, :])), scale


def _surely_regular(scaled: Array) -> bool:
    """Whether all pivots of the matrices with unit diagonal are far from 0: a Cholesky factor is cheap to look at."""
    try:
        pivots = np.einsum("vii->vi", np.linalg.cholesky(scaled))
    except np.linalg.LinAlgError:
        return False
    return bool(pivots.min(initial=1.0) > SAFE_PIVOT)
