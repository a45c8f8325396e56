"""Define the optimisation problem, penalties, site summaries, local fits, edge selection and the theory.

`fedkin.core.theory` computes the bounds of the paper's theorems.
"""

from __future__ import annotations

from fedkin.core.edge_tests import (
    FAMILY_WISE,
    Correction,
    EdgeSelection,
    alike_groups,
    bonferroni,
    inverse_trigamma,
    select_edges,
    wald_tests,
)
from fedkin.core.linalg import (
    RANK_TOLERANCE,
    damped_newton,
    generalized_inverse,
    least_eigenvalue,
    solve_and_rest,
    sum_groups,
)
from fedkin.core.local import LocalFit, Variance, global_fit, local_fit, oracle_fit
from fedkin.core.ownfits import minimise_with_ridge
from fedkin.core.parquet import (
    FileRows,
    Streamed,
    infer_target,
    rows_in_files,
    summarise_files,
)
from fedkin.core.penalties import L1, Penalty, make_penalty
from fedkin.core.privacy import Budget, composed_epsilon, private_summary, table_of_sums
from fedkin.core.problem import FusedObjective, Problem, Solution, Status, gap_scale
from fedkin.core.quadratics import Quadratics, QuadraticTerms, SiteTerms, ball_gap
from fedkin.core.sitedata import (
    AffineMap,
    Columns,
    RowData,
    SiteData,
    assign_folds,
    resolve_losses,
    site_data,
)
from fedkin.core.summaries import Summaries
from fedkin.core.summarising import (
    RunningSums,
    merge_sums,
    partial_sums,
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
    "FAMILY_WISE", "L1", "RANK_TOLERANCE", "AffineMap", "Budget", "Columns", "Correction", "EdgeSelection", "FileRows",
    "FusedObjective", "LocalFit", "MixedTerms", "OwnEstimate", "Penalty", "PlainMessage", "Privacy", "Problem",
    "QuadraticTerms", "Quadratics", "Query", "RowData", "RowTerms", "RunningSums", "SiteData", "SiteTerms", "Solution",
    "Status", "Streamed", "Summaries", "Summary", "SummedTerms", "Variance", "alike_groups", "assign_folds", "ball_gap",
    "bonferroni", "build_terms", "check_shapes", "composed_epsilon", "damped_newton", "from_plain", "gap_scale",
    "generalized_inverse", "global_fit", "infer_target", "inverse_trigamma", "least_eigenvalue", "local_fit",
    "make_penalty", "merge_sums", "minimise_with_ridge", "oracle_fit", "partial_sums", "private_summary", "refuse",
    "resolve_losses", "rows_in_files", "select_edges", "site_answer", "site_data", "site_summary", "solve_and_rest",
    "sum_groups", "summarise", "summarise_files", "summed_terms", "table_of_sums", "to_plain", "wald_tests",
]  # fmt: skip
