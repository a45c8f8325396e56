"""Federations between processes: what sites have agreed on, who is who, and what carries their messages.

In: a `Contract`, then directories of signed files (`enrol`). Out: programs that run the rounds and the edge tests
between sites, with the bits of one process; each site's parameters.
Imports: `admm`, `core` and below; not `fitting`.

| part | what is in it |
|---|---|
| `contract` | what all sites agree on; one site's view of a run, and what it plans from its rows |
| `trust` | certificates, the envelope of all files that travel, private files |
| `enrol` | invite, join, admit: the organiser's directory and a site's; who is out |
| `sharing` | sums instead of rounds: a site's summary, what is asked next, all summaries checked |
| `views` | from these directories to a view of the run |
| `frames`, `journal`, `records`, `kept` | what travels; a site's log, files, state on disk |
| `waiting`, `post` | what has come and how long to wait; how everybody who steps waits for it |
| `peer`, `replicas`, `central` | who steps for whom: a site, Algorithm 2 |
| `links` | what carries thetas: memory (tests), zenoh and its access lists |
| `programs` | what runs on a machine: a site's programs, their supervisor, an overview |

To add a transport: `federate/links` lists the files. To add a key of the contract:
`federate/contract/contract` (raise `FORMAT`) and docs/contract.md. To change when a site refuses to share:
`federate/sharing/thresholds`.

Names are imported on first use, so that a site's process stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedkin.federate.contract.contract import Contract, ContractError, EdgeTests, Rounds, Thresholds
    from fedkin.federate.contract.draft import draft_contract
    from fedkin.federate.programs.files import SELECTION, STDERR
    from fedkin.federate.programs.overview import TROUBLE, Line, overview, places_in, prometheus
    from fedkin.federate.programs.snapshot import snapshot
    from fedkin.federate.programs.supervisor import (
        STOP_SIGNAL,
        Supervisor,
        all_done,
        check_idle,
        only_supervisor,
        stop_all,
    )
    from fedkin.federate.views import site_view, steps_of
    from fedkin.federate.waiting import Patience

_MODULES = {
    "contract.contract": "Contract ContractError EdgeTests Rounds Thresholds",
    "contract.draft": "draft_contract",
    "programs.files": "SELECTION STDERR",
    "programs.overview": "TROUBLE Line overview places_in prometheus",
    "programs.snapshot": "snapshot",
    "programs.supervisor": "STOP_SIGNAL Supervisor all_done check_idle only_supervisor stop_all",
    "views": "site_view steps_of",
    "waiting": "Patience",
}
_WHERE = {name: f"fedkin.federate.{module}" for module, names in _MODULES.items() for name in names.split()}

__all__ = [*_WHERE]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'fedkin.federate' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
