"""What can be wrong with a problem, found while solving it and said with the name of the device."""

from __future__ import annotations

import numpy as np

from fedkin._base import Array
from fedkin.errors import SolverError
from fedkin.graph import Graph
from fedkin.objective import FusedObjective
from fedkin.solvers.expansion import Expansion

#: What slows the solver down: sizes of features that differ by more than this factor, and Gram matrices (in units of
#: their diagonals) with a larger condition number than this.
UNEVEN, COLLINEAR = 1e3, 1e6
#: Hessians with more entries than this are not looked at.
ROOM = 20_000_000


def advice(objective: FusedObjective, theta: Array) -> str:
    """What helps where the iteration limit came first, given the parameters ``theta (V, p)`` that were found."""
    cures = []
    if theta.shape[0] * theta.shape[1] ** 2 <= ROOM:
        hessians = objective.terms.hessians(theta)
        diagonal = np.sqrt(np.einsum("vii->vi", hessians).clip(np.finfo(float).tiny))
        sizes = diagonal.mean(axis=0)
        if sizes.max() > UNEVEN * sizes.min():
            cures.append(f"standardise the features, whose sizes differ by a factor of {sizes.max() / sizes.min():.0e}")
        values = np.linalg.eigvalsh(hessians / (diagonal[:, :, None] * diagonal[:, None, :]))
        poor = values[:, 0] * COLLINEAR < values[:, -1]
        if poor.any():
            device = objective.graph.devices[int(poor.argmax())]
            who = f"device {device!r} and {poor.sum() - 1} others" if poor.sum() > 1 else f"device {device!r}"
            cures.append(f"drop features or add a small ridge (features of {who} are nearly collinear)")
    return ", ".join([*cures, "raise max_iter" if not cures else "or raise max_iter"])


def raise_if_not_finite(graph: Graph, values: Array, what: str) -> None:
    """Raise `SolverError` for the first device whose ``values (V,)`` or ``(V, ...)`` are not all finite."""
    bad = ~np.isfinite(values.reshape(graph.n_devices, -1)).all(axis=1)
    if bad.any():
        raise SolverError(
            f"the {what} of device {graph.devices[int(bad.argmax())]!r} is not finite; scale its features and offsets "
            "down, or check the functions of a custom loss"
        )


def raise_if_unbounded(graph: Graph, before: Expansion, at: Expansion) -> None:
    """Raise when the last step ran along a direction in which a likelihood keeps losing curvature.

    A likelihood without a maximum (separable classes, counts that are all 0) approaches its supremum exponentially:
    gaps vanish, but Newton's steps do not get shorter, and each of them leaves a fraction of the curvature.
    """
    step = at.theta - before.theta
    moving = np.linalg.norm(step, axis=1) > 1e-3 * np.linalg.norm(at.theta, axis=1)
    # other losses may be flat where they please
    moving &= at.terms.caution()[1] == 0
    if not moving.any():
        return

    def along(hessians: Array) -> Array:
        return np.asarray(np.einsum("vp,vpq,vq->v", step, hessians, step))

    now, at_zero = along(at.hessians), along(at.terms.hessians(np.zeros_like(step)))
    lost = moving & (now < 1e-6 * at_zero) & (now < 0.6 * along(before.hessians))
    if not lost.any():
        return
    first, labels = int(lost.argmax()), graph.components()
    kin = labels == labels[first]
    who, cure = f"the parameters of device {graph.devices[first]!r}", "add ridge=1e-3 or so"
    if not lost[kin].all():
        cure += ", or connect the device to others with a larger lam"
    elif kin.sum() > 1:
        who += " and of all devices it is connected to"
    raise SolverError(
        f"{who} run away: the objective has no finite minimiser there (separable classes, all-zero counts); {cure}"
    )


def raise_if_no_descent(graph: Graph, values: Array, linear: Array, error: Array) -> None:
    """Raise when a short step changes a device's loss by something else than its gradient says.

    Parameters
    ----------
    graph : Graph
        For the names of the V devices.
    values : array (V,)
        Losses before the step.
    linear : array (V,)
        Gradients times the step.
    error : array (V,)
        What losses gained above a model with these gradients.
    """
    wrong = (error > 0.25 * np.abs(linear)) & (error > 1e-11 * np.abs(values))
    if wrong.any():
        raise SolverError(
            f"the loss of device {graph.devices[int(wrong.argmax())]!r} does not fall as its gradient says, however "
            "short the step: check gradient_fn of the loss against value_fn"
        )
