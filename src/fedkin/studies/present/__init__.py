"""Figures, tables, claims and the page of a study, from its rows alone.

In: the rows of a study. Out: figures, tables, claims with their verdicts, and one HTML page.
To add a figure of a study: an entry ``[[figure]]`` with name and caption in the study's TOML file
(``studies/built_in``), and no more, if it is of a kind that exists (`figures`, `maps`, `election`; the docstring
of `figures` describes entries).
A new kind, files in this order:
1. `studies/present`: a function ``(spec, rows, folder) -> Figure`` in one of these modules.
2. `studies/present/figures`: its name in `_KINDS`; options that name columns in `draw`.
3. `studies/entries`: its name and its options in `FIGURES`.
A column that rows lack is computed in `studies/tasks`, and the study is run again. Tests of the studies kin and
availability list their figures.
Steps 2 and 3 are not needed for ``kind = "module:function"``.
Imports: `tasks` (for names), `rows`, `config`; the templates of `fedkin.report`, outlines of counties from
`fedkin.datasets`, `fedkin.graph` and `fedkin.data`, names of methods from `fedkin.core`.
"""

from __future__ import annotations

from fedkin.studies.present.report import Report, write_report

__all__ = ["Report", "write_report"]
