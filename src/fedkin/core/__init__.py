"""The problem, its terms and penalties, site summaries, local fits, edge selection, and the theory.

`fedkin.core.theory` holds the calculators of the paper's theorems.
"""

from __future__ import annotations

from fedkin.core.local import (
    FAMILY_WISE,
    Correction,
    EdgeSelection,
    LocalFit,
    Variance,
    alike_groups,
    bonferroni,
    global_fit,
    inverse_trigamma,
    local_fit,
    oracle_fit,
    select_edges,
    wald_tests,
)
from fedkin.core.ownfits import minimise_with_ridge
from fedkin.core.parquet import (
    FileRows,
    Streamed,
    holds_labels,
    holds_zeros_and_ones,
    rows_in_files,
    summarise_files,
    table_size,
)
from fedkin.core.penalties import L1, Penalty, make_penalty
from fedkin.core.problem import SCALE_FLOOR, FusedObjective, Problem, Solution, Status
from fedkin.core.quadratics import (
    RANK_TOLERANCE,
    Quadratics,
    QuadraticTerms,
    SiteTerms,
    ball_gap,
    damped_newton,
    generalized_inverse,
    least_eigenvalue,
    solve_and_rest,
    sum_groups,
)
from fedkin.core.sitedata import (
    Columns,
    RowData,
    SiteData,
    assign_folds,
    parameter_names,
    resolve_losses,
    site_data,
)
from fedkin.core.summaries import Summaries
from fedkin.core.summarising import (
    Budget,
    RunningSums,
    composed_epsilon,
    merge_sums,
    partial_sums,
    private_summary,
    site_answer,
    site_summary,
    summarise,
)
from fedkin.core.summary import (
    OwnEstimate,
    PlainMessage,
    Privacy,
    Query,
    Summary,
    check_shapes,
    from_plain,
    refuse,
    to_plain,
)
from fedkin.core.terms import MixedTerms, RowTerms, SummedTerms, build_terms, summed_terms

__all__ = [
    "FAMILY_WISE", "L1", "RANK_TOLERANCE", "SCALE_FLOOR", "Budget", "Columns", "Correction", "EdgeSelection",
    "FileRows", "FusedObjective", "LocalFit", "MixedTerms", "OwnEstimate", "Penalty", "PlainMessage", "Privacy",
    "Problem", "QuadraticTerms", "Quadratics", "Query", "RowData", "RowTerms", "RunningSums", "SiteData", "SiteTerms",
    "Solution", "Status", "Streamed", "Summaries", "Summary", "SummedTerms", "Variance", "alike_groups", "assign_folds",
    "ball_gap", "bonferroni", "build_terms", "check_shapes", "composed_epsilon", "damped_newton", "from_plain",
    "generalized_inverse", "global_fit", "holds_labels", "holds_zeros_and_ones", "inverse_trigamma", "least_eigenvalue",
    "local_fit", "make_penalty", "merge_sums", "minimise_with_ridge", "oracle_fit", "parameter_names", "partial_sums",
    "private_summary", "refuse", "resolve_losses", "rows_in_files", "select_edges", "site_answer", "site_data",
    "site_summary", "solve_and_rest", "sum_groups", "summarise", "summarise_files", "summed_terms", "table_size",
    "to_plain", "wald_tests",
]  # fmt: skip
