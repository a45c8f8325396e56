"""Reports: words about a model, HTML pages, figures with Matplotlib, and the page of ``fedkin watch``.

To add a figure to the report page: its values in `payload`, their types in ``web/src/data.ts``, its drawing in
``web/src``, then ``make web``. Sentences, for the terminal too, are in `text`.
"""

from fedkin.report.pages import (
    LiveServer,
    demo_picture,
    plot_coefficients,
    plot_graph,
    plot_kin,
    plot_path,
    render,
    report_page,
)
from fedkin.report.payload import read_coordinates, report_payload
from fedkin.report.text import model_card

__all__ = [
    "LiveServer", "demo_picture", "model_card", "plot_coefficients", "plot_graph", "plot_kin", "plot_path",
    "read_coordinates", "render", "report_page", "report_payload",
]  # fmt: skip
