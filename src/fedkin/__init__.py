"""Fedkin: heterogeneous federated learning on a graph.

Every site keeps its rows and gets its own model, which borrows from similar sites. docs/architecture.md shows the
packages, the main types, and where to add things. Names are imported on first use, so that ``import fedkin`` stays
light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Availability", "FedADMMClassifier", "FedADMMRegressor", "Federation", "FedkinError", "Graph", "Kin",
    "KinClassifier", "KinRegressor", "KinSurvival", "Problem", "SiteScorer", "Solution", "Summaries", "Summary",
    "WithinSiteKFold", "__version__", "cross_validate_lam", "fed_admm", "find_kin", "fit", "global_fit", "lam_max",
    "lam_path", "load", "local_fit", "merge_sums", "oracle_fit", "partial_sums", "progress", "select_edges", "solve",
    "summarise", "summarise_files",
]  # fmt: skip

if TYPE_CHECKING:
    from fedkin._progress import progress
    from fedkin.admm import Availability
    from fedkin.admm.algorithm import fed_admm
    from fedkin.core import (
        Problem,
        Solution,
        Summaries,
        Summary,
        global_fit,
        local_fit,
        merge_sums,
        oracle_fit,
        partial_sums,
        select_edges,
        summarise,
        summarise_files,
    )
    from fedkin.data import Federation
    from fedkin.errors import FedkinError
    from fedkin.fitting import fit, load
    from fedkin.fitting.estimators import (
        FedADMMClassifier,
        FedADMMRegressor,
        KinClassifier,
        KinRegressor,
        KinSurvival,
        SiteScorer,
        WithinSiteKFold,
    )
    from fedkin.graph import Graph
    from fedkin.kin import Kin, find_kin
    from fedkin.solvers import cross_validate_lam, lam_max, lam_path, solve

#: Where public names are looked up, each package after those that it imports.
_PLACES = (
    *("errors", "_progress", "data", "graph", "core", "solvers", "admm", "admm.algorithm", "kin", "fitting"),
    "fitting.estimators",
)
#: Modules to reach as ``fedkin.NAME`` without importing them by hand.
_MODULES = {"penalties": "core.penalties", "scoring": "fitting.scoring", "theory": "core.theory"}


def __getattr__(name: str) -> Any:
    if name in ("datasets", "losses", *_MODULES):
        return import_module(f"fedkin.{_MODULES.get(name, name)}")
    for place in _PLACES if name in __all__ else ():
        module = import_module(f"fedkin.{place}")
        if hasattr(module, name):
            globals()[name] = value = getattr(module, name)
            return value
    raise AttributeError(f"module 'fedkin' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
