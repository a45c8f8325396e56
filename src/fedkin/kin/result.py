"""`Kin`: the result of a fit, in the units of the columns."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from scipy.special import stdtrit

from fedkin._base import Array, Index, check_choice, check_level, count, html_card, some_of
from fedkin.core import Summary
from fedkin.data import Rows, site_id
from fedkin.errors import DataError, ParameterError, UnknownSiteError
from fedkin.graph import Graph
from fedkin.kin import partitions
from fedkin.kin.chains import AGREE, NEARLY
from fedkin.kin.inference import (
    Contrast,
    Kind,
    Predicted,
    Sites,
    Target,
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


@dataclass(frozen=True, eq=False)
class Diagnostics:
    """How well the chains of the sampler have mixed.

    Attributes
    ----------
    weights : array (C,)
        Of the chains in every average.
    starts : tuple of C str
        Where they began.
    draws : int
        Sweeps that each has kept.
    rhat, size : dict
        Split R-hat, and effective sample size of all chains, of the number of groups, of the bound on the evidence and
        of the sites' parameters (the worst of them, and the median). Parameters are those that are reported: averaged
        with what a model without groups says, and by what chains disagree of the variance that is stated.
    """

    weights: Array
    starts: tuple[str, ...]
    draws: int
    rhat: dict[str, float]
    size: dict[str, float]

    @property
    def verdict(self) -> Literal["agree", "nearly", "disagree"]:
        """Whether the chains agree on all sites, on most of them, or not: by R-hat of the sites' parameters."""
        worst, typical = self.rhat["parameters, worst"], self.rhat["parameters, median"]
        if worst <= AGREE:
            return "agree"
        return "nearly" if typical <= AGREE or worst <= NEARLY else "disagree"


@dataclass(frozen=True, eq=False, repr=False)
class Kin:
    """Who is alike, and every site's parameters, in the units of the columns.

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
        Effects of the population of sites, which nothing shrinks: generalised least squares given the variances between
        sites, with Satterthwaite's degrees of freedom for their standard errors. See `population`.
    sd : array (p,)
        Standard deviation of each coefficient between sites, as their estimates use it: lightly held by a prior.
        `summary` has that of restricted maximum likelihood.
    theta, covariance : arrays (V, p), (V, p, p)
        Posterior means and covariances of the sites' parameters, averaged over all groupings. Intervals from them
        cover as often as they promise on average over sites; a site unlike all others is covered less often. Where
        perhaps no site differs, means are averaged over that, and covariances are those of the likelier case: of one
        model for all from a probability of 2/3 on.
    noise : array (V,)
        Noise variance of each site, or its dispersion.
    probability : array (V, V), or Pairs
        That two sites are kin: in one group. For more than 3,000 sites a `Pairs`, which computes blocks of it.
    n_groups : array
        Entry k is the probability of k groups; a continuum without groups counts as one.
    groups : int array (V,)
        Groups to show, 0 for the largest: the average-linkage cut with the least expected variation of information.
        All 0 where no groups are resolved.
    resolved : bool
        Whether groups are to be believed: there are several, and the adjusted Rand index that is expected between them
        and the true ones is 0.9 or more, and members of each are kin with probability 1/2 or more on average.
    weight_mixed : float
        Weight of the model without groups in estimates.
    graph_use : "none", "used", "ignored" or "inverted"
        What was made of the graph: nothing without one; "ignored" when it says nothing about groups or hurts.
    rates : (float, float) or None
        Share of pairs with an edge inside groups and between them.
    sure : dict
        Stein's unbiased estimate of the risk of this fit ("kin"), of a model per site ("Local") and of one model for
        all ("Global").
    diagnostics : Diagnostics or None
        How well the sampler has mixed; None where nothing was sampled.
    learned : Learned
        The fit in standardised units, for new sites.
    within : tuple of (site, district), or None
        The district of each site, and of some to come, where sites are within districts.
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

    @property
    def fixed_columns(self) -> list[str]:
        """The columns of `fixed`, which have a parameter for each class where there are several."""
        return list(dict.fromkeys(name.split(" [class ")[0] for name in self.fixed))

    def __repr__(self) -> str:
        groups = count(int(self.groups.max()) + 1, "group") if self.resolved else "no groups resolved"
        return f"Kin({count(len(self.sites), 'site')}, {count(len(self.names), 'parameter')}, {groups})"

    def _repr_html_(self) -> str:
        likely, K = int(np.argmax(self.n_groups)), int(self.groups.max()) + 1 if self.resolved else 0
        facts = {
            "sites": f"{len(self.sites)}, {int(self.n_samples.sum())} rows",
            "groups": count(K, "group") if K else "no groups resolved",
            "most likely number": f"{likely} (probability {self.n_groups[likely]:.2f})",
            "weight of no groups": f"{self.weight_mixed:.2f}",
        }
        members = [self.members(k) for k in range(K)]
        lines = [(k, len(sites), some_of(sites)) for k, sites in enumerate(members, 1)]
        return html_card("Kin", facts, ("group", "sites", "members"), lines)

    def reordered(self, order: Index) -> Kin:
        """Return the same result with sites in another order; groups of equal size are numbered by first member."""
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
        """What is known about some sites, by position; what all have in common stays. No new site can join them."""
        made = self.reordered(order)
        return replace(made, learned=replace(made.learned, states=None, whole=False))

    def in_units(self, A: Array, shift: Array, names: tuple[str, ...]) -> Kin:
        """Return the same result with parameters ``A theta + shift``, called ``names``."""
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
        """Mean probability that two members are kin, of each group ``(K,)``, and that of sites of different groups.

        Examples
        --------
        >>> import fedkin
        >>> from fedkin.datasets import paper_design
        >>> design = paper_design(n_sites=12, n_samples=40, n_features=5, n_clusters=2, signal=2, seed=0)
        >>> inside, between = fedkin.find_kin(design.federation).cohesion()
        >>> bool(inside.min() > 0.9 and between < 0.1)
        True
        """
        same, labels = self.probability, self.groups
        return partitions.inside_probabilities(same, labels), partitions.between_probability(same, labels)

    def agreement(self) -> float:
        """The adjusted Rand index that is expected between the best groups and the true ones; resolved from 0.9 on."""
        return partitions.agreement(
            self.probability, self.groups if self.resolved else partitions.display_groups(self.probability)
        )

    def position(self, site: Hashable) -> int:
        """Return where a site is in ``sites``."""
        site = site_id(site)
        try:
            return self.sites.index(site)
        except ValueError:
            raise UnknownSiteError(f"site {site!r} was not part of the fit; ask for its model with `join`") from None

    def graph(self, kind: Literal["probability", "groups"] = "probability", least: float = 0.05) -> Graph:
        """Return a graph for the fused estimator.

        Parameters
        ----------
        kind : "probability" or "groups"
            Edges weighted by the probability of being kin, or cliques of the groups to show (no edges where none are
            resolved).
        least : float
            Pairs with a lower probability have no edge.

        Examples
        --------
        >>> import fedkin
        >>> from fedkin.datasets import paper_design
        >>> design = paper_design(n_sites=12, n_samples=40, n_features=5, n_clusters=2, signal=2, seed=0)
        >>> fedkin.find_kin(design.federation).graph("groups")
        Graph(12 sites, 30 edges, 2 components)
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
            Its rows, with the columns of the fit, or its summary; None before it has any.
        within : id, optional
            Its district, where sites are within districts; one that the fit did not have is like a new one.

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
            raise ParameterError("this is what is known about some sites; a new one can join only all of them")
        if within is not None and self.within is None:
            raise ParameterError("the fit has no districts: leave within= out")
        number = None if within is None else self.districts.get(site_id(within))
        return join_site(self.learned.around(number), self.loss, self.names, site)

    @property
    def districts(self) -> dict[Hashable, int]:
        """The number of each district that the fit has rows of."""
        nested, known = self.learned.nested, dict(self.within or ())
        return {} if nested is None else {known[site]: int(k) for site, k in zip(self.sites, nested.index, strict=True)}

    def population(self, level: float = 0.95) -> Array:
        """Return effects of the population of sites: estimates with intervals.

        Parameters
        ----------
        level : float in (0, 1)
            Probability that the intervals promise, over samples of sites and of their rows.

        Returns
        -------
        array (p, 3)
            Rows ``(estimate, low, high)`` in the order of ``names``. Intervals are of the t distribution with
            ``degrees`` of freedom, since variances are estimated; one site alone says nothing about a population.

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
        return difference_errors(self.learned, self.theta, self.probability)

    def members(self, group: int) -> list[Hashable]:
        """Return the sites of a group to show, numbered as in ``groups``."""
        found = [self.sites[u] for u in np.flatnonzero(self.groups == group)]
        if not self.resolved or not found:
            last = int(self.groups.max())
            known = f"groups are 0 to {last}" if self.resolved else "no groups are resolved"
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
        rows = np.atleast_2d(np.asarray(X, dtype=np.float64))
        u = self.position(site)
        if rows.shape[1] != len(self.names):
            raise DataError(f"X has {rows.shape[1]} columns, expected {len(self.names)}: {', '.join(self.names)}")
        noise = float(self.noise[u])
        return predicted(
            self, rows, self.theta[u], self.covariance[u], noise, level=level, target=target, offset=offset
        )

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
        return describe(self, level, site, group, kind)
