"""What a check of a compiled iteration looks at, with the work shared among threads."""

from __future__ import annotations

from fedkin._base import Array
from fedkin.solvers.fuse import INTERIOR
from fedkin.solvers.kernels import gaps as gap_kernels
from fedkin.solvers.kernels.bundles import Devices, Edges
from fedkin.solvers.kernels.steps import L1
from fedkin.solvers.workload import Crew


def certificate(crew: Crew, devices: Devices, edges: Edges, x: Array, y: Array, s: Array) -> tuple[float, float]:
    """Objective value and duality gap of parameters ``x`` and duals ``y`` with the balance ``s``, without sparsity."""
    of_devices = crew.run(lambda _, lo, hi: gap_kernels.node_gap(lo, hi, devices, x, s), crew.split(x.shape[0]))
    of_edges = crew.run(lambda _, lo, hi: gap_kernels.edge_gap(lo, hi, edges, x, y), crew.split(y.shape[0]))
    value, gap = (sum(part) for part in zip(*of_devices, *of_edges, strict=True))
    return float(value), float(gap)


def fuse(crew: Crew, devices: Devices, edges: Edges, x: Array, y: Array, z: Array, out: Array) -> Array:
    """Parameters ``out`` in which fused devices are exactly equal."""
    # columns of other penalties than l1 belong together
    columns = crew.split(x.shape[1]) if edges.kind == L1 and crew.size > 1 else [(0, x.shape[1])]
    crew.run(lambda _, lo, hi: gap_kernels.fuse(lo, hi, edges, y, 1.0 - INTERIOR, z, devices.box, x, out), columns)
    return out
