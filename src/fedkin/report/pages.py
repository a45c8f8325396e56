"""HTML pages that need no network, and the picture of the demonstration: templates in ``templates/``, filled in.

Pages with a script embed the bundle that ``web/`` is built into (``static/``, by ``make web``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedkin._base import Index, Mask, some_of
from fedkin.fitting import FittedModel
from fedkin.graph import Graph
from fedkin.report.payload import report_payload
from fedkin.report.text import comparison_table, members

#: Groups, and members of each, that are named in the page's own text; the script shows all.
_MOST_GROUPS, _MOST_NAMED = 20, 12


def report_page(model: FittedModel, places: Mapping[str, Any] | None = None) -> str:
    """Return the report of a model as one HTML page, which opens without a network.

    Parameters
    ----------
    model : FittedModel
        As fitted, or as `fedkin.load` reads it.
    places : mapping, optional
        Where the sites are: what `read_coordinates` gives.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.fitting import FitOptions, fit
    >>> fed = fedkin.Federation({u: [[float(u > 1)]] for u in range(4)})
    >>> model = fit(fed, None, FitOptions(loss="mean", lam=0.02, select="none"))
    >>> page = report_page(model)
    >>> "4 sites form 2 groups." in page, "https://" in page.split("<script")[0]
    (True, False)
    """
    payload = report_payload(model, places)
    return page_with_script(
        "report",
        payload["headline"],
        payload,
        **{name: payload[name] for name in ("lead", "about", "trust", "reproduction")},
        comparison=None if not model.comparison else comparison_table(model.comparison),
        groups=[(len(sites), some_of(sites, _MOST_NAMED)) for sites in members(model)[:_MOST_GROUPS]],
    )


def page_with_script(kind: str, title: str, payload: Mapping[str, Any], **values: Any) -> str:
    """Fill in the template of a kind of page, with the bundle and its values embedded."""
    return render(
        f"{kind}.html",
        title=title,
        style=Markup(bundle("fedkin.css")),
        script=Markup(bundle("fedkin.js").replace("</script", "<\\/script").replace("<!--", "<\\!--")),
        payload=Markup(embedded(payload)),
        **values,
    )


def embedded(values: Mapping[str, Any]) -> str:
    """Return JSON that can stand in a ``<script>``: nothing in it, whatever sites are called, ends the element."""
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


@cache
def bundle(name: str) -> str:
    """Return a file of the bundle that ``web/`` was built into."""
    return files("fedkin.report").joinpath("static", name).read_text("utf-8").strip()


def render(template: str, **values: Any) -> str:
    """Fill in a file of ``templates/``; every value is escaped, and a missing one is an error."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Environment:
    how: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=PackageLoader("fedkin.report"), autoescape=True, **how)


def demo_picture(errors: Mapping[str, float], strong: str, given: Graph, found: Graph, labels: Index) -> str:
    """Draw two graphs of sites with true groups ``labels`` and the errors of methods side by side, as one ``<svg>``."""
    low = math.floor(math.log10(min(errors.values())) + 1e-9)
    high = max(math.ceil(math.log10(max(errors.values())) - 1e-9), low + 1)

    def share(value: float) -> float:
        return (math.log10(value) - low) / (high - low)

    matrices = [_matrix(given, labels, "The graph as given"), _matrix(found, labels, "Sites that Fedkin takes for kin")]
    ticks = [(share(10.0**power), f"{10.0**power:g}") for power in range(low, high + 1)]
    dots = [
        {"name": name, "share": share(value), "label": f"{value:.3g}", "strong": name == strong}
        for name, value in errors.items()
    ]
    return render("demo.svg", matrices=matrices, longest=max(map(len, errors)), ticks=ticks, dots=dots).strip()


def _matrix(graph: Graph, labels: Index, title: str) -> dict[str, Any]:
    """Return the matrix of a graph, sites sorted by group: a square for each edge, within groups and across them."""
    rank = np.argsort(np.argsort(labels, kind="stable"))
    within = labels[graph.edges[:, 0]] == labels[graph.edges[:, 1]]

    def squares(chosen: Mask) -> str:
        i, j = rank[graph.edges[chosen]].T
        return "".join(f"M{x} {y}h1v1h-1z" for x, y in zip(np.r_[i, j].tolist(), np.r_[j, i].tolist(), strict=True))

    note = f"{graph.n_edges} edges, {int((~within).sum())} of them wrong"
    return {"title": title, "note": note, "size": graph.n_sites, "within": squares(within), "across": squares(~within)}
