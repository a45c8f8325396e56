"""Runs in one process: `fed_admm`, which adds a trace, a certificate, checkpoints and restarts to the loop of rounds.

In: a `Problem`. Out: a `Solution`. `run` has the arguments, `session` the run, with `trace`, `checkpoint` and, for
whoever watches, `running_file`; `backend` chooses numpy or compiled rounds (`compiled`, `kernels`); `baselines` are the
rivals on the same terms.
To add a loss to compiled rounds: its slope in `kernels`. To add a rival: `baselines`.
Imports: the modules of `admm` beside it, `solvers` (certificates), `core` and below.
"""

from __future__ import annotations

from fedkin.admm.in_process.baselines import network_lasso_admm, subgradient_descent
from fedkin.admm.in_process.run import fed_admm
from fedkin.admm.in_process.trace import Progress

__all__ = ["Progress", "fed_admm", "network_lasso_admm", "subgradient_descent"]
