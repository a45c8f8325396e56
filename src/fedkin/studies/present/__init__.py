"""Figures, tables, claims and the page of a study, from its rows alone.

In: the rows of a study. Out: figures, tables, claims with their verdicts, and one HTML page.
To add a figure: `fedkin.studies` says how.
Imports: `tasks` (for names), `rows`, `config`; the templates of `fedkin.report`, outlines of counties from
`fedkin.datasets`, `fedkin.graph` and `fedkin.data`.
"""

from __future__ import annotations

from fedkin.studies.present.report import Report, write_report

__all__ = ["Report", "write_report"]
