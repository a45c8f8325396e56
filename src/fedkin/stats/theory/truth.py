"""Terms of a federation whose true parameters are known."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedkin.data import Federation
from fedkin.errors import ParameterError
from fedkin.objective import DeviceTerms, LossLike, build_terms, resolve_losses

Array = NDArray[np.float64]


def terms_of(federation: Federation, loss: LossLike) -> DeviceTerms:
    """The devices' mean losses, without a ridge."""
    losses = resolve_losses(loss, federation)
    return build_terms(federation, losses, np.zeros(losses[0].n_params(federation.n_features)))


def true_parameters(federation: Federation, theta_star: ArrayLike, terms: DeviceTerms) -> Array:
    """``theta_star`` as an array ``(V, p)``, or the error that it is none."""
    theta = np.asarray(theta_star, dtype=np.float64)
    expected = (federation.n_devices, terms.n_params)
    if theta.shape != expected:
        raise ParameterError(f"theta_star has shape {theta.shape}, expected {expected}: a row for every device")
    return theta
