"""Fedkin: heterogeneous federated learning on a graph.

Every site keeps its rows and gets a model of its own, which borrows from the sites that are like it.
docs/architecture.md shows the packages, the main types, and where to add things. Names are imported on first use, so
that ``import fedkin`` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "Federation": "fedkin.data",
    "Graph": "fedkin.graph",
    "Problem": "fedkin.core",
    "Solution": "fedkin.core",
    "Summaries": "fedkin.core",
    "Summary": "fedkin.core",
    "solve": "fedkin.solvers",
    "fed_admm": "fedkin.admm",
    "find_kin": "fedkin.kin",
    "Kin": "fedkin.kin",
    "Availability": "fedkin.admm",
    "lam_max": "fedkin.solvers",
    "lam_path": "fedkin.solvers",
    "local_fit": "fedkin.core",
    "global_fit": "fedkin.core",
    "oracle_fit": "fedkin.core",
    "select_edges": "fedkin.core",
    "summarise": "fedkin.core",
    "summarise_files": "fedkin.core",
    "cross_validate_lam": "fedkin.solvers",
    "FedADMMRegressor": "fedkin.fitting.estimators",
    "FedADMMClassifier": "fedkin.fitting.estimators",
    "SiteScorer": "fedkin.fitting.estimators",
    "WithinSiteKFold": "fedkin.fitting.estimators",
    "fit": "fedkin.fitting",
    "KinRegressor": "fedkin.fitting.estimators",
    "KinClassifier": "fedkin.fitting.estimators",
    "load": "fedkin.fitting",
    "progress": "fedkin.fitting.progress",
    "FedkinError": "fedkin.errors",
}

#: Modules to reach as ``fedkin.NAME`` without importing them by hand.
_MODULES = {
    "datasets": "fedkin.datasets",
    "losses": "fedkin.losses",
    "penalties": "fedkin.core.penalties",
    "scoring": "fedkin.fitting.scoring",
    "theory": "fedkin.core.theory",
}

__all__ = ["__version__", *_WHERE]

if TYPE_CHECKING:
    from fedkin.admm import Availability as Availability
    from fedkin.admm import fed_admm as fed_admm
    from fedkin.core import Problem as Problem
    from fedkin.core import Solution as Solution
    from fedkin.core import Summaries as Summaries
    from fedkin.core import Summary as Summary
    from fedkin.core import global_fit as global_fit
    from fedkin.core import local_fit as local_fit
    from fedkin.core import oracle_fit as oracle_fit
    from fedkin.core import select_edges as select_edges
    from fedkin.core import summarise as summarise
    from fedkin.core import summarise_files as summarise_files
    from fedkin.data import Federation as Federation
    from fedkin.errors import FedkinError as FedkinError
    from fedkin.fitting import fit as fit
    from fedkin.fitting import load as load
    from fedkin.fitting.estimators import FedADMMClassifier as FedADMMClassifier
    from fedkin.fitting.estimators import FedADMMRegressor as FedADMMRegressor
    from fedkin.fitting.estimators import KinClassifier as KinClassifier
    from fedkin.fitting.estimators import KinRegressor as KinRegressor
    from fedkin.fitting.estimators import SiteScorer as SiteScorer
    from fedkin.fitting.estimators import WithinSiteKFold as WithinSiteKFold
    from fedkin.fitting.progress import progress as progress
    from fedkin.graph import Graph as Graph
    from fedkin.kin import Kin as Kin
    from fedkin.kin import find_kin as find_kin
    from fedkin.solvers import cross_validate_lam as cross_validate_lam
    from fedkin.solvers import lam_max as lam_max
    from fedkin.solvers import lam_path as lam_path
    from fedkin.solvers import solve as solve


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _WHERE:
        raise AttributeError(f"module 'fedkin' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
