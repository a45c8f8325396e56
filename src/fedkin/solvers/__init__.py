"""Solve a problem exactly: one level (`solve`), a path of levels (`lam_path`), the choice of a level.

A `Problem` becomes a `Solution` with a certified gap. An `Iteration` (`pdhg`: numpy on edges, or sorted cliques;
`compiled`: kernels on edges) takes primal-dual steps; `exact` drives it, certifies where it stands and keeps the best.
"""

from __future__ import annotations

from fedkin.solvers.compiled import Crew
from fedkin.solvers.crossvalidation import (
    LamChoice,
    best_level,
    cross_validate_lam,
    cross_validate_ridge,
    cross_validate_sparsity,
    held_out_losses,
    mean_and_error,
)
from fedkin.solvers.exact import solve, solve_fused
from fedkin.solvers.kernels import load_kernels
from fedkin.solvers.path import lam_grid, lam_max, lam_path
from fedkin.solvers.pdhg import MinimizerBall, fused_parameters
from fedkin.solvers.variants import Debias, ProfiledProblem, minimised_out, solve_debiased

__all__ = [
    "Crew",
    "Debias",
    "LamChoice",
    "MinimizerBall",
    "ProfiledProblem",
    "best_level",
    "cross_validate_lam",
    "cross_validate_ridge",
    "cross_validate_sparsity",
    "fused_parameters",
    "held_out_losses",
    "lam_grid",
    "lam_max",
    "lam_path",
    "load_kernels",
    "mean_and_error",
    "minimised_out",
    "solve",
    "solve_debiased",
    "solve_fused",
]
