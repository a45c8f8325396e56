"""`Kin`: the result of a fit, in the units of the columns."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from fedkin._base import Array, Index, check_choice, count, html_card, some_of
from fedkin.core import Summary
from fedkin.data import Rows, site_id
from fedkin.errors import ParameterError, UnknownSiteError
from fedkin.graph import Graph
from fedkin.kin import display
from fedkin.kin.display import AGREE, NEARLY, Pairs
from fedkin.kin.groups import Grouped
from fedkin.kin.inference import Inference
from fedkin.kin.learned import Joined, Learned, join_site
from fedkin.kin.likelihoods import Units, apply
from fedkin.kin.mixed import MixedModel
from fedkin.kin.partitions import SHARES
from fedkin.kin.sources import Source
from fedkin.losses import Loss

GraphUse = Literal["none", "used", "ignored", "inverted"]


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
class Kin(Inference):
    """Who is alike, and every site's parameters, in the units of the columns.

    Attributes
    ----------
    sites : tuple of V ids
    names : tuple of p str
        Of the parameters.
    loss : Loss
    n_samples : int array (V,)
    mean, mean_covariance : arrays (p,), (p, p)
        Of the population of sites.
    sd : array (p,)
        Standard deviation of each coefficient between sites.
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
    """

    sites: tuple[Hashable, ...]
    names: tuple[str, ...]
    loss: Loss
    n_samples: Index | Array
    mean: Array
    mean_covariance: Array
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
        each = {name: getattr(self, name)[order] for name in ("n_samples", "theta", "covariance", "noise")}
        return replace(
            self,
            **each,
            sites=tuple(self.sites[u] for u in order.tolist()),
            probability=display.in_order(self.probability, order),
            groups=display.by_size(self.groups[order]),
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
            mean=A @ self.mean + shift,
            mean_covariance=A @ self.mean_covariance @ A.T,
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
        return display.inside_probabilities(same, labels), display.between_probability(same, labels)

    def agreement(self) -> float:
        """The adjusted Rand index that is expected between the best groups and the true ones; resolved from 0.9 on."""
        return display.agreement(
            self.probability, self.groups if self.resolved else display.display_groups(self.probability)
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

    def join(self, site: Rows | Summary | None = None) -> Joined:
        """Return a model for a site that was not part of the fit.

        Parameters
        ----------
        site : Rows, Summary or None
            Its rows, with the columns of the fit, or its summary; None before it has any.

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
        return join_site(self.learned, self.loss, self.names, site)


def make_kin(source: Source, units: Units, model: MixedModel, found: Grouped, *, had_graph: bool) -> Kin:
    """Return the result in the user's units, sites in canonical order."""
    V, p, blend = len(model.theta), len(model.mean), found.blend
    same, n_groups, weight = found.kinship()
    labels = display.display_groups(same)
    shown = display.resolved(same, labels)
    use, rates = _graph_use(found) if had_graph else ("none", None)
    states = found.kept if found.kept is not None else None if blend is None else blend.chains.states()
    learned = Learned(
        units=units,
        mean=model.mean,
        mean_covariance=found.mean_covariance,
        variance=found.variance,
        noise=float(np.exp(np.log(model.noise).mean())),
        precision=model.precision,
        score=model.score,
        F=found.F,
        weight=1.0 if blend is None else blend.weight,
        scales=np.zeros(len(SHARES)) if blend is None else blend.scales,
        states=states if states is not None and len(states.weight) else None,
        one=found.one,
        one_mean=np.zeros(p) if found.common is None else found.common.mean,
        one_covariance=np.zeros((p, p)) if found.common is None else found.common.covariance,
    )
    return Kin(
        sites=source.sites,
        names=source.names,
        loss=source.loss,
        n_samples=source.n_samples,
        mean=units.theta(model.mean),
        mean_covariance=units.covariance(model.mean_covariance),
        sd=np.sqrt(np.diag(units.covariance(np.diag(found.variance)))),
        theta=units.theta(found.theta),
        covariance=units.covariance(found.covariance),
        noise=model.noise * units.target**2,
        probability=same,
        n_groups=n_groups,
        groups=labels if shown else np.zeros(V, dtype=np.int64),
        resolved=shown,
        weight_mixed=weight,
        graph_use=use,
        rates=rates,
        sure=_sure(model, found),
        diagnostics=_diagnostics(found),
        learned=learned,
    )


def _graph_use(found: Grouped) -> tuple[GraphUse, tuple[float, float] | None]:
    """Return what was made of the graph: it counts when the odds of an edge differ by two standard deviations."""
    blend = found.blend
    if blend is None or not found.with_graph:
        return "ignored", None
    weights = blend.chains.weights
    rates = blend.chains.trace(lambda one: one.trace[:, 3:5])
    inside, between = (weights @ rates.mean(axis=1)).tolist()
    odds = np.log(rates / (1 - rates))
    contrast = odds[:, :, 0] - odds[:, :, 1]
    mean = float(weights @ contrast.mean(axis=1))
    deviation = float(np.sqrt(weights @ ((contrast - mean) ** 2).mean(axis=1)))
    if blend.weight > 0.5 or abs(mean) < 2 * deviation:
        return "ignored", (inside, between)
    return ("used" if mean > 0 else "inverted"), (inside, between)


def _diagnostics(found: Grouped) -> Diagnostics | None:
    blend = found.blend
    if blend is None:
        return None
    chains = blend.chains
    rhat, size = {}, {}
    lines = chains.trace(lambda one: one.trace)
    for name, draws in (("number of groups", lines[:, :, 1]), ("bound on the evidence", lines[:, :, 0])):
        rhat[name], size[name] = float(display.split_rhat(draws)), float(display.effective_size(draws))
    each, sizes = blend.mixing()
    rhat |= {"parameters, worst": float(each.max()), "parameters, median": float(np.median(each))}
    size |= {"parameters, worst": float(sizes.min()), "parameters, median": float(np.median(sizes))}
    return Diagnostics(chains.weights, chains.starts, int(lines.shape[1]), rhat, size)


def _sure(model: MixedModel, found: Grouped) -> dict[str, float]:
    """Return unbiased estimates of ``sum_u (theta_u - truth_u)'S_u (theta_u - truth_u)``, but for that of the noise."""
    S, c, fitted = model.precision, model.score, found.theta
    values, vectors = np.linalg.eigh(S)
    seen = values > 1e-9 * np.maximum(values[:, -1:], 1e-300)
    turned = apply(np.swapaxes(vectors, 1, 2), c)
    explained, rank = float((turned[seen] ** 2 / values[seen]).sum()), float(seen.sum())
    total, pooled = S.sum(axis=0), c.sum(axis=0)
    one = np.linalg.lstsq(total, pooled, rcond=None)[0]
    common = float(np.linalg.matrix_rank(total, hermitian=True))
    misfit = float((fitted * (apply(S, fitted) - 2 * c)).sum())
    return {
        "kin": misfit + explained - rank + 2 * found.degrees,
        "Local": rank,
        "Global": explained - float(pooled @ one) - rank + 2 * common,
    }
