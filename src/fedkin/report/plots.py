"""Draw figures with Matplotlib, which is imported on the first call; functions take and return axes."""

from __future__ import annotations

import textwrap
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from fedkin._base import Array, Index
from fedkin.errors import ParameterError, missing_dependency
from fedkin.fitting import FittedModel
from fedkin.graph import Graph
from fedkin.report.payload import LEVEL, METHODS, display_order, shares_of
from fedkin.report.text import group_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The palette of Okabe and Ito without yellow; with four shapes, 28 groups have different marks.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#8a6200", "#b8588f", "#3a9bd6", "#4d4d4d")
SHAPES = ("o", "s", "^", "D")
_PLAIN, _GAIN, _LOSS = "#5f6b76", "#0f766e", "#c2571a"
_RAMP = ("#f3f1ec", "#0b4f49")
#: Scales of coefficients, by the link of the loss.
_SCALES = {"log": "log of the mean", "logit": "log-odds", "softmax": "log-odds"}
_MOST_NAMED = 40  # most sites with names along a matrix or a graph


def plot_kin(model: FittedModel, ax: Axes | None = None) -> Axes:
    """Draw the probability that each pair of sites is alike, sites ordered by group.

    For a fused model, draw the share of coefficients that are equal at two sites. Axes are optional in all figures; a
    new figure is made by default.

    Examples
    --------
    >>> import matplotlib
    >>> matplotlib.use("Agg")
    >>> import fedkin
    >>> from fedkin.fitting import FitOptions, fit
    >>> from fedkin.report import plot_kin
    >>> fed = fedkin.Federation({u: [[float(u > 1)]] for u in range(4)})
    >>> model = fit(fed, None, FitOptions(method="fused", loss="mean", lam=0.02, select="none"))
    >>> plot_kin(model).get_title()
    'Share of equal coefficients'
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
    if model.n_sites <= _MOST_NAMED:
        names = [_short(str(model.sites[u])) for u in order]
        ax.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
        ax.set_yticks(range(len(names)), names, fontsize=7)
        for ticks in (ax.get_xticklabels(), ax.get_yticklabels()):
            for tick, site in zip(ticks, order.tolist(), strict=True):
                tick.set_color(_colour(int(groups[site]), resolved))
    ax.set_xlabel("site")
    ax.set_ylabel("site")
    ax.set_title("Share of equal coefficients" if model.kin is None else "Probability of being alike")
    return ax


def plot_coefficients(
    model: FittedModel, feature: str | int = 0, ax: Axes | None = None, *, level: float = LEVEL, most: int = 60
) -> Axes:
    """Draw one coefficient at every site, with any intervals, sites sorted by group and size.

    Parameters
    ----------
    model, ax
        As in `plot_kin`.
    feature : str or int
        Name or number of a feature.
    level : float in (0, 1)
        Level of the intervals.
    most : int
        Maximum number of sites to draw: of more, evenly spaced ones are drawn, and the title gives their number.
    """
    number = _feature(model, feature)
    (groups, resolved), values = group_labels(model), model.coef[:, 0, number]
    order = _some(np.lexsort((values, -groups)), most)
    half, kin = None, model.kin
    if kin is not None and model.coef.shape[1] == 1:
        half = np.ptp(kin.confint(level), axis=2)[order, number + int(model.fit_intercept)] / 2
    colours = [_colour(int(groups[u]), resolved) for u in order.tolist()]
    ax = _dots(ax, model, order, values[order], half, colours)
    marks = groups[order] % len(SHAPES) if resolved else np.zeros(order.size, dtype=np.int64)
    for mark in np.unique(marks).tolist():
        own = np.flatnonzero(marks == mark)
        ax.scatter(values[order][own], own, c=[colours[j] for j in own], marker=SHAPES[mark], s=22, zorder=3)
    units = {} if model.schema is None else {one.name: one.unit for one in model.schema.features}
    name = model.feature_names[number]
    scale = "log hazard" if model.baseline is not None else _SCALES.get(model.loss.link or "")
    per = f" per {units[name]}" if units.get(name) else ""
    return _finish(ax, f"{name}: effect on {model.target_name or 'the target'}{per}{f' ({scale})' if scale else ''}")


def plot_gains(model: FittedModel, ax: Axes | None = None, *, most: int = 60) -> Axes:
    """Draw each site's gain over its own model, with two standard errors, in order of gain.

    The model needs a `comparison`, as ``fedkin fit`` keeps it. Of more than ``most`` sites, some are drawn.
    """
    found = _comparison(model)
    lines = [line for line in found["sites"] if line.get("gain") is not None]
    gain = np.array([line["gain"] for line in lines])
    error = np.array([np.nan if line.get("gain_error") is None else line["gain_error"] for line in lines])
    order = _some(np.argsort(gain, kind="stable"), most)
    colours = [_GAIN if gain[j] > 0 else _LOSS for j in order]
    ax = _dots(ax, model, order, gain[order], 2 * error[order], colours, [str(line["site"]) for line in lines])
    ax.scatter(gain[order], range(order.size), c=colours, s=22, zorder=3)
    return _finish(ax, f"reduction of {found['metric']} from sharing (lines: two standard errors)")


def plot_comparison(model: FittedModel, ax: Axes | None = None) -> Axes:
    """Draw the error of every method on held-out rows, with one standard error of its difference from Fedkin."""
    found = _comparison(model)
    methods = [line for line in found["methods"] if line.get("mean") is not None][::-1]
    ax = _axes(ax, (6.0, 0.9 + 0.4 * len(methods)))
    for place, line in enumerate(methods):
        own = line["name"] == METHODS[-1]
        error = None if own else line.get("difference_error")
        ax.errorbar(line["mean"], place, xerr=error, fmt="o", color=_GAIN if own else _PLAIN, capsize=0)
    ax.set_yticks(range(len(methods)), [str(line["name"]) for line in methods])
    ax.set_ylim(-0.6, len(methods) - 0.4)
    lines = "lines: one standard error of the difference from Fedkin"
    return _finish(ax, f"{found['metric']} on held-out rows (lower is better; {lines})")


def plot_survival(
    model: FittedModel,
    X: ArrayLike | None = None,
    sites: Sequence[Hashable] | None = None,
    ax: Axes | None = None,
    *,
    most: int = 12,
) -> Axes:
    """Draw the survival curve of one row of features at every site, and at a new site.

    Parameters
    ----------
    model, ax, most
        As in `plot_coefficients`; the model has the Cox loss and its baseline hazards.
    X : array (q,), optional
        The row; by default one with average features.
    sites : list of ids, optional
        The sites to draw; by default all.
    """
    if model.baseline is None:
        raise ParameterError("the model has no baseline hazards: survival curves are for the cox loss, fitted to rows")
    row = np.atleast_2d(model.baseline.at if X is None else np.asarray(X, dtype=np.float64))
    chosen = list(model.sites) if sites is None else list(sites)
    some = [chosen[j] for j in _some(np.arange(len(chosen)), most)]
    ax = _axes(ax, (6.0, 4.0))
    for k, site in enumerate(some):
        times = np.append(0.0, model.baseline.times[model.position(site)])
        curve = model.predict_survival(row, site, times)[0]
        style = ("-", "--", ":", "-.")[k // len(COLOURS) % 4]
        ax.step(times, curve, where="post", color=_colour(k), linestyle=style, linewidth=1.2, label=_short(str(site)))
    if model.kin is not None and sites is None:
        times = np.append(0.0, model.baseline.pooled().times[0])
        new = model.predict_survival(row, object(), times, unseen="population")[0]
        ax.step(times, new, where="post", color="black", linewidth=2, label="a new site")
    ax.set_ylim(0, 1)
    ax.set_ylabel("probability of no event yet")
    ax.legend(fontsize=7, title="site", frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    _say_left_out(ax, len(some), len(chosen))
    return _finish(ax, model.target_name or "time")


def plot_path(model: FittedModel, ax: Axes | None = None) -> Axes:
    """Draw how sites fuse as ``lam`` grows: one line per site; lines meet where parameters are equal.

    The model needs the path in its ``history``, from ``fedkin fit`` or `with_history`.
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
        Groups that determine colours; by default the connected components.
    coordinates : array (V, 2), optional
        Coordinates of the sites.
    ax
        As in `plot_kin`.

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
    labels = np.asarray(graph.components() if groups is None else groups, dtype=np.int64)
    angle = 2 * np.pi / labels.size * np.argsort(np.argsort(labels, kind="stable"))
    circle = np.column_stack([np.cos(angle), np.sin(angle)])
    places = circle if coordinates is None else np.asarray(coordinates, dtype=np.float64).reshape(-1, 2)
    for name, size in (("groups", labels.size), ("coordinates", len(places))):
        if size != graph.n_sites:
            raise ParameterError(f"{name} has {size} lines, expected {graph.n_sites}: one per site")
    ax = _axes(ax, (5.0, 5.0))
    from matplotlib.collections import LineCollection

    ax.add_collection(LineCollection(list(places[graph.edges]), colors="0.6", linewidths=0.7, alpha=0.6))
    colours = [_colour(int(label)) for label in labels]
    ax.scatter(places[:, 0], places[:, 1], c=colours, s=40, zorder=3, edgecolors="white")
    if graph.n_sites <= _MOST_NAMED:
        for (x, y), site in zip(places, graph.sites, strict=True):
            ax.annotate(str(site), (x, y), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=7)
    ax.set_aspect("equal")
    ax.set_axis_off()
    return ax


# --- parts of figures ---------------------------------------------------------------------------------------------


def _dots(
    ax: Axes | None,
    model: FittedModel,
    order: Index,
    values: Array,
    half: Array | None,
    colours: Sequence[str],
    names: Sequence[str] | None = None,
) -> Axes:
    """Draw the rows of a dot plot: a label for each site in ``order``, and its interval."""
    names = [str(site) for site in model.sites] if names is None else names
    ax = _axes(ax, (6.0, max(2.0, 0.6 + 0.2 * order.size)))
    if half is not None:
        ax.hlines(range(order.size), values - half, values + half, colors=colours, linewidth=1.5)
    ax.axvline(0, color="0.6", linewidth=0.8, linestyle=":")
    ax.set_yticks(range(order.size), [_short(names[j]) for j in order.tolist()], fontsize=7)
    ax.set_ylim(-1, order.size)
    ax.set_ylabel("site")
    _say_left_out(ax, order.size, len(names))
    return ax


def _some(order: Index, most: int) -> Index:
    """Return ``most`` evenly spaced entries of an order, including the first and the last."""
    if order.size <= most:
        return order
    return order[np.unique(np.linspace(0, order.size - 1, most).astype(np.int64))]


def _say_left_out(ax: Axes, drawn: int, of: int) -> None:
    if drawn < of:
        ax.set_title(f"{drawn} of {of} sites shown", fontsize=9, loc="left")


def _short(name: str) -> str:
    """Cut a long name in its middle: names of sites often differ at their ends."""
    return name if len(name) <= 24 else f"{name[:12]}…{name[-11:]}"


def _finish(ax: Axes, x_label: str) -> Axes:
    ax.set_xlabel(textwrap.fill(x_label, 44))
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _comparison(model: FittedModel) -> Mapping[str, Any]:
    if not model.comparison:
        raise ParameterError("the model has no comparison: `fedkin fit` makes one, and so does fitting.compare(...)")
    return model.comparison


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
