"""The paper's algorithms: Fed-ADMM as shards that step, exchange thetas and step again, and its rivals.

`plan_run` (or `fedkin.federate`, of a contract) makes a `RunPlan`; a `Shard` of it does the arithmetic;
`run_rounds(shard, link, config, store)` is the loop of rounds, in one process as between machines. `fed_admm` is all
of that for one process, with compiled rounds that agree to rounding. It is imported on first use: the process of a
site needs neither solvers nor a compiler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedkin.admm.availability import Availability, StandIns, site_keys
from fedkin.admm.gradients import ChangeTest, GradientKind, Gradients, SiteRows
from fedkin.admm.plan import Average, RunPlan, StepRule, check_steps, plan_run, site_rows
from fedkin.admm.rounds import (
    MOST_PARAMS,
    DirectLink,
    Link,
    RoundConfig,
    Shard,
    ShardState,
    Share,
    ShareTaker,
    Wire,
    is_shared,
    run_rounds,
    together,
)
from fedkin.admm.store import Saved, Sent, Store

if TYPE_CHECKING:
    from fedkin.admm.run import fed_admm
    from fedkin.admm.trace import Progress, subgradient_descent

_LATER = {"Progress": "trace", "fed_admm": "run", "subgradient_descent": "trace"}

__all__ = [
    *_LATER,
    "MOST_PARAMS", "Availability", "Average", "ChangeTest", "DirectLink", "GradientKind", "Gradients", "Link",
    "RoundConfig", "RunPlan", "Saved", "Sent", "Shard", "ShardState", "Share", "ShareTaker",
    "SiteRows", "StandIns", "StepRule", "Store", "Wire", "check_steps", "is_shared", "plan_run", "run_rounds",
    "site_keys", "site_rows", "together",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'fedkin.admm' has no attribute {name!r}")
    return getattr(import_module(f"fedkin.admm.{_LATER[name]}"), name)
