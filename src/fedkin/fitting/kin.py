"""From rows to a model with kin: preparation, `find_kin`, and a model that predicts and is saved."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fedkin.data import Federation
from fedkin.fitting.model import FittedModel
from fedkin.fitting.options import AUTO, FitOptions
from fedkin.fitting.preparation import prepare
from fedkin.graph import Graph
from fedkin.kin import Kin, find_kin
from fedkin.losses import Loss


@dataclass(frozen=True, eq=False)
class KinFit:
    """A model for every site, and what was found about the sites."""

    model: FittedModel
    kin: Kin


def fit_kin(
    federation: Federation,
    graph: Graph | None = None,
    *,
    loss: str | Loss = AUTO,
    fit_intercept: bool = True,
    seed: int = 0,
) -> KinFit:
    """Fit a model for every site by `find_kin`.

    Parameters
    ----------
    federation : Federation
        Rows as the user has them: classes may be labels, and an intercept is added here.
    graph : Graph, optional
        Who may be kin.
    loss : str or Loss
        "auto" is "linear" for numbers and "logistic" for labels.
    fit_intercept : bool
        Whether every site has an intercept.
    seed : int
        Of the sampler.

    Returns
    -------
    KinFit
        ``model`` has the groups that are resolved as clusters, and cliques of them as graph; where none are, every
        site is on its own. Its ``gap`` is not a number, as nothing is minimised. ``kin`` has parameters in the same
        units, intercept first.

    Examples
    --------
    >>> from fedkin.datasets import paper_design
    >>> from fedkin.fitting import fit_kin
    >>> design = paper_design(n_devices=12, n_samples=40, n_features=5, n_clusters=2, signal=2, seed=0)
    >>> fit_kin(design.federation).model.n_clusters
    2
    """
    options = FitOptions(loss=loss, fit_intercept=fit_intercept, standardize=False, seed=seed)
    prepared = prepare(federation, options)
    kin = find_kin(prepared.federation, graph, loss=prepared.loss, seed=seed)
    _, first, number = np.unique(kin.groups, return_index=True, return_inverse=True)
    labels = np.argsort(np.argsort(first))[number] if kin.resolved else np.arange(len(kin.devices))
    model = prepared.units.model(
        kin.theta,
        kin.graph("groups"),
        federation.n_samples,
        "none",
        clusters=labels.astype(np.int64),
        gap=float("nan"),
        options={"method": "kin", "loss": kin.loss.name, "fit_intercept": prepared.fit_intercept, "seed": seed},
    )
    return KinFit(replace(model, kin=kin), kin)
