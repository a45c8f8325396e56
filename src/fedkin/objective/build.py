"""From a federation's rows to its terms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedkin._base import Array, Index, Mask
from fedkin.data import Federation
from fedkin.losses import Loss, by_loss
from fedkin.objective.batch import RowBlock, row_blocks
from fedkin.objective.custom import LossTerms
from fedkin.objective.mixed import MixedTerms
from fedkin.objective.quadratic import quadratic_terms
from fedkin.objective.rowwise import RowTerms
from fedkin.objective.terms import DeviceTerms


def build_terms(federation: Federation, losses: Sequence[Loss], ridge: Array, alone: Mask | None = None) -> DeviceTerms:
    """The terms of a federation: one kind per distinct loss, Gram statistics where the loss is quadratic.

    Parameters
    ----------
    federation : Federation
        Rows of V devices.
    losses : sequence of Loss
        One per device.
    ridge : array (p,)
        Adds ``sum_c ridge_c theta_c^2 / 2`` to each device.
    alone : bool array (V,), optional
        Devices that nothing ties to others, so that their own minimiser has to be exact; all of them by default.
    """
    alone = np.ones(federation.n_devices, dtype=bool) if alone is None else alone
    parts = [(devices, _terms_of_kind(federation, devices, loss, ridge, alone)) for devices, loss in by_loss(losses)]
    return parts[0][1] if len(parts) == 1 else MixedTerms(parts)


def _terms_of_kind(federation: Federation, devices: Index, loss: Loss, ridge: Array, alone: Mask) -> DeviceTerms:
    if not loss.quadratic and loss.rowwise is None:
        return LossTerms(loss, [federation[federation.devices[u]] for u in devices], ridge)
    place = np.full(federation.n_devices, -1)
    place[devices] = np.arange(devices.size)
    blocks = [RowBlock(place[block.devices], block.rows) for block in row_blocks(federation, devices)]
    if loss.quadratic:
        return quadratic_terms(loss, blocks, ridge, alone[devices])
    assert loss.rowwise is not None
    return RowTerms(loss.rowwise, blocks, ridge)
