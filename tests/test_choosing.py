"""lam chosen in rounds between sites: the level, the losses and the model of cross-validation with all rows."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from federations import contract_text, in_threads, make_sites, reference, whole_job, write_job
from fedkin import Federation, Graph, Problem, cross_validate_lam
from fedkin.datasets import paper_design
from fedkin.errors import DataError
from fedkin.federate import Contract, ContractError, Journal, Participant, Site, change_settings, read_record, site_plan
from fedkin.federate.inbox import PeerError, Stopped
from fedkin.federate.plan import ChoicePlan
from fedkin.federate.records import CHOICE, Choice
from fedkin.fitting import load
from fedkin.report.text import method_text
from memory_network import QUICK, Faults, MemoryNetwork
from processes import capped, free_ports

LEVELS = [0.3, 0.1, 0.03, 0.01, 0.003]


def small(n_sites: int = 5, n_samples: int = 60) -> Problem:
    """Two groups of sites in a chain: what one end knows takes all hops to the other."""
    fed = paper_design(n_sites, n_samples, 2, 2, seed=1).federation
    named = Federation.from_arrays(fed.X, fed.y, np.repeat([f"d{u}" for u in range(n_sites)], fed.n_samples))
    return Problem(named, Graph(named.sites, [(f"d{u}", f"d{u + 1}") for u in range(n_sites - 1)]), lam=0.1)


def choice_plans(folder: Path, problem: Problem, **rounds: object) -> list[ChoicePlan]:
    make_sites(folder, problem, **{"lam": "cv", "levels": LEVELS, "level_rounds": 40, **rounds})
    plans = [site_plan(folder / name) for name in problem.federation.sites]
    assert all(isinstance(plan, ChoicePlan) for plan in plans)
    return plans


def chosen(plans: list[ChoicePlan], faults: Faults | None = None) -> list[object]:
    """What the sites choose, each on a thread of its own."""
    network, found = MemoryNetwork(faults), [None] * len(plans)

    def live(u: int) -> None:
        participant = Participant(plans[u], network.join(), Journal(f"d{u}"), patience=QUICK)
        found[u] = plans[u].chosen(participant.run())
        participant.linger()

    try:
        in_threads(live, len(plans))
    finally:
        network.close()
    return found


def test_all_sites_choose_what_cross_validation_of_all_rows_chooses(tmp_path: Path) -> None:
    problem = small()
    found = chosen(choice_plans(tmp_path, problem))
    assert all(one == found[0] for one in found)
    pooled = cross_validate_lam(problem, LEVELS, seed=0, tol=1e-8)
    assert found[0].lam == pooled.lam and found[0].sites == 5
    np.testing.assert_allclose(np.array(found[0].losses) / 5, pooled.mean, rtol=1e-3)


def test_a_bad_network_changes_no_bit_of_the_choice(tmp_path: Path) -> None:
    plans = choice_plans(tmp_path, small(4), level_rounds=5)
    assert chosen(plans, Faults(loss=0.02, duplication=0.02, delay=0.002)) == chosen(plans)


def test_a_site_that_is_stopped_anywhere_goes_on_and_all_choose_the_same(tmp_path: Path) -> None:
    plans = choice_plans(tmp_path, small(3), level_rounds=10)
    network, found, stops = MemoryNetwork(), [None] * 3, iter((7, 50, 123, 250))
    due = [next(stops)]

    def tick(participant: Participant) -> None:
        if participant.plan.here == 1 and participant.done >= due[0]:
            due[0] = next(stops, 10**6)
            raise Stopped("stopped on request")

    def live(u: int) -> None:
        while found[u] is None:
            own = network.join()
            participant = Participant(
                plans[u], own, Journal(f"d{u}"), checkpoint=tmp_path / f"{u}.db", patience=QUICK, tick=tick
            )
            with suppress(Stopped):
                found[u] = plans[u].chosen(participant.run())
                participant.save(participant.done, True)
                participant.linger()
            own.close()

    try:
        in_threads(live, 3)
        assert due[0] == 10**6 and found == chosen(plans)
        alone = Participant(plans[0], network.join(), Journal("d0"), checkpoint=tmp_path / "0.db", patience=QUICK)
        assert plans[0].chosen(alone.run()) == found[0]  # it has what the others told
    finally:
        network.close()


def test_who_tells_other_losses_of_a_site_is_found_out(tmp_path: Path) -> None:
    plans = choice_plans(tmp_path, small(3), level_rounds=1)
    network, failures = MemoryNetwork(), {}

    def live(u: int) -> None:
        participant = Participant(plans[u], network.join(), Journal(f"d{u}"), patience=replace(QUICK, give_up=3.0))
        if u == 2:
            participant.link.table[0] = 1.0  # d0 is no neighbour of d2
        try:
            participant.run()
        except PeerError as error:
            failures[u] = str(error)

    try:
        in_threads(live, 3)
    finally:
        network.close()
    assert "d2 sends other held-out losses" in failures[1] or "d0 sends other held-out losses" in failures[1]


def test_folds_that_are_held_out_have_as_many_rows_as_the_thresholds_ask_for(tmp_path: Path) -> None:
    problem = small(3)
    make_sites(tmp_path, problem, lam="cv", levels=LEVELS, level_rounds=5)
    for rows, folds in ((12, 5), (13, 4), (20, 3), (30, 2), (31, 0)):
        change_settings(tmp_path / "d0", rows=rows)
        plan = site_plan(tmp_path / "d0")
        out = [60 - int(one.rows.counts[0]) for one, held in zip(plan.training, plan.held_out, strict=True) if held]
        assert plan.n_held == len(out) == folds and all(n >= rows for n in out)
    plans = [site_plan(tmp_path / name) for name in problem.federation.sites]
    assert chosen(plans)[0].sites == 3  # who holds nothing out takes part all the same
    with pytest.raises(DataError, match="federation order DIR --lam X"):
        plans[0].chosen(np.array([[*np.zeros(len(LEVELS)), 1.0]] * 3))


def test_levels_follow_from_the_contract_and_a_number_that_is_ordered_counts(tmp_path: Path) -> None:
    problem = small(3)
    text = contract_text(problem, {"lam": "cv"})
    levels = Contract.from_toml(text).levels(n_edges=10)
    assert (np.diff(levels) < 0).all() and levels[0] == pytest.approx(1000 * levels[-1])
    scaled = Contract.from_toml(text.replace('name = "y"', 'name = "y"\nlow = -50\nhigh = 50'))
    np.testing.assert_allclose(scaled.levels(n_edges=10), 50 * levels)
    with pytest.raises(ContractError, match='placement "peer"'):
        Contract.from_toml(text + 'placement = "replicas"\n')
    heart = make_sites(tmp_path, problem, lam="cv")
    assert isinstance(site_plan(tmp_path / "d0"), ChoicePlan)
    [(path, _)] = heart.order(lam=0.25)
    Site.read(tmp_path / "d0").accept(path)
    plan = site_plan(tmp_path / "d0")
    assert not isinstance(plan, ChoicePlan) and plan.lam == 0.25


@pytest.mark.processes
@pytest.mark.timeout(900)
def test_twelve_processes_choose_lam_by_themselves(tmp_path: Path) -> None:
    """No levels are given, and nobody sees the rows of another: within 1% of the best that pooled rows can choose."""
    pytest.importorskip("zenoh")
    design = paper_design(12, 75, 3, 3, varrho=0.2, signal=0.5, seed=1)
    names = [f"d{u}" for u in range(12)]
    fed = Federation.from_arrays(design.federation.X, design.federation.y, np.repeat(names, 75))
    problem = Problem(fed, Graph.from_indices(names, design.graph.edges, design.graph.weights), lam=0.1)
    assert problem.graph.n_components == 1
    words = write_job(tmp_path, problem, lam="cv", level_rounds=30, rounds=150)
    words += ["--by", "run", "--out", str(tmp_path / "trial"), "--port", str(free_ports(13))]
    command = [sys.executable, "-m", "fedkin", "federation", "simulate", *words]
    done = subprocess.run(command, preexec_fn=capped, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    places = [tmp_path / "trial" / "sites" / name for name in names]
    choices = [read_record(place / CHOICE, Choice) for place in places]
    assert all(one == choices[0] for one in choices) and choices[0].sites == 12
    assert f"lam {choices[0].lam:.4g}, chosen by the sites" in done.stdout
    lam, losses = choices[0].lam, np.array(choices[0].losses) / 12
    pooled = cross_validate_lam(problem, seed=0)
    assert cross_validate_lam(problem, [lam], seed=0).mean[0] <= 1.01 * pooled.mean.min()
    assert losses.min() == pytest.approx(pooled.mean.min(), rel=0.01)
    models = [load(place / "model") for place in places]
    assert all(model.fused.lam == lam and "by cross-validation" in method_text(model) for model in models)
    theta = np.stack([model.coef.ravel() for model in models])
    assert theta.tobytes() == reference(problem, whole_job(problem, lam=lam, rounds=150)).tobytes()
