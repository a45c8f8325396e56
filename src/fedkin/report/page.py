"""The report of the demonstration: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from fedkin.graph import Graph
from fedkin.report.pictures import Placed, adjacency, dot_plot, picture, side_by_side

_STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #eef1f4; color: #1f2933;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 32px 20px 48px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 32px 0 8px; }
.lead { font-size: 18px; margin: 8px 0 20px; } .faint { color: #66717d; }
svg { max-width: 100%; height: auto; display: block; }
.card { background: #fff; border-radius: 10px; padding: 4px 20px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; font-weight: 600; }
th, td { padding: 8px 12px 8px 0; border-bottom: 1px solid #e4e8ec; vertical-align: top; }
tr:last-child td { border-bottom: 0; } .number { text-align: right; font-variant-numeric: tabular-nums; }
tr.strong td { font-weight: 600; color: #0f766e; }
"""


@dataclass(frozen=True, eq=False)
class DemoResult:
    """What the page shows.

    Attributes
    ----------
    summary : str
        The result in a few plain sentences.
    estimation, held_out : mapping of method to error
    meaning : mapping of method to a few words
    highlight : sequence of methods
    given, kept : Graph
        Before and after the edge tests.
    labels : int array (V,)
        True group of each device.
    wrong_edges : int
        Edges of `given` between groups.
    groups : sequence of groups of devices
        As found.
    facts : mapping of name to words
    version : str
    """

    summary: str
    estimation: Mapping[str, float]
    held_out: Mapping[str, float]
    meaning: Mapping[str, str]
    highlight: Sequence[str]
    given: Graph
    kept: Graph
    labels: NDArray[np.int64]
    wrong_edges: int
    groups: Sequence[Sequence[Hashable]]
    facts: Mapping[str, str]
    version: str


def demo_picture(result: DemoResult) -> str:
    """The given graph, the kept edges and the errors side by side, as one ``<svg>``."""
    pieces = (_given(result), _kept(result), _errors(result))
    words = "Matrix of the given graph, matrix of the edges that were kept, and the estimation error of each method"
    return picture(side_by_side(pieces), description=words)


def demo_page(result: DemoResult) -> str:
    """The whole page.

    Parameters
    ----------
    result : DemoResult
        What to show.

    Returns
    -------
    str
        HTML without scripts and without links to anything outside.
    """
    last = list(result.estimation)[-1]
    rows = "".join(
        f"<tr{' class=strong' if name == result.highlight[-1] else ''}><td>{escape(name)}</td>"
        f"<td>{escape(result.meaning[name])}</td><td class=number>{result.held_out[name]:.4g}</td>"
        f"<td class=number>{error:.3g}</td><td class=number>{error / result.estimation[last]:.2f}</td></tr>"
        for name, error in result.estimation.items()
    )
    facts = "".join(f"<tr><td>{escape(name)}</td><td>{escape(words)}</td></tr>" for name, words in result.facts.items())
    groups = "".join(
        f"<tr><td>{number}</td><td class=number>{len(group)}</td><td>{escape(', '.join(map(str, group)))}</td></tr>"
        for number, group in enumerate(sorted(result.groups, key=len, reverse=True), start=1)
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Fedkin: demonstration</title><style>{_STYLE}</style></head><body><main>
<h1>Who is like whom, without sharing a row</h1>
<p class="lead">{escape(result.summary)}</p>
{demo_picture(result)}
<p class="faint">In the matrices a row and a column stand for each site, sorted by true group, and a square for each
edge: green between sites of one group, orange between sites that differ.</p>
<h2>Errors</h2>
<div class="card"><table><tr><th>Method</th><th></th><th class=number>Held-out error</th>
<th class=number>Estimation error</th><th class=number>Times the oracle</th></tr>{rows}</table></div>
<p class="faint">Held-out error: mean squared error on rows that no method saw; even the truth has about 1,
the noise. Estimation error: squared distance of a site's parameters from the true ones, averaged over sites.</p>
<h2>Groups found</h2>
<div class="card"><table><tr><th>Group</th><th class=number>Sites</th><th>Members</th></tr>{groups}</table></div>
<h2>Details</h2>
<div class="card"><table>{facts}</table></div>
<p class="faint">Fedkin {escape(result.version)}</p>
</main></body></html>
"""


def _given(result: DemoResult) -> Placed:
    note = f"{result.given.n_edges} edges, {result.wrong_edges} of them wrong"
    return adjacency(result.given, result.labels, title="The graph as given", note=note)


def _kept(result: DemoResult) -> Placed:
    ends = result.labels[result.kept.edges]
    wrong = int((ends[:, 0] != ends[:, 1]).sum())
    note = f"{result.kept.n_edges} edges, {wrong} of them wrong"
    return adjacency(result.kept, result.labels, title="Edges that Fedkin kept", note=note)


def _errors(result: DemoResult) -> Placed:
    return dot_plot(result.estimation, title="Estimation error", highlight=result.highlight, width=445)
