"""Pages with a script: the bundle of ``web/`` and the values that it shows, in one file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from fedkin._base import some_of
from fedkin.report.pages import render
from fedkin.report.payload import report_payload

if TYPE_CHECKING:  # loads what fits models
    from fedkin.fitting import FittedModel

#: Members of a group that are named in the page's own text; the script shows all.
_MOST_NAMED = 12
#: Groups that are named there.
_MOST_GROUPS = 20


def report_page(model: FittedModel, places: Mapping[str, Any] | None = None) -> str:
    """The report of a model as one HTML page, which opens without a network.

    Parameters
    ----------
    model : FittedModel
        As fitted, or as `fedkin.load` reads it.
    places : mapping, optional
        Where the sites are: what `read_coordinates` gives.

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.fitting import FitOptions, fit_federation
    >>> fed = fedkin.Federation({u: [[float(u > 1)]] for u in range(4)})
    >>> model = fit_federation(fed, None, FitOptions(loss="mean", lam=0.02, select="none"))
    >>> page = report_page(model)
    >>> "4 sites form 2 groups." in page, "https://" in page.split("<script")[0]
    (True, False)
    """
    payload = report_payload(model, places)
    return page_with_script("report", payload["headline"], payload, **_plain(payload))


def page_with_script(kind: str, title: str, payload: Mapping[str, Any], **values: Any) -> str:
    """The template of a kind of page with the bundle and its values embedded."""
    from markupsafe import Markup

    return render(
        f"{kind}.html",
        title=title,
        style=Markup(bundle("fedkin.css")),
        script=Markup(bundle("fedkin.js").replace("</script", "<\\/script").replace("<!--", "<\\!--")),
        payload=Markup(embedded(payload)),
        **values,
    )


def embedded(values: Mapping[str, Any]) -> str:
    """JSON that can stand in a ``<script>``: nothing in it, whatever sites are called, ends the element.

    Examples
    --------
    >>> embedded({"site": "</script><b>"})
    '{"site":"\\\\u003c/script\\\\u003e\\\\u003cb\\\\u003e"}'
    """
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


@cache
def bundle(name: str) -> str:
    """A file of the bundle that ``web/`` was built into."""
    return files("fedkin.report").joinpath("static", name).read_text("utf-8").strip()


def _plain(payload: Mapping[str, Any]) -> dict[str, Any]:
    """What the page says without its script."""
    names, labels = payload["sites"]["names"], payload["sites"]["groups"]
    members: dict[int, list[str]] = {}
    for site, group in zip(names, labels, strict=True):
        members.setdefault(group, []).append(site)
    groups = []
    if payload["resolved"]:
        for group in sorted(members)[:_MOST_GROUPS]:
            sites = members[group]
            groups.append((f"Group {group + 1}", len(sites), some_of(sites, _MOST_NAMED)))
    return {
        "lead": payload["lead"],
        "about": payload["about"],
        "groups": groups,
        "comparison": payload["comparison"],
        "trust": payload["trust"],
        "reproduction": payload["reproduction"],
    }
