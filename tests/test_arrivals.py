"""Rows that arrive while a site runs: taken in once, at a round that a crash does not change, and never too few."""

from __future__ import annotations

import csv
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import small_problem
from federations import in_threads, make_sites, side_by_side, split
from fedkin.data import Rows
from fedkin.errors import DataError, FedkinError, ParameterError
from fedkin.federate import Journal, Participant, Site, change_settings, site_plan, whole_plan
from fedkin.federate.arrivals import Arrivals
from fedkin.federate.plan import planned_rows
from fedkin.federate.records import read_arrived
from fedkin.losses import make_loss
from memory_network import QUICK, MemoryNetwork

EVERY, ROUNDS = 5, 40


class Crash(Exception):
    pass


def new_rows(n: int, seed: int, theta: float = 1.0) -> Rows:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 3))
    return Rows(X, X @ np.full(3, theta) + 0.3 * rng.normal(size=n))


def write(path: Path, *parts: Rows) -> Path:
    """A table that has not been written to for a while."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["x0", "x1", "x2", "y"])
        for rows in parts:
            table.writerows([*map(repr, x), repr(y)] for x, y in zip(rows.X.tolist(), rows.y.tolist(), strict=True))
    os.utime(path, (time.time() - 60, time.time() - 60))
    return path


def sites_in(folder: Path, n: int = 2, **rounds: Any) -> Any:
    problem = small_problem(n)
    names = problem.federation.feature_names
    assert tuple(names) == ("x0", "x1", "x2"), names
    return problem, make_sites(folder, problem, **{"rounds": ROUNDS, "checkpoint_every": EVERY, **rounds})


def arrivals_of(place: Path, source: Path | None, journal: Journal | None = None) -> Arrivals:
    plan = site_plan(place)
    made = journal or Journal(place.name)
    return Arrivals(Site.read(place), plan.revision, source, plan.theta[0], plan.loss_object(), made)


def run_both(folder: Path, follow: Path, grow: Any = None) -> dict[int, Participant]:
    """Both sites to the end; the first follows a table, and dies after the rounds in ``grow``, when that is called."""
    network, finished = MemoryNetwork(None, seed=1), {}
    deaths = sorted(grow or {}, reverse=True)

    def live(u: int) -> None:
        place = folder / f"d{u}"

        def tick(site: Participant) -> None:
            if u == 0 and deaths and site.done >= deaths[-1]:
                grow[deaths.pop()]()
                raise Crash

        while u not in finished:
            transport, plan = network.join(), site_plan(place)
            arrivals = arrivals_of(place, follow) if u == 0 else None
            how: dict[str, Any] = {"patience": QUICK, "tick": tick, "arrivals": arrivals}
            try:
                site = Participant(plan, transport, Journal(f"d{u}"), checkpoint=place / "state.db", **how)
                site.run()
                site.linger()
                finished[u] = site
            except Crash:
                transport.close()

    try:
        in_threads(live, 2)
    finally:
        network.close()
    return finished


@pytest.mark.parametrize("batch", [None, 4])
def test_the_bits_are_those_of_rows_that_change_at_known_rounds(tmp_path: Path, batch: int | None) -> None:
    problem, heart = sites_in(tmp_path, batch_size=batch)
    joined, first, second = problem.federation["d0"], new_rows(60, 1), new_rows(70, 2)
    table = write(tmp_path / "grows.csv", joined, first)
    # it dies in round 7, after the first intake, and in round 12, before the second: rows that came while it was away
    # count from the next safe round on, and never in a round that the neighbour may have seen already
    grow = {7: lambda: None, 12: lambda: write(table, joined, first, second)}
    found = run_both(tmp_path, table, grow)
    whole = whole_plan(heart.contract, problem.graph, {0: joined, 1: problem.federation["d1"]}, run=heart.charter.run)
    shards, place = split(whole, np.arange(2)), Site.read(tmp_path / "d0")
    done = 0
    for until, rows in ((5, [first]), (15, [first, second]), (ROUNDS, None)):
        side_by_side(shards, done + 1, until)
        done = until
        if rows is not None:
            shards[0].take_rows(*planned_rows(site_plan(place), place, Rows.stack([joined, *rows])))
    for u in (0, 1):
        assert found[u].shard.theta.tobytes() == shards[u].theta.tobytes()
        assert found[u].shard.average.tobytes() == shards[u].average.tobytes()
    assert [part.round for part in read_arrived(tmp_path / "d0").parts] == [6, 16]
    noted = [one for one in Site.read(tmp_path / "d0").ledger.entries() if one.what == "arrived"]
    assert [one.rows for one in noted] == [first.digest, second.digest]
    status = found[0].status
    assert status.arrived == 130 and status.changed is None
    assert status.new_loss == pytest.approx(0.045, abs=5 * status.new_error)  # half the variance of the noise
    # the gap is one of all rows, also of those that have arrived
    assert found[0].shard.gradients.rows.counts.tolist() == [142]


def test_a_directory_of_files_and_a_later_run(tmp_path: Path) -> None:
    problem, _ = sites_in(tmp_path)
    (folder := tmp_path / "daily").mkdir()
    write(folder / "0.csv", problem.federation["d0"])
    arrivals = arrivals_of(tmp_path / "d0", folder)
    theta = site_plan(tmp_path / "d0").theta[0]
    arrivals.look(5, theta)
    assert arrivals.parts == []  # the site joined with these rows
    write(folder / "1.csv", new_rows(60, 1))
    write(folder / ".2.csv", new_rows(60, 2))  # not yet there
    write(folder / "notes.md", new_rows(60, 2))
    arrivals.look(10, theta)
    arrivals.look(15, theta)
    assert [rows.n_samples for rows in arrivals.parts] == [60]
    assert arrivals.rows_from(10) is None and arrivals.rows_from(11).n_samples == 72
    # without --follow, what was taken in still counts; a later order begins with it
    again = arrivals_of(tmp_path / "d0", None)
    assert again.rows_from(11).n_samples == 72
    site = Site.read(tmp_path / "d0")
    later = Arrivals(site, 1, folder, theta, arrivals.loss, arrivals.journal)
    assert later.base.n_samples == 72 and later.parts == []
    later.look(5, theta)
    assert later.parts == []


def test_a_batch_of_all_rows_stays_one_of_all_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem, _ = sites_in(tmp_path, batch_size=12)
    table = write(tmp_path / "t.csv", problem.federation["d0"], new_rows(60, 1))
    arrivals = arrivals_of(tmp_path / "d0", table, Journal("d0", echo=True))
    change_settings(tmp_path / "d0", below_minima=False)
    arrivals.site = Site.read(tmp_path / "d0")
    arrivals.look(5, site_plan(tmp_path / "d0").theta[0])
    assert arrivals.parts == [] and "rounds.batch_size is 12, but these are 72 rows" in capsys.readouterr().err


def test_rows_that_arrived_count_as_left_in_every_federation(tmp_path: Path) -> None:
    """Thetas before and after told of them; a table with one more row elsewhere would have told of that row."""
    problem, _ = sites_in(tmp_path)
    joined, arrived, one = problem.federation["d0"], new_rows(60, 1), new_rows(1, 3)
    arrivals = arrivals_of(tmp_path / "d0", write(tmp_path / "t.csv", joined, arrived))
    arrivals.look(5, site_plan(tmp_path / "d0").theta[0])
    assert arrivals.rows_from(6) is not None
    _, other = sites_in(tmp_path / "other")
    table = write(tmp_path / "more.csv", joined, arrived, one)
    there, _ = Site.join(other.directory / "invites" / "d1.invite", table, tmp_path / "other" / "more")
    with pytest.raises(DataError, match=r"but not exactly these, have left before \(as d0"):
        there.allowed_rows("run")
    Site.read(tmp_path / "d0").allowed_rows("run")  # goes on with the rows of the join


def test_what_does_not_fit_waits_or_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem, _ = sites_in(tmp_path)
    joined, journal = problem.federation["d0"], Journal("d0", echo=True)
    theta = site_plan(tmp_path / "d0").theta[0]

    def told(*parts: Rows, text: str = "", fresh: bool = False) -> str:
        path = write(tmp_path / "grows.csv", *parts)
        if text:
            path.write_text(path.read_text() + text)
            os.utime(path, (time.time() - 60, time.time() - 60))
        if fresh:
            os.utime(path)
        arrivals.look(10, theta)
        return capsys.readouterr().err

    write(tmp_path / "grows.csv", joined)
    arrivals = arrivals_of(tmp_path / "d0", tmp_path / "grows.csv", journal)
    assert "new rows are waiting for more" in told(joined, new_rows(1, 1)) and arrivals.parts == []
    assert "not a number" in told(joined, new_rows(60, 1), text="1,2,three,4\n") and arrivals.parts == []
    assert told(joined, new_rows(60, 1), fresh=True) == "" and arrivals.parts == []  # perhaps still written to
    assert "does not start with" in told(new_rows(80, 1)) and arrivals.parts == []
    assert "rows arrived" in told(joined, new_rows(60, 1)) and len(arrivals.parts) == 1
    assert "not those that were taken in" in told(joined, new_rows(61, 2)) and len(arrivals.parts) == 1
    with pytest.raises(DataError, match="no table or directory"):
        arrivals_of(tmp_path / "d0", tmp_path / "nowhere.csv")


@pytest.mark.parametrize("rounds", [{"gradient": "saga", "batch_size": 4}, {"placement": "central"}])
def test_only_plain_rounds_between_peers_take_rows_in(tmp_path: Path, rounds: dict[str, Any]) -> None:
    sites_in(tmp_path, **rounds)
    with pytest.raises(ParameterError, match="placement = 'peer' and gradient = 'plain'"):
        arrivals_of(tmp_path / "d0", tmp_path)


def test_a_change_is_noticed_and_found_again_after_a_crash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem, _ = sites_in(tmp_path)
    rows, theta = [problem.federation["d0"]], site_plan(tmp_path / "d0").theta[0]
    table = write(tmp_path / "grows.csv", *rows)
    arrivals = arrivals_of(tmp_path / "d0", table, Journal("d0", echo=True))
    for k in range(12):
        rows.append(new_rows(50, k, theta=1.0 if k < 8 else 0.5))
        write(table, *rows)
        arrivals.look(5 * (k + 1), theta)
    assert capsys.readouterr().err.count("rows follow different parameters") == 1
    assert len(arrivals.changes) == 1 and abs(arrivals.changes[0] - 400) < 60
    assert arrivals_of(tmp_path / "d0", None).changes == arrivals.changes


def test_a_damaged_list_is_named(tmp_path: Path) -> None:
    problem, _ = sites_in(tmp_path)
    table = write(tmp_path / "grows.csv", problem.federation["d0"], new_rows(60, 1))
    arrivals_of(tmp_path / "d0", table).look(5, site_plan(tmp_path / "d0").theta[0])
    path = tmp_path / "d0" / "arrived" / "list.json"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(FedkinError, match=r"list\.json is damaged"):
        site_plan(tmp_path / "d0")


def test_rows_that_arrive_change_the_risk_sets_of_cox(tmp_path):
    sites_in(tmp_path)
    plan, site = site_plan(tmp_path / "d0"), Site.read(tmp_path / "d0")
    with pytest.raises(ParameterError, match="change the risk sets of all others"):
        Arrivals(site, plan.revision, None, plan.theta[0], make_loss("cox"), Journal("a"))
