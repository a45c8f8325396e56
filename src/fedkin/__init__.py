"""Fedkin: heterogeneous federated learning on a graph.

Every site keeps its rows, talks only to its neighbours on a graph, and ends up with a model as good as if someone had
told it which sites are its kin. Names are imported on first use, so that ``import fedkin`` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "Federation": "fedkin.federation",
    "Graph": "fedkin.graph",
    "Problem": "fedkin.problem",
    "Solution": "fedkin.problem",
    "solve": "fedkin.solvers.exact",
    "fed_admm": "fedkin.solvers.fedadmm",
    "Availability": "fedkin.availability",
    "lam_max": "fedkin.solvers.path",
    "lam_path": "fedkin.solvers.path",
    "local_fit": "fedkin.local",
    "global_fit": "fedkin.local",
    "oracle_fit": "fedkin.local",
    "select_edges": "fedkin.selection",
    "cross_validate_lam": "fedkin.tuning",
    "FedADMMRegressor": "fedkin.estimators",
    "FedADMMClassifier": "fedkin.estimators",
    "load": "fedkin.model",
    "FedkinError": "fedkin.errors",
}

#: Modules to reach as ``fedkin.NAME`` without importing them by hand.
_MODULES = ("datasets", "losses", "penalties", "scoring", "theory")

__all__ = ["__version__", *_WHERE]

if TYPE_CHECKING:
    from fedkin.availability import Availability as Availability
    from fedkin.errors import FedkinError as FedkinError
    from fedkin.estimators import FedADMMClassifier as FedADMMClassifier
    from fedkin.estimators import FedADMMRegressor as FedADMMRegressor
    from fedkin.federation import Federation as Federation
    from fedkin.graph import Graph as Graph
    from fedkin.local import global_fit as global_fit
    from fedkin.local import local_fit as local_fit
    from fedkin.local import oracle_fit as oracle_fit
    from fedkin.model import load as load
    from fedkin.problem import Problem as Problem
    from fedkin.problem import Solution as Solution
    from fedkin.selection import select_edges as select_edges
    from fedkin.solvers.exact import solve as solve
    from fedkin.solvers.fedadmm import fed_admm as fed_admm
    from fedkin.solvers.path import lam_max as lam_max
    from fedkin.solvers.path import lam_path as lam_path
    from fedkin.tuning import cross_validate_lam as cross_validate_lam


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"fedkin.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'fedkin' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
