"""`Kin`: the result of a fit, in the units of the columns."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
from scipy.special import stdtrit

from fedkin._base import Array, Index, check_choice, check_level, count, html_card, probability, some_of
from fedkin.core import Summary
from fedkin.data import HasSites, Rows, site_id
from fedkin.errors import DataError, ParameterError
from fedkin.graph import Graph
from fedkin.kin import partitions
from fedkin.kin.chains import Diagnostics
from fedkin.kin.inference import (
    Contrast,
    Interval,
    Kind,
    Predicted,
    Sites,
    describe,
    interval,
    positions,
    predicted,
    site_estimates,
    words,
)
from fedkin.kin.learned import Joined, Learned, covariance_of_sum, difference_errors, join_site, unseen
from fedkin.kin.partitions import GraphUse, Pairs
from fedkin.losses import Loss


@dataclass(frozen=True, eq=False, repr=False)
class Kin(HasSites):
    """Result of `find_kin`: which sites are alike, and every site's parameters, in the units of the columns.

    Attributes
    ----------
    sites : tuple of V ids
    names : tuple of p str
        Of the parameters.
    fixed : tuple of str
        Parameters that are the same at all sites: population effects.
    loss : Loss
    n_samples : int array (V,)
    mean, mean_covariance, degrees : arrays (p,), (p, p), (p,)
        Population effects without shrinkage: generalised least squares given the variances between sites, with
        Satterthwaite's degrees of freedom for their standard errors. See `population`.
    sd : array (p,)
        Standard deviation of each coefficient between sites, as used for their estimates, with a weak prior. `summary`
        shows that of restricted maximum likelihood.
    theta, covariance : arrays (V, p), (V, p, p)
        Posterior means and covariances of the sites' parameters, averaged over all groupings. Intervals from them have
        their nominal coverage on average over sites; a site unlike all others is covered less often. If possibly no
        site differs, means are averaged with one model for all; covariances are those of sites that differ.
    noise : array (V,)
        Noise variance, or dispersion, of each site.
    probability : array (V, V), or Pairs
        Probability that two sites are alike, that is in one group. For more than 3,000 sites, a `Pairs` that computes
        blocks of it on demand.
    n_groups : array
        Entry k is the probability of k groups; a continuum without groups counts as one.
    groups : int array (V,)
        Reported groups, 0 for the largest: the average-linkage cut with the least expected variation of information.
        All 0 if no groups are resolved.
    resolved : bool
        Whether groups are reliable: there are several, their expected adjusted Rand index with the true groups is at
        least 0.9, and members of each are alike with an average probability of at least 1/2.
    weight_mixed : float
        Weight of the model without groups in estimates.
    graph_use : "none", "used", "ignored" or "inverted"
        How the graph was used; "ignored" if it is unrelated to the groups or makes estimates worse.
    rates : (float, float) or None
        Shares of pairs joined by an edge, inside and between groups.
    sure : dict
        Stein's unbiased estimate of the risk of this fit ("kin"), of a model per site ("Local") and of one model for
        all ("Global").
    diagnostics : Diagnostics or None
        Convergence of the sampler; None if nothing was sampled.
    learned : Learned
        The fit in standardised units, for new sites.
    within : tuple of (site, district), or None
        The district of each site, and of planned sites, if sites are within districts.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.datasets import paper_design
    >>> design = paper_design(n_sites=12, n_samples=40, n_features=5, n_clusters=2, signal=2, seed=0)
    >>> kin = fedkin.find_kin(design.federation)
    >>> kin.groups.tolist() == design.labels.tolist(), kin.agreement() > 0.9
    (True, True)
    >>> inside, between = kin.cohesion()
    >>> bool(inside.min() > 0.9 and between < 0.1)
    True
    >>> kin.graph("groups")
    Graph(12 sites, 30 edges, 2 components)
    >>> narrow, wide = kin.confint(0.95), kin.confint(0.95, "site")
    >>> bool((np.ptp(narrow, axis=2) < np.ptp(wide, axis=2)).all())
    True
    >>> mean, new = (kin.predict(np.ones((1, 5)), 0, interval=kind) for kind in ("mean", "observation"))
    >>> bool(new.low < mean.low < mean.mean < mean.high < new.high)
    True
    >>> bool(abs(kin.difference_errors()[0, 11] - kin.contrast(0, 11).standard_error).max() < 1e-9)
    True
    """

    sites: tuple[Hashable, ...]
    names: tuple[str, ...]
    fixed: tuple[str, ...]
    loss: Loss
    n_samples: Index | Array
    mean: Array
    mean_covariance: Array
    degrees: Array
    sd: Array
    theta: Array
    covariance: Array
    noise: Array
    probability: Array | Pairs
    n_groups: Array
    groups: Index
    resolved: bool
    weight_mixed: float
    graph_use: GraphUse
    rates: tuple[float, float] | None
    sure: dict[str, float]
    diagnostics: Diagnostics | None
    learned: Learned = field(repr=False)
    within: tuple[tuple[Hashable, Hashable], ...] | None = None
    _lacks: ClassVar[str] = "was not part of the fit"
    _remedy: ClassVar[str] = ". `join` makes a model for a new site"

    @property
    def fixed_columns(self) -> list[str]:
        """The fixed columns, with a parameter for each class if there are several."""
        return list(dict.fromkeys(name.split(" [class ")[0] for name in self.fixed))

    def __repr__(self) -> str:
        groups = count(int(self.groups.max()) + 1, "group") if self.resolved else "no groups resolved"
        return f"Kin({count(len(self.sites), 'site')}, {count(len(self.names), 'parameter')}, {groups})"

    def _repr_html_(self) -> str:
        likely, K = int(np.argmax(self.n_groups)), int(self.groups.max()) + 1 if self.resolved else 0
        facts = {
            "data": f"{count(len(self.sites), 'site')}, {count(int(self.n_samples.sum()), 'row')}",
            "groups": count(K, "group") if K else "no groups resolved",
            "most likely number": f"{likely} (probability {probability(float(self.n_groups[likely]))})",
            "weight of no groups": probability(self.weight_mixed),
        }
        members = [self.members(k) for k in range(K)]
        lines = [(k, len(sites), some_of(sites)) for k, sites in enumerate(members, 1)]
        return html_card("Kin", facts, ("group", "sites", "members"), lines)

    def reordered(self, order: Index) -> Kin:
        """Return the result with sites in another order; groups of equal size are numbered by first member."""
        same = self.probability
        each = {name: getattr(self, name)[order] for name in ("n_samples", "theta", "covariance", "noise")}
        return replace(
            self,
            **each,
            sites=tuple(self.sites[u] for u in order.tolist()),
            probability=same.take(order) if isinstance(same, Pairs) else same[np.ix_(order, order)],
            groups=partitions.by_size(self.groups[order]),
            learned=self.learned.reordered(order),
        )

    def part(self, order: Index) -> Kin:
        """Return the result for some sites, by position, with the same population. New sites cannot join it."""
        made = self.reordered(order)
        return replace(made, learned=replace(made.learned, states=None, whole=False))

    def in_units(self, A: Array, shift: Array, names: tuple[str, ...]) -> Kin:
        """Return the result for the parameters ``A theta + shift``, named ``names``."""
        units = replace(self.learned.units, A=A @ self.learned.units.A, shift=A @ self.learned.units.shift + shift)
        return replace(
            self,
            names=names,
            fixed=tuple(name for name, one in zip(names, self.learned.units.fixed_mask, strict=True) if one),
            mean=A @ self.mean + shift,
            mean_covariance=A @ self.mean_covariance @ A.T,
            degrees=self.learned.population.degrees(units.A),
            sd=np.sqrt(np.diag(units.covariance(np.diag(self.learned.variance)))),
            theta=self.theta @ A.T + shift,
            covariance=A @ self.covariance @ A.T,
            learned=replace(self.learned, units=units),
        )

    def cohesion(self) -> tuple[Array, float]:
        """Return the mean probability that two members of each group are alike ``(K,)``, and that two sites of
        different groups are.
        """
        return partitions.cohesion(self.probability, self.groups)

    def agreement(self) -> float:
        """Return the expected adjusted Rand index between the best groups and the true ones; groups are resolved from
        0.9 on."""
        return partitions.agreement(
            self.probability, self.groups if self.resolved else partitions.display_groups(self.probability)
        )

    def graph(self, kind: Literal["probability", "groups"] = "probability", least: float = 0.05) -> Graph:
        """Return a graph for the fused estimator.

        Parameters
        ----------
        kind : "probability" or "groups"
            Edges weighted by the probability of being alike, or cliques of the reported groups (no edges if none are
            resolved).
        least : float
            Lowest probability of a pair with an edge.
        """
        check_choice("kind", kind, ("probability", "groups"))
        if kind == "groups":
            return Graph.clusters(self.groups.tolist(), self.sites) if self.resolved else Graph.empty(self.sites)
        if isinstance(self.probability, Pairs):
            many = f"{len(self.sites)} sites have too many pairs"
            raise ParameterError(f"{many} for a graph of probabilities: use graph('groups')")
        i, j = np.tril_indices(len(self.sites), -1)
        chance = self.probability[i, j]
        kept = chance > max(least, 0.0)
        return Graph.from_indices(self.sites, np.column_stack([i, j])[kept], chance[kept])

    def join(self, site: Rows | Summary | None = None, within: Hashable | None = None) -> Joined:
        """Return a model for a site that was not part of the fit.

        Parameters
        ----------
        site : Rows, Summary or None
            Its rows, with the columns of the fit, or its summary; None if it has no rows yet.
        within : id, optional
            Its district, if sites are within districts; a district that is not in the fit counts as new.

        Returns
        -------
        Joined

        Examples
        --------
        >>> import fedkin
        >>> from fedkin.datasets import paper_design
        >>> design = paper_design(n_sites=12, n_samples=40, n_features=5, n_clusters=2, signal=2, seed=0)
        >>> kin = fedkin.find_kin(design.federation.subset(range(1, 12)))
        >>> joined = kin.join(design.federation[0])
        >>> bool(joined.probability[design.labels[1:] == design.labels[0]].min() > 0.9)
        True
        """
        if not self.learned.whole:
            raise ParameterError("this result has only some of the sites; a new site can join only the full result")
        if within is not None and self.within is None:
            raise ParameterError("the fit has no districts: leave within= out")
        number = None if within is None else self.districts.get(site_id(within))
        return join_site(self.learned.around(number), self.loss, self.names, site)

    @property
    def districts(self) -> dict[Hashable, int]:
        """Number of each district in the fit."""
        nested, known = self.learned.nested, dict(self.within or ())
        return {} if nested is None else {known[site]: int(k) for site, k in zip(self.sites, nested.index, strict=True)}

    def population(self, level: float = 0.95) -> Array:
        """Return population effects: estimates with intervals.

        Parameters
        ----------
        level : float in (0, 1)
            Coverage of the intervals, over samples of sites and of their rows.

        Returns
        -------
        array (p, 3)
            Rows ``(estimate, low, high)`` in the order of ``names``. Intervals use the t distribution with ``degrees``
            of freedom, since variances are estimated; a single site carries no information about a population.

        Examples
        --------
        >>> import numpy as np, fedkin
        >>> rng = np.random.default_rng(0)
        >>> X, site = np.ones((200, 1)), np.repeat(np.arange(20), 10)
        >>> y = 5.0 + rng.normal(size=20)[site] + rng.normal(size=200)
        >>> kin = fedkin.find_kin(fedkin.Federation.from_arrays(X, y, site, feature_names=["(intercept)"]))
        >>> estimate, low, high = kin.population()[0]
        >>> bool(low < 5 < high), round(float(kin.degrees[0]))
        (True, 19)
        """
        check_level(level)
        times = np.where(self.degrees > 0, stdtrit(np.maximum(self.degrees, 1e-3), 0.5 + level / 2), np.inf)
        half = times * np.sqrt(np.diag(self.mean_covariance))
        return np.column_stack([self.mean, self.mean - half, self.mean + half])

    def confint(self, level: float = 0.95, kind: Kind = "average") -> Array:
        """Return intervals for every site's parameters.

        Parameters
        ----------
        level : float in (0, 1)
            Coverage of the intervals.
        kind : "average" or "site"
            "average": posterior intervals, with nominal coverage on average over sites. "site": intervals from a site's
            own rows alone, with nominal coverage at every single site; wider, and infinite where the rows carry no
            information.

        Returns
        -------
        array (V, p, 2)
        """
        theta, covariance = site_estimates(self, kind)
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
            A site, or several sites for their mean (`members` lists those of a group). Without ``other``, the result
            is about ``one`` alone.
        weights : mapping {parameter: float}, optional
            A combination of parameters; by default every parameter separately.
        kind : "average" or "site"
            As in `confint`. With "site", the Wald test of a difference uses only the rows of the two sites.

        Returns
        -------
        Contrast
            Prints as a table; ``wald`` tests that nothing differs, ``probability`` is that of the two being alike.

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
        first = positions(self, one)
        second = np.empty(0, dtype=np.int64) if other is None else positions(self, other)
        both = set(first.tolist()) & set(second.tolist())
        if both:
            raise ParameterError(
                f"site {self.sites[both.pop()]!r} is on both sides: name two different sites or groups"
            )
        sites = np.concatenate([first, second])
        a = np.concatenate([np.full(len(first), 1 / len(first)), np.full(len(second), -1 / max(len(second), 1))])
        theta, each = site_estimates(self, kind)
        estimate = a @ theta[sites]
        if kind == "site":
            covariance = np.tensordot(a**2, each[sites], 1)
        elif len(sites) == 1:
            covariance = each[sites[0]]
        else:
            covariance = covariance_of_sum(self.learned, self.theta, sites, a)
        names, probability = self.names, None
        if len(first) == len(second) == 1:
            probability = float(self.probability[int(first[0]), int(second[0])])
            if kind == "average":
                lacks = unseen(self.learned, np.array([probability]), first, second)
                covariance = covariance + float(lacks[0]) * np.outer(estimate, estimate)
        if weights is not None:
            unknown = [name for name in weights if name not in names]
            if unknown:
                raise ParameterError(f"there is no parameter {unknown[0]!r}; there are {', '.join(names)}")
            R = np.array([[weights.get(name, 0.0) for name in names]])
            names = (" ".join(f"{value:+g} {name}" for name, value in weights.items()),)
            estimate, covariance = R @ estimate, R @ covariance @ R.T
        label = words(one) if other is None else f"{words(one)} minus {words(other)}"
        return Contrast(label, names, estimate, covariance, kind, probability)

    def difference_errors(self) -> Array:
        """Return standard errors ``(V, V, p)`` of the differences between all pairs of sites, as in `contrast`.

        It has ``V * V * p`` numbers, so use it for up to a few hundred sites.
        """
        return difference_errors(self.learned, self.theta, self.probability)

    def members(self, group: int) -> list[Hashable]:
        """Return the sites of a group, numbered as in ``groups``."""
        found = [self.sites[u] for u in np.flatnonzero(self.groups == group)]
        if not self.resolved or not found:
            last = int(self.groups.max())
            known = f"groups are 0 to {last}" if self.resolved else "no groups are resolved"
            raise ParameterError(f"there is no group {group!r}: {known}")
        return found

    def predict(
        self, X: Array, site: Hashable, *, level: float = 0.95, interval: Interval = "mean", offset: Array | None = None
    ) -> Predicted:
        """Return predictions for rows of one site, with intervals.

        Parameters
        ----------
        X : array (n, p)
            Rows with the columns of the fit, including the intercept.
        site : id
            The site of the rows.
        level : float in (0, 1)
            Coverage of the intervals.
        interval : "mean" or "observation"
            Intervals for the mean response, or for a new observation including its noise (linear and Poisson losses).
        offset : array (n,), optional
            Known part of the predictor.
        """
        check_choice("interval", interval, ("mean", "observation"))
        rows = np.atleast_2d(np.asarray(X, dtype=np.float64))
        u = self.position(site)
        if rows.shape[1] != len(self.names):
            raise DataError(f"X has {rows.shape[1]} columns, expected {len(self.names)}: {', '.join(self.names)}")
        given = self, rows, self.theta[u], self.covariance[u], float(self.noise[u])
        averaged = self.posterior_covariance(u)
        return predicted(*given, level=level, interval=interval, offset=offset, posterior=averaged)

    def posterior_covariance(self, u: int) -> Array:
        """Return the posterior covariance ``(p, p)`` of the parameters of a site, by position.

        Class probabilities are averaged over it. ``covariance`` is larger if possibly no site differs: intervals from
        it cover also where sites do.
        """
        learned = self.learned
        off = learned.units.theta(learned.one_mean) - self.theta[u]
        alike = learned.units.covariance(learned.one_covariance) + np.outer(off, off)
        return np.asarray((1 - learned.one) * self.covariance[u] + learned.one * alike)

    def summary(
        self, level: float = 0.95, *, site: Hashable | None = None, group: int | None = None, kind: Kind = "average"
    ) -> str:
        """Return the result as text, as statsmodels does.

        Parameters
        ----------
        level : float in (0, 1)
            Coverage of the intervals.
        site : id, optional
            Only this site: its parameters, and the sites that are probably like it.
        group : int, optional
            Only this group: the mean of its members' parameters.
        kind : "average" or "site"
            As in `confint`.
        """
        return describe(self, level, site, group, kind)
