"""What can be asked of a `Kin` about uncertainty: intervals, differences between sites and groups, predictions."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from fedkin._base import Array, Index, check_choice, check_level
from fedkin.errors import DataError, ParameterError
from fedkin.kin.result.combine import covariance_of_sum, difference_errors, unseen

if TYPE_CHECKING:
    from fedkin.kin.result.kin import Kin

#: "average": posterior, covers as promised on average over sites; "site": from a site's own rows alone.
Kind = Literal["average", "site"]
#: A site, or several whose mean is meant.
Sites = Hashable | list[Hashable]


@dataclass(frozen=True, eq=False, repr=False)
class Contrast:
    """A difference, or another linear combination of sites' parameters, with its uncertainty.

    Attributes
    ----------
    label : str
        What was compared.
    names : tuple of r str
        Of the parameters, or of their combination.
    estimate, covariance : arrays (r,), (r, r)
    kind : "average" or "site"
    probability : float or None
        That the two sites are kin, where two were compared.
    """

    label: str
    names: tuple[str, ...]
    estimate: Array
    covariance: Array
    kind: Kind
    probability: float | None = None

    @property
    def standard_error(self) -> Array:
        """Of each estimate, ``(r,)``."""
        return np.asarray(np.sqrt(np.maximum(np.diag(self.covariance), 0.0)))

    @property
    def p_values(self) -> Array:
        """Two-sided tail areas of each estimate against 0, ``(r,)``."""
        return two_sided(self.estimate, self.standard_error)

    @property
    def wald(self) -> tuple[float, int, float]:
        """Wald's statistic that all are 0, its degrees of freedom, and the tail area of chi-square."""
        from scipy.special import chdtrc  # slow to load, as all of scipy

        if not np.isfinite(self.covariance).all():
            return 0.0, 0, 1.0
        values, vectors = np.linalg.eigh(self.covariance)
        seen = values > 1e-12 * max(float(values[-1]), 1e-300)
        turned = vectors[:, seen].T @ self.estimate
        statistic = float((turned**2 / values[seen]).sum())
        return statistic, int(seen.sum()), float(chdtrc(int(seen.sum()), statistic))

    def confint(self, level: float = 0.95) -> Array:
        """Intervals ``(r, 2)``."""
        return interval(self.estimate, self.standard_error, level)

    def summary(self, level: float = 0.95) -> str:
        """The result as text, in the manner of statsmodels."""
        from fedkin.kin.result.text import contrast_text

        return contrast_text(self, level)

    def __repr__(self) -> str:
        return self.summary()


class Inference:
    """What a `Kin` says about uncertainty."""

    @property
    def _result(self) -> Kin:
        return cast("Kin", self)

    def confint(self, level: float = 0.95, kind: Kind = "average") -> Array:
        """Intervals for every site's parameters.

        Parameters
        ----------
        level : float in (0, 1)
            Probability that they promise.
        kind : "average" or "site"
            "average" are posterior intervals, which cover as promised on average over sites. "site" are from a site's
            own rows alone: as promised for every single site, and wider; infinite where the rows do not tell.

        Returns
        -------
        array (V, p, 2)

        Examples
        --------
        >>> import fedkin
        >>> from fedkin.datasets import paper_design
        >>> design = paper_design(n_sites=8, n_samples=30, n_features=3, n_clusters=2, seed=0)
        >>> kin = fedkin.find_kin(design.federation)
        >>> narrow, wide = kin.confint(0.95), kin.confint(0.95, "site")
        >>> bool((np.ptp(narrow, axis=2) < np.ptp(wide, axis=2)).all())
        True
        """
        theta, covariance = site_estimates(self._result, kind)
        return interval(theta, np.sqrt(np.einsum("ujj->uj", covariance)), level)

    def contrast(
        self,
        one: Sites,
        other: Sites | None = None,
        *,
        weights: Mapping[str, float] | None = None,
        kind: Kind = "average",
    ) -> Contrast:
        """How two sites or groups differ, or another linear combination of parameters.

        Parameters
        ----------
        one, other : id, or list of ids
            A site, or several sites whose mean is meant (`members` lists those of a group). Without ``other`` it is
            about ``one`` alone.
        weights : mapping {parameter: float}, optional
            A combination of parameters; every parameter by itself without it.
        kind : "average" or "site"
            As in `confint`. With "site" the test that two sites differ is Wald's, of their own rows alone.

        Returns
        -------
        Contrast
            Prints as a table; ``wald`` is the test that nothing differs, ``probability`` that the two are kin.

        Examples
        --------
        >>> import fedkin
        >>> from fedkin.datasets import paper_design
        >>> design = paper_design(n_sites=12, n_samples=40, n_features=5, n_clusters=2, signal=2, seed=0)
        >>> kin = fedkin.find_kin(design.federation)
        >>> apart, alike = kin.contrast(0, 11), kin.contrast(0, 1)
        >>> apart.wald[2] < 1e-6 < alike.wald[2], alike.probability > 0.5 > apart.probability
        (True, True)
        >>> groups = kin.contrast(kin.members(0), kin.members(1), weights={"x0": 1.0, "x1": -1.0})
        >>> groups.names, groups.estimate.shape
        (('+1 x0 -1 x1',), (1,))
        """
        return contrast(self._result, one, other, weights, kind)

    def difference_errors(self) -> Array:
        """Standard errors ``(V, V, p)`` of the differences between all pairs of sites, as `contrast` has them.

        Takes ``V * V * p`` numbers: meant for up to some hundred sites.

        Examples
        --------
        >>> import fedkin
        >>> from fedkin.datasets import paper_design
        >>> design = paper_design(n_sites=12, n_samples=40, n_features=5, n_clusters=2, signal=2, seed=0)
        >>> kin = fedkin.find_kin(design.federation)
        >>> bool(abs(kin.difference_errors()[0, 11] - kin.contrast(0, 11).standard_error).max() < 1e-9)
        True
        """
        return difference_errors(self._result.learned, self._result.theta, self._result.probability)

    def members(self, group: int) -> list[Hashable]:
        """The sites of a group to show, numbered as in ``groups``."""
        found = [self._result.sites[u] for u in np.flatnonzero(self._result.groups == group)]
        if not self._result.resolved or not found:
            known = (
                f"groups are 0 to {int(self._result.groups.max())}"
                if self._result.resolved
                else "no groups are resolved"
            )
            raise ParameterError(f"there is no group {group!r}: {known}")
        return found

    def predict(
        self,
        X: Array,
        site: Hashable,
        *,
        level: float = 0.95,
        target: Literal["mean", "observation"] = "mean",
        offset: Array | None = None,
    ) -> Predicted:
        """Predictions for rows of one site, with intervals.

        Parameters
        ----------
        X : array (n, p)
            Rows with the columns of the fit, the intercept among them.
        site : id
            Whose rows they are.
        level : float in (0, 1)
            Probability that the intervals promise.
        target : "mean" or "observation"
            Intervals of the mean response, or of a new observation (linear and Poisson losses), which add its noise.
        offset : array (n,), optional
            Known part of the predictor.

        Examples
        --------
        >>> import numpy as np, fedkin
        >>> from fedkin.datasets import paper_design
        >>> design = paper_design(n_sites=8, n_samples=30, n_features=2, n_clusters=2, seed=0)
        >>> kin = fedkin.find_kin(design.federation)
        >>> mean, new = (kin.predict(np.ones((1, 2)), 0, target=target) for target in ("mean", "observation"))
        >>> bool(new.low < mean.low < mean.mean < mean.high < new.high)
        True
        """
        check_choice("target", target, ("mean", "observation"))
        kin, how = self._result, How(level, target, offset)
        u, rows = kin.position(site), check_columns(kin, X)
        return predicted(kin, rows, kin.theta[u], kin.covariance[u], float(kin.noise[u]), how)

    def summary(
        self,
        level: float = 0.95,
        *,
        site: Hashable | None = None,
        group: int | None = None,
        kind: Kind = "average",
    ) -> str:
        """The result as text, in the manner of statsmodels.

        Parameters
        ----------
        level : float in (0, 1)
            Of the intervals.
        site : id, optional
            Only this site: its parameters, and who is likely to be its kin.
        group : int, optional
            Only this group: the mean of its members' parameters.
        kind : "average" or "site"
            As in `confint`.
        """
        from fedkin.kin.result.text import group_text, site_text, summary_of

        if site is not None:
            return site_text(self._result, site, level, kind)
        return summary_of(self._result, level) if group is None else group_text(self._result, group, level, kind)


def interval(estimate: Array, error: Array, level: float) -> Array:
    """Normal intervals ``(..., 2)``."""
    from scipy.special import ndtri

    check_level(level)
    half = ndtri(0.5 + level / 2) * error
    return np.stack([estimate - half, estimate + half], axis=-1)


def two_sided(estimate: Array, error: Array) -> Array:
    """Tail areas of normal estimates against 0; 1 where an error is infinite."""
    from scipy.special import ndtr

    return np.asarray(2 * ndtr(-np.abs(estimate) / np.where(error > 0, error, np.finfo(float).tiny)))


def site_estimates(kin: Kin, kind: Kind) -> tuple[Array, Array]:
    """Estimates ``(V, p)`` and covariances ``(V, p, p)`` of all sites."""
    check_choice("kind", kind, ("average", "site"))
    return (kin.theta, kin.covariance) if kind == "average" else kin.learned.own()


def contrast(kin: Kin, one: Sites, other: Sites | None, weights: Mapping[str, float] | None, kind: Kind) -> Contrast:
    """`Kin.contrast`."""
    first = _positions(kin, one)
    second = np.empty(0, dtype=np.int64) if other is None else _positions(kin, other)
    both = set(first.tolist()) & set(second.tolist())
    if both:
        raise ParameterError(f"site {kin.sites[both.pop()]!r} is on both sides: name two different sites or groups")
    sites = np.concatenate([first, second])
    a = np.concatenate([np.full(len(first), 1 / len(first)), np.full(len(second), -1 / max(len(second), 1))])
    theta, each = site_estimates(kin, kind)
    estimate = a @ theta[sites]
    if kind == "site":
        covariance = np.tensordot(a**2, each[sites], 1)
    elif len(sites) == 1:
        covariance = each[sites[0]]
    else:
        covariance = covariance_of_sum(kin.learned, kin.theta, sites, a)
    names, probability = kin.names, None
    if len(first) == len(second) == 1:
        probability = float(kin.probability[int(first[0]), int(second[0])])
        if kind == "average":
            lacks = unseen(kin.learned, np.array([probability]), first, second)
            covariance = covariance + float(lacks[0]) * np.outer(estimate, estimate)
    if weights is not None:
        unknown = [name for name in weights if name not in names]
        if unknown:
            raise ParameterError(f"there is no parameter {unknown[0]!r}; there are {', '.join(names)}")
        R = np.array([[weights.get(name, 0.0) for name in names]])
        names = (" ".join(f"{value:+g} {name}" for name, value in weights.items()),)
        estimate, covariance = R @ estimate, R @ covariance @ R.T
    label = _words(one) if other is None else f"{_words(one)} minus {_words(other)}"
    return Contrast(label, names, estimate, covariance, kind, probability)


def _positions(kin: Kin, sites: Sites) -> Index:
    chosen = sites if isinstance(sites, list) else [sites]
    if not chosen:
        raise ParameterError("a contrast needs at least one site on each side, got none")
    return np.array([kin.position(site) for site in chosen], dtype=np.int64)


def _words(sites: Sites) -> str:
    if not isinstance(sites, list):
        return str(sites)
    return str(sites[0]) if len(sites) == 1 else f"mean of {len(sites)} sites ({sites[0]}, ...)"


@dataclass(frozen=True, eq=False)
class Predicted:
    """Predictions with intervals.

    Attributes
    ----------
    mean : array (n,)
        Mean responses; of classes averaged over what is open about the site.
    low, high : arrays (n,)
        Ends of the intervals.
    """

    mean: Array
    low: Array
    high: Array


def predicted(kin: Kin, X: Array, theta: Array, covariance: Array, noise: float, how: How) -> Predicted:
    """Intervals for rows ``X (n, p)``, intercept included, of one site."""
    loss = kin.loss.rowwise
    if loss is None or loss.n_outputs > 1 or X.shape[1] != len(kin.names):
        raise ParameterError(f"the {kin.loss.name} loss has no single predictor, so no intervals for predictions")
    eta = X @ theta + (0.0 if how.offset is None else how.offset)
    error = np.sqrt(np.maximum(np.einsum("np,pq,nq->n", X, covariance, X), 0.0))

    def response(values: Array) -> Array:
        return np.asarray(loss.response(values[:, None])).reshape(len(values), -1)[:, 0]

    averaged = loss.averaged_predictor(eta[:, None], (error**2)[:, None, None])[:, 0]
    if how.target == "mean":
        low, high = (response(end) for end in _around(eta, error, averaged, how.level))
    else:
        low, high = loss.observation_interval(eta, error, noise, how.level)
    return Predicted(response(averaged), low, high)


def _around(eta: Array, error: Array, averaged: Array, level: float) -> tuple[Array, Array]:
    """Ends ``(n,)`` of an interval that normal predictors lie in with probability ``level``, ``averaged`` inside.

    Its tails are equal, unless ``averaged`` lies in one of them. Then that end is ``averaged``, and the other one comes
    nearer by as much as keeps the probability.
    """
    from scipy.special import ndtr, ndtri

    low, high = np.moveaxis(interval(eta, error, level), 1, 0)
    away = np.abs(averaged - eta) / np.where(error > 0, error, np.inf)
    # the share of predictors on the near side of averaged is more than the level
    other = ndtri(np.maximum(ndtr(away) - level, (1 - level) / 2)) * error
    above, below = averaged > high, averaged < low
    return (
        np.where(above, eta + other, np.where(below, averaged, low)),
        np.where(below, eta - other, np.where(above, averaged, high)),
    )


@dataclass(frozen=True)
class How:
    """Which intervals: of the mean response or of a new observation, how sure, and with which offset."""

    level: float
    target: Literal["mean", "observation"]
    offset: Array | None = None


def check_columns(kin: Kin, X: Array) -> Array:
    """Rows ``(n, p)`` with the columns of the fit."""
    rows = np.atleast_2d(np.asarray(X, dtype=np.float64))
    if rows.shape[1] != len(kin.names):
        raise DataError(f"X has {rows.shape[1]} columns, expected {len(kin.names)}: {', '.join(kin.names)}")
    return rows
