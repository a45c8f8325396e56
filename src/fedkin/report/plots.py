"""Figures with Matplotlib: each takes axes, or makes some, and returns them.

Matplotlib is imported when a figure is asked for (``pip install 'fedkin[report]'``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from fedkin._base import Array, Index
from fedkin.errors import ParameterError, missing_dependency
from fedkin.fitting import FittedModel
from fedkin.graph import Graph
from fedkin.report.payload import LEVEL, display_order, shares_of
from fedkin.report.text import group_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Colours of groups, as on the page; beyond ten they come again.
COLOURS = (
    *("#0f766e", "#c2571a", "#5b5bd6", "#b0256b", "#8a6d00"),
    *("#1d6fb8", "#6b7a10", "#8b46b5", "#a3422f", "#44616f"),
)
_PLAIN, _RAMP = "#5f6b76", ["#f3f1ec", "#0b4f49"]


def plot_kin(model: FittedModel, ax: Axes | None = None) -> Axes:
    """Draw the ordered matrix of a model: how probable it is that two sites are kin.

    Of a fused model, the share of coefficients that two sites have in common.

    Parameters
    ----------
    model : FittedModel
        As fitted or loaded.
    ax : matplotlib axes, optional
        Where to draw; a new figure by default.

    Returns
    -------
    matplotlib axes

    Examples
    --------
    >>> import matplotlib
    >>> matplotlib.use("Agg")
    >>> import fedkin
    >>> from fedkin.fitting import FitOptions, fit
    >>> from fedkin.report import plot_kin
    >>> fed = fedkin.Federation({u: [[float(u > 1)]] for u in range(4)})
    >>> model = fit(fed, None, FitOptions(loss="mean", lam=0.02, select="none"))
    >>> plot_kin(model).get_title()
    'Coefficients in common'
    """
    ax = _axes(ax, (5.0, 5.0))
    from matplotlib.colors import LinearSegmentedColormap

    groups, resolved = group_labels(model)
    shares, ramp = shares_of(model, np.arange(model.n_sites)), LinearSegmentedColormap.from_list("kin", _RAMP)
    order = display_order(shares, groups)
    picture = ax.imshow(shares[np.ix_(order, order)], cmap=ramp, vmin=0, vmax=1, interpolation="nearest")
    ax.figure.colorbar(picture, ax=ax, shrink=0.8)
    if resolved:
        for edge in np.flatnonzero(np.diff(groups[order])) + 0.5:
            ax.axhline(edge, color="white", linewidth=1)
            ax.axvline(edge, color="white", linewidth=1)
    if model.n_sites <= 40:
        names = [str(model.sites[u]) for u in order]
        ax.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
        ax.set_yticks(range(len(names)), names, fontsize=7)
        for ticks in (ax.get_xticklabels(), ax.get_yticklabels()):
            for tick, site in zip(ticks, order.tolist(), strict=True):
                tick.set_color(_colour(int(groups[site]), resolved))
    ax.set_title("Coefficients in common" if model.kin is None else "Probability of being kin")
    return ax


def plot_coefficients(
    model: FittedModel, feature: str | int = 0, ax: Axes | None = None, *, level: float = LEVEL, most: int = 60
) -> Axes:
    """Draw one coefficient at every site, with intervals where the model has them, sites sorted by group and size.

    Parameters
    ----------
    model, ax
        As in `plot_kin`.
    feature : str or int
        Name or number of a feature.
    level : float in (0, 1)
        Of the intervals.
    most : int
        Sites that are drawn; of more, evenly spread ones.
    """
    number = _feature(model, feature)
    (groups, resolved), values = group_labels(model), model.coef[:, 0, number]
    order = np.lexsort((values, -groups))
    if order.size > most:
        order = order[np.unique(np.linspace(0, order.size - 1, most).astype(np.int64))]
    ax = _axes(ax, (6.0, max(2.0, 0.22 * order.size)))
    places, values = np.arange(order.size), values[order]
    colours = [_colour(int(groups[u]), resolved) for u in order.tolist()]
    if model.kin is not None and model.coef.shape[1] == 1:
        half = np.ptp(model.kin.confint(level), axis=2)[order, number + int(model.fit_intercept)] / 2
        ax.hlines(places, values - half, values + half, colors=colours, linewidth=1.5)
    ax.scatter(values, places, c=colours, s=22, zorder=3)
    ax.axvline(0, color="0.6", linewidth=0.8, linestyle=":")
    ax.set_yticks(places, [str(model.sites[u]) for u in order.tolist()], fontsize=7)
    ax.set_xlabel(model.feature_names[number])
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return ax


def plot_path(model: FittedModel, ax: Axes | None = None) -> Axes:
    """Draw how sites fuse as ``lam`` grows: a line per site; lines meet where parameters are equal.

    Parameters
    ----------
    model : FittedModel
        With the path in its ``history``, as ``fedkin fit`` and `with_history` keep it.
    ax : matplotlib axes, optional
        Where to draw.
    """
    path: Mapping[str, Any] | None = (model.history or {}).get("path")
    if path is None:
        raise ParameterError("the model has no path in its history: fit with lam='cv', then fitting.with_history(...)")
    ax = _axes(ax, (6.0, 4.0))
    groups, resolved = group_labels(model)
    lams, labels = np.asarray(path["lams"]), np.asarray(path["labels"])
    rank = np.argsort(np.argsort(groups, kind="stable"))
    heights = np.array([(np.bincount(line, weights=rank) / np.maximum(np.bincount(line), 1))[line] for line in labels])
    for u in range(model.n_sites):
        ax.plot(lams, heights[:, u], color=_colour(int(groups[u]), resolved), linewidth=1, alpha=0.7)
    if model.fused is not None:
        lam = model.fused.lam
        ax.axvline(lam, color="0.2", linewidth=1.2)
        ax.annotate(f"lam = {lam:.3g}", (lam, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize=8)
    ax.set_xscale("log")
    ax.set_yticks([])
    ax.set_xlabel("lam")
    ax.set_ylabel("sites")
    return ax


def plot_graph(
    graph: Graph, groups: ArrayLike | None = None, coordinates: ArrayLike | None = None, ax: Axes | None = None
) -> Axes:
    """Draw a graph of sites: at their coordinates, or on a circle, sorted by group.

    Parameters
    ----------
    graph : Graph
        The sites and their edges.
    groups : sequence of V ints, optional
        Colours the sites; by default the connected components.
    coordinates : array (V, 2), optional
        Where the sites are.
    ax : matplotlib axes, optional
        Where to draw.

    Examples
    --------
    >>> import matplotlib
    >>> matplotlib.use("Agg")
    >>> import fedkin
    >>> from fedkin.report import plot_graph
    >>> axes = plot_graph(fedkin.Graph.clusters([0, 0, 1, 1, 1]))
    >>> len(axes.collections[0].get_segments())
    4
    """
    from matplotlib.collections import LineCollection

    labels = np.asarray(graph.components() if groups is None else groups, dtype=np.int64)
    places = _places(labels, coordinates)
    for name, size in (("groups", labels.size), ("coordinates", len(places))):
        if size != graph.n_sites:
            raise ParameterError(f"{name} has {size} lines, expected {graph.n_sites}: one for each site")
    ax = _axes(ax, (5.0, 5.0))
    ax.add_collection(LineCollection(list(places[graph.edges]), colors="0.6", linewidths=0.7, alpha=0.6))
    colours = [_colour(int(label)) for label in labels]
    ax.scatter(places[:, 0], places[:, 1], c=colours, s=40, zorder=3, edgecolors="white")
    if graph.n_sites <= 40:
        for (x, y), site in zip(places, graph.sites, strict=True):
            ax.annotate(str(site), (x, y), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=7)
    ax.set_aspect("equal")
    ax.set_axis_off()
    return ax


def _places(labels: Index, coordinates: ArrayLike | None) -> Array:
    if coordinates is not None:
        return np.asarray(coordinates, dtype=np.float64).reshape(-1, 2)
    angle = 2 * np.pi / labels.size * np.argsort(np.argsort(labels, kind="stable"))
    return np.column_stack([np.cos(angle), np.sin(angle)])


def _feature(model: FittedModel, feature: str | int) -> int:
    if isinstance(feature, str):
        if feature in model.feature_names:
            return model.feature_names.index(feature)
        raise ParameterError(f"the model has no feature {feature!r}; it has {', '.join(model.feature_names[:8])}")
    if not 0 <= feature < model.n_features:
        raise ParameterError(f"feature must be from 0 to {model.n_features - 1}, got {feature!r}")
    return feature


def _colour(group: int, resolved: bool = True) -> str:
    return COLOURS[group % len(COLOURS)] if resolved else _PLAIN


def _axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    if ax is not None:
        return ax
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise missing_dependency("matplotlib", "a figure", "report") from None
    return plt.subplots(figsize=size, layout="constrained")[1]
