"""What carries out the iterations: numpy or compiled kernels (numba).

numpy is the reference. The kernels take the same steps several times faster, but loading them takes about half a
second, and compiling them, once per machine, 10 to 20. So ``"auto"`` uses them when they are loaded already, or when
the work ahead is worth the wait; a first small fit never waits for a compiler.
"""

from __future__ import annotations

import sys
from typing import Literal, get_args

from fedkin._base import Array
from fedkin.errors import ParameterError
from fedkin.objective import FusedObjective, QuadraticTerms
from fedkin.solvers.kernels.cache import cached
from fedkin.solvers.pdhg import Iteration, NumpyIteration
from fedkin.solvers.workload import sizes

Backend = Literal["auto", "numpy", "numba"]
Resolved = Literal["numpy", "numba"]

#: Penalties that have kernels.
COMPILED_PENALTIES = ("l1", "l2", "linf")
#: Seconds of numpy work that outweigh loading the kernels from their cache, and compiling them.
LOADING_PAYS, COMPILING_PAYS = 1.0, 30.0
#: What a solve usually takes: iterations, and numpy's nanoseconds for an edge's coordinate and for an entry of a Gram.
USUAL_ITERATIONS, EDGE_COST, GRAM_COST = 60, 20.0, 3.0
_KERNELS = "fedkin.solvers.kernels.steps"


def resolve_backend(backend: Backend, objective: FusedObjective, n_solves: int = 1) -> Resolved:
    """The backend to use for ``n_solves`` problems like ``objective``.

    Parameters
    ----------
    backend : "auto", "numpy" or "numba"
        What was asked for.
    objective : FusedObjective
        Its size and penalty count.
    n_solves : int
        Number of problems ahead.

    Raises
    ------
    ParameterError
        For an unknown name, or a custom penalty with "numba".

    Examples
    --------
    >>> import fedkin
    >>> from fedkin.solvers import resolve_backend
    >>> fed = fedkin.Federation({"a": [[0.0]], "b": [[2.0]]})
    >>> problem = fedkin.Problem(fed, fedkin.Graph.complete(["a", "b"]), loss="mean")
    >>> resolve_backend("numpy", problem.fused)
    'numpy'
    """
    if backend not in get_args(Backend):
        raise ParameterError(f"unknown backend {backend!r}; choose one of {', '.join(get_args(Backend))}")
    if backend == "numpy":
        return "numpy"
    name = objective.penalty.name
    if backend == "numba":
        if name not in COMPILED_PENALTIES:
            raise ParameterError(f"there are no kernels for the penalty {name!r}; use backend='numpy'")
        return "numba"
    if name not in COMPILED_PENALTIES:
        return "numpy"
    if _KERNELS in sys.modules:
        return "numba"
    work = n_solves * expected_seconds(objective)
    if work < LOADING_PAYS:
        return "numpy"
    return "numba" if work > COMPILING_PAYS or cached() else "numpy"


def expected_seconds(objective: FusedObjective) -> float:
    """Rough time of one solve with numpy."""
    edges, entries = sizes(objective, objective.terms)
    return 1e-9 * USUAL_ITERATIONS * (EDGE_COST * edges + GRAM_COST * entries)


def compile_kernels() -> None:
    """Compile the kernels now and leave them in numba's cache; a second call only loads them."""
    from fedkin.solvers.kernels import chains, levels  # noqa: F401  (and the kernels they call)


def start_iteration(
    backend: Resolved,
    objective: FusedObjective,
    quadratic: QuadraticTerms,
    theta: Array | None,
    alpha: Array | None,
    zeta: Array | None,
    rho: Array,
) -> Iteration:
    """An iteration on that backend; the arguments are those of `fedkin.solvers.pdhg.NumpyIteration`."""
    if backend == "numpy":
        return NumpyIteration(objective, quadratic, theta, alpha, zeta, rho)
    from fedkin.solvers.chains import ChainIteration, chains_for
    from fedkin.solvers.compiled import CompiledIteration

    chains = chains_for(objective, quadratic)
    if chains is not None:
        return ChainIteration(objective, quadratic, chains, alpha)
    return CompiledIteration(objective, quadratic, theta, alpha, zeta, rho)
