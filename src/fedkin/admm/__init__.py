"""The paper's algorithms: Fed-ADMM as shards that step, exchange thetas and step again.

In: a `Problem` (`fed_admm` gives a `Solution`), or a `Plan`, which makes shards that run anywhere.
Out: `run_rounds(shard, link, store, course)`, the loop of rounds for sites, ranks and one process; links are
`federate`'s, and so are the drivers of Algorithm 2, who step for absent sites. Compiled rounds agree to rounding.
Imports: `solvers` (certificates), `core` and below.

`plan` makes shards, `shard` does their arithmetic (with `gradients`, `sampling`, `curvature`), `rounds` is the loop and
`store` what it keeps on disk; `shares` is what a shard adds to residuals and certificate. `availability` and `patterns`
say who is there in a round. The sub-room `in_process` has `fed_admm`, compiled rounds and the rivals.
To add a gradient estimator: `gradients`. To change what a shard does with thetas in a round: `shard`, and for compiled
rounds `in_process`. To carry thetas in another way: a `Link`, in `fedkin.federate.links`.
"""

from __future__ import annotations

from fedkin.admm.availability import Availability, StandIns
from fedkin.admm.curvature import local_curvature
from fedkin.admm.gradients import GradientKind, Gradients, SiteRows
from fedkin.admm.in_process import (
    Progress,
    fed_admm,
    network_lasso_admm,
    subgradient_descent,
)
from fedkin.admm.plan import Plan, Settings, plan_run, site_rows
from fedkin.admm.rounds import Course, DirectLink, Link, LocalShards, Wire, run_rounds
from fedkin.admm.sampling import site_keys
from fedkin.admm.shard import Average, Shard, ShardState, StepRule, UpdateRule
from fedkin.admm.shares import MOST_PARAMS, Share, ShareTaker, is_shared, together
from fedkin.admm.store import Saved, Sent, Store

__all__ = [
    "MOST_PARAMS",
    "Availability",
    "Average",
    "Course",
    "DirectLink",
    "GradientKind",
    "Gradients",
    "Link",
    "LocalShards",
    "Plan",
    "Progress",
    "Saved",
    "Sent",
    "Settings",
    "Shard",
    "ShardState",
    "Share",
    "ShareTaker",
    "SiteRows",
    "StandIns",
    "StepRule",
    "Store",
    "UpdateRule",
    "Wire",
    "fed_admm",
    "is_shared",
    "local_curvature",
    "network_lasso_admm",
    "plan_run",
    "run_rounds",
    "site_keys",
    "site_rows",
    "subgradient_descent",
    "together",
]
