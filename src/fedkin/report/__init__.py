"""What people look at: one set of templates for everything in HTML, pages that need nothing else.

In: a `FittedModel`, or results as plain values. Out: HTML and SVG as text. `report_page` and the page of
``fedkin watch`` embed the bundle that ``web/`` is built into (``static/``); the other pages have no script.
Imports: `fitting` and below; plotting libraries only where a figure is asked for.

`page` makes the report of `payload` (values; `arrays`, `places`) and `words` (sentences); `card` is the model card,
`live` serves ``fedkin watch``, `pages` fills the templates, `plots` draws with Matplotlib.
To add a figure, files in this order. First say where it is seen.
On the report page:
1. `report/payload`: its values, which the model must hold (else `fitting/model` first); `report/words`: sentences
   at the head of the page.
2. ``web/src/data.ts``: the types of the values; ``web/src/NAME.ts``: its drawing and its text, a section, which
   ``web/src/report.ts`` puts on the page; ``web/src/style.css``.
3. `report/page`: what readers without a script see (`_plain`), and its place in ``templates/report.html``.
4. ``make web`` writes ``static/``; commit it.
In Python, with Matplotlib: a function in `report/plots`, exported here, and its name in docs/api.md.
In a study or the paper: `studies/present` lists the files.
"""

from __future__ import annotations

from fedkin.report.card import model_card
from fedkin.report.live import LiveServer
from fedkin.report.page import report_page
from fedkin.report.pages import DemoResult, demo_picture, render
from fedkin.report.payload import report_payload
from fedkin.report.places import read_coordinates
from fedkin.report.plots import plot_coefficients, plot_graph, plot_kin, plot_path

__all__ = [
    "DemoResult",
    "LiveServer",
    "demo_picture",
    "model_card",
    "plot_coefficients",
    "plot_graph",
    "plot_kin",
    "plot_path",
    "read_coordinates",
    "render",
    "report_page",
    "report_payload",
]
