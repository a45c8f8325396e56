"""A site's part of a model, signed by the organiser for it; and one model of those that sites published."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedkin.errors import DataError
from fedkin.federate import SELECTION, Organiser, Site, read_selection, site_plan
from fedkin.fitting import FittedModel, check_model_place, join_parts, load
from fedkin.graph import Graph


def accept_any(directory: Path, path: Path) -> str:
    """Keep what came from outside; returns what it was, in words."""
    return Site.read(directory).accept(path)


def deliver(directory: Path, model: Path, sites: Sequence[str], ca_key: Path | None = None) -> list[Path]:
    """Write the parts of a model for some sites, or for all that it has."""
    organiser, fitted = Organiser.read(directory), load(model)
    names = sites or [str(site) for site in fitted.sites]
    out = organiser.out()
    ids = {str(site): site for site in fitted.sites}
    with tempfile.TemporaryDirectory() as folder:
        parts = {}
        for name in names:
            member = organiser.member(name)
            if member.name in out:
                raise DataError(f"{member.name} has left or was expelled, so nothing is sent to it")
            if str(member.id) not in ids:
                raise DataError(f"{model} has no model of {name}: it sent no summary in time")
            parts[member.name] = Path(folder, member.name)
            fitted.part([ids[str(member.id)]]).save(parts[member.name])
        return organiser.deliver(parts, ca_key)


def publish(directory: Path) -> Path:
    """Sign a site's own model, with what its edge tests dropped."""
    dropped: frozenset[str] = frozenset()
    if (directory / SELECTION).exists():
        plan = site_plan(directory)
        dropped = frozenset(plan.name(number) for number in read_selection(directory, plan))
    return Site.read(directory).publish(dropped)


def gather(directory: Path, published: Sequence[Path], out: Path) -> FittedModel:
    """One model of those that sites published."""
    check_model_place(out)
    organiser = Organiser.read(directory)
    found = {}
    dropped: set[frozenset[int]] = set()
    with tempfile.TemporaryDirectory() as folder:
        for path in published:
            file = organiser.read_published(path)
            member = organiser.member(file.site)
            if member.number in found:
                raise DataError(f"{path}: there are two files of {file.site}; keep one")
            file.unpack(Path(folder, file.site))
            part = load(Path(folder, file.site))
            if [str(site) for site in part.sites] != [str(member.id)] or part.schema != organiser.contract.schema:
                raise DataError(f"{path}: it is not the model of {file.site} alone, with the columns of the contract")
            found[member.number] = part
            dropped |= {frozenset((member.number, organiser.member(name).number)) for name in file.dropped}
    numbers = sorted(found)
    place = np.full(len(organiser.members), -1)
    place[numbers] = np.arange(len(numbers))
    graph = organiser.graph
    kept = np.array([frozenset(edge) not in dropped for edge in graph.edges.tolist()], dtype=bool)
    kept &= (place[graph.edges] >= 0).all(axis=1)
    sites = [found[number].sites[0] for number in numbers]
    edges = Graph.from_indices(sites, place[graph.edges[kept]], graph.weights[kept])
    tested = organiser.contract.rounds.select is not None
    model = join_parts([found[number] for number in numbers], edges, tested=tested)
    model.save(out)
    return model
