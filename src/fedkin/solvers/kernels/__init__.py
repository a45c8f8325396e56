"""Compiled loops (numba); `fedkin.solvers.compiled` drives them, `fedkin.solvers.backend` decides when."""
