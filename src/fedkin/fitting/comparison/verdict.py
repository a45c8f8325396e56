"""What to do with a comparison, in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from fedkin._base import Array
from fedkin.fitting.comparison.baselines import GLOBAL, INTERCEPTS, LOCAL

FEDKIN = "Fedkin"
#: A difference is clear from so many standard errors on, and its interval has so many on both sides.
CLEAR = 2.0
#: A simpler model is recommended only where its interval excludes that its error is larger by more than this share of
#: Fedkin's. As its difference is within one standard error, the estimated loss is a third of this at most.
RELEVANT = 0.05
#: Smaller shares round to 0.0%.
_SHOWN = 0.0005

NAMES = {GLOBAL: "one model for all", INTERCEPTS: "site intercepts", LOCAL: "the sites' own models"}
_SIMPLER = {
    GLOBAL: "One model for all sites",
    INTERCEPTS: "One model with site intercepts",
    LOCAL: "Every site's own model",
}


def verdict(
    scale: float,
    apart: Mapping[str, float],
    error: Mapping[str, float],
    *,
    how: str = "",
    gains: str = "",
    remark: Callable[[str], str] = lambda name: "",
) -> str:
    r"""The sentence, from differences to Fedkin and their standard errors.

    Parameters
    ----------
    scale : float
        Fedkin's error.
    apart, error : dict {name: float}
        How much larger the error of each simpler model is, and the standard error of that; NaN where it is unknown.
    how : str
        Where to get the simpler model.
    gains : str
        A clause about the sites that gain by Fedkin.
    remark : callable
        Gives a clause about a simpler model.

    Notes
    -----
    In this order: a simpler model that is clearly better is recommended; Fedkin, where it is clearly better than each
    of them; a simpler one whose difference is within a standard error, if the interval excludes a loss of `RELEVANT`,
    the simplest of them unless another predicts better by more than chance; otherwise the rows cannot tell. That
    Fedkin's model loses next to nothing is said where the interval excludes `RELEVANT` on that side, too.

    Examples
    --------
    >>> verdict(100.0, {"Local": 9.0, "Global": 0.2}, {"Local": 1.0, "Global": 0.5})
    "One model for all sites does as well and is simpler; Fedkin's model loses next to nothing."
    >>> print(verdict(100.0, {"Local": 9.0, "Global": 2.0}, {"Local": 1.0, "Global": 5.0}).replace("; ", ";\n"))
    These rows cannot tell Fedkin from one model for all (its error could be 8% smaller or 12% larger);
    Fedkin's model is kept.
    """
    better = [name for name in apart if apart[name] < -CLEAR * error[name]]
    if better:
        best = min(better, key=lambda name: apart[name])
        return f"{_SIMPLER[best]} predicts better than Fedkin here: use it{how and f', {how}'}{remark(best)}."
    best = min(apart, key=lambda name: apart[name])
    open_ones = [name for name in NAMES if name in apart and not apart[name] > CLEAR * error[name]]
    if not open_ones:
        smaller = apart[best] / abs(scale + apart[best] or 1.0)
        said = f"its error is {smaller:.1%} smaller than that of {NAMES[best]}"
        return f"Fedkin predicts best: {said}{gains}{remark(LOCAL)}."
    ties = [
        name
        for name in open_ones
        if apart[name] <= error[name] and apart[name] + CLEAR * error[name] <= RELEVANT * abs(scale)
    ]
    if ties:
        name = _simplest(ties, apart, error)
        if apart[name] - CLEAR * error[name] < -RELEVANT * abs(scale):
            return f"{_SIMPLER[name]} does as well or better, and is simpler: use it{how and f', {how}'}{remark(name)}."
        said = f"{_SIMPLER[name]} does as well and is simpler{how and f' ({how})'}"
        return f"{said}; Fedkin's model loses next to nothing{remark(name)}."
    return f"These rows cannot tell Fedkin from {_unknown(scale, open_ones, apart, error)}; Fedkin's model is kept."


def corrected_error(values: Array, test_size: float) -> float:
    """Standard error of the mean over splits that share rows (Nadeau and Bengio 2003); NaN with one split."""
    if len(values) < 2:
        return float("nan")
    return float(np.sqrt(values.var(ddof=1) * (1 / len(values) + test_size / (1 - test_size))))


def finite(value: float) -> float | None:
    """A number for JSON."""
    return float(value) if np.isfinite(value) else None


def _simplest(ties: list[str], apart: Mapping[str, float], error: Mapping[str, float]) -> str:
    """The first of them, or the one with the smallest error if that is clearly smaller."""
    best = min(ties, key=lambda name: apart[name])
    clearly = apart[ties[0]] - apart[best] > float(np.hypot(error[ties[0]], error[best]))
    return best if clearly else ties[0]


def _unknown(scale: float, names: list[str], apart: Mapping[str, float], error: Mapping[str, float]) -> str:
    """Which models the rows cannot tell from Fedkin, and how far the best of them may be from it."""
    best = min(names, key=lambda name: apart[name])
    low, high = ((apart[best] + side * error[best]) / abs(scale or 1.0) for side in (-CLEAR, CLEAR))
    whose = "its error" if len(names) == 1 and best != LOCAL else f"the error of {NAMES[best]}"
    if not np.isfinite(high):
        told = "no standard error"
    elif low <= -1:  # no error can shrink by more than all of it
        told = "the difference cannot be told: rows differ too much"
    elif max(-low, high) < _SHOWN:
        told = "equal to the digits shown"
    else:
        told = f"{whose} could be {_percent(-low)} smaller or {_percent(high)} larger"
    return f"{' or '.join(NAMES[name] for name in names)} ({told})"


def _percent(share: float) -> str:
    if share < _SHOWN:
        return f"less than {2 * _SHOWN:.1%}"
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1%}"
