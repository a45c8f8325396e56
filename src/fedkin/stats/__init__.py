"""The statistics around the objective: local and pooled fits, edge selection, the paper's theory.

In: a `Federation` (or the `Summaries` of its sites) and a loss. Out: estimates with variances (`LocalFit`), tests of
edges (`EdgeSelection`), summaries of rows, and theoretical quantities (`fedkin.stats.theory`). Imports: `objective` and
below; not the solvers.

`local` fits each site by itself, from rows (`ownfits`) or sums (`summed`), and estimates variances, and fits groups
of sites; `selection` tests edges; `summarise` is what a site says about its rows (`private`: with noise; `running`:
as rows come; `streaming`: in one pass over large files; `rereading`: in many). `newton` does the numerical work, many
sites at once.
To add an edge test, files in this order:
1. `stats/selection`. A correction for many edges is a name in `Method`, a sentence in `ERROR_CONTROLLED`, perhaps
   `FAMILY_WISE`, and a branch of `threshold_of`; options, estimators and commands read the names from there. Another
   statistic is a function beside `wald_tests`, exported here, and an argument of `select_edges` that chooses it, then
   an option (the room `fitting` lists the files), which `used_graph` in `fitting/ways/federation` passes on.
2. `studies/present/summary`: what figures call it. ``studies/built_in/error-rates.toml``, if it is to be measured.
3. Between sites no site sees all p-values, so a correction stays Bonferroni. Another statistic: a key of `EdgeTests` in
   `federate/contract/contract` (docs/contract.md, `FORMAT`), which `federate/programs/select` follows; what it needs
   beyond estimate, covariance and number of rows goes into the messages there (`summary`, `_pair`) and into
   `most_bytes` of `federate/contract/manifest`.
4. docs/command-line.md (``--select``) and docs/paper.md list the names; so does `METHODS` in
   ``tests/test_selection.py``.
"""

from __future__ import annotations

from fedkin.stats.local import LocalFit, Variance, global_fit, local_fit, oracle_fit
from fedkin.stats.newton import minimise_with_ridge
from fedkin.stats.private import Budget, private_summary
from fedkin.stats.rereading import FileRows, holds_labels, holds_zeros_and_ones, rows_in_files
from fedkin.stats.running import RunningSums
from fedkin.stats.selection import FAMILY_WISE, EdgeSelection, Method, bonferroni, select_edges, wald_tests
from fedkin.stats.streaming import Streamed, summarise_files, table_size
from fedkin.stats.summarise import site_answer, site_summary, summarise

__all__ = [
    "FAMILY_WISE",
    "Budget",
    "EdgeSelection",
    "FileRows",
    "LocalFit",
    "Method",
    "RunningSums",
    "Streamed",
    "Variance",
    "bonferroni",
    "global_fit",
    "holds_labels",
    "holds_zeros_and_ones",
    "local_fit",
    "minimise_with_ridge",
    "oracle_fit",
    "private_summary",
    "rows_in_files",
    "select_edges",
    "site_answer",
    "site_summary",
    "summarise",
    "summarise_files",
    "table_size",
    "wald_tests",
]
