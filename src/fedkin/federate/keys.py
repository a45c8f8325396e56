"""The keys under which devices write to each other; access lists are made of the same."""

from __future__ import annotations

from fedkin.federate.contract.manifest import Manifest
from fedkin.federate.messages import Kind


def keys_of(manifest: Manifest, sender: int, receiver: int) -> dict[Kind, str]:
    """The keys under which ``sender`` writes what ``receiver`` reads."""
    name = manifest.members[sender].name
    keys = {Kind.THETA: f"{manifest.run}/theta/{name}", Kind.DONE: f"{manifest.run}/done/{name}"}
    if sender < receiver and manifest.compare_every:
        keys[Kind.ALPHA] = f"{manifest.run}/alpha/{name}/{manifest.members[receiver].name}"
    if manifest.placement == "replicas" and sender == manifest.leader(sender):
        keys[Kind.PRESENT], keys[Kind.REPLICA] = f"{manifest.run}/present/{name}", f"{manifest.run}/replica/{name}"
    return keys


def presence_key(manifest: Manifest, sender: int) -> str:
    """The key under which a device shows that it is there."""
    return f"{manifest.run}/live/{manifest.members[sender].name}"


def selection_keys(manifest: Manifest, sender: int, receiver: int) -> dict[Kind, str]:
    """The keys of edge selection: a device's summary, the verdict on an edge (from its smaller end), "I am done"."""
    name = manifest.members[sender].name
    keys = {Kind.SUMMARY: f"{manifest.run}/summary/{name}", Kind.DONE: f"{manifest.run}/chosen/{name}"}
    if sender < receiver:
        keys[Kind.VERDICT] = f"{manifest.run}/verdict/{name}/{manifest.members[receiver].name}"
    return keys
