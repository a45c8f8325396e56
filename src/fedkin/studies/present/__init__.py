"""What people look at.

In: the rows of a study. Out: figures, tables, claims with their verdicts, and one HTML page, from the rows alone.
Imports: `tasks` (for names), `rows`, `config`, and the templates of `fedkin.report`.
"""

from __future__ import annotations

from fedkin.studies.present.report import Report, write_report

__all__ = ["Report", "write_report"]
