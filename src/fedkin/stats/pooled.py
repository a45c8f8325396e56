"""Fits that pool devices: all of them, or groups that are known to be alike."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from fedkin._base import Array, Index, check_choice
from fedkin.data import Federation
from fedkin.errors import DegenerateDeviceWarning
from fedkin.losses import Loss, RowLoss, by_loss
from fedkin.objective import LossLike, RowBatch, check_labels, resolve_losses
from fedkin.stats.minimise import minimise, minimise_sum, minimise_with_ridge
from fedkin.stats.ownfits import ROUNDING, column_scale, has_means, light_ridge, ridge_rule, why_no_minimiser

Weights = Literal["samples", "devices"]


def global_fit(federation: Federation, loss: LossLike = "linear", weights: Weights = "samples") -> Array:
    """One parameter for all devices.

    Parameters
    ----------
    federation : Federation
        The devices and their rows.
    loss : str, Loss or mapping {device: loss}
        What each device minimises.
    weights : "samples" or "devices"
        "samples" minimises ``sum_u n_u M_u``, every row counting alike: the pooled fit that section 5 calls Global.
        "devices" minimises ``sum_u M_u``, every device counting alike: what the penalised estimator becomes when lam
        grows without bound on a connected graph. They agree when all n_u are equal.

    Returns
    -------
    array (p,)

    Warns
    -----
    DegenerateDeviceWarning
        When the pooled loss has no unique minimiser and a rule of `LocalFit` was used.

    Examples
    --------
    >>> import fedkin
    >>> fed = fedkin.Federation({"a": [[0.0], [0.0], [0.0]], "b": [[4.0]]})
    >>> fedkin.global_fit(fed, "mean").tolist(), fedkin.global_fit(fed, "mean", weights="devices").tolist()
    ([1.0], [2.0])
    """
    return np.asarray(oracle_fit(federation, [0] * federation.n_devices, loss, weights)[0])


def oracle_fit(
    federation: Federation,
    labels: Mapping[Hashable, object] | Sequence[object],
    loss: LossLike = "linear",
    weights: Weights = "samples",
) -> Array:
    """One parameter for each group of devices: what one could do knowing who is alike.

    Parameters
    ----------
    federation : Federation
        The devices and their rows.
    labels : mapping {device: label}, or sequence of V labels in device order
        Devices with the same label share a fit.
    loss : str, Loss or mapping {device: loss}
        What each device minimises.
    weights : "samples" or "devices"
        As in `global_fit`, within each group.

    Returns
    -------
    array (V, p)

    Examples
    --------
    >>> import fedkin
    >>> fed = fedkin.Federation({"a": [[0.0]], "b": [[2.0]], "c": [[9.0]]})
    >>> fedkin.oracle_fit(fed, {"a": "low", "b": "low", "c": "high"}, "mean").ravel().tolist()
    [1.0, 1.0, 9.0]
    """
    check_choice("weights", weights, get_args(Weights))
    losses = resolve_losses(loss, federation)
    groups: dict[object, list[int]] = {}
    for u, label in enumerate(check_labels(labels, federation.devices)):
        groups.setdefault(label, []).append(u)
    theta = np.empty((federation.n_devices, losses[0].n_params(federation.n_features)))
    for label, group in groups.items():
        members = np.asarray(group)
        theta[members], problem = _pooled(federation, members, losses, weights)
        if problem:
            who = "1 device" if members.size == 1 else f"{members.size} devices"
            warnings.warn(
                f"group {label!r} of {who} has no unique minimiser: {problem}",
                DegenerateDeviceWarning,
                stacklevel=2,
            )
    return theta


def _pooled(federation: Federation, members: Index, losses: Sequence[Loss], weights: Weights) -> tuple[Array, str]:
    """Common minimiser ``(p,)`` of some devices, and why it is not an ordinary one ("" when it is)."""
    sizes = federation.n_samples[members]
    n_rows = int(sizes.sum())
    share = sizes / n_rows if weights == "samples" else np.full(members.size, 1.0 / members.size)
    kinds = by_loss(losses, members)
    loss = kinds[0][1]
    if len(kinds) > 1 or not (loss.rowwise or has_means(loss)):
        parts = [
            (float(share[k]), losses[u], federation[federation.devices[u]]) for k, u in enumerate(members.tolist())
        ]
        theta, _, problem = minimise_sum(parts, n_rows, loss.n_params(federation.n_features))
        return theta, problem
    weight = None if weights == "samples" else np.repeat(share * n_rows / sizes, sizes)
    rows = federation.rows.take(np.concatenate([np.arange(*federation.starts[u : u + 2]) for u in members]))
    if loss.rowwise is None:
        return np.average(rows.X, axis=0, weights=weight), ""
    as_one_device = rows.map(lambda part: part[None].astype(np.float64, copy=False))
    batch = RowBatch(loss.rowwise, as_one_device, None if weight is None else weight[None])
    if batch.full_rank[0]:
        theta, exists = minimise(batch)
        if exists[0]:
            return theta[0], ""
    why = why_no_minimiser(loss.rowwise, n_rows, int(batch.rank[0]), federation.n_features)
    return minimise_with_ridge(batch, _ridge(batch, loss.rowwise))[0], f"{why}; a ridge fit is used"


def _ridge(batch: RowBatch, loss: RowLoss) -> Array:
    """The ridge ``(1, p)`` of the rule, for one device that has no others to learn from."""
    scale = column_scale(batch.X[0], loss)[None]
    size = np.maximum(loss.plausible_size(batch.y, batch.rows.offset), 1e-100)
    dispersion = 1.0
    if loss.estimates_scale:
        light = minimise_with_ridge(batch, light_ridge(scale, batch.n_rows))
        dispersion = max(loss.dispersion(light[0], *batch.rows.take(0).arrays), ROUNDING * float(size[0]))
    return ridge_rule(scale, batch.n_rows, size, dispersion)
