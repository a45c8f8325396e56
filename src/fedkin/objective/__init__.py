"""What is minimised: ``(1/|V|) sum_u M_u(theta_u) + lam sum_e w_e phi(theta_i - theta_j)``.

In: a `Federation`, a `Graph`, losses, a penalty. Out: a `Problem`, its `DeviceTerms` on arrays, and the `Solution` that
solvers return. Imports: `losses`, `graph`, `data` and below.
"""

from __future__ import annotations

from fedkin.objective.penalties import L1, Penalty, make_penalty
from fedkin.objective.problem import FusedObjective, LossLike, Problem, Solution, Status, check_labels, resolve_losses
from fedkin.objective.terms import (
    RANK_TOLERANCE,
    DeviceTerms,
    QuadraticTerms,
    build_terms,
    generalized_inverse,
    row_blocks,
    sum_groups,
    summed_terms,
)

__all__ = [
    "L1",
    "RANK_TOLERANCE",
    "DeviceTerms",
    "FusedObjective",
    "LossLike",
    "Penalty",
    "Problem",
    "QuadraticTerms",
    "Solution",
    "Status",
    "build_terms",
    "check_labels",
    "generalized_inverse",
    "make_penalty",
    "resolve_losses",
    "row_blocks",
    "sum_groups",
    "summed_terms",
]
