"""A run between machines as one of them sees it: itself, its partners, and what it computes.

A `SitePlan` is made in memory from signed files and the rows of the site, and is never written to a file. Sites are
identified by their numbers in the organiser's list, which determine the order of edges, their ends and members, and
appear in messages. So what a site computes from its own part of the graph is bitwise equal to a run on the whole graph.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fedkin._base import Array
from fedkin.admm import RunPlan, Shard, SiteRows, StepRule, plan_run, site_keys
from fedkin.core import Problem, SiteTerms, Summary, build_terms, local_fit, make_penalty, table_of_sums
from fedkin.data import Federation, Rows, deal_folds
from fedkin.errors import DataError, DegenerateSiteWarning, ParameterError
from fedkin.federate.contract import Contract, EdgeTests, Placement
from fedkin.federate.disclosure import check_count, check_rounds, most_folds, refuse_disclosure
from fedkin.federate.inbox import HEADER_BYTES, RUN_BYTES, Kind
from fedkin.federate.messages import CENTRE, Invite, Member, Order, Steps
from fedkin.federate.organiser import Organiser
from fedkin.federate.records import Choice, read_choice
from fedkin.federate.settings import Thresholds, required
from fedkin.federate.site import Site, rows_before
from fedkin.graph import Graph
from fedkin.losses import Loss, described_loss

Edge = tuple[int, int, float]

#: Default rho, for features that are scaled to about 1: smaller if noise makes steps short.
AGREED_RHO, AGREED_NOISY_RHO = 1.0, 0.25
#: Kinds of messages that have a single receiver.
_PAIRWISE = (Kind.ALPHA, Kind.VERDICT, Kind.DOWN, Kind.RESULT)


@dataclass(frozen=True, eq=False, kw_only=True)
class SitePlan(RunPlan):
    """Plan of a run (`fedkin.admm.RunPlan`) with the settings of its messages.

    - ``run``: 16 hexadecimal digits; ``revision``: number of orders by the organiser so far. Sites with different
      revisions refuse each other's messages.
    - ``here``: the number of the site whose plan this is, ``federation_size`` for the central machine; ``members``: the
      site itself and its partners, increasing by number; ``federation_size``: number of all sites.
      - ``sites``, ``theta``, ``steps`` are those of the sites whose steps are computed here; ``edges`` touch them.
    - ``checkpoint_every``, ``compare_every``: rounds between checkpoints, and between comparisons of the edge duals'
      replicas (0 for never).
    - ``placement``: which machine holds the state of an edge: its two ends, a central one (its endpoint is ``centre``),
      or every site of the component.
    - ``select``: the edge selection that comes before the rounds, among ``n_edges`` edges of the whole graph.
    - ``constrained``: whether the ball of ``radius`` is a constraint that the contract states, not a limit by default.
    - ``effective_rows``: how many rows of the site must carry the weight at any of its thetas, 0 for no such check.
    - ``noisy``: the noisy sums that the rows of this plan are made from, with their digest; None for the site's rows.
    - ``phase``: "" for the rounds that end with a model; messages of other phases have other keys and marks.
    """

    run: str
    here: int
    federation_size: int
    members: tuple[Member, ...]
    loss: Mapping[str, Any]
    lam: float
    checkpoint_every: int = 100
    compare_every: int = 200
    placement: Placement = "peer"
    centre: str | None = None
    select: EdgeTests | None = None
    n_edges: int = 0
    revision: int = 0
    phase: str = ""
    constrained: bool = False
    effective_rows: float = 0.0
    noisy: tuple[Summary, str] | None = None

    def __post_init__(self) -> None:
        """Raise `DataError` if two fields contradict each other."""
        if len({member.name for member in self.members} | {CENTRE}) <= len(self.members):
            raise DataError("two sites have the same name")
        if self.numbers != sorted(self.numbers):
            raise DataError("members are not in the order of their numbers")
        known = set(self.numbers)
        for i, j in self.edges.tolist():
            if not j < i or not {i, j} <= known:
                raise DataError(f"edge ({i}, {j}) does not join two members, larger number first")
        parts = (self.theta, self.steps.start, self.steps.growth, self.edge_radius)
        if not all(np.isfinite(part).all() for part in parts) or not math.isfinite(self.rho + self.lam):
            raise DataError("rho, lam, the steps and the edge bounds must be finite")
        if self.placement == "central" and self.centre is None:
            raise DataError("placement is central, but the endpoint of the central machine is missing")

    @cached_property
    def run_bytes(self) -> bytes:
        """Mark of messages and checkpoints: the run id, or a digest of the id, the revision and the phase."""
        if self.revision == 0 and not self.phase:
            return bytes.fromhex(self.run)
        return hashlib.blake2b(f"{self.run}{self.phase} {self.revision}".encode(), digest_size=RUN_BYTES).digest()

    @property
    def most_bytes(self) -> int:
        """Size of the largest message of this run in bytes."""
        p, m = self.n_params, len(self.members)
        summary = 0 if self.select is None else p * p + 2 * p + 5
        replica = (5 * m + len(self.edges)) * p + m if self.placement == "replicas" else 0
        keys = 1024 + 8 * self.federation_size  # the list of keys, 64 bytes each
        return HEADER_BYTES + 8 * max(2 * p + 1, summary, replica, keys)

    def loss_object(self) -> Loss:
        """Return the loss of the run."""
        return described_loss(dict(self.loss))

    @cached_property
    def _by_number(self) -> dict[int, Member]:
        return {member.number: member for member in self.members}

    @property
    def numbers(self) -> list[int]:
        """Numbers of the members, increasing."""
        return list(self._by_number)

    def name(self, number: int) -> str:
        """Return the name of a site, or of the central machine."""
        return CENTRE if number == self.federation_size else self._by_number[number].name

    def number(self, name: str) -> int:
        """Return the number of the site with this name."""
        for member in self.members:
            if member.name == name:
                return member.number
        raise DataError(f"{self.name(self.here)} knows no site named {name!r}")

    def endpoint(self, number: int) -> str | None:
        """Return the endpoint on which a site, or the central machine, listens."""
        return self.centre if number == self.federation_size else self._by_number[number].endpoint

    def neighbours(self, number: int) -> list[int]:
        """Return the numbers of the neighbours of a site, increasing."""
        touching = self.edges[(self.edges == number).any(axis=1)]
        return [int(v) for v in np.unique(touching[touching != number])]

    @property
    def is_centre(self) -> bool:
        """Whether this is the plan of the central machine."""
        return self.here == self.federation_size

    @property
    def leader(self) -> int:
        """The first site of the component (placement replicas)."""
        return self.numbers[0]

    def partners(self) -> list[int]:
        """Return the numbers of this site's partners, increasing."""
        if self.placement == "central":
            return self.numbers if self.is_centre else [self.federation_size]
        if self.placement == "replicas":
            return [u for u in self.numbers if u != self.here]
        return self.neighbours(self.here)

    def kinds(self, sender: int, receiver: int) -> list[Kind]:
        """Return the kinds of messages that ``sender`` writes for ``receiver``."""
        if self.placement == "central":
            return [Kind.DOWN, Kind.RESULT] if sender == self.federation_size else [Kind.THETA, Kind.DONE]
        kinds = [Kind.THETA, Kind.DONE]
        if self.placement == "replicas":
            return kinds + ([Kind.PRESENT, Kind.REPLICA] if sender == self.leader else [])
        kinds += [Kind.ALPHA] if sender < receiver and self.compare_every else []
        if self.select is not None:
            kinds += [Kind.SUMMARY, Kind.CHOSEN] + ([Kind.VERDICT] if sender < receiver else [])
        return kinds

    def key(self, kind: Kind, sender: int, receiver: int) -> str:
        """Return the key under which ``sender`` writes messages for ``receiver``."""
        pair = f"/{self.name(receiver)}" if kind in _PAIRWISE else ""
        return f"{self.run}{self.phase}/{kind.name.lower()}/{self.name(sender)}{pair}"

    def asking_key(self, kind: Kind, sender: int, receiver: int) -> str:
        """Return the key under which only ``receiver`` may ask for lost messages; the key identifies it."""
        return f"{self.run}{self.phase}/ask/{kind.name.lower()}/{self.name(sender)}/{self.name(receiver)}"

    def presence_key(self, sender: int) -> str:
        """Return the key under which a site announces its presence."""
        return f"{self.run}{self.phase}/live/{self.name(sender)}"

    def all_keys(self, sender: int, receiver: int) -> list[str]:
        """Return all keys under which ``sender`` writes messages for ``receiver``."""
        kinds = self.kinds(sender, receiver)
        keys = [self.key(kind, sender, receiver) for kind in kinds]
        keys += [list_key(self.run, self.name(sender), self.name(receiver)), self.presence_key(sender)]
        return [*keys, *(self.asking_key(kind, sender, receiver) for kind in kinds)]


@dataclass(frozen=True, eq=False, kw_only=True)
class ChoicePlan(SitePlan):
    """Plan of the rounds in which sites choose ``lam``: for each fold, all ``levels (M,)``, the largest first.

    A stage is a fold and a level, and takes ``level_rounds`` rounds with all training rows. ``training`` has a plan for
    each fold, with ``lam`` 1, and ``held_out`` the held-out rows of this site, None for none.
    """

    levels: Array
    level_rounds: int
    training: tuple[SitePlan, ...]
    held_out: tuple[SiteTerms | None, ...]

    @property
    def most_bytes(self) -> int:
        return max(super().most_bytes, HEADER_BYTES + 8 * self.federation_size * (self.levels.size + 1))

    @property
    def n_held(self) -> int:
        """Folds in which this site holds rows out."""
        return len(self.held_out) - self.held_out.count(None)

    def kinds(self, sender: int, receiver: int) -> list[Kind]:
        return [*super().kinds(sender, receiver), Kind.HELD_OUT]

    def all_keys(self, sender: int, receiver: int) -> list[str]:
        """Return the keys of this phase and of the rounds that follow, which use the same links."""
        later = replace(self.training[0], phase="", compare_every=1)
        return [*super().all_keys(sender, receiver), *later.all_keys(sender, receiver)]

    def stage(self, number: int, shard: Shard) -> RunPlan:
        """Return the plan of a stage; all but the first of a fold continue from the state of the shard."""
        fold, level = divmod(number, self.levels.size)
        plan, radius = self.training[fold], self.levels[level] * self.edge_radius
        theta, alpha = plan.theta, np.zeros((len(self.edges), self.n_params))
        if level:
            theta, kept = shard.theta.copy(), shard.edges.tolist()
            alpha[[edge in kept for edge in self.edges.tolist()]] = shard.alpha
        return replace(plan, theta=theta, edge_radius=radius, alpha=self.penalty.project(alpha, radius))

    def held_out_loss(self, number: int, theta: Array) -> float:
        """Return the mean loss at ``theta (p,)`` of the held-out rows of a stage, 0 without any."""
        terms = self.held_out[number // self.levels.size]
        return 0.0 if terms is None else float(terms.values(theta[None])[0])

    def chosen(self, table: Array) -> Choice:
        """Return the level with the least total loss, from losses by site ``(V, M + 1)`` (`ChoosingLink`)."""
        totals = np.zeros(self.levels.size)
        for line in table:  # one after the other, so that all sites get the same bits
            totals += line[:-1]
        if not totals.any():
            raise DataError(
                "no site has enough rows to hold some out, so lam cannot be chosen: let the organiser order one "
                "(fedkin federation order DIR --lam X), or agree on fewer folds"
            )
        lam, known = float(self.levels[int(totals.argmin())]), int(table[:, -1].sum())
        return Choice(self.run, self.revision, lam, self.levels.tolist(), totals.tolist(), known)


def list_key(run: str, sender: str, receiver: str) -> str:
    """Return the key under which ``receiver`` asks ``sender`` for a newer list of keys."""
    return f"{run}/keys/{sender}/{receiver}"


def site_plan(directory: Path | Site) -> SitePlan:
    """Return the plan of a site from its directory: invite, order, and steps planned from its own rows.

    It is a `ChoicePlan` if sites choose ``lam`` and have not done so yet.
    """
    site = directory if isinstance(directory, Site) else Site.read(directory)
    given, own, noisy, where = site.invite, site.invite.site, site.noisy_sums(), str(site.directory)
    contract, revision = _ordered(site.contract, site.order), 0 if site.order is None else site.order.revision
    placement = contract.rounds.placement
    rows = rows_before(site, revision) if noisy is None else table_of_sums(noisy[0])
    others: Mapping[str, Steps] = {}
    members = tuple(one.member for one in given.neighbours)
    near = [(one.member.number, one.weight) for one in given.neighbours]
    edges = [(max(own.number, v), min(own.number, v), weight) for v, weight in near]
    if placement == "replicas":
        assert given.component is not None and given.edges is not None
        members, edges = given.component, list(given.edges)
        others = {} if site.order is None or site.order.steps is None else site.order.steps
    elif placement == "central":
        members, edges = (), []
    members = tuple(sorted({one.number: one for one in (*members, own)}.values(), key=lambda one: one.number))
    planned, every = plan_site(contract, rows, given.degree)
    if noisy is None:
        findings = check_rounds(contract, rows, np.array(planned.theta), site.settings)
        refuse_disclosure(findings, f"{where}: no rounds")
    steps = {own.number: others.get(own.name, planned)}  # as the others know it, also when rows were replaced
    if placement == "replicas":
        if missing := [one.name for one in members if one.name not in others and one is not own]:
            raise DataError(
                f"{where} lacks the steps of {missing[0]}, which replicas need; the organiser sends them with an order "
                "when all sites are admitted (fedkin federation order)"
            )
        steps = {one.number: others.get(one.name, planned) for one in members}
    degrees = {u: sum(u in edge[:2] for edge in edges) for u in steps} | {own.number: given.degree}
    facts: dict[str, Any] = {"run": given.run, "revision": revision, "here": own.number, "n_edges": given.n_edges}
    facts |= {"federation_size": given.n_sites, "snapshot_every": every, "centre": given.centre, "where": where}
    facts |= {"effective_rows": required(contract, site.settings).effective_rows, "noisy": noisy}
    about = members, edges, steps, degrees, {own.number: rows}
    if contract.rounds.lam == "cv":
        lam = read_choice(site.directory, given.run, revision)
        if lam is None and noisy is not None:
            raise ParameterError(
                "with noisy sums no rows can be held out to choose lam: let the organiser order one (fedkin federation "
                "order DIR --lam X)"
            )
        if lam is None:
            # without noise, from all rows
            calm = {"batch_size": None, "gradient": "plain", "average": "last", "compare_every": 0}
            contract = _with_rounds(contract, lam=1.0, **calm)
            return _choice_plan(contract, _plan(contract, *about, **facts), rows, own, given.degree, site.settings)
        contract = _with_rounds(contract, lam=lam)
    return _plan(contract, *about, **facts)


def _with_rounds(contract: Contract, **changes: Any) -> Contract:
    """Return the contract with other settings of the rounds."""
    return msgspec.structs.replace(contract, rounds=msgspec.structs.replace(contract.rounds, **changes))


def _ordered(contract: Contract, order: Order | None) -> Contract:
    """Return the contract with the settings that an order replaces."""
    given = {name: getattr(order, name, None) for name in ("lam", "rounds", "rho")}
    return _with_rounds(contract, **{name: value for name, value in given.items() if value is not None})


def _choice_plan(
    contract: Contract, plan: SitePlan, rows: Rows, own: Member, degree: int, settings: Thresholds
) -> ChoicePlan:
    """Return the plan of the rounds in which a site chooses ``lam`` with the others."""
    folds = most_folds(contract, rows, settings, site=own.id)
    fold_of = deal_folds(own.id, rows.n_samples, max(folds, 1), contract.seed)
    loss, nothing = contract.loss_object(), np.zeros(contract.n_params)
    training, held_out = list[SitePlan](), list[SiteTerms | None]()
    for fold in range(contract.folds):
        held = fold_of == fold if fold < folds else np.zeros(rows.n_samples, dtype=bool)
        if check_count(contract, int((~held).sum()), settings):  # too few would train
            held[:] = False
        train = rows.take(~held)
        steps, _ = plan_site(contract, train, degree)
        rule = StepRule(np.array([steps.start]), np.array([steps.growth]), plan.steps.damping)
        own_rows, theta = stacked(contract, {0: train}, {0: own.id}), np.array([steps.theta])
        training.append(replace(plan, rows=own_rows, steps=rule, theta=theta))
        held_out.append(build_terms(Federation({0: rows.take(held)}), [loss], nothing) if held.any() else None)
    levels, each = contract.levels(plan.n_edges), contract.rounds.level_rounds
    known: dict[str, Any] = {one.name: getattr(plan, one.name) for one in fields(plan)}
    known |= {"phase": "-choice", "rounds": len(training) * levels.size * each}
    known |= {"training": tuple(training), "held_out": tuple(held_out)}
    return ChoicePlan(**known, levels=levels, level_rounds=each)


def centre_plan(organiser: Organiser) -> SitePlan:
    """Return the plan of the central machine, from the organiser's directory: all sites, and the steps they sent."""
    graph, order, known, members = organiser.graph, organiser.newest_order(), organiser.steps(), organiser.members
    if missing := ", ".join(member.name for member in members if member.name not in known):
        raise DataError(f"{missing} not admitted yet: the central machine needs the steps of all sites")
    steps, degrees = {one.number: known[one.name] for one in members}, dict(enumerate(graph.degree.tolist()))
    facts: dict[str, Any] = {"run": organiser.charter.run, "revision": 0 if order is None else order.revision}
    facts |= {"here": len(members), "federation_size": len(members), "centre": organiser.charter.centre}
    facts |= {"n_edges": graph.n_edges, "where": str(organiser.directory)}
    return _plan(_ordered(organiser.contract, order), members, _edges(graph), steps, degrees, {}, **facts)


def whole_plan(
    contract: Contract, graph: Graph, rows: Mapping[int, Rows], *, run: str, order: Order | None = None
) -> SitePlan:
    """Return the plan of a run that sees all sites, for any placement of the contract."""
    ids = [one if isinstance(one, str | int) else str(one) for one in graph.sites]
    members, contract = tuple(Member(one, f"site-{k}", k) for k, one in enumerate(ids)), _ordered(contract, order)
    degrees = dict(enumerate(graph.degree.tolist()))
    steps = {u: plan_site(contract, part, degrees[u])[0] for u, part in rows.items()}
    batch = contract.rounds.batch_size
    passes = [part.n_samples / min(batch or part.n_samples, part.n_samples) for part in rows.values()]
    every = 2 * int(np.ceil(np.mean(passes)))  # as `fedkin.admm.plan_run`
    facts: dict[str, Any] = {"run": run, "here": 0, "federation_size": len(members), "snapshot_every": every}
    facts |= {"placement": "peer", "n_edges": graph.n_edges, "where": "the contract"}
    facts["revision"] = 0 if order is None else order.revision
    return _plan(contract, members, _edges(graph), steps, degrees, rows, **facts)


def steps_of(invite: Invite, rows: Rows) -> Steps:
    """Return the steps that a site sends to the organiser if others step for it while it is absent."""
    return plan_site(invite.terms, rows, invite.degree)[0]


def _plan(
    contract: Contract,
    members: tuple[Member, ...],
    edges: Sequence[Edge],
    steps: Mapping[int, Steps],
    degrees: Mapping[int, int],
    rows: Mapping[int, Rows],
    *,
    where: str,
    federation_size: int,
    **facts: Any,
) -> SitePlan:
    contract.check_rounds(where)
    rounds, rho, lam = contract.rounds, _rho(contract), contract.rounds.lam
    if lam == "cv":
        raise ParameterError(f'{where}: lam is "cv", which sites choose in rounds; here it must be a number')
    if lam is None:
        raise ParameterError(f"{where}: no lam is set; the organiser can set it: fedkin federation order DIR --lam X")
    ordered, numbers = sorted(edges), sorted(steps)
    ids = {member.number: member.id for member in members}
    # edges without any strength do not slow a site down
    damping = [rho * degrees[u] if lam > 0 else 0.0 for u in numbers]
    reduced = rounds.gradient != "plain" and rounds.placement == "peer"
    sparsity = contract.per_parameter(contract.fixed_sparsity) if contract.sparsity else None
    return SitePlan(
        **{"placement": rounds.placement, **facts},
        sites=np.array(numbers, dtype=np.int64),
        theta=np.array([steps[u].theta for u in numbers]).reshape(-1, contract.n_params),
        edges=np.array([edge[:2] for edge in ordered], dtype=np.int64).reshape(-1, 2),
        edge_radius=lam * federation_size * np.array([weight for _, _, weight in ordered]),  # as `Problem.strength`
        penalty=make_penalty(contract.penalty),
        rho=rho,
        steps=StepRule(
            np.array([steps[u].start for u in numbers]), np.array([steps[u].growth for u in numbers]), np.array(damping)
        ),
        rows=stacked(contract, rows, ids) if rows else None,
        with_rows=np.array(sorted(rows), dtype=np.int64),
        rounds=rounds.rounds,
        seed=contract.seed,
        gradient=rounds.gradient,
        average=rounds.average or ("last" if reduced or not _is_noisy(contract) else "tail"),
        sparsity=None if sparsity is None else np.tile(sparsity, (len(numbers), 1)),
        radius=contract.radius,
        constrained=rounds.radius is not None,
        federation_size=federation_size,
        members=members,
        loss=contract.loss,
        lam=lam,
        wire=rounds.wire,
        checkpoint_every=rounds.checkpoint_every,
        compare_every=rounds.compare_every,
        select=rounds.select,
    )


def stacked(contract: Contract, rows: Mapping[int, Rows], ids: Mapping[int, str | int]) -> SiteRows:
    """Return the rows of some sites, by number, in the form that shards need."""
    here = sorted(rows)
    counts = np.array([rows[u].n_samples for u in here], dtype=np.int64)
    batch = contract.rounds.batch_size
    return SiteRows(
        Rows.stack([rows[u] for u in here]),
        np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64),
        counts,
        site_keys([ids[u] for u in here]),
        (contract.loss_object(),) * len(here),
        counts if batch is None else np.minimum(batch, counts),
        contract.per_parameter(contract.ridge),
    )


def planned_rows(plan: SitePlan, site: Site, rows: Rows) -> tuple[SiteRows, Array]:
    """Return other rows of a plan's own site for its shard, and 1 / (the longest first step) for them ``(1,)``."""
    steps, _ = plan_site(site.contract, rows, site.invite.degree)
    return stacked(site.contract, {plan.here: rows}, {plan.here: site.invite.site.id}), np.array([steps.start])


def plan_site(contract: Contract, rows: Rows, degree: int) -> tuple[Steps, int]:
    """Return the plan based on a site's own rows: steps, start, and rounds between snapshots.

    A site starts from its own estimate on all its rows, inside the ball. From 0, its first theta would be the gradient
    of a few rows; its own estimate is a start that others do not know.
    """
    rounds, ridge = contract.rounds, contract.per_parameter(contract.ridge)
    problem = Problem(Federation({0: rows}), Graph.empty([0]), contract.loss_object(), lam=0.0, ridge=ridge)
    batch = None if rounds.batch_size is None else min(rounds.batch_size, rows.n_samples)
    plan = plan_run(problem, 1, batch, gradient=rounds.gradient, noisy=_is_noisy(contract))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateSiteWarning)  # with a ridge if there is none otherwise
        theta = local_fit(problem.federation, contract.loss_object()).theta
    inside = make_penalty("l2").project(theta, 0.5 * contract.radius)[0]
    start, growth = float(plan.steps.start[0]), float(plan.steps.growth[0])
    return Steps(start, growth, _rho(contract) * degree, tuple(inside.tolist())), plan.snapshot_every


def _is_noisy(contract: Contract) -> bool:
    """Return whether anything is random in a run: batches or presence."""
    return contract.rounds.batch_size is not None or contract.rounds.placement != "peer"


def _rho(contract: Contract) -> float:
    return contract.rounds.rho or (AGREED_NOISY_RHO if _is_noisy(contract) else AGREED_RHO)


def _edges(graph: Graph) -> list[Edge]:
    pairs = zip(graph.edges.tolist(), graph.weights.tolist(), strict=True)
    return [(i, j, weight) for (i, j), weight in pairs]
