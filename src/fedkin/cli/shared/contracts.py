"""From a contract to a fit, and from what its rounds found to a model."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from numpy.typing import ArrayLike

from fedkin.federate import Contract
from fedkin.fitting import FittedModel, FusedFit, model_from_theta
from fedkin.graph import Graph


def fit_options(contract: Contract) -> dict[str, Any]:
    """What a contract settles of `fedkin.fitting.FitOptions`; nothing is standardised, since its scale is agreed on."""
    return {
        "method": contract.method,
        "loss": contract.loss_object(),
        "penalty": contract.penalty,
        "fit_intercept": contract.intercept,
        "standardize": False,
        "ridge": contract.ridge,
        "sparsity": contract.sparsity,
        "cv_folds": contract.folds,
        "seed": contract.seed,
    }


def model_of_rounds(
    contract: Contract,
    theta: Mapping[Hashable, ArrayLike],
    graph: Graph,
    n_samples: Mapping[Hashable, int],
    *,
    lam: float,
    rounds: int,
    selection: Mapping[str, Any] | None = None,
    **more: Any,
) -> FittedModel:
    """The model of sites whose parameters were found in rounds, on rows that the contract prepared.

    As `fedkin.fitting.model_from_theta`, which knows no contracts; the options name the contract and its digest.
    """
    return model_from_theta(
        theta,
        graph,
        schema=contract.schema,
        loss=contract.loss_object(),
        intercept=contract.intercept,
        n_samples=n_samples,
        # without a gap: a certificate takes the rows of all sites
        fused=FusedFit(contract.penalty, lam, n_iter=rounds, selection=selection),
        origin={"from": "rounds", "rounds": rounds},
        options={"contract": contract.name, "contract_digest": contract.digest},
        **more,
    )
