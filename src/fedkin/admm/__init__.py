"""The paper's algorithms: Fed-ADMM as shards that step, exchange thetas and step again.

In: a `Problem`, or the rows and plan of some devices. Out: a `Solution`, or a shard to run somewhere else.
Imports: `solvers` (certificates), `objective` and below.
"""

from __future__ import annotations

from fedkin.admm.availability import Availability, Presence
from fedkin.admm.checkpoint import load_checkpoint, save_checkpoint
from fedkin.admm.curvature import local_curvature
from fedkin.admm.gradients import DeviceRows, GradientKind, Gradients
from fedkin.admm.inprocess import RunPlan
from fedkin.admm.plan import Settings, device_rows, plan_run
from fedkin.admm.run import fed_admm
from fedkin.admm.sampling import device_keys
from fedkin.admm.shard import Average, Shard, StepRule
from fedkin.admm.subgradient import subgradient_descent
from fedkin.admm.trace import Callback, Progress

__all__ = [
    "Availability",
    "Average",
    "Callback",
    "DeviceRows",
    "GradientKind",
    "Gradients",
    "Presence",
    "Progress",
    "RunPlan",
    "Settings",
    "Shard",
    "StepRule",
    "device_keys",
    "device_rows",
    "fed_admm",
    "load_checkpoint",
    "local_curvature",
    "plan_run",
    "save_checkpoint",
    "subgradient_descent",
]
