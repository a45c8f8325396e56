"""Maps of the election study: groups of states, and what is found about each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedkin.datasets.counties import Rings, read_outlines
from fedkin.studies.present.election import Groups, groups
from fedkin.studies.rows import Row

# light and dark, and hatched, so that a grey print shows the groups
_GROUPS = (
    {"facecolor": "#F0E442", "hatch": ""},
    {"facecolor": "#0072B2", "hatch": "////"},
    {"facecolor": "#009E73", "hatch": "...."},
    {"facecolor": "#CC79A7", "hatch": "xxxx"},
)


def state_map(spec: Mapping[str, Any], rows: Sequence[Row], folder: Path) -> Any:
    """Two maps: the groups of D_loc, and how much each state has in common with most others."""
    found = groups(rows)
    share = found.measure.mean(axis=0)
    limits = (min(float(share.min()), 0.9), 1.0)
    title = "Coefficients in common with most states (mean over splits)"
    return _two_maps(found, "Groups of D_loc", folder, limits, (title, "share of a state's coefficients (1 = all)"))


def kin_map(spec: Mapping[str, Any], rows: Sequence[Row], folder: Path) -> Any:
    """Two maps: the groups of kin, and how far each state is from the common mean."""
    found = groups(rows, "kin")
    distance = found.measure.mean(axis=0)
    title = "Distance from the common mean (mean over splits)"
    return _two_maps(found, "Groups of kin", folder, (0.0, float(distance.max())), (title, "log-odds"))


def _two_maps(
    found: Groups, title: str, folder: Path, limits: tuple[float, float], lower_words: tuple[str, str]
) -> Any:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    shapes = read_outlines(folder)
    figure = Figure(figsize=(7.2, 9.0), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    for axis in (upper, lower):
        axis.set_aspect("equal")
        axis.set_axis_off()
        for rings in shapes.values():
            _outline(axis, rings, facecolor="white", edgecolor="#b5b5b5", linewidth=0.4)
    _draw_groups(upper, found, shapes)
    upper.set_title(f"{title}: {found.note}", loc="left")
    scale = ScalarMappable(Normalize(*limits), "cividis")
    for state, value in zip(found.states, found.measure.mean(axis=0), strict=True):
        _outline(lower, shapes[state], facecolor=scale.to_rgba(value), edgecolor="#333333", linewidth=0.5)
        dark = float(np.dot(scale.to_rgba(value)[:3], (0.3, 0.6, 0.1))) < 0.5
        _name(lower, shapes[state], f"{state}\n{value:.2f}", "white" if dark else "black")
    lower.set_title(lower_words[0], loc="left")
    figure.colorbar(scale, ax=lower, shrink=0.6, label=lower_words[1])
    return figure


def _draw_groups(axis: Any, found: Groups, shapes: Mapping[str, Rings]) -> None:
    from matplotlib.patches import Patch

    sizes = np.bincount(found.labels)
    handles: dict[str, Any] = {}
    for u, state in enumerate(found.states):
        label = int(found.labels[u])
        style: dict[str, Any] = {"facecolor": "#9a9a9a", "hatch": ""}
        name = "alone"
        if letter := found.name(u):
            style = dict(_GROUPS[label % len(_GROUPS)])
            name = f"group {letter}: {sizes[label]} states"
        _outline(axis, shapes[state], edgecolor="#333333", linewidth=0.5, **style)
        _name(axis, shapes[state], state, "black")
        handles.setdefault(name, Patch(edgecolor="#333333", **style))
    handles["not in the study"] = Patch(facecolor="white", edgecolor="#b5b5b5")
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
