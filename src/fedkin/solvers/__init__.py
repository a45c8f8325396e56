"""How it is solved exactly: one level (`solve`), a path of levels (`lam_path`), the choice of a level.

In: a `Problem`. Out: a `Solution` with a certified duality gap. `kernels/` holds the compiled loops.
Imports: `objective` and below.
"""

from __future__ import annotations

from fedkin.solvers.backend import compile_kernels, resolve_backend, start_iteration
from fedkin.solvers.crossvalidation import cross_validate_lam
from fedkin.solvers.exact import SCALE_FLOOR, solve, solve_fused
from fedkin.solvers.fuse import fused_parameters
from fedkin.solvers.path import lam_max, lam_path
from fedkin.solvers.pdhg import PrimalDual, initial_rho
from fedkin.solvers.radius import MinimizerBall

__all__ = [
    "SCALE_FLOOR",
    "MinimizerBall",
    "PrimalDual",
    "compile_kernels",
    "cross_validate_lam",
    "fused_parameters",
    "initial_rho",
    "lam_max",
    "lam_path",
    "resolve_backend",
    "solve",
    "solve_fused",
    "start_iteration",
]
