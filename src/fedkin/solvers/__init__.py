"""How a problem is solved exactly: one level (`solve`), a path of levels (`lam_path`), the choice of a level.

In: a `Problem`. Out: a `Solution` with a certified duality gap, or a level chosen by cross-validation within sites.
An `Iteration` (numpy, compiled, along chains, or on cliques or almost cliques without edges) takes primal-dual steps;
`exact` certifies where it stands and makes a `Solution` of the best; `debias` solves again with weaker edges;
`profiled` leaves out parameters that no edge pulls at. `kernels/` holds the compiled loops and the toolkit that
compiles them.
To add an iteration: a subclass of `pdhg.Iteration`, which `exact.start_iteration` chooses. A penalty is added in
`core.penalties`. Imports: `core` and below.
"""

from __future__ import annotations

from fedkin.solvers.compiled import Crew
from fedkin.solvers.crossvalidation import (
    LamChoice,
    best_level,
    cross_validate_lam,
    cross_validate_ridge,
    held_out_losses,
    mean_and_error,
)
from fedkin.solvers.debias import Debias, solve_debiased
from fedkin.solvers.exact import SCALE_FLOOR, solve, solve_fused
from fedkin.solvers.fusing import MinimizerBall, fused_parameters
from fedkin.solvers.kernels import load_kernels
from fedkin.solvers.path import lam_grid, lam_max, lam_path
from fedkin.solvers.profiled import ProfiledProblem, minimised_out

__all__ = [
    "SCALE_FLOOR",
    "Crew",
    "Debias",
    "LamChoice",
    "MinimizerBall",
    "ProfiledProblem",
    "best_level",
    "cross_validate_lam",
    "cross_validate_ridge",
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
