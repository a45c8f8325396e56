"""The statistics around the objective: local fits, edge selection, the paper's theory.

In: a `Federation` and a loss. Out: estimates with variances, tests of edges, theoretical quantities.
Imports: `objective` and below; not the solvers.
"""

from __future__ import annotations

from fedkin.stats.local import LocalFit, Variance, check_variance, global_fit, local_fit, oracle_fit
from fedkin.stats.selection import EdgeSelection, Method, select_edges, wald_tests

__all__ = [
    "EdgeSelection",
    "LocalFit",
    "Method",
    "Variance",
    "check_variance",
    "global_fit",
    "local_fit",
    "oracle_fit",
    "select_edges",
    "wald_tests",
]
