"""Which code does the rounds: numpy, the reference, or compiled kernels where the work pays for the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fedkin._base import Array, Mask
from fedkin.admm.rounds import LocalShards
from fedkin.admm.sampling import FLOYD_LIMIT
from fedkin.errors import ParameterError
from fedkin.losses import COMPILED_LOSSES, Loss, MeanLoss

Backend = Literal["auto", "numpy", "numba"]
Advance = Callable[[int, int, Mask | None, Array | None], None]

#: From this many multiplications on, waiting for the compiler pays.
COMPILE_WORK = 2e9


def choose_backend(local: LocalShards, backend: Backend, work: float) -> tuple[Backend, Advance]:
    """The name of the backend and the function ``(first, count, available, probability)`` that does rounds.

    Parameters
    ----------
    local : LocalShards
        What is to be advanced.
    backend : "auto", "numpy" or "numba"
        What the user asked for.
    work : float
        Multiplications of the whole run.
    """
    if backend not in ("auto", "numpy", "numba"):
        raise ParameterError(f"backend must be 'auto', 'numpy' or 'numba', got {backend!r}")
    if backend == "numpy" or (backend == "auto" and work < COMPILE_WORK):
        return "numpy", local.run
    reason = unsupported(local)
    if reason is not None:
        if backend == "auto":
            return "numpy", local.run
        raise ParameterError(f"backend='numba' cannot do this run: {reason}; use backend='numpy'")
    from fedkin.admm.in_process.compiled import CompiledRounds

    return "numba", CompiledRounds(local)


def unsupported(local: LocalShards) -> str | None:
    """Why the compiled rounds cannot do this run, or None when they can."""
    plan = local.plan
    loss = plan.rows.losses[0]
    if len(local.shards) > 1:
        return f"it runs one shard, not {len(local.shards)}"
    if local.streams:
        return "it cannot draw from streams"
    if any(other is not loss for other in plan.rows.losses):
        return "it needs the same loss on every site"
    known: tuple[type[Loss], ...] = (MeanLoss, *COMPILED_LOSSES)
    if type(loss) not in known:
        return f"it has no {loss.name} loss, only {', '.join(kind.name for kind in known)}"
    if ((plan.rows.batch > FLOYD_LIMIT) & (plan.rows.batch < plan.rows.counts)).any():
        return f"it cannot draw batches of more than {FLOYD_LIMIT} rows"
    if plan.penalty.name not in ("l1", "l2", "linf") or type(plan.penalty).__module__ != "fedkin.core.penalties":
        return f"it has no {plan.penalty.name} penalty"
    return None
