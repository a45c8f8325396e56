"""Tables to try things on: the paper's simulation, with its truth; public tables, and generated ones like them.

In: sizes and seeds, or a folder with files that the user has got (no data come with Fedkin). Out: a `Design`, or a
`PublicTable` with its rows, its loss and how it is split. Imports: `graph`, `data` and below.

`design` draws the simulation of section 5, `public` reads tables (`counties` those of the election), `alike` generates
tables of their shape. To add a public table: `public`.
"""

from __future__ import annotations

from fedkin.datasets.alike import look_alike
from fedkin.datasets.design import Design, paper_design
from fedkin.datasets.public import (
    PublicTable,
    load_computer_survey,
    load_election,
    load_landmine,
    load_melanoma,
    load_sacramento,
    load_school,
    load_table,
    table_names,
)

__all__ = [
    "Design",
    "PublicTable",
    "load_computer_survey",
    "load_election",
    "load_landmine",
    "load_melanoma",
    "load_sacramento",
    "load_school",
    "load_table",
    "look_alike",
    "paper_design",
    "table_names",
]
