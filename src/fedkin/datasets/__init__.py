"""Tables to try things on: the paper's simulation, public tables, and generated ones like them."""

from __future__ import annotations

from fedkin.datasets.design import Design, look_alike, paper_design
from fedkin.datasets.public import PublicTable, load_table, table_names

__all__ = ["Design", "PublicTable", "load_table", "look_alike", "paper_design", "table_names"]
