"""All contenders on one instance, to the same measured suboptimality, in alternating order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fedkin.solvers import solve_fused

from .contenders import Attempt, Contender
from .instances import SEED, Instance

Row = dict[str, Any]
#: A contender that needs longer than this is not repeated.
PATIENCE = 5.0


def duel(instance: Instance, contenders: list[Contender], targets: list[float], repeats: int) -> Iterator[Row]:
    """Rows with the seconds of each contender and repeat, or the reason why there are none."""
    objective = instance.objective
    reference = solve_fused(objective, 1e-10, quiet=True, backend="auto").objective
    for target in targets:
        chosen: list[tuple[Contender, Attempt]] = []
        for contender in contenders:
            reason = contender.skip(instance)
            if reason is None:
                attempt, reason = _first_good(contender, instance, target, reference)
            if reason is None:
                assert attempt is not None
                chosen.append((contender, attempt))
            else:
                yield _row(contender, target) | {"skipped": reason}
        slow: set[str] = set()
        for repeat in range(repeats):
            # everyone is first once, so that a busy moment hits all alike
            turn = repeat % max(len(chosen), 1)
            for contender, attempt in chosen[turn:] + chosen[:turn]:
                if contender.name in slow:
                    continue
                theta, seconds = attempt.run()
                if seconds > PATIENCE:
                    slow.add(contender.name)
                found = objective.value(np.ascontiguousarray(theta))
                yield _row(contender, target) | {
                    "setting": attempt.setting,
                    "repeat": repeat,
                    "seconds": seconds,
                    "suboptimality": found / reference - 1.0,
                }


def _first_good(
    contender: Contender, instance: Instance, target: float, reference: float
) -> tuple[Attempt | None, str | None]:
    """The coarsest setting that reaches the target (a rehearsal, also for compilers and caches)."""
    reached = np.inf
    for attempt in contender.attempts(instance, target):
        theta, _ = attempt.run()
        if np.isfinite(theta).all():
            reached = instance.objective.value(np.ascontiguousarray(theta)) / reference - 1.0
            if reached <= target * 1.001:
                return attempt, None
    return None, f"reached {reached:.1e} at best"


def _row(contender: Contender, target: float) -> Row:
    return {"contender": contender.name, "version": contender.version(), "target": target, "seed": SEED}
