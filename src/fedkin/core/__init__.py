"""The problem, its terms and penalties, site summaries, local fits, edge selection, and the theory.

`fedkin.core.theory` holds the calculators of the paper's theorems.
"""

from __future__ import annotations

from fedkin.core.columns import Columns, parameter_names
from fedkin.core.local import LocalFit, Variance, global_fit, local_fit, oracle_fit
from fedkin.core.newton import (
    RANK_TOLERANCE,
    damped_newton,
    generalized_inverse,
    least_eigenvalue,
    solve_and_rest,
    solve_positive,
    sum_groups,
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
from fedkin.core.quadratics import Quadratics, RowData, SiteData, assign_folds
from fedkin.core.rows import LossLike, RowBatch, RowTerms, build_terms, resolve_losses, unit_weights
from fedkin.core.selection import FAMILY_WISE, Correction, EdgeSelection, bonferroni, select_edges, wald_tests
from fedkin.core.summaries import Summaries
from fedkin.core.summarising import Budget, RunningSums, private_summary, site_answer, site_summary, summarise
from fedkin.core.summary import (
    Curvature,
    Message,
    OwnEstimate,
    Privacy,
    Query,
    Summary,
    check_shapes,
    decode,
    encode,
    refuse,
)
from fedkin.core.terms import LossTerms, MixedTerms, QuadraticTerms, SiteTerms, ball_gap, summed_terms

__all__ = [
    "FAMILY_WISE", "L1", "RANK_TOLERANCE", "SCALE_FLOOR", "Budget", "Columns", "Correction", "Curvature",
    "EdgeSelection", "FileRows", "FusedObjective", "LocalFit", "LossLike", "LossTerms", "Message", "MixedTerms",
    "OwnEstimate", "Penalty", "Privacy", "Problem", "QuadraticTerms", "Quadratics", "Query", "RowBatch", "RowData",
    "RowTerms", "RunningSums", "SiteData", "SiteTerms", "Solution", "Status", "Streamed", "Summaries", "Summary",
    "Variance", "assign_folds", "ball_gap", "bonferroni", "build_terms", "check_shapes", "damped_newton", "decode",
    "encode", "generalized_inverse", "global_fit", "holds_labels", "holds_zeros_and_ones", "least_eigenvalue",
    "local_fit", "make_penalty", "minimise_with_ridge", "oracle_fit", "parameter_names", "private_summary",
    "refuse", "resolve_losses", "rows_in_files", "select_edges", "site_answer", "site_summary", "solve_and_rest",
    "solve_positive", "sum_groups", "summarise", "summarise_files", "summed_terms", "table_size", "unit_weights",
    "wald_tests",
]  # fmt: skip
