"""The accuracy figure and the map of the election study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkin.studies.present.election import PROTOCOLS, PUBLISHED, Groups, groups
from fedkin.studies.present.figures import add_legend
from fedkin.studies.present.summary import distinct, summarize
from fedkin.studies.rows import Row
from fedkin.studies.tasks.election import LABELS
from fedkin.studies.tasks.election.data import read_outlines
from fedkin.studies.tasks.election.topojson import Rings

_MODELS = ("local", "global", "fed-loc", "fed-his")
_LINES: Mapping[str, Mapping[str, Any]] = {
    "always-republican": {"color": "#777777", "linestyle": (0, (1, 1.5))},
    "state-majority": {"color": "#777777", "linestyle": (0, (5, 2))},
    "boosting": {"color": "#000000", "linestyle": (0, (5, 1, 1, 1))},
}
# light and dark, and hatched, so that a grey print shows the groups
_GROUPS = (
    {"facecolor": "#F0E442", "hatch": ""},
    {"facecolor": "#0072B2", "hatch": "////"},
    {"facecolor": "#009E73", "hatch": "...."},
    {"facecolor": "#CC79A7", "hatch": "xxxx"},
)


def accuracy(spec: Mapping[str, Any], rows: Sequence[Row], folder: Path) -> Any:
    """Accuracies with their spread over splits, between the floors and the ceiling, beside the published ones."""
    from matplotlib.figure import Figure

    protocols = distinct(rows, "standardize")
    figure = Figure(figsize=(4.3 * len(protocols) + 0.8, 3.4), layout="constrained")
    axes = figure.subplots(1, len(protocols), sharey=True, sharex=True, squeeze=False)[0]
    table = summarize(rows, ["standardize", "method"], "accuracy")
    for axis, protocol in zip(axes, protocols, strict=True):
        places = np.arange(len(_MODELS))[::-1]
        for place, method in zip(places, _MODELS, strict=True):
            found = table.get((protocol, method))
            if found is None:
                continue
            mine = {"color": "#D55E00", "marker": "o", "markersize": 6, "capsize": 3, "linestyle": "none"}
            axis.errorbar(
                found.mean, place + 0.12, xerr=np.nan_to_num(found.sd), label="here: mean ± sd over splits", **mine
            )
            value, sd = PUBLISHED[method]
            theirs = {"color": "#0072B2", "marker": "D", "markersize": 5, "capsize": 3, "linestyle": "none"}
            axis.errorbar(value, place - 0.12, xerr=sd, label="published: mean ± sd", markerfacecolor="white", **theirs)
        for method, style in _LINES.items():
            if (line := table.get((protocol, method))) is not None:
                axis.axvline(line.mean, linewidth=1.2, zorder=1, label=LABELS[method], **style)
        axis.set_yticks(places, [LABELS[method] for method in _MODELS])
        axis.set_ylim(-0.6, len(_MODELS) - 0.4)
        axis.set_title(PROTOCOLS.get(protocol, protocol), loc="left")
        axis.grid(axis="y", visible=False)
    figure.supxlabel("accuracy: share of held-out counties predicted right", fontsize=10)
    add_legend(figure, axes)
    return figure


def state_map(spec: Mapping[str, Any], rows: Sequence[Row], folder: Path) -> Any:
    """Two maps: the groups of D_loc, and how much each state has in common with most others."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    found = groups(rows)
    shapes = read_outlines(folder)
    figure = Figure(figsize=(7.2, 9.0), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    for axis in (upper, lower):
        axis.set_aspect("equal")
        axis.set_axis_off()
        for rings in shapes.values():
            _outline(axis, rings, facecolor="white", edgecolor="#b5b5b5", linewidth=0.4)
    _draw_groups(upper, found, shapes)
    share = found.common.mean(axis=0)
    scale = ScalarMappable(Normalize(min(float(share.min()), 0.9), 1.0), "cividis")
    for state, value in zip(found.states, share, strict=True):
        _outline(lower, shapes[state], facecolor=scale.to_rgba(value), edgecolor="#333333", linewidth=0.5)
        dark = float(np.dot(scale.to_rgba(value)[:3], (0.3, 0.6, 0.1))) < 0.5
        _name(lower, shapes[state], f"{state}\n{value:.2f}", "white" if dark else "black")
    lower.set_title("Coefficients in common with most states (mean over splits)", loc="left")
    figure.colorbar(scale, ax=lower, shrink=0.6, label="share of a state's coefficients (1 = all)")
    return figure


def _draw_groups(axis: Any, found: Groups, shapes: Mapping[str, Rings]) -> None:
    from matplotlib.patches import Patch

    sizes = np.bincount(found.labels)
    handles: dict[str, Any] = {}
    for u, state in enumerate(found.states):
        label = int(found.labels[u])
        style: dict[str, Any] = {"facecolor": "#9a9a9a", "hatch": ""}
        name = "not connected to another state"
        if sizes[label] > 1:
            style = dict(_GROUPS[label % len(_GROUPS)])
            name = f"group {chr(ord('A') + label)}: {sizes[label]} states"
        _outline(axis, shapes[state], edgecolor="#333333", linewidth=0.5, **style)
        _name(axis, shapes[state], state, "black")
        handles.setdefault(name, Patch(edgecolor="#333333", **style))
    handles["not in the study"] = Patch(facecolor="white", edgecolor="#b5b5b5")
    splits, pairs = len(found.kept), len(found.states) * (len(found.states) - 1) // 2
    full = sum(kept == pairs for kept in found.kept)
    axis.set_title(f"Groups of D_loc: in {full} of {splits} splits the test keeps all {pairs} edges", loc="left")
    axis.legend(list(handles.values()), list(handles), loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3)


def _outline(axis: Any, rings: Rings, **style: Any) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    outline = Outline.make_compound_path(*(Outline(ring, closed=True) for ring in rings))
    axis.add_patch(PathPatch(outline, **style))
    axis.autoscale_view()


def _name(axis: Any, rings: Rings, text: str, color: str) -> None:
    x, y = _inside(max(rings, key=lambda ring: float(np.ptp(ring[:, 0]) * np.ptp(ring[:, 1]))))
    axis.text(x, y, text, ha="center", va="center", fontsize=5.5, color=color, linespacing=0.95)


def _inside(ring: Any) -> tuple[float, float]:
    """A point well inside a ring: of a lattice of points, the one farthest from the outline."""
    from matplotlib.path import Path as Outline

    low, high = ring.min(axis=0), ring.max(axis=0)
    x, y = np.meshgrid(*(np.linspace(a, b, 25)[1:-1] for a, b in zip(low, high, strict=True)))
    points = np.column_stack([x.ravel(), y.ravel()])
    points = points[Outline(ring).contains_points(points)]
    if not len(points):
        return float(ring[:, 0].mean()), float(ring[:, 1].mean())
    # a name is wider than high
    distance = np.hypot((points[:, None, 0] - ring[None, :, 0]) / 1.5, points[:, None, 1] - ring[None, :, 1])
    best = points[distance.min(axis=1).argmax()]
    return float(best[0]), float(best[1])
