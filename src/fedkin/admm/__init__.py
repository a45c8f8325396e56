"""Provide the paper's decentralised algorithm Fed-ADMM and subgradient baselines.

`plan_run` (or `fedkin.federate`, from a contract) makes a `RunPlan`, and a `Shard` of it does the arithmetic.
`run_rounds(shard, link)` is the loop of rounds, within one process or between machines.
`algorithm.fed_admm` combines these in one process, with compiled rounds that agree up to rounding. A site's process
does not import it and needs neither solvers nor a compiler.
"""

from __future__ import annotations

from fedkin.admm.availability import Availability, StandIns, site_keys
from fedkin.admm.checkpoint import Saved, Sent, Store
from fedkin.admm.gradients import ChangeTest, GradientKind, Gradients, SiteRows
from fedkin.admm.links import DirectLink
from fedkin.admm.rounds import (
    MOST_PARAMS,
    ROUND_ARRAYS,
    Link,
    Shard,
    Share,
    ShareTaker,
    is_shared,
    run_rounds,
    together,
)
from fedkin.admm.run_plan import Average, RunPlan, StepRule, Wire, check_steps, plan_run, site_rows

__all__ = [
    "MOST_PARAMS", "ROUND_ARRAYS", "Availability", "Average", "ChangeTest", "DirectLink", "GradientKind", "Gradients",
    "Link", "RunPlan", "Saved", "Sent", "Shard", "Share", "ShareTaker", "SiteRows", "StandIns", "StepRule", "Store",
    "Wire", "check_steps", "is_shared", "plan_run", "run_rounds", "site_keys", "site_rows", "together",
]  # fmt: skip
