"""Uncertainty of a `Kin`: intervals, differences between sites and groups, predictions, and summaries as text."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
from scipy.special import chdtrc, ndtr, ndtri

from fedkin._base import Array, Index, check_choice, check_level, count, some_of
from fedkin.errors import DataError, ParameterError
from fedkin.kin.learned import covariance_of_sum, difference_errors, unseen

if TYPE_CHECKING:
    from fedkin.kin.result import Kin

#: "average": posterior, covers as promised on average over sites; "site": from a site's own rows alone.
Kind = Literal["average", "site"]
#: Intervals of the mean response, or of a new observation.
Target = Literal["mean", "observation"]
#: A site, or several whose mean is meant.
Sites = Hashable | list[Hashable]
_WIDTH = 78
_GRAPHS = {
    "none": "no graph",
    "used": "used",
    "ignored": "ignored: it does not tell who is kin",
    "inverted": "inverted: its edges join sites that differ",
}


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
        error = np.where(self.standard_error > 0, self.standard_error, np.finfo(float).tiny)
        return np.asarray(2 * ndtr(-np.abs(self.estimate) / error))

    @property
    def wald(self) -> tuple[float, int, float]:
        """Wald's statistic that all are 0, its degrees of freedom, and the tail area of chi-square."""
        if not np.isfinite(self.covariance).all():
            return 0.0, 0, 1.0
        values, vectors = np.linalg.eigh(self.covariance)
        seen = values > 1e-12 * max(float(values[-1]), 1e-300)
        turned = vectors[:, seen].T @ self.estimate
        statistic = float((turned**2 / values[seen]).sum())
        return statistic, int(seen.sum()), float(chdtrc(int(seen.sum()), statistic))

    def confint(self, level: float = 0.95) -> Array:
        """Return intervals ``(r, 2)``."""
        return interval(self.estimate, self.standard_error, level)

    def summary(self, level: float = 0.95) -> str:
        """Return the result as text, in the manner of statsmodels."""
        statistic, degrees, tail = self.wald
        lines = [
            *_table(self, self.label, level),
            f"Wald test that all are 0: chi2({degrees}) = {statistic:.4g}, p = {tail:.3g}",
        ]
        if self.probability is not None:
            lines.append(f"Probability that the two are kin: {self.probability:.2f}")
        return "\n".join([*lines, *_ending(self.kind, level)])

    def __repr__(self) -> str:
        return self.summary()


class Inference:
    """What a `Kin` says about uncertainty."""

    @property
    def _result(self) -> Kin:
        return cast("Kin", self)

    def confint(self, level: float = 0.95, kind: Kind = "average") -> Array:
        """Return intervals for every site's parameters.

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
        """Return how two sites or groups differ, or another linear combination of parameters.

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
        kin = self._result
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

    def difference_errors(self) -> Array:
        """Return standard errors ``(V, V, p)`` of the differences between all pairs of sites, as `contrast` has them.

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
        """Return the sites of a group to show, numbered as in ``groups``."""
        found = [self._result.sites[u] for u in np.flatnonzero(self._result.groups == group)]
        if not self._result.resolved or not found:
            last = int(self._result.groups.max())
            known = f"groups are 0 to {last}" if self._result.resolved else "no groups are resolved"
            raise ParameterError(f"there is no group {group!r}: {known}")
        return found

    def predict(
        self, X: Array, site: Hashable, *, level: float = 0.95, target: Target = "mean", offset: Array | None = None
    ) -> Predicted:
        """Return predictions for rows of one site, with intervals.

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
        kin, rows = self._result, np.atleast_2d(np.asarray(X, dtype=np.float64))
        u = kin.position(site)
        if rows.shape[1] != len(kin.names):
            raise DataError(f"X has {rows.shape[1]} columns, expected {len(kin.names)}: {', '.join(kin.names)}")
        noise = float(kin.noise[u])
        return predicted(kin, rows, kin.theta[u], kin.covariance[u], noise, level=level, target=target, offset=offset)

    def summary(
        self, level: float = 0.95, *, site: Hashable | None = None, group: int | None = None, kind: Kind = "average"
    ) -> str:
        """Return the result as text, in the manner of statsmodels.

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
        kin = self._result
        if site is not None:
            u = kin.position(site)
            head, more = f"Site {site}: {count(int(kin.n_samples[u]), 'row')}", _likely_kin(kin, u)
            found = self.contrast(site, kind=kind)
        elif group is not None:
            sites = self.members(group)
            head, more = f"Group {group + 1}: mean of {count(len(sites), 'site')}", f"Members: {some_of(sites)}"
            found = self.contrast(sites, kind=kind)
        else:
            double, single = "=" * _WIDTH, "-" * _WIDTH
            head = "Kin: partial pooling with groups".center(_WIDTH)
            body = [*_coefficients(kin, level), single, *_groups(kin), single, *_notes(kin, level)]
            return "\n".join([head, double, *_header(kin), double, *body, double])
        return "\n".join([*_table(found, head, level), more, *_ending(kind, level)])


def interval(estimate: Array, error: Array, level: float) -> Array:
    """Return normal intervals ``(..., 2)``."""
    check_level(level)
    half = ndtri(0.5 + level / 2) * error
    return np.stack([estimate - half, estimate + half], axis=-1)


def site_estimates(kin: Kin, kind: Kind) -> tuple[Array, Array]:
    """Return estimates ``(V, p)`` and covariances ``(V, p, p)`` of all sites."""
    check_choice("kind", kind, ("average", "site"))
    return (kin.theta, kin.covariance) if kind == "average" else kin.learned.own()


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


def predicted(
    kin: Kin,
    X: Array,
    theta: Array,
    covariance: Array,
    noise: float,
    *,
    level: float,
    target: Target,
    offset: Array | None = None,
) -> Predicted:
    """Return intervals for rows ``X (n, p)``, intercept included, of one site."""
    loss = kin.loss.rowwise
    if loss is None or loss.n_outputs > 1 or X.shape[1] != len(kin.names):
        raise ParameterError(f"the {kin.loss.name} loss has no single predictor, so no intervals for predictions")
    eta = X @ theta + (0.0 if offset is None else offset)
    error = np.sqrt(np.maximum(np.einsum("np,pq,nq->n", X, covariance, X), 0.0))

    def response(values: Array) -> Array:
        return np.asarray(loss.response(values[:, None])).reshape(len(values), -1)[:, 0]

    averaged = loss.averaged_predictor(eta[:, None], (error**2)[:, None, None])[:, 0]
    if target == "mean":
        low, high = (response(end) for end in _around(eta, error, averaged, level))
    else:
        low, high = loss.observation_interval(eta, error, noise, level)
    return Predicted(response(averaged), low, high)


def _around(eta: Array, error: Array, averaged: Array, level: float) -> tuple[Array, Array]:
    """Ends ``(n,)`` of an interval that normal predictors lie in with probability ``level``, ``averaged`` inside.

    Its tails are equal, unless ``averaged`` lies in one of them. Then that end is ``averaged``, and the other one comes
    nearer by as much as keeps the probability.
    """
    low, high = np.moveaxis(interval(eta, error, level), 1, 0)
    away = np.abs(averaged - eta) / np.where(error > 0, error, np.inf)
    # the share of predictors on the near side of averaged is more than the level
    other = ndtri(np.maximum(ndtr(away) - level, (1 - level) / 2)) * error
    above, below = averaged > high, averaged < low
    return (
        np.where(above, eta + other, np.where(below, averaged, low)),
        np.where(below, eta - other, np.where(above, averaged, high)),
    )


def _table(found: Contrast, title: str, level: float) -> list[str]:
    low, high = f"[{(1 - level) / 2:.3f}", f"{(1 + level) / 2:.3f}]"
    heads = ("coef", "std err", "z", "P>|z|", low, high)
    head = f"{'':<18}" + "".join(f"{head:>10}" for head in heads)
    lines = [title.center(_WIDTH).rstrip(), "=" * _WIDTH, head, "-" * _WIDTH]
    error, tails, ends = found.standard_error, found.p_values, found.confint(level)
    for j, name in enumerate(found.names):
        z = found.estimate[j] / error[j] if error[j] > 0 else np.nan
        tested = f"{found.estimate[j]:>10.4g}{error[j]:>10.3g}{z:>10.3f}{tails[j]:>10.3f}"
        lines.append(f"{name[:17]:<18}{tested}{ends[j, 0]:>10.4g}{ends[j, 1]:>10.4g}")
    return [*lines, "-" * _WIDTH]


def _likely_kin(kin: Kin, u: int) -> str:
    if not kin.resolved:
        return "No groups resolved: the site leans on the mean of all, as far as the variance between sites allows."
    chance = np.array(kin.probability[np.full(len(kin.sites), u), np.arange(len(kin.sites))])
    chance[u] = -1.0
    likely = [v for v in np.argsort(-chance, kind="stable")[:5] if chance[v] >= 0.005]
    if not likely:
        return f"Group {int(kin.groups[u]) + 1}; no other site is likely to be its kin."
    named = ", ".join(f"{kin.sites[v]} ({chance[v]:.2f})" for v in likely)
    return f"Group {int(kin.groups[u]) + 1}; likely kin (probability): {named}"


def _ending(kind: Kind, level: float) -> tuple[str, str]:
    text = f"Intervals cover {level:.0%} on average over sites; a site unlike all others less often."
    if kind == "site":
        text = f"From the rows of the site alone: intervals cover {level:.0%} at every single site."
    return text, "=" * _WIDTH


def _header(kin: Kin) -> list[str]:
    likely = int(np.argmax(kin.n_groups))
    n, sure = kin.n_samples, kin.sure
    facts = [
        ("Loss", kin.loss.name, "Likely groups", f"{likely} (P = {kin.n_groups[likely]:.2f})"),
        ("Sites", len(kin.sites), "Weight, no groups", f"{kin.weight_mixed:.2f}"),
        ("Rows", int(n.sum()), "SURE kin", f"{sure['kin']:.1f}"),
        (
            "Rows per site",
            f"{n.min()} to {n.max()}",
            "SURE Local, Global",
            f"{sure['Local']:.1f}, {sure['Global']:.1f}",
        ),
    ]
    lines = [f"{a + ':':<16}{b:>20}    {c + ':':<20}{d:>18}" for a, b, c, d in facts]
    return [*lines, f"{'Graph:':<16}{_GRAPHS[kin.graph_use]}"]


def _coefficients(kin: Kin, level: float) -> list[str]:
    error = np.sqrt(np.diag(kin.mean_covariance))
    ends = interval(kin.mean, error, level)
    low, high = f"[{(1 - level) / 2:.3f}", f"{(1 + level) / 2:.3f}]"
    lines = [f"{'':<24}{'mean':>11}{'std err':>10}{low:>11}{high:>11}{'sd':>11}", "-" * _WIDTH]
    for j, name in enumerate(kin.names):
        cells = f"{kin.mean[j]:>11.4g}{error[j]:>10.4g}{ends[j, 0]:>11.4g}{ends[j, 1]:>11.4g}{kin.sd[j]:>11.4g}"
        lines.append(f"{name[:23]:<24}{cells}")
    return lines


def _groups(kin: Kin) -> list[str]:
    if not kin.resolved:
        return ["No groups resolved: use the sites' estimates, which average over all groupings."]
    members = [kin.members(k) for k in range(int(kin.groups.max()) + 1)]
    return [f"Group {k} ({count(len(sites), 'site')}): {some_of(sites)}" for k, sites in enumerate(members, 1)]


def _notes(kin: Kin, level: float) -> list[str]:
    lines = [
        f"Intervals of sites cover {level:.0%} on average over sites; confint(kind='site') has",
        "intervals for every single site. sd: standard deviation between sites.",
    ]
    found = kin.diagnostics
    if found is None:
        return [*lines, "Nothing was sampled: too few sites, or nothing differs between them."]
    worst, typical = found.rhat["parameters, worst"], found.rhat["parameters, median"]
    return [
        *lines,
        f"{count(len(found.starts), 'chain')} of {found.draws} sweeps: R-hat of parameters {typical:.2f} (median), "
        f"{worst:.2f} (worst);",
        f"effective size of the number of groups {found.size['number of groups']:.0f}.",
    ]
