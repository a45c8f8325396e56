"""Who may be kin: edges between devices.

In: edge lists, coordinates, files. Out: a `Graph` over named devices, its matrices and its spectrum.
Imports: `data` (tables and ids), `_base`, `errors`.

`graph` is the type, and `cliques` are unions of cliques without a list of edges; `files`, `shapes`, `checks`,
`matrices` and `spectrum` do the work on arrays.
"""

from __future__ import annotations

from fedkin.graph.cliques import Cliques
from fedkin.graph.graph import Graph

__all__ = ["Cliques", "Graph"]
