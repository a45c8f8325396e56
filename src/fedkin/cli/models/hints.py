"""Hints at a loss that may suit a target better than the one it gets by default."""

from __future__ import annotations

import numpy as np

from fedkin.cli.shared.console import note
from fedkin.data import Federation
from fedkin.fitting import FitOptions

#: Whole numbers with a larger mean than this are rarely counts of events, unless 0 is among them.
_MEAN_OF_COUNTS = 10.0


def hint_at_loss(federation: Federation, how: FitOptions) -> None:
    """Say that numbers look like classes or counts, where nobody has named a loss."""
    y, name = federation.y, federation.target_name
    if how.loss != "auto" or y is None or y.dtype.kind != "f":
        return
    values = np.unique(y)
    if values.tolist() == [0.0, 1.0]:
        note(f"the target {name!r} is 0 or 1 everywhere; to model it as a class, add --loss logistic")
        return
    whole = values.size > 2 and values[0] >= 0 and bool((values == np.floor(values)).all())
    if whole and (values[0] == 0 or y.mean() <= _MEAN_OF_COUNTS):
        note(
            f"the target {name!r} holds whole numbers of at least 0 and is modelled by least squares; if it counts "
            "events, add --loss poisson"
        )
