"""`QuadraticLikelihoods`: losses as quadratics around 0, and the units in which one prior suits all coefficients."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.kin.matrices import Dense, LowRank, Matrices, low_rank

#: A column whose variance is below this share of its mean square is constant.
CONSTANT = 1e-10


@dataclass(frozen=True, eq=False)
class QuadraticLikelihoods:
    """Losses of V sites, ``theta'G_u theta / 2 - c_u'theta + yy_u / 2``, each a sum over the rows of a site.

    Least squares is one: ``G = X'X``, ``c = X'y``, ``yy = y'y``. A smooth loss is expanded at a point: ``G`` is its
    Hessian there and ``c = G at - gradient``. Nothing here is ever inverted: ``G_u`` may be singular, even zero.

    Attributes
    ----------
    G : array (V, p, p)
    c : array (V, p)
    yy : array (V,)
    n : array (V,)
        Numbers behind the noise: rows, or rows times columns for the mean loss.
    known : LowRank, optional
        ``G`` as diagonal plus low rank, where sites have said it so.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.kin import QuadraticLikelihoods
    >>> one = QuadraticLikelihoods(np.array([[[2.0]]]), np.array([[3.0]]), np.array([5.0]), np.array([2.0]))
    >>> one.values(np.array([[1.5]])).tolist()
    [0.25]
    """

    G: Array
    c: Array
    yy: Array
    n: Array
    known: LowRank | None = field(default=None, repr=False)

    @cached_property
    def matrices(self) -> Matrices:
        """``G``, as diagonal plus low rank where that pays."""
        return self.known or low_rank(self.G, int(self.n.max(initial=0.0))) or Dense(self.G)

    @property
    def n_sites(self) -> int:
        return len(self.c)

    @property
    def n_params(self) -> int:
        return int(self.c.shape[1])

    def values(self, theta: Array) -> Array:
        """Return the losses ``(V,)`` at ``theta (V, p)``."""
        return np.asarray(((0.5 * apply(self.G, theta) - self.c) * theta).sum(axis=1) + 0.5 * self.yy)

    def take(self, sites: Index) -> QuadraticLikelihoods:
        """Return some sites, in that order."""
        known = None if self.known is None else self.known.take(sites)
        return QuadraticLikelihoods(self.G[sites], self.c[sites], self.yy[sites], self.n[sites], known)


@dataclass(frozen=True, eq=False)
class Units:
    """The way between the user's parameters and those that are fitted: ``theta = A fitted + shift``.

    Features are centred (where there is an intercept to take up the means) and scaled, and a target that has a scale
    is divided by it, all over the rows of all sites: which follows from sums.
    """

    A: Array  # (p, p), the target's scale included
    shift: Array  # (p,)
    target: float  # scale of the target; 1 for losses with units of their own

    def fitted(self, sums: QuadraticLikelihoods) -> QuadraticLikelihoods:
        """Return the losses as functions of the fitted parameters, divided by the square of the target's scale."""
        scaled = self.A / self.target
        c = (sums.c - sums.G @ self.shift) @ scaled / self.target
        yy = (sums.yy - (2 * sums.c - sums.G @ self.shift) @ self.shift) / self.target**2
        known = None if sums.known is None else sums.known.congruent(scaled)
        return QuadraticLikelihoods(scaled.T @ sums.G @ scaled, c, np.maximum(yy, 0.0), sums.n, known)

    def theta(self, fitted: Array) -> Array:
        """Return parameters ``(..., p)`` in the user's units."""
        return np.asarray(fitted @ self.A.T + self.shift)

    def to_fitted(self, theta: Array) -> Array:
        """Return the way back, for ``theta (..., p)``."""
        return np.asarray((theta - self.shift) @ np.linalg.inv(self.A).T)

    def covariance(self, fitted: Array) -> Array:
        """Return covariances ``(..., p, p)`` in the user's units."""
        return np.asarray(self.A @ fitted @ self.A.T)


def common_units(sums: QuadraticLikelihoods, intercepts: Mask, *, has_scale: bool, location: bool = False) -> Units:
    """Return units from the sums of all sites.

    ``intercepts (p,)`` are the parameters of columns of ones: one for every block of ``p / intercepts.sum()``
    parameters (a class of the multinomial loss), or none. ``has_scale``: the target is measured in units (least
    squares). ``location``: the parameters are points among the rows, and keep their units but for one common scale.
    """
    p, G = sums.n_params, sums.G.sum(axis=0)
    shift = np.zeros(p)
    if location:
        centre = sums.c.sum(axis=0) / np.diag(G)
        spread = (sums.yy.sum() - sums.c.sum(axis=0) @ centre) / sums.n.sum()
        size = np.sqrt(spread) if spread > CONSTANT * sums.yy.sum() / sums.n.sum() else 1.0
        return Units(np.eye(p) * size, centre, float(size))
    blocks = max(int(intercepts.sum()), 1)
    block = p // blocks
    first = G[:block, :block]
    rows = max(first[0, 0] if intercepts[0] else sums.n.sum(), 1e-300)
    square = np.diag(first) / rows
    mean = first[0] / rows if intercepts[0] else np.zeros(block)
    variance = square - mean**2
    usable = variance > CONSTANT * square
    scale = np.where(usable, np.sqrt(np.where(usable, variance, 1.0)), 1.0)
    each = np.diag(1.0 / scale)
    if intercepts[0]:
        each[0, 1:] = -mean[1:] / scale[1:]
        each[0, 0] = 1.0
    A = np.asarray(np.kron(np.eye(blocks), each))
    target = 1.0
    if has_scale:
        shift[0] = sums.c[:, 0].sum() / rows if intercepts[0] else 0.0
        spread = (sums.yy.sum() - rows * shift[0] ** 2) / sums.n.sum()
        target = float(np.sqrt(spread)) if spread > CONSTANT * sums.yy.sum() / sums.n.sum() else 1.0
    return Units(A * target, shift, target)


def apply(matrices: Array, vectors: Array) -> Array:
    """``M_u v_u`` for ``(V, p, p)`` and ``(V, p)``."""
    return np.asarray(np.matmul(matrices, vectors[:, :, None])[:, :, 0])
