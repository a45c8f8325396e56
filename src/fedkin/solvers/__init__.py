"""Solve a problem exactly at one level (`solve`) or along a path (`lam_path`), and choose the level.

Solving a `Problem` gives a `Solution` with a certified gap. An `Iteration` (`pdhg`: numpy on edges, or sorted cliques;
`compiled`: kernels on edges) takes primal-dual steps; `exact` drives it, certifies iterates and keeps the best.
"""

from __future__ import annotations

from fedkin.solvers.compiled import Backend, Crew
from fedkin.solvers.crossvalidation import (
    LamChoice,
    best_level,
    cross_validate_lam,
    cross_validate_ridge,
    cross_validate_sparsity,
    held_out_losses,
)
from fedkin.solvers.exact import solve, solve_fused
from fedkin.solvers.newton import ProfiledProblem, minimised_out
from fedkin.solvers.path import lam_grid, lam_max, lam_path, solve_debiased
from fedkin.solvers.pdhg import MinimizerBall, fused_parameters
from fedkin.solvers.pdhg_kernels import load_kernels

__all__ = [
    "Backend", "Crew", "LamChoice", "MinimizerBall", "ProfiledProblem", "best_level", "cross_validate_lam",
    "cross_validate_ridge", "cross_validate_sparsity", "fused_parameters", "held_out_losses", "lam_grid", "lam_max",
    "lam_path", "load_kernels", "minimised_out", "solve", "solve_debiased", "solve_fused",
]  # fmt: skip
