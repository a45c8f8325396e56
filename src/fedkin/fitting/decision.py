"""The verdict of a comparison: which model to use, by how much, in which metric, and for how many sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from fedkin._base import percent
from fedkin.fitting.baselines import GLOBAL, INTERCEPTS, LOCAL

FEDKIN = "Fedkin"
#: Number of standard errors from which a difference is clear; also the half-width of its interval.
CLEAR = 2.0
#: A simpler model is recommended only if its interval excludes an error larger than Fedkin's by more than this share.
#: Since its difference is within one standard error, the estimated loss is at most a third of this share.
RELEVANT = 0.05
#: Smaller shares round to 0.0%.
SHOWN = 0.0005
#: Fedkin without the boosting column, compared when the options ask for boosting.
PLAIN = "Without boosting"
#: Names of the other models in sentences, the simplest first.
NAMES = {
    GLOBAL: "one model for all sites",
    INTERCEPTS: "site intercepts",
    LOCAL: "the sites' own models",
    PLAIN: "the model without boosting",
}


class Decision(NamedTuple):
    """A verdict in one sentence, the recommended model, and the model it was compared with."""

    text: str
    use: str
    other: str


def decide(
    scale: float,
    apart: Mapping[str, float],
    error: Mapping[str, float],
    metric: str = "error",
    gains: Callable[[str, int], str] = lambda name, sign: "",
    plain: Mapping[str, float] | None = None,
) -> Decision:
    """Return the recommended model.

    ``scale`` is Fedkin's error, ``apart`` are the differences of the other models' errors from it, and ``error`` the
    standard errors of these differences. Differences that round to 0.0% count as zero. ``gains`` counts the sites that
    gain from Fedkin (sign 1) or from another model (-1). Sentences give the ``plain`` differences, which are those of a
    table of errors, where they have the same sign.
    """
    told = {name: (plain or apart).get(name, one) for name, one in apart.items()}
    told = {name: one if one * apart[name] > 0 else apart[name] for name, one in told.items()}
    level = SHOWN * abs(scale)
    better = [name for name in apart if apart[name] < -max(CLEAR * error[name], level)]
    if better:
        best = min(better, key=lambda name: apart[name])
        much = percent(-told[best] / abs(scale or 1.0), 1)
        return Decision(f"Use {NAMES[best]}: {metric} {much} lower than Fedkin's{gains(best, -1)}.", best, best)
    best = min(apart, key=lambda name: apart[name])
    unclear = [name for name in NAMES if name in apart and not apart[name] > max(CLEAR * error[name], level)]
    if not unclear:
        much, others = percent(told[best] / abs(scale + told[best] or 1.0), 1), f"the next best ({NAMES[best]})"
        return Decision(f"Use Fedkin: {metric} {much} lower than {others}{gains(best, 1)}.", FEDKIN, best)
    near = [name for name in unclear if apart[name] <= max(error[name], level)]
    ties = [name for name in near if apart[name] + CLEAR * error[name] <= RELEVANT * abs(scale)]
    # a model is not recommended where a simpler one has the lower error
    order = [name for name in NAMES if name in apart]
    ties = [name for name in ties if apart[name] <= min(apart[one] for one in order[: order.index(name) + 1])]
    if not ties:
        best = min(unclear, key=lambda name: apart[name])
        names = " or ".join(NAMES[name] for name in unclear)
        what = metric if len(unclear) == 1 else f"{metric} of {NAMES[best]}"
        ends = _interval(scale, apart[best], error[best], what)
        return Decision(f"Use Fedkin; these rows cannot tell it from {names} ({ends}).", FEDKIN, best)
    # the simplest one, unless another has a clearly smaller error
    name, best = ties[0], min(ties, key=lambda one: apart[one])
    if apart[name] - apart[best] > float(np.hypot(error[name], error[best])):
        name = best
    share = abs(told[name]) / abs(scale or 1.0)
    much = "equal to" if share < SHOWN else f"{percent(share, 1)} {'higher' if told[name] > 0 else 'lower'} than"
    text = f"Use {NAMES[name]}, or Fedkin: {metric} {much} Fedkin's, no clear difference; the former is simpler."
    if apart[name] - CLEAR * error[name] < -RELEVANT * abs(scale):
        text = f"Use {NAMES[name]}: simpler than Fedkin, and as good or better ({metric} {much} Fedkin's)."
    return Decision(text, name, name)


def _interval(scale: float, apart: float, error: float, what: str) -> str:
    """Describe by how much the error of a model may differ from Fedkin's."""
    low, high = ((apart + side * error) / abs(scale or 1.0) for side in (-CLEAR, CLEAR))
    if not np.isfinite(high):
        return "no standard error"
    if low <= -1:  # an error cannot fall by more than 100%
        return "rows differ too much"
    if max(-low, high) < SHOWN:
        return "equal to the digits shown"
    return f"{what} could be {_share(-low)} lower or {_share(high)} higher"


def _share(share: float) -> str:
    return f"less than {percent(2 * SHOWN, 1)}" if share < SHOWN else percent(share, 0 if share >= 0.01 else 1)
