"""What is minimised: ``(1/|V|) sum_u M_u(theta_u) + lam sum_e w_e phi(theta_i - theta_j)``.

In: a `Federation` (or the `Summaries` of its sites), a `Graph`, losses, a penalty. Out: a `Problem`, its `SiteTerms`
on arrays, and the `Solution` that solvers return. Imports: `losses`, `graph`, `data` and below.

`problem` states the problem and `build` turns its rows into terms: `terms` (Gram statistics, no rows), `rows` (linear
predictors), functions, and mixtures. `sums` adds up rows fold by fold. The sub-room `summaries` has what sites say
about their rows, which takes the place of rows here and in all rooms above. `rows`, `linalg` and `newton` are the
arithmetic on many sites at once, which other rooms use too; `rerouting` serves certificates on singular designs.
To add a penalty: `objective/penalties`; its name in `fitting/options` (`PenaltyName`), `federate/contract/contract`
(raise `FORMAT`) and `federate/peer` (`_BOUND_KIND`); `solvers/debias` (`_reach`); for compiled loops `solvers/backend`,
`solvers/kernels/steps`, `admm/in_process/backend` and `admm/in_process/kernels`. A loss is added in `fedkin.losses`.
"""

from __future__ import annotations

from fedkin.objective.build import LossTerms, MixedTerms, build_terms, summed_terms
from fedkin.objective.linalg import (
    RANK_TOLERANCE,
    generalized_inverse,
    inverse_of,
    least_eigenvalue,
    solve_and_rest,
    sum_groups,
    unit_diagonal,
)
from fedkin.objective.newton import damped_newton, solve_positive
from fedkin.objective.penalties import L1, Penalty, make_penalty
from fedkin.objective.problem import FusedObjective, LossLike, Problem, Solution, Status, resolve_losses
from fedkin.objective.rows import RowBatch, RowTerms, row_blocks, unit_weights
from fedkin.objective.summaries import (
    INFINITE,
    Ask,
    Curvature,
    OwnEstimate,
    Privacy,
    Reader,
    Summaries,
    Summary,
    parameter_map,
)
from fedkin.objective.sums import FoldSums, assign_folds
from fedkin.objective.terms import QuadraticTerms, SiteTerms, ball_gap

__all__ = [
    "INFINITE",
    "L1",
    "RANK_TOLERANCE",
    "Ask",
    "Curvature",
    "FoldSums",
    "FusedObjective",
    "LossLike",
    "LossTerms",
    "MixedTerms",
    "OwnEstimate",
    "Penalty",
    "Privacy",
    "Problem",
    "QuadraticTerms",
    "Reader",
    "RowBatch",
    "RowTerms",
    "SiteTerms",
    "Solution",
    "Status",
    "Summaries",
    "Summary",
    "assign_folds",
    "ball_gap",
    "build_terms",
    "damped_newton",
    "generalized_inverse",
    "inverse_of",
    "least_eigenvalue",
    "make_penalty",
    "parameter_map",
    "resolve_losses",
    "row_blocks",
    "solve_and_rest",
    "solve_positive",
    "sum_groups",
    "summed_terms",
    "unit_diagonal",
    "unit_weights",
]
