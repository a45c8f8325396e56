"""The paper's quantities on given data: what its theorems promise, when the truth is known.

Each function names its equation. The scale of lambda needs care: Theorem 1 states
``lambda = |V|^{-1/2} R*{(D^+)' Psi}``, but its proof uses ``lambda / |V|^{1/2}`` as the penalty level of the objective
(eq. basic_ineq3 against eq. ob). `theorem1_lambda` is the theorem's number and `objective_lam` turns it into the
``lam`` of `fedkin.Problem`.
"""

from __future__ import annotations

from fedkin.stats.theory.graphs import compatibility_lower_bound, gamma_squared, graph_fidelity
from fedkin.stats.theory.theorem1 import kappa, objective_lam, rho, theorem1_bound, theorem1_lambda
from fedkin.stats.theory.theorem2 import Sizes, theorem2_bound, theorem2_rate
from fedkin.stats.theory.theorem3 import MinimumSignal, minimum_signal_check

__all__ = [
    "MinimumSignal",
    "Sizes",
    "compatibility_lower_bound",
    "gamma_squared",
    "graph_fidelity",
    "kappa",
    "minimum_signal_check",
    "objective_lam",
    "rho",
    "theorem1_bound",
    "theorem1_lambda",
    "theorem2_bound",
    "theorem2_rate",
]
