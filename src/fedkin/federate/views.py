"""From what was signed to a view of the run: of a site, of the central machine, or of all sites in one place.

In: a `Contract`, an `Order`, who is who and which edges there are, and the steps that sites planned from their rows.
Out: a `Manifest`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from fedkin.data import Rows
from fedkin.errors import DataError, ParameterError
from fedkin.federate.contract import Contract
from fedkin.federate.disclosure import check_disclosure, refuse_disclosure
from fedkin.federate.manifest import Manifest
from fedkin.federate.messages import Invite, Member, Order, Steps
from fedkin.federate.organiser import Organiser
from fedkin.federate.reading import is_noisy, per_parameter, plan_site, usual_rho
from fedkin.federate.site import Site
from fedkin.graph import Graph

Edge = tuple[int, int, float]


def site_view(directory: Path | Site) -> Manifest:
    """A site's view, from its directory: invite, order, and steps planned from its own rows.

    Examples
    --------
    ``site_view(Path("north")).partners()`` are the numbers of its neighbours.
    """
    site = directory if isinstance(directory, Site) else Site.read(directory)
    given, contract, rows = site.invite, site.contract, site.rows()
    refuse_disclosure(check_disclosure(contract, rows, site.settings), f"{site.directory}: no rounds")
    own, placement = given.site, contract.rounds.placement
    members = tuple(one.member for one in given.neighbours)
    edges = [(*_ordered(own.number, one.member.number), one.weight) for one in given.neighbours]
    if placement == "replicas":
        assert given.component is not None and given.edges is not None
        members, edges = given.component, list(given.edges)
    members = tuple(sorted({one.number: one for one in (*members, own)}.values(), key=lambda one: one.number))
    view = _view(contract, site.order, given.run, members, edges, given.n_sites, where=str(site.directory))
    planned, plan = plan_site(contract, rows, _degree(given.degree, view), view.rho)
    steps = {own.number: planned}
    if placement == "replicas":
        others = {} if site.order is None or site.order.steps is None else site.order.steps
        for member in members:
            if member.number != own.number:
                if member.name not in others:
                    raise DataError(
                        f"{site.directory} has no steps of {member.name}, for which it must step: the organiser sends "
                        "them with an order, when all are admitted (fedkin federation order)"
                    )
                steps[member.number] = _damped(others[member.name], view, len(view.neighbours(member.number)))
        if own.name in others:  # as the others know it, also when rows were replaced
            steps[own.number] = _damped(others[own.name], view, _degree(given.degree, view))
    view = replace(
        view,
        here=own.number,
        steps=steps,
        snapshot_every=plan.snapshot_every,
        centre=given.centre,
        n_edges=given.n_edges,
    )
    view.check()
    return view


def centre_view(organiser: Organiser) -> Manifest:
    """The view of the central machine, from the organiser's directory: all sites, and the steps that they sent."""
    graph, order = organiser.graph, organiser.newest_order()
    edges = _edges(graph)
    where = str(organiser.directory)
    view = _view(
        organiser.contract, order, organiser.charter.run, organiser.members, edges, len(organiser.members), where
    )
    known = organiser.steps()
    missing = [member.name for member in organiser.members if member.name not in known]
    if missing:
        raise DataError(
            f"{', '.join(missing)} not admitted yet: the central machine steps for all, and needs their steps"
        )
    degrees = graph.degree.tolist()
    steps = {one.number: _damped(known[one.name], view, degrees[one.number]) for one in organiser.members}
    view = replace(view, here=view.n_sites, steps=steps, centre=organiser.charter.centre)
    view.check()
    return view


def whole_view(
    contract: Contract,
    graph: Graph,
    rows: Mapping[int, Rows],
    *,
    run: str,
    order: Order | None = None,
    numbers: Sequence[int] | None = None,
) -> Manifest:
    """The view of whoever sees all sites, as on a trusted cluster; steps are planned for those in ``numbers``."""
    ids = [one if isinstance(one, str | int) else str(one) for one in graph.sites]
    members = tuple(Member(one, f"site-{k}", k) for k, one in enumerate(ids))
    view = _view(contract, order, run, members, _edges(graph), len(members), "the contract")
    degrees = graph.degree.tolist()
    planned = rows if numbers is None else numbers
    steps = {u: plan_site(contract, rows[u], _degree(degrees[u], view), view.rho)[0] for u in planned}
    passes = [part.n_samples / (min(view.batch, part.n_samples) or part.n_samples) for part in rows.values()]
    snapshot_every = 2 * int(np.ceil(np.mean(passes)))  # as `fedkin.admm.plan_run`
    view = replace(view, steps=steps, placement="peer", snapshot_every=snapshot_every)
    view.check()
    return view


def steps_of(invite: Invite, rows: Rows) -> Steps:
    """What a site tells the organiser of its plan, where others step for it while it is away."""
    contract = invite.terms
    return plan_site(contract, rows, invite.degree, usual_rho(contract))[0]


def _view(
    contract: Contract,
    order: Order | None,
    run: str,
    members: tuple[Member, ...],
    edges: Sequence[Edge],
    n_sites: int,
    where: str,
) -> Manifest:
    """What does not depend on rows."""
    contract.check_rounds(where)
    rounds = contract.rounds
    lam = rounds.lam if order is None or order.lam is None else order.lam
    if lam is None:
        raise ParameterError(f"{where}: no lam is set; the organiser orders one: fedkin federation order DIR --lam X")
    ordered = sorted(edges)
    strength = lam * n_sites  # as `Problem.strength`
    return Manifest(
        run=run,
        here=0,
        n_sites=n_sites,
        members=members,
        edges=[(i, j) for i, j, _ in ordered],
        edge_radius=(strength * np.array([weight for _, _, weight in ordered])).tolist(),
        loss=contract.loss,
        penalty=contract.penalty,
        lam=lam,
        n_params=contract.n_params,
        ridge=per_parameter(contract, contract.ridge),
        sparsity=per_parameter(contract, contract.sparsity) if contract.sparsity else None,
        radius=contract.radius,
        rounds=rounds.rounds if order is None or order.rounds is None else order.rounds,
        rho=usual_rho(contract) if order is None or order.rho is None else order.rho,
        steps={},
        seed=contract.seed,
        gradient=rounds.gradient,
        average=rounds.average or _usual_average(contract),
        batch=rounds.batch_size or 0,
        wire=rounds.wire,
        checkpoint_every=rounds.checkpoint_every,
        compare_every=rounds.compare_every,
        placement=rounds.placement,
        select=rounds.select,
        n_edges=len(edges),
        revision=0 if order is None else order.revision,
    )


def _usual_average(contract: Contract) -> Any:
    """As `fedkin.admm.plan_run` chooses it."""
    reduced = contract.rounds.gradient != "plain" and contract.rounds.placement == "peer"
    return "last" if reduced or not is_noisy(contract) else "tail"


def _degree(degree: int, view: Manifest) -> int:
    return degree if view.lam > 0 else 0  # edges without any strength do not slow a site down


def _damped(steps: Steps, view: Manifest, degree: int) -> Steps:
    return replace(steps, damping=view.rho * _degree(degree, view))


def _ordered(u: int, v: int) -> tuple[int, int]:
    return max(u, v), min(u, v)


def _edges(graph: Graph) -> list[Edge]:
    pairs = zip(graph.edges.tolist(), graph.weights.tolist(), strict=True)
    return [(i, j, weight) for (i, j), weight in pairs]

