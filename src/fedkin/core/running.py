"""Sums of least squares that grow as rows come: batch after batch, of sites that may be new."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from fedkin._base import Array, Index
from fedkin.core.quadratics import Quadratics
from fedkin.core.summaries import Summaries
from fedkin.data import INTERCEPT
from fedkin.losses import make_loss

#: Numbers that the outer products of a chunk of rows may take.
_CHUNK = 2**21


class RunningSums:
    """Sums of ``w z z'`` with ``z = [1, x, y]`` of each site and fold, for as many sites as come.

    Parameters
    ----------
    n_features : int
        Columns q of x.
    folds : int
        Number of folds; a site's rows go to them in turn, as they come.

    Examples
    --------
    >>> import numpy as np
    >>> sums = RunningSums(1, folds=2)
    >>> sums.add(["a", "a", "b"], np.array([[0.0], [1.0], [2.0]]), np.array([1.0, 3.0, 4.0]))
    >>> sums.add(["b"], np.array([[0.0]]), np.array([0.0]))
    >>> sums.summaries(["x"]).n_samples.tolist()
    [2, 2]
    """

    def __init__(self, n_features: int, folds: int) -> None:
        self.width, self.folds = n_features + 2, folds
        self.number: dict[Hashable, int] = {}
        self.weighted = False
        self._gram = np.zeros((0, folds, self.width, self.width))
        self._rows = np.zeros(0, dtype=np.int64)

    @property
    def sites(self) -> tuple[Hashable, ...]:
        """The sites so far, in the order in which they came."""
        return tuple(self.number)

    @property
    def whole(self) -> Array:
        """The sums ``(q + 2, q + 2)`` over all rows."""
        return np.asarray(self._gram.sum(axis=(0, 1)))

    @property
    def size(self) -> int:
        """Numbers that are kept."""
        return len(self.number) * self.folds * self.width**2

    def add(self, ids: Sequence[Hashable], X: Array, y: Array, weight: Array | None = None) -> None:
        """Add rows ``X (n, q)``, ``y (n,)`` of the sites ``ids``; a row of weight w counts as w rows."""
        if not len(ids):
            return
        self.weighted |= weight is not None
        Z = np.column_stack([np.ones(len(y)), X, y])
        code = np.fromiter((self.number.setdefault(one, len(self.number)) for one in ids), np.int64, len(ids))
        self._grow(len(self.number))
        order = np.argsort(code, kind="stable")
        code, Z = code[order], Z[order]
        weighted = Z if weight is None else Z * weight[order, None]
        first = np.flatnonzero(np.diff(code, prepend=-1))
        place = np.arange(code.size) - np.repeat(first, np.diff(first, append=code.size)) + self._rows[code]
        self._rows += np.bincount(code, minlength=self._rows.size)
        part = code * self.folds + place % self.folds
        order = np.argsort(part, kind="stable")
        self._add_parts(part[order], Z[order], weighted[order])

    def summaries(
        self, names: Sequence[str], keep: Index | None = None, *, intercept: bool = True, seed: int = 0
    ) -> Summaries:
        """What sites would say about these rows: of the features ``keep``, called ``names``, after an intercept."""
        v = len(self.number)
        gram, rows = self._gram[:v], self._rows[:v]
        parts = np.concatenate([gram, np.zeros_like(gram[:, :1])], axis=1)
        single = rows == 1  # a single row is in no fold: it trains
        parts[single, -1], parts[single, :-1] = gram[single].sum(axis=1), 0.0
        kept = np.arange(self.width - 2) if keep is None else keep
        used = np.concatenate([np.arange(0 if intercept else 1, 1), kept + 1])
        total, weights = parts.sum(axis=1), parts[..., 0, 0]
        counts = weights if self.weighted else np.rint(weights).astype(np.int64)
        hessian = parts[..., used[:, None], used]
        folded = Quadratics(np.zeros((v, used.size)), counts, 0.5 * parts[..., -1, -1], -parts[..., used, -1], hessian)
        return Summaries(
            self.sites,
            make_loss("linear", None),
            (*((INTERCEPT,) if intercept else ()), *names),
            seed,
            folded,
            total[:, 0, used],
            total[:, used, used],
        )

    def _add_parts(self, part: Index, Z: Array, weighted: Array) -> None:
        flat = self._gram.reshape(-1, self.width, self.width)
        starts = np.flatnonzero(np.diff(part, prepend=-1))
        if part.size >= 16 * starts.size:
            for a, b in zip(starts.tolist(), [*starts[1:].tolist(), part.size], strict=True):
                flat[part[a]] += weighted[a:b].T @ Z[a:b]
            return
        step = max(1, _CHUNK // self.width**2)
        for a in range(0, part.size, step):  # many parts with few rows
            some = slice(a, a + step)
            np.add.at(flat, part[some], weighted[some, :, None] * Z[some, None, :])

    def _grow(self, needed: int) -> None:
        have = self._gram.shape[0]
        if needed > have:
            more = max(needed, 2 * have) - have
            self._gram = np.concatenate([self._gram, np.zeros((more, *self._gram.shape[1:]))])
            self._rows = np.concatenate([self._rows, np.zeros(more, dtype=np.int64)])
