"""Reports on models: sentences, HTML pages, Matplotlib figures, and the page of ``fedkin watch``.

To add a figure to the report page, put its values into `payload`, their types into ``web/src/data.ts`` and its drawing
into ``web/src``, then run ``make web``. Sentences, including those of the terminal, are in `text`.
"""

from fedkin.report.pages import LiveServer, demo_picture, render, report_page
from fedkin.report.payload import read_coordinates, report_payload
from fedkin.report.plots import (
    plot_coefficients,
    plot_comparison,
    plot_gains,
    plot_graph,
    plot_kin,
    plot_path,
    plot_survival,
)
from fedkin.report.text import model_card

__all__ = [
    "LiveServer", "demo_picture", "model_card", "plot_coefficients", "plot_comparison", "plot_gains",
    "plot_graph", "plot_kin", "plot_path", "plot_survival", "read_coordinates", "render", "report_page",
    "report_payload",
]  # fmt: skip
