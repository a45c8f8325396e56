"""The loss of a target where nobody has named one, and hints at one that may suit it better."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedkin._base import Array
from fedkin.cli.shared.console import note
from fedkin.data import Federation
from fedkin.fitting import FitOptions
from fedkin.losses import LOSSES, loss_for

#: Up to this share of the rows, values beside 0 and 1 may be typing errors.
_STRAY = 0.01


def with_loss(federation: Federation, how: FitOptions) -> FitOptions:
    """The options with the logistic loss for numbers that are 0 or 1, where nobody has named a loss.

    Says so, and that whole numbers may be counts.
    """
    y, name = federation.y, federation.target_name
    if how.loss != "auto" or y is None or y.dtype.kind != "f":
        return how
    values = np.unique(y)
    classes = loss_for("class")
    if classes.suits(y):
        note(f"the target {name!r} is 0 or 1 everywhere: its probabilities are modelled; --loss linear fits numbers")
        return replace(how, loss=classes.name)
    if _stray(federation, values):
        return how
    for kind in LOSSES.values():
        if kind.purpose and kind.suits(y):
            note(
                f"the target {name!r} is modelled by least squares; if it holds {kind.purpose}, "
                f"add --loss {kind.name}"
            )
    return how


def _stray(federation: Federation, values: Array) -> bool:
    """Whether a target is 0 or 1 but for a few rows; says which ones."""
    y = federation.y
    assert y is not None
    odd = np.flatnonzero((y != 0) & (y != 1))
    if not np.isin([0.0, 1.0], values).all() or not 0 < odd.size <= max(1.0, _STRAY * len(y)) or len(y) < 20:
        return False
    first = int(odd[0])
    site = federation.sites[int(federation.site_index[first])]
    rest = f"one of {len(y)} rows" if odd.size == 1 else f"{odd.size} of {len(y)} rows"
    note(
        f"the target {federation.target_name!r} is 0 or 1 but for {rest} ({y[first]:g} at site {site!r}): a typing "
        "error? As it is, it is modelled by least squares, and with 0 and 1 alone by probabilities; if it holds "
        f"counts of events, add --loss {loss_for('count').name}"
    )
    return True
