"""Federations between processes: what sites have agreed on, who is who, and what carries their messages.

In: a `Problem` to plan for, then the signed directory of a federation. Out: programs that run the rounds and the edge
tests between sites, with the bits of one process; each site's parameters.
Imports: `admm`, `stats` and below; not `fitting`.

| part | what is in it |
|---|---|
| `contract` | what all sites agree on, and what is for one of them only |
| `messages`, `journal`, `kept`, `waiting` | what travels; a device's log, its state on disk, its inbox |
| `peer`, `replicas`, `central`, `mpi`, `flower` | who steps for whom: a device, Algorithm 2, ranks |
| `trust` | certificates, the envelope of all files that travel, private files, access lists |
| `enrol` | invite, join, admit: the organiser's directory and a site's; who is out |
| `sharing` | sums instead of rounds: a site's summary, what is asked next, all summaries checked |
| `setup` | the directory of a federation: planned, made, read, signed again; who has left |
| `links` | what carries thetas: memory (tests), zenoh, MPI |
| `programs` | what runs on a machine: a device's programs, their supervisor, an overview |

Names are imported on first use, so that a device process stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedkin.federate.contract.contract import Contract, ContractError, EdgeTests, Rounds, Thresholds
    from fedkin.federate.contract.draft import Draft, draft_contract
    from fedkin.federate.contract.manifest import Manifest, ManifestError, Member
    from fedkin.federate.contract.reading import load_manifest, plan_of
    from fedkin.federate.journal import Journal
    from fedkin.federate.links.memory import Faults, MemoryNetwork
    from fedkin.federate.messages import HEADER_BYTES, Kind, MessageError, encode
    from fedkin.federate.mpi import JOB, check_no_job, check_out, small_cut
    from fedkin.federate.programs.overview import (
        NOT_HERE,
        TROUBLE,
        Line,
        expected_names,
        is_device,
        is_running,
        missing_or_damaged,
        overview,
        prometheus,
    )
    from fedkin.federate.programs.supervisor import (
        STDERR,
        STOP_SIGNAL,
        Supervisor,
        all_done,
        check_idle,
        only_supervisor,
        stop_all,
    )
    from fedkin.federate.setup.departures import LEFT, left_devices, read_authority, read_departures, write_departure
    from fedkin.federate.setup.deploy import (
        centre_endpoint,
        device_parts,
        local_endpoints,
        make_manifest,
        read_endpoints,
    )
    from fedkin.federate.setup.directory import (
        AUTHORITY_KEY,
        DEVICES,
        SELECTION,
        collect,
        device_directories,
        read_result,
        read_status,
        sign_again,
        write_federation,
    )
    from fedkin.federate.trust.security import (
        Pair,
        SecurityError,
        make_authority,
        read_authority_files,
        with_absolute_paths,
    )
    from fedkin.federate.waiting import Patience

_MODULES = {
    "contract.contract": "Contract ContractError EdgeTests Rounds Thresholds",
    "contract.draft": "Draft draft_contract",
    "contract.manifest": "Manifest ManifestError Member",
    "contract.reading": "load_manifest plan_of",
    "journal": "Journal",
    "links.memory": "Faults MemoryNetwork",
    "messages": "HEADER_BYTES Kind MessageError encode",
    "mpi": "JOB check_no_job check_out small_cut",
    "programs.overview": (
        "NOT_HERE TROUBLE Line expected_names is_device is_running missing_or_damaged overview prometheus"
    ),
    "programs.supervisor": "STDERR STOP_SIGNAL Supervisor all_done check_idle only_supervisor stop_all",
    "setup.departures": "LEFT left_devices read_authority read_departures write_departure",
    "setup.deploy": "centre_endpoint device_parts local_endpoints make_manifest read_endpoints",
    "setup.directory": (
        "AUTHORITY_KEY DEVICES SELECTION collect device_directories read_result read_status sign_again write_federation"
    ),
    "trust.security": "Pair SecurityError make_authority read_authority_files with_absolute_paths",
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
