"""Which kernels a problem needs: only these are compiled for it."""

from __future__ import annotations

from fedkin.solvers.kernels import checks, gaps, steps
from fedkin.solvers.kernels.cliques import pool
from fedkin.solvers.kernels.jit import Outlined


def needed_kernels(
    penalty: str, scalar: bool, *, cliques: bool, isotropic: bool, sparse: bool, threads: bool, quadratic: bool
) -> list[Outlined]:
    """The kernels that solving a problem of this kind takes, almost always; ``scalar`` ones have one parameter.

    Examples
    --------
    >>> kernels = needed_kernels(
    ...     "l2", False, cliques=False, isotropic=True, sparse=False, threads=True, quadratic=True
    ... )
    >>> [kernel.name for kernel in kernels][:2]
    ['isotropic_step', 'l2_step']
    """
    if cliques:
        return [pool]
    kind = steps.L1 if scalar else steps.KINDS[penalty]
    needed = [steps.isotropic_step if isotropic else steps.dense_step, steps.EDGE_STEPS[kind], steps.edge_moves]
    needed += [steps.add_balance, gaps.isotropic_gap if isotropic else gaps.dense_gap, gaps.edge_gap, gaps.fuse]
    if not isotropic:
        needed.append(gaps.invert)
    if sparse:
        needed.append(steps.box_step)
    if threads:
        return needed
    whole = quadratic and not sparse
    return [*needed, *([checks.settle, checks.begin, checks.keep] if whole else [steps.run])]
