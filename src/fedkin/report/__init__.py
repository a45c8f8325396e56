"""Pages that need nothing else: one set of templates for everything in HTML, without scripts or links to the outside.

In: results as plain values. Out: HTML and SVG as text. Imports: `graph` and below; no plotting library.
"""

from __future__ import annotations

from fedkin.report.pages import DemoResult, demo_page, demo_picture, render

__all__ = ["DemoResult", "demo_page", "demo_picture", "render"]
