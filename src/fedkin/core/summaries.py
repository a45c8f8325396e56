"""Define `Summaries`, the sufficient statistics of all sites, used instead of rows.

A summary holds sums over rows, by fold, of the loss and its first two derivatives at one point. For quadratic losses
these sums determine the loss everywhere, so fitting summaries gives the same result as fitting rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from msgspec.structs import replace as replace_in

from fedkin._base import Array, Index, Mask, listed
from fedkin.core.quadratics import Quadratics, QuadraticTerms
from fedkin.core.sitedata import Columns, SiteData
from fedkin.core.summary import LowRankCurvature, OwnEstimate, Privacy, Summary
from fedkin.data import INTERCEPT
from fedkin.errors import DataError, ParameterError, UnknownSiteError
from fedkin.losses import Loss, describe_loss

_T = TypeVar("_T")
#: A column whose variance is below this share of its mean square is treated as constant.
CONSTANT = 1e-14
#: Entries of all sites: arrays, and what some sites may lack.
_ARRAYS, _SOME = ("column_sums", "column_squares", "scores"), ("own", "privacy", "curvature")


@dataclass(frozen=True, eq=False)
class Summaries(SiteData):
    """Summaries of V sites, stacked in the order of ``sites``; `Problem` accepts them instead of rows.

    Attributes
    ----------
    sums : Quadratics
        Sums by site and fold.
    column_sums, column_squares : array (V, q)
    scores : array (V, K + 1, p, p) or None
    own, privacy, curvature : tuple of V, or None
    gaps : array (V,) or None
        As in `Summary`.
    """

    sites: tuple[Hashable, ...]
    loss: Loss
    feature_names: tuple[str, ...]
    seed: int
    sums: Quadratics = field(repr=False)
    column_sums: Array = field(repr=False)
    column_squares: Array = field(repr=False)
    scores: Array | None = field(default=None, repr=False)
    own: tuple[OwnEstimate, ...] | None = field(default=None, repr=False)
    gaps: Array | None = field(default=None, repr=False)
    privacy: tuple[Privacy | None, ...] | None = field(default=None, repr=False)
    curvature: tuple[LowRankCurvature | None, ...] | None = field(default=None, repr=False)

    @classmethod
    def stack(cls, summaries: Iterable[Summary]) -> Summaries:
        """Stack the summaries of several sites, in that order.

        Raises
        ------
        DataError
            When a site appears twice, or summaries differ in the loss, columns or folds.
        """
        parts = list(summaries)
        if not parts:
            raise DataError("there are no summaries to stack: pass the summary of at least one site")
        first, seen = parts[0], set()
        for part in parts:
            for (what, one), two in zip(_agreed(first).items(), _agreed(part).values(), strict=True):
                if one != two:
                    raise DataError(
                        f"the summaries of {first.site!r} and {part.site!r} differ in the {what}: {one} and {two}; "
                        "ask for summaries that were made with the same contract"
                    )
            if part.site in seen:
                raise DataError(f"site {part.site!r} has two summaries: keep the newer one")
            seen.add(part.site)
        hessian = np.zeros((len(parts), *first.hessian.shape))
        for own_sums, part in zip(hessian, parts, strict=True):
            where = slice(None) if part.curvature is None else slice(-1, None)  # the rest of a large array stays unused
            own_sums[where] = part.hessian[where]

        def stacked(name: str) -> Any:
            each = [getattr(part, name) for part in parts]
            return None if each[0] is None else np.stack(each)

        sums = Quadratics(stacked("at"), stacked("count"), stacked("value"), stacked("gradient"), hessian)
        more = {name: stacked(name) for name in _ARRAYS}
        more |= {name: _known(getattr(part, name) for part in parts) for name in _SOME}
        head = tuple(part.site for part in parts), first.loss, first.feature_names, first.seed
        return cls(*head, sums, gaps=stacked("gap"), **more)

    # --- looking at it, as at a federation ----------------------------------------------------------------------

    @property
    def folds(self) -> int:
        """Number of folds K."""
        return self.sums.folds

    @cached_property
    def n(self) -> Index:
        return np.asarray(self.sums.count.sum(axis=1))

    @property
    def has_intercept(self) -> bool:
        """Whether the first column is the constant 1."""
        return self.feature_names[:1] == (INTERCEPT,)

    def __contains__(self, site: object) -> bool:
        return site in self.index

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def __getitem__(self, site: Hashable) -> Summary:
        if site not in self.index:
            raise UnknownSiteError(f"there is no summary of site {site!r}, only of {listed(self.sites)}")
        u, sums = self.index[site], self.sums
        entries: dict[str, Any] = {
            name: None if (each := getattr(self, name)) is None else each[u] for name in _ARRAYS + _SOME
        }
        entries |= {name: getattr(sums, name)[u] for name in ("at", "count", "value", "gradient", "hessian")}
        gap = None if self.gaps is None else float(self.gaps[u])
        return Summary(site, self.loss, self.feature_names, self.seed, gap=gap, **entries)

    # --- making another one -------------------------------------------------------------------------------------

    def subset(self, sites: Sequence[Hashable]) -> Summaries:
        """Return the summaries of the given sites, in that order."""
        unknown = [site for site in sites if site not in self.index]
        if unknown:
            raise UnknownSiteError(f"there is no summary of site {unknown[0]!r}, only of {listed(self.sites)}")
        if len(set(sites)) < len(sites):
            raise DataError("a site is named twice: name each site once")
        return self.take(np.array([self.index[site] for site in sites], dtype=np.int64))

    def take(self, order: Index) -> Summaries:
        """Return the summaries of the sites at the given positions, in that order."""
        entries: dict[str, Any] = {"sums": self.sums.take(order), "sites": tuple(self.sites[u] for u in order)}
        for name in (*_ARRAYS, "gaps"):
            entries[name] = None if (each := getattr(self, name)) is None else each[order]
        for name in _SOME:
            each = getattr(self, name)
            entries[name] = None if each is None else _known(each[u] for u in order)
        return replace(self, **entries)

    def pooled(self) -> Summaries:
        """Return the summary of all rows combined into one site, for quadratic losses."""
        if self.privacy is not None:
            raise DataError("noisy sums of several sites cannot be pooled: the scale of their noise would be lost")
        if not self.loss.quadratic:
            raise DataError(f"sums of the {self.loss.name} loss at different points cannot be added up")
        entries: dict[str, Any] = {"sites": (0,), "curvature": None, "sums": self.sums.pooled()}
        for name in _ARRAYS:
            entries[name] = None if (each := getattr(self, name)) is None else each.sum(axis=0, keepdims=True)
        return replace(self, **entries)

    def noise(self) -> Array:
        """Return standard deviations ``(V, q + 1, q + 1)`` of the noise in sums over all rows of ``z z'``.

        Here z holds the columns and the target (for the mean loss, a constant 1 instead). The result is 0 for exact
        sums.
        """
        out = np.zeros((self.n_sites, self.n_features + 1, self.n_features + 1))
        for u, one in enumerate(self.privacy or ()):
            if one is not None:
                draws = int((self.sums.count[u] > 0).sum())
                out[u] = np.sqrt(draws) * one.noise * np.outer(one.limits, one.limits)
        constant = self.n_features if self.loss.location else 0
        if self.loss.location or self.has_intercept:
            out[:, constant, constant] = 0.0  # the number of rows is public
        return out

    def repaired(self) -> Summaries:
        """Add enough ridge to noisy sums to make them valid sums of squares (as AdaSSP does).

        Every site's matrix of cross-products becomes positive definite with the margin ``noise * sqrt(draws * p)``,
        half of the possible effect of the noise, for all rows and with any one fold left out.
        """
        if self.privacy is None:
            return self
        sums, scores = self.sums, self.scores
        matrices, value = (sums.hessian if scores is None else scores).copy(), sums.value.copy()
        for u, privacy in enumerate(self.privacy):
            if privacy is not None:
                count = sums.count[u].astype(np.float64)
                matrices[u] = _with_margin(matrices[u], count, privacy)
                if scores is None:
                    value[u] = _raised(value[u], matrices[u], sums.gradient[u], count, privacy)
        if scores is None:
            return replace(self, sums=replace(sums, hessian=matrices, value=value))
        return replace(self, sums=replace(sums, value=0.5 * np.einsum("vkpp->vk", matrices)), scores=matrices)

    # --- as `SiteData` ------------------------------------------------------------------------------------------

    has_rows: ClassVar[Literal[False]] = False
    in_memory: ClassVar[Literal[False]] = False

    def check_folds(self, folds: int, seed: int) -> None:
        if (self.folds, self.seed) != (folds, seed):
            raise ParameterError(
                f"the sites split their rows into {self.folds} folds with seed {self.seed}, which cannot be "
                f"changed: give folds={self.folds} and seed={self.seed} instead of {folds} and {seed}"
            )
        if not self.sums.count[:, :-1].any():
            raise DataError("no summary has sums by fold, so cross-validation is not possible: give lam as a number")

    def expand(self, theta: Array, folds: int = 1, seed: int = 0) -> Quadratics:
        """Return the sums, expanded around the point in the summaries."""
        return self.sums if folds > 1 else self.sums.total()

    def terms(self, ridge: Array, alone: Mask | None = None) -> QuadraticTerms:
        """Return the sites' mean losses as quadratics around ``at``; exact everywhere for quadratic losses."""
        return self.sums.total().terms(ridge=ridge)

    def standardized(self) -> tuple[Summaries, Array, Array]:
        """Return the summaries of standardised columns, as `Federation.standardized` does, with ``mean, scale (q,)``.

        Columns are centred if there is an intercept, and for the mean loss.
        """
        if self.privacy is not None:
            raise ParameterError("noisy sums cannot be standardised again: use standardize=False")
        n = int(self.n_samples.sum())
        mean = self.column_sums.sum(axis=0) / n
        square = self.column_squares.sum(axis=0) / n
        variance = square - mean**2
        scale = np.sqrt(np.where(variance > CONSTANT * square, variance, 1.0))
        if self.has_intercept:
            mean[0], scale[0] = 0.0, 1.0
        elif not self.loss.location:
            mean = np.zeros_like(mean)
        made = self._shifted_rows(mean, scale) if self.loss.location else self._reparametrised(mean, scale)
        rows = self.n_samples[:, None]
        sums = (self.column_sums - rows * mean) / scale
        squares = (self.column_squares - 2 * mean * self.column_sums + rows * mean**2) / scale**2
        return replace(made, column_sums=sums, column_squares=squares), mean, scale

    def _shifted_rows(self, mean: Array, scale: Array) -> Summaries:
        assert self.scores is not None
        count, total = self.sums.count[:, :, None], -self.sums.gradient
        cross = total[..., :, None] * mean
        scores = self.scores - cross - np.swapaxes(cross, 2, 3) + count[..., None] * np.outer(mean, mean)
        scores = scores / np.outer(scale, scale)
        value, gradient = 0.5 * np.einsum("vkpp->vk", scores), -(total - count * mean) / scale
        sums = replace(self.sums, value=value, gradient=gradient)
        return replace(self, sums=sums, scores=scores)

    def _reparametrised(self, mean: Array, scale: Array) -> Summaries:
        columns = Columns(self.feature_names, mean, scale, self.n_params // self.n_features)
        T, sums = columns.A, self.sums.map(columns.A)
        own = None
        if self.own is not None:
            # a ridge in other coordinates is a matrix, of which the diagonal is kept
            own = tuple(replace_in(one, ridge=np.einsum("ij,i,ij->j", T, one.ridge, T)) for one in self.own)
        return replace(self, sums=sums, own=own, curvature=None)


def _known(entries: Iterable[_T]) -> tuple[_T, ...] | None:
    """Return the entries of sites; None if no site has one."""
    each = tuple(entries)
    return each if any(one is not None for one in each) else None


def _with_margin(parts: Array, count: Array, privacy: Privacy) -> Array:
    limits = privacy.limits[:-1]
    scaled = parts / np.outer(limits, limits)
    share, draws = count / count.sum(), int((count > 0).sum())
    margin = privacy.noise * np.sqrt(draws * len(limits))
    whole = scaled.sum(axis=0)
    lacking = [0.0, margin - np.linalg.eigvalsh(whole)[0]]
    for k in np.flatnonzero(count).tolist() if draws > 1 else ():
        left = 1.0 - share[k]
        lacking.append((left * margin - np.linalg.eigvalsh(whole - scaled[k])[0]) / left)
    return np.asarray(parts + max(lacking) * share[:, None, None] * np.diag(limits**2))


def _raised(value: Array, matrices: Array, gradient: Array, count: Array, privacy: Privacy) -> Array:
    """Raise the values so that the residual sum of squares is at least the standard deviation of its noise."""
    b = gradient.sum(axis=0)
    least = 0.5 * float(b @ np.linalg.solve(matrices.sum(axis=0), b))
    least += 0.5 * np.sqrt(int((count > 0).sum())) * privacy.noise * privacy.limits[-1] ** 2
    missing = max(least - float(value.sum()), 0.0)
    return np.asarray(value + missing * count / count.sum())


def _agreed(summary: Summary) -> dict[str, object]:
    return {
        "loss": describe_loss(summary.loss),
        "columns": summary.feature_names,
        "number of folds": summary.folds,
        "seed of the folds": summary.seed,
        "kind of message (first, or answer)": (summary.own is None, summary.gap is None),
        "number of parameters": summary.n_params,
    }
