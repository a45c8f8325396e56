"""SVG pictures of a result: a dot plot of errors and the matrix of a graph.

Every function returns the inside of an ``<svg>``; `picture` closes it to a picture of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from fedkin.graph import Graph

INK, FAINT, GRID, PAPER = "#1f2933", "#66717d", "#d9dee3", "#ffffff"
ACCENT, WITHIN, ACROSS = "#0f766e", "#0f766e", "#d97757"
FONT = "font-family='system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif'"


@dataclass(frozen=True)
class Placed:
    """A piece of a picture and the room it takes, in pixels."""

    body: str
    width: float
    height: float


def dot_plot(errors: Mapping[str, float], *, title: str, highlight: Sequence[str] = (), width: float = 420.0) -> Placed:
    """Errors as dots on a logarithmic axis, one row per method.

    Parameters
    ----------
    errors : mapping of method to error
        Positive; drawn from top to bottom.
    title : str
        Above the plot.
    highlight : sequence of str
        Methods drawn in the strong colour.
    width : float
        In pixels.

    Examples
    --------
    >>> "Local" in dot_plot({"Local": 0.7, "Oracle": 0.02}, title="Error").body
    True
    """
    row, top, left, right = 30.0, 34.0, 22.0 + 8.4 * max(map(len, errors)), 58.0
    low = math.floor(math.log10(min(errors.values())) + 1e-9)
    high = max(math.ceil(math.log10(max(errors.values())) - 1e-9), low + 1)
    bottom = top + row * len(errors)

    def place(value: float) -> float:
        return left + (math.log10(value) - low) / (high - low) * (width - left - right)

    parts = [_text(0, 14, title, size=14, weight=600)]
    for power in range(low, high + 1):
        x = place(10.0**power)
        parts.append(f"<path d='M{x:.1f} {top}V{bottom:.1f}' stroke='{GRID}' stroke-width='1'/>")
        parts.append(_text(x, bottom + 16, f"{10.0**power:g}", size=11, colour=FAINT, anchor="middle"))
    for k, (name, value) in enumerate(errors.items()):
        y = top + row * (k + 0.5)
        strong = name in highlight
        colour = ACCENT if strong else FAINT
        x = place(value)
        parts.append(_text(left - 12, y + 4, name, size=13, anchor="end", weight=600 if strong else 400))
        parts.append(f"<path d='M{left} {y}H{x:.1f}' stroke='{colour}' stroke-width='2' stroke-opacity='.35'/>")
        parts.append(f"<circle cx='{x:.1f}' cy='{y}' r='6' fill='{colour}'/>")
        parts.append(_text(x + 12, y + 4, f"{value:.3g}", size=12, weight=600 if strong else 400))
    parts.append(
        _text(left, bottom + 34, "logarithmic: each line to the left is ten times better", size=11, colour=FAINT)
    )
    return Placed("".join(parts), width, bottom + 40)


def adjacency(graph: Graph, labels: NDArray[np.int64], *, title: str, note: str = "", size: float = 220.0) -> Placed:
    """The matrix of a graph, devices sorted by group: edges within groups in one colour, across in another.

    Parameters
    ----------
    graph : Graph
        With V devices.
    labels : int array of shape (V,)
        Group of each device.
    title, note : str
        Above and below the matrix.
    size : float
        Side of the matrix in pixels.

    Examples
    --------
    >>> import numpy as np
    >>> adjacency(Graph.complete("ab"), np.array([0, 0]), title="All pairs").height > 200
    True
    """
    rank = np.argsort(np.argsort(labels, kind="stable"))
    cell, top = size / graph.n_devices, 24.0
    within = labels[graph.edges[:, 0]] == labels[graph.edges[:, 1]]
    parts = [
        _text(0, 14, title, size=14, weight=600),
        f"<rect x='0' y='{top}' width='{size}' height='{size}' fill='#f4f6f8' stroke='{GRID}'/>",
        f"<g transform='translate(0 {top}) scale({cell:.5f})'>",
    ]
    for colour, chosen in ((ACROSS, ~within), (WITHIN, within)):
        i, j = rank[graph.edges[chosen]].T
        squares = [f"M{x} {y}h1v1h-1z" for x, y in zip(np.r_[i, j].tolist(), np.r_[j, i].tolist(), strict=True)]
        parts.append(f"<path fill='{colour}' d='{''.join(squares)}'/>")
    parts.append("</g>")
    if note:
        parts.append(_text(0, top + size + 17, note, size=12, colour=FAINT))
    return Placed("".join(parts), size, top + size + 24)


def side_by_side(pieces: Sequence[Placed], gap: float = 28.0) -> Placed:
    """Pieces in a row, their tops aligned."""
    x, parts = 0.0, []
    for piece in pieces:
        parts.append(f"<g transform='translate({x:.1f} 0)'>{piece.body}</g>")
        x += piece.width + gap
    return Placed("".join(parts), x - gap, max(piece.height for piece in pieces))


def picture(piece: Placed, *, description: str, margin: float = 20.0) -> str:
    """A whole ``<svg>`` with a white ground, which can be a file or a part of a page.

    Parameters
    ----------
    piece : Placed
        What to show.
    description : str
        For people who do not see it.
    margin : float
        In pixels.

    Examples
    --------
    >>> picture(Placed("", 10, 10), description="nothing").startswith("<svg")
    True
    """
    width, height = piece.width + 2 * margin, piece.height + 2 * margin
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height:.0f}' width='{width:.0f}' "
        f"height='{height:.0f}' role='img' aria-label='{escape(description, quote=True)}' {FONT}>"
        f"<rect width='100%' height='100%' rx='10' fill='{PAPER}'/>"
        f"<g transform='translate({margin} {margin})'>{piece.body}</g></svg>"
    )


def _text(
    x: float, y: float, words: str, *, size: int, colour: str = INK, anchor: str = "start", weight: int = 400
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{colour}' text-anchor='{anchor}' "
        f"font-weight='{weight}'>{escape(words)}</text>"
    )
