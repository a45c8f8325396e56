"""The templates in ``templates/``, filled in; what the demonstration's picture shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from fedkin._base import Index, Mask
from fedkin.graph import Graph

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values: Any) -> str:
    """Fill in a file of ``templates/``; every value is escaped, and a missing one is an error."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("fedkin.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["readable"] = readable
    return made


def readable(value: float | None) -> str:
    """A number with four digits that count, thousands apart; a dash where there is none.

    Examples
    --------
    >>> readable(11358800000.0), readable(0.19814), readable(107.0948)
    ('11 360 000 000', '0.1981', '107.1')
    """
    if value is None:
        return "–"
    if not 1e4 <= abs(value) < 1e15:
        return f"{value:.4g}"
    return f"{float(f'{value:.3e}'):,.0f}".replace(",", " ")


@dataclass(frozen=True, eq=False)
class DemoResult:
    """What the demonstration found; mappings are by method."""

    summary: str  # a few plain sentences
    estimation: Mapping[str, float]
    held_out: Mapping[str, float]
    highlight: Sequence[str]
    given: Graph  # before and after the edge tests
    kept: Graph
    labels: Index  # (V,), true group of each site


def demo_picture(result: DemoResult) -> str:
    """The given graph, the kept edges and the errors side by side, as one ``<svg>``."""
    return render("demo.svg", **_picture(result)).strip()


def _picture(result: DemoResult) -> dict[str, Any]:
    """What ``demo.svg`` draws: the matrices of two graphs, and errors as dots on a logarithmic axis."""
    errors = result.estimation
    low = math.floor(math.log10(min(errors.values())) + 1e-9)
    high = max(math.ceil(math.log10(max(errors.values())) - 1e-9), low + 1)

    def share(value: float) -> float:
        return (math.log10(value) - low) / (high - low)

    return {
        "matrices": [
            _matrix(result.given, result.labels, "The graph as given"),
            _matrix(result.kept, result.labels, "Sites that Fedkin takes for kin"),
        ],
        "longest": max(map(len, errors)),
        "ticks": [(share(10.0**power), f"{10.0**power:g}") for power in range(low, high + 1)],
        "dots": [
            {"name": name, "share": share(value), "label": f"{value:.3g}", "strong": name in result.highlight}
            for name, value in errors.items()
        ],
    }


def _matrix(graph: Graph, labels: Index, title: str) -> dict[str, Any]:
    """The matrix of a graph, sites sorted by group: a square for each edge, within groups and across them."""
    rank = np.argsort(np.argsort(labels, kind="stable"))
    within = labels[graph.edges[:, 0]] == labels[graph.edges[:, 1]]

    def squares(chosen: Mask) -> str:
        i, j = rank[graph.edges[chosen]].T
        return "".join(f"M{x} {y}h1v1h-1z" for x, y in zip(np.r_[i, j].tolist(), np.r_[j, i].tolist(), strict=True))

    note = f"{graph.n_edges} edges, {int((~within).sum())} of them wrong"
    return {
        "title": title,
        "note": note,
        "size": graph.n_sites,
        "within": squares(within),
        "across": squares(~within),
    }
