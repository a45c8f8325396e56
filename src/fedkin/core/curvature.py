"""A short form of a site's second derivatives: diagonal plus low rank, r times p numbers instead of p times p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedkin._base import Array
from fedkin.core.plain import Reader

#: Directions with less than this share of the largest curvature are those that rows say nothing about.
NOTHING = 1e-10
#: A diagonal stands for the rest if it keeps so much of it, and this times the share of directions that are kept: of
#: about as many rows as parameters it would know next to nothing, and not how little.
WORTH, WORTH_PER_RANK = 0.3, 1.5


@dataclass(frozen=True, eq=False)
class Curvature:
    """The matrix ``diag(diagonal) + factor factor'`` of p parameters.

    Attributes
    ----------
    diagonal : array (p,)
    factor : array (p, r)
    left_out : int
        Directions that rows tell something about and this matrix nothing.

    Examples
    --------
    >>> import numpy as np
    >>> from fedkin.core import Curvature
    >>> Curvature(np.array([0.0, 1.0]), np.array([[2.0], [1.0]])).dense().tolist()
    [[4.0, 2.0], [2.0, 2.0]]
    """

    diagonal: Array
    factor: Array
    left_out: int = 0

    @property
    def rank(self) -> int:
        """Columns of the factor."""
        return int(self.factor.shape[1])

    @property
    def exact(self) -> bool:
        """Whether nothing was left out or stands for something else."""
        return not self.left_out and not self.diagonal.any()

    def dense(self) -> Array:
        """The matrix ``(p, p)``."""
        return np.asarray(np.diag(self.diagonal) + self.factor @ self.factor.T)

    def apply(self, vector: Array) -> Array:
        """The matrix times ``vector (p,)``."""
        return np.asarray(self.diagonal * vector + self.factor @ (vector @ self.factor))

    def to_plain(self) -> dict[str, Any]:
        """Plain numbers, as a file holds them: the factor column by column."""
        return {"diagonal": self.diagonal.tolist(), "factor": self.factor.T.tolist(), "left_out": self.left_out}

    @classmethod
    def from_plain(cls, plain: object, p: int, what: str) -> Curvature:
        """What `to_plain` wrote about p parameters; ``what`` begins errors."""
        reader = Reader(plain, f"{what}, entry 'curvature',")
        columns = reader.left.get("factor")
        rank = len(columns) if isinstance(columns, list | tuple) else 0
        factor = reader.matrix("factor", rank, p).T
        made = cls(reader.numbers("diagonal", p), np.ascontiguousarray(factor), reader.whole("left_out"))
        reader.done()
        if (made.diagonal < 0).any():
            reader.refuse("has a number below 0 in 'diagonal'")
        return made


def shortened(value: float, gradient: Array, hessian: Array, rank: int) -> tuple[float, Array, Curvature]:
    """A quadratic with second derivatives of this rank that has its minimum where the given one has it.

    Parameters
    ----------
    value, gradient, hessian : float, arrays (p,), (p, p)
        Of the given quadratic at some point, as sums over rows.
    rank : int
        From as many on as there are directions that rows say something about, nothing is lost.

    Returns
    -------
    value, gradient, curvature : float, array (p,), Curvature
        Of the short one, at the same point. Its minimum is as deep.

    Notes
    -----
    The factor holds the directions of most curvature, in units in which every parameter alone has curvature 1. For
    least squares, directions that are left out are rows of a rotated table that are left out: less is known, and what
    is known is right. Where rows tell enough about all parameters, the diagonal stands for the rest, scaled so that
    the minimum is as far from the truth as it promises, on average over directions: ``trace(short / hessian) = p``.
    """
    size = np.sqrt(np.maximum(np.diag(hessian), 0.0))
    size = np.where(size > 0, size, 1.0)
    values, vectors = np.linalg.eigh(hessian / np.outer(size, size))
    values, vectors = values[::-1], vectors[:, ::-1] * np.where(vectors[:, ::-1].sum(axis=0) < 0, -1.0, 1.0)
    seen = int((values > NOTHING * max(float(values[0]), 0.0)).sum())
    p, kept = len(size), min(rank, seen)
    factor = size[:, None] * vectors[:, :kept] * np.sqrt(values[:kept])
    if kept == seen:
        return value, gradient, Curvature(np.zeros(p), factor)
    step = -(vectors[:, :seen] / values[:seen]) @ (vectors[:, :seen].T @ (gradient / size)) / size
    diagonal, left_out = np.zeros(p), seen - kept
    if seen == p:
        rest = np.maximum(1.0 - (vectors[:, :kept] ** 2) @ values[:kept], 0.0)
        scale = (p - kept) / float(rest @ (vectors**2 @ (1.0 / values)))
        if scale > max(WORTH, WORTH_PER_RANK * kept / p):
            diagonal, left_out = scale * rest * size**2, 0
    made = Curvature(diagonal, factor, left_out)
    bend = made.apply(step)
    return value + 0.5 * float(gradient @ step) + 0.5 * float(step @ bend), -bend, made
