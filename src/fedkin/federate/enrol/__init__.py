"""How a federation comes about: the organiser invites and admits, a site joins with a key that never leaves it.

In: a `Contract` and a list of sites (organiser), an invite and a table of rows (site). Out: the organiser's directory
(`organiser`), a site's directory (`site`), and the signed files that travel between them (`files`).
Imports: `contract`, `trust`, and the packages below `federate`.

A site knows itself, its neighbours and nobody else, so its directory does not grow with the federation.
"""

from __future__ import annotations

from fedkin.federate.enrol.admission import (
    admit,
    admitted_steps,
    centre_pair,
    order,
    revoked,
    status,
)
from fedkin.federate.enrol.files import Invite, Order, Steps
from fedkin.federate.enrol.joining import Enrolled, accept, join, leave, renew
from fedkin.federate.enrol.organiser import Organiser, expel, invite, new, read_charter, read_federation, read_invite
from fedkin.federate.enrol.settings import SiteSettings, read_settings
from fedkin.federate.enrol.site import Site, change_settings, contract_in, departures, read_site

__all__ = [
    "Enrolled",
    "Invite",
    "Order",
    "Organiser",
    "Site",
    "SiteSettings",
    "Steps",
    "accept",
    "admit",
    "admitted_steps",
    "centre_pair",
    "change_settings",
    "contract_in",
    "departures",
    "expel",
    "invite",
    "join",
    "leave",
    "new",
    "order",
    "read_charter",
    "read_federation",
    "read_invite",
    "read_settings",
    "read_site",
    "renew",
    "revoked",
    "status",
]
