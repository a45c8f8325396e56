"""Who may be kin: edges between sites.

In: edge lists, coordinates, files. Out: a `Graph` over named sites, its matrices and its spectrum.
Imports: `data` (tables and ids), `_base`, `errors`.

`graph` makes and changes graphs, on what is known of their `edges`; `cliques` are unions of cliques without a list of
edges; `files`, `shapes`, `checks`, `matrices` and `spectrum` do the work on arrays.
To add a file format: `files`. To add a way to make a graph: a class method in `graph`, its pairs in `shapes`.
"""

from __future__ import annotations

from fedkin.graph.cliques import Cliques
from fedkin.graph.graph import Graph

__all__ = ["Cliques", "Graph"]
