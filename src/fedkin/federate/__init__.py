"""Federations between processes: what sites have agreed on, who is who, and what carries their messages.

| module | what is in it |
|---|---|
| `contract`, `draft`, `disclosure` | what all sites agree on; a draft from a table; when nothing may be disclosed |
| `trust`, `envelope`, `messages` | certificates and private files; signed JSON; every file that travels |
| `organiser`, `addresses`, `site` | the organiser's directory; the list of sites; a site's directory |
| `sharing` | a site's summary, its answers to queries, and all summaries checked |
| `manifest`, `reading`, `views` | one site's view of a run, and what it plans from its rows |
| `frames`, `journal`, `records`, `kept` | what travels; a site's log, files, state on disk |
| `waiting`, `post` | what has come and how long to wait; how everybody who steps waits for it |
| `peer`, `replicas`, `central` | who steps for whom: a site, Algorithm 2 |
| `links` | what carries thetas: memory (tests), zenoh and its access lists |
| `programs` | what runs on a machine: a site's programs, their supervisor, an overview |

To add a transport: `federate/links` lists the files. To add a key of the contract: `contract` (raise `FORMAT`) and
docs/contract.md. To change when a site refuses to share: `disclosure`.

Names are imported on first use, so that a site's process stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedkin.federate.contract import Contract, ContractError, EdgeTests, Rounds
    from fedkin.federate.disclosure import Thresholds, check_disclosure
    from fedkin.federate.draft import draft_contract
    from fedkin.federate.messages import Order, Steps, read_charter, read_invite
    from fedkin.federate.organiser import Organiser
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
    from fedkin.federate.site import Joined, Site, SiteSettings, change_settings, contract_in, departures
    from fedkin.federate.trust import SecurityError
    from fedkin.federate.views import site_view, steps_of
    from fedkin.federate.waiting import Patience

_MODULES = {
    "contract": "Contract ContractError EdgeTests Rounds",
    "disclosure": "Thresholds check_disclosure",
    "draft": "draft_contract",
    "messages": "Order Steps read_charter read_invite",
    "organiser": "Organiser",
    "site": "Joined Site SiteSettings change_settings contract_in departures",
    "trust": "SecurityError",
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
