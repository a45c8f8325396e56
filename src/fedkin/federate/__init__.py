"""Federations between machines: contracts, identities, and the transport of messages.

| module | what is in it |
|---|---|
| `contract`, `toml`, `draft` | the contract that all sites agree on, as TOML; a draft from a table |
| `disclosure`, `algebra`, `describe` | which numbers may leave a site, why, and what those of a summary reveal |
| `trust`, `messages` | certificates and private files; every signed file that is exchanged |
| `organiser`, `members` | the organiser's directory and list of sites |
| `site`, `settings` | a site's directory; thresholds and a site's own rules |
| `sharing`, `received` | a site's summary and its answers to queries; checks of all summaries |
| `plan` | a run as one site sees it, from these directories and its rows |
| `participant`, `arrivals` | a participant in the rounds, edge tests before them; rows that arrive meanwhile |
| `links`, `attendance` | how thetas travel: between neighbours; with a central machine, or replicas |
| `endpoint`, `inbox` | messages sent and received, waiting for them, their format |
| `transports` | transport of frames between machines, and access control |
| `records`, `ledger` | a site's log and small files; the ledger of everything that has left it |
| `program`, `supervisor`, `monitoring` | the process of a site; several sites on one machine, and what they do |

Names are imported on first use: a contract needs no cryptography, and a site's process stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedkin.federate.contract import Contract, ContractError, EdgeTests, Rounds
    from fedkin.federate.describe import describe_summary
    from fedkin.federate.disclosure import check_disclosure
    from fedkin.federate.draft import draft_contract
    from fedkin.federate.inbox import Patience
    from fedkin.federate.messages import Order, Steps, read_charter, read_invite
    from fedkin.federate.monitoring import TROUBLE, Line, overview, places_in, prometheus, snapshot
    from fedkin.federate.organiser import Organiser
    from fedkin.federate.participant import Participant
    from fedkin.federate.plan import SitePlan, centre_plan, site_plan, steps_of, whole_plan
    from fedkin.federate.records import (
        SELECTION,
        STDERR,
        Journal,
        read_record,
        read_selection,
        read_status,
        write_record,
    )
    from fedkin.federate.settings import SiteSettings, Thresholds
    from fedkin.federate.site import Site, change_settings, contract_in
    from fedkin.federate.supervisor import STOP_SIGNAL, Supervisor, all_done, check_idle, only_supervisor, stop_all
    from fedkin.federate.trust import SecurityError

_MODULES = {
    "contract": "Contract ContractError EdgeTests Rounds",
    "describe": "describe_summary",
    "disclosure": "check_disclosure",
    "draft": "draft_contract",
    "messages": "Order Steps read_charter read_invite",
    "organiser": "Organiser",
    "settings": "SiteSettings Thresholds",
    "site": "Site change_settings contract_in",
    "trust": "SecurityError",
    "inbox": "Patience",
    "participant": "Participant",
    "plan": "SitePlan centre_plan site_plan steps_of whole_plan",
    "records": "SELECTION STDERR Journal read_record read_selection read_status write_record",
    "monitoring": "TROUBLE Line overview places_in prometheus snapshot",
    "supervisor": "STOP_SIGNAL Supervisor all_done check_idle only_supervisor stop_all",
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
