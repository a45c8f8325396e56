"""The ledger of a site, and what it refuses: rows that changed, exact numbers after noise, fresh noise."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import beta, norm

import heart
from federations import in_threads
from fedkin._base import replacing
from fedkin.admm import Shard, Store
from fedkin.cli import main
from fedkin.cli.site_run import write_model
from fedkin.core import (
    Budget,
    Problem,
    Query,
    Summaries,
    composed_epsilon,
    private_summary,
    site_summary,
    table_of_sums,
)
from fedkin.data import Rows, natural_basis
from fedkin.errors import DataError, ParameterError
from fedkin.federate import Journal, Participant, Site, SitePlan, change_settings, sharing, site_plan
from fedkin.federate.program import Result
from fedkin.federate.program import main as run_site
from fedkin.graph import Graph
from fedkin.losses import LinearLoss, MeanLoss
from fedkin.solvers import solve
from memory_network import QUICK, MemoryNetwork

FUSED = heart.CONTRACT.replace("[features]", 'method = "fused"\n[features]') + "[rounds]\nlam = 0.1\nrounds = 3\n"


def add_row(place: Path, row: str = "44.5,A,9\n") -> Path:
    table = place.parent / "more.csv"
    table.write_text((place.parent / f"{place.name}.csv").read_text() + row)
    return table


def test_another_directory_or_lost_files_do_not_allow_sums_of_other_rows(tmp_path: Path) -> None:
    """The difference of two sums was the patient that had been added."""
    made = heart.organiser(tmp_path)
    north = heart.admitted(made, "north")
    sharing.share(north)
    other = heart.enrolled(made, "north", add_row(north), tmp_path / "other", again=True)
    with pytest.raises(DataError, match="the difference would reveal the rows that changed"):
        sharing.share(other)
    shutil.rmtree(north / "sent")
    (north / "ledger.jsonl").unlink()
    Site.join(heart.invite_of(made, "north"), tmp_path / "more.csv", north)
    with pytest.raises(DataError, match="the difference would reveal the rows that changed"):
        sharing.share(other)
    assert main(["site", "ledger", str(other), "--withdrawn", "the organiser has deleted it"]) == 0
    sharing.share(other)


def test_answers_and_folds_are_counted_by_the_ledger_and_not_by_a_directory(tmp_path: Path) -> None:
    """The copy of a site in another directory has no answers, and counted from the beginning."""
    made = heart.organiser(tmp_path, f"messages = 3\n{heart.LOGISTIC}")
    table = heart.write_deaths(tmp_path / "t.csv")
    for place in ("north", "again"):
        site = heart.enrolled(made, "north", table, tmp_path / place, again=True)
        start = sharing.share(site).summary.at
        for number in (2, 3):
            path = made.directory / "asks" / f"north@{number}.ask"
            shift = 0.1 * number if place == "north" else 0.05 * number
            made.write_queries([Query("north", number, start + shift, np.zeros(4))], {})
            if place == "north":
                assert sharing.answer(site, path).path is not None
            else:
                with pytest.raises(DataError, match=r"north@\d\.ask: 3 messages have left this site"):
                    sharing.answer(site, path)
    shutil.rmtree(tmp_path / "again" / "sent")
    with pytest.raises(DataError, match="in 5 folds of north, seed 0, order"):
        sharing.share(tmp_path / "again", folds=3)
    assert sharing.share(tmp_path / "again").summary.count[:5].all()  # the same folds tell nothing new


def test_a_table_with_one_more_row_is_refused_in_another_federation(tmp_path: Path) -> None:
    """The organisers of both, or one who runs both, would have had the patient as a difference."""
    north = heart.admitted(heart.organiser(tmp_path), "north")
    sharing.share(north)
    made = heart.organiser(tmp_path / "other")
    tables = {"south": add_row(north), "east": heart.write_table(tmp_path / "east.csv", seed=7)}
    sites = {}
    for name, table in tables.items():
        sites[name] = heart.enrolled(made, name, table, tmp_path / "other" / name)
    with pytest.raises(DataError, match=r"but not exactly these, have left before \(as north"):
        sharing.share(sites["south"])
    sharing.share(sites["east"])  # other patients
    assert main(["site", "ledger", str(north), "--withdrawn", "the organiser has deleted it"]) == 0
    sharing.share(sites["south"])


def test_the_ledger_says_what_left_and_a_changed_line_is_refused(tmp_path: Path, capsys) -> None:
    made = heart.organiser(tmp_path)
    north = heart.admitted(made, "north")
    assert main(["site", "ledger", str(north)]) == 0 and "Nothing has left" in capsys.readouterr().out
    assert main(["site", "share", str(north), "--epsilon", "5", "--dry-run"]) == 0
    assert "other noise is drawn when the summary is written" in capsys.readouterr().out
    assert Site.read(north).ledger.entries() == []
    assert main(["site", "share", str(north), "--yes"]) == main(["site", "status", str(north)]) == 0
    assert re.search("north sent last: .* share .* to the organiser: message 1", capsys.readouterr().out)
    made.write_queries([Query("north", 2, np.zeros(4), np.zeros(4), 10.0)], {})
    sharing.answer(north, made.directory / "asks" / "north@2.ask")
    change_settings(north, below_minima=True)
    assert main(["site", "ledger", str(north)]) == 0
    said = capsys.readouterr().out
    assert [word in said for word in ("share", "message 1", "answer", "message 2", "lifts the hard minima")] == [
        True
    ] * 5
    path = north / "ledger.jsonl"
    lines = path.read_text().splitlines()
    assert json.loads(lines[1])["before"] == json.loads(lines[0])["digest"]
    for changed in ([lines[0].replace("message 1", "message 7"), *lines[1:]], lines[1:], [lines[1], lines[0]]):
        path.write_text("\n".join(changed) + "\n")
        with pytest.raises(DataError, match=r"ledger\.jsonl, line 1: damaged or changed"):
            sharing.share(north)


def test_rows_that_change_in_the_middle_of_a_run_are_refused(tmp_path: Path, capfd) -> None:
    made = heart.organiser(tmp_path, FUSED, names=("north", "south"))
    north = heart.admitted(made, "north")
    words = [str(north), "--give-up", "0.1", "--linger", "0"]
    assert run_site(None, words) == 4  # it waits for south
    store = Store(north / "state.db", made.charter.run)
    store.save(1, {}, {"site": "north", "rows": "other"}, durable=True)
    store.close()
    assert run_site(None, words) == 2 and "computed from other rows" in capfd.readouterr().err
    (north / "state.db").unlink()
    Site.join(heart.invite_of(made, "north"), add_row(north), north)
    assert run_site(None, words) == 2 and "rows that changed" in capfd.readouterr().err


# --- differential privacy -----------------------------------------------------------------------------------------


def test_after_noise_nothing_exact_leaves_and_no_fresh_noise(tmp_path: Path, capfd) -> None:
    made = heart.organiser(tmp_path, FUSED, names=("north", "south"))
    north = heart.admitted(made, "north", n=100)
    first = sharing.share(north, epsilon=1.0).path.read_bytes()
    (north / "model").mkdir()
    change_settings(north, share_result=True)
    with pytest.raises(DataError, match=r"model\.json cannot be used"):
        Site.read(north).publish()
    made.write_queries([Query("north", 2, np.zeros(4), np.zeros(4), 10.0)], {})
    with pytest.raises(DataError, match="To answer would reveal more"):
        sharing.answer(north, made.directory / "asks" / "north@2.ask")
    # another draw of the noise would let the organiser average
    shutil.rmtree(north / "sent")
    for epsilon in (1.0, None):
        with pytest.raises(DataError, match=r"north\.summary again if it was lost"):
            sharing.share(north, epsilon=epsilon)
    (north / "ledger.jsonl").unlink()
    with pytest.raises(DataError, match="sums with noise"):
        sharing.share(north, epsilon=1.0)
    # the same rows under another name, in another federation
    other = heart.organiser(tmp_path / "other")
    table = north.parent / "north.csv"
    twin = heart.enrolled(other, "south", table, tmp_path / "other" / "south")
    with pytest.raises(DataError, match="sums with noise"):
        sharing.share(twin)
    assert first


def test_shape_and_refusals_of_private_sums_depend_on_no_row(tmp_path: Path) -> None:
    """Two tables that differ in one row were told apart by the number of folds, or by a refusal, at any epsilon."""
    made = heart.organiser(tmp_path)
    shapes = []
    for k, name in enumerate(heart.SITES[:2]):
        place = heart.admitted(made, name, n=100)
        rows = Site.read(place).rows()
        if k:  # one patient in another ward leaves two, or fewer in a fold than a cell must have
            rows.X[:, 2:] = 0.0
            rows.X[:2, 2] = 1.0
            rows.save(place / "rows.npz")
        shared = sharing.share(place, epsilon=0.5)
        shapes.append((shared.summary.count > 0).tolist())
    assert shapes[0] == shapes[1] == [True] * 5 + [False]


def audited_epsilon(epsilon: float, messages: int, noise: float = 1.0, times: int = 4000) -> float:
    """Return a lower bound of epsilon (99.9%), assuming Gaussian noise: a linear test, tables with an extreme row."""
    delta, rng = 1e-5, np.random.default_rng(0)
    X, y = np.column_stack([np.ones(20), rng.uniform(-1, 1, 20)]), rng.uniform(-1, 1, 20)
    budget, how = Budget(epsilon, delta), {"feature_names": ("(intercept)", "x"), "by_fold": False}

    def scores(sign: float) -> np.ndarray:
        rows = Rows(X.copy(), y.copy())
        rows.X[0, 1], rows.y[0] = sign, 1.0
        generator = SmallerNoise(np.random.default_rng(int(sign) + 7), noise)
        drawn = [private_summary("a", rows, LinearLoss(), budget, rng=generator, **how)
                 for _ in range(times * messages)]  # fmt: skip
        one = np.array([one.hessian[-1, 0, 1] - one.gradient[-1, 1] for one in drawn])
        return one.reshape(times, messages).sum(axis=1)

    here, there = scores(1.0), scores(-1.0)
    best = 0.0
    for cut in np.quantile(np.concatenate([here, there]), np.linspace(0.05, 0.95, 19)):
        hits, false = int((here > cut).sum()), int((there > cut).sum())
        # Clopper-Pearson bounds of both probabilities, for 19 cuts
        least = beta.ppf(0.001 / 38, hits, times - hits + 1) if hits else 0.0
        most = beta.ppf(1 - 0.001 / 38, false + 1, times - false)
        best = max(best, float(norm.ppf(least) - norm.ppf(most)))

    def excess(epsilon: float) -> float:  # of a Gaussian mechanism whose two outcomes are `best` apart
        return norm.cdf(best / 2 - epsilon / best) - np.exp(epsilon) * norm.cdf(-best / 2 - epsilon / best) - delta

    return float(brentq(excess, 0.0, 60.0)) if best > 1e-3 else 0.0


class SmallerNoise:
    """Draws normal numbers of another standard deviation than 1."""

    def __init__(self, rng: np.random.Generator, size: float) -> None:
        self.rng, self.size = rng, size

    def standard_normal(self, n: int) -> np.ndarray:
        return self.size * self.rng.standard_normal(n)


@pytest.mark.exhaustive
@pytest.mark.parametrize("epsilon", [2.0, 8.0])
def test_an_audit_finds_no_more_than_the_stated_epsilon_and_finds_noise_that_is_too_small(epsilon: float) -> None:
    assert 0.0 < audited_epsilon(epsilon, 1) < epsilon  # the test has power, and the promise holds
    assert epsilon < 8.0 or audited_epsilon(epsilon, 1, noise=0.5) > epsilon  # less is too little for 4000 tries


@pytest.mark.exhaustive
def test_an_audit_of_three_messages_finds_no_more_than_their_composed_epsilon() -> None:
    together, found = composed_epsilon([(4.0, 1e-5)] * 3), audited_epsilon(4.0, 3)
    assert 4.0 < together < 12.0  # less than their sum
    assert 0.0 < found < together
    assert audited_epsilon(4.0, 3, noise=0.5) > together


def in_rounds(places: list[Path]) -> list[np.ndarray]:
    """The thetas that neighbours end with."""
    network, found = MemoryNetwork(), [np.zeros(0)] * len(places)

    def live(u: int) -> None:
        participant = Participant(site_plan(places[u]), network.join(), Journal(places[u].name), patience=QUICK)
        found[u] = participant.run()
        participant.linger()

    try:
        in_threads(live, len(places))
    finally:
        network.close()
    return found


def test_rounds_with_noise_are_a_fit_of_the_noisy_sums_and_of_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = heart.organiser(tmp_path, FUSED.replace("rounds = 3", "rounds = 1500"), names=("north", "south"))
    north, south = (heart.admitted(made, name, n=100) for name in ("north", "south"))
    sharing.share_with_neighbours(north, 20.0)
    noisy, _ = Site.read(north).noisy_sums()
    names, rows = made.contract.column_names, Site.read(south).rows()
    whole = Summaries.stack([noisy, site_summary("south", rows, LinearLoss(), feature_names=names)]).repaired()
    problem = Problem(whole, Graph(["north", "south"], [("north", "south")]), lam=0.1)
    found = problem.objective(np.array(in_rounds([north, south])))
    assert found == pytest.approx(solve(problem, tol=1e-9).objective, rel=1e-6)

    def plan_of(folder: str) -> SitePlan:
        """Of other patients; what noise is added to does not matter where the noisy sums are the same."""
        again = heart.organiser(tmp_path / folder, FUSED, names=("north", "south"))
        place = heart.admitted(again, "north", n=100, seed=7)
        exact = site_plan(place)
        with monkeypatch.context() as patch:
            patch.setattr(sharing, "private_summary", lambda *_, **__: noisy)
            sharing.share_with_neighbours(place, 8.0)
        assert not np.array_equal(exact.theta, site_plan(place).theta)
        return site_plan(place)

    plans = [site_plan(north), plan_of("other")]
    shards = [Shard(plan) for plan in plans]
    for t in range(1, 6):
        for shard in shards:
            shard.node_step(t)
            shard.take({1: np.full(4, 0.1 * t)})
            shard.edge_step()
    assert shards[0].theta.tobytes() == shards[1].theta.tobytes()
    assert plans[0].rows.data.digest == plans[1].rows.data.digest


def test_noise_is_drawn_once_for_a_summary_rounds_and_what_is_published(tmp_path: Path, capfd) -> None:
    """And everything that follows from it costs its epsilon once."""
    made = heart.organiser(tmp_path, FUSED, names=("north", "south"))
    north = heart.admitted(made, "north", n=100)
    words = [str(north), "--give-up", "0.1", "--linger", "0"]
    sent = sharing.share(north, epsilon=1.0, folds=0).path.read_bytes()
    for _ in range(2):
        sharing.share_with_neighbours(north, 1.0)
        assert run_site(None, words) == 4  # it waits for south
    assert (north / "sent" / "north.summary").read_bytes() == sent
    with pytest.raises(ParameterError, match="noise with epsilon 1 and delta 1e-05 was added"):
        sharing.share_with_neighbours(north, 2.0)
    assert run_site(None, [*words, "--follow", str(north.parent / "north.csv")]) == 2
    assert "leave out --follow" in capfd.readouterr().err
    change_settings(north, share_result=True)
    result = Result(Site.read(north), site_plan(north), np.zeros(4), 100)
    write_model(replace(result, plan=replace(result.plan, noisy=None)))
    with pytest.raises(DataError, match="not made by rounds with the noisy sums that left"):
        Site.read(north).publish()
    write_model(result)
    file = made.read_published(Site.read(north).publish())
    assert '"epsilon":1.0' in file.files["model.json"].replace(" ", "")
    left = Site.read(north).ledger.entries()
    assert [one.what for one in left if one.sums] == ["share", "run", "publish"]
    assert len({one.sums for one in left if one.sums}) == 1 and {one.epsilon for one in left if one.sums} == {1.0}
    with pytest.raises(DataError, match="would reveal more than was promised"):
        sharing.share(north, epsilon=1.0)
    change_settings(north, epsilon=1.9)  # room for one more of the same, as nothing was counted twice
    sharing.share(north, epsilon=1.0)
    (north / "sent" / "north.summary").write_bytes(sent)
    assert site_plan(north).noisy is not None  # sums that left, too
    (north / "sent" / "north.summary").unlink()
    assert run_site(None, words) == 2 and "north.summary" in capfd.readouterr().err


def test_rounds_with_noise_are_for_least_squares_and_means_and_an_ordered_lam(tmp_path: Path, capfd) -> None:
    logistic = 'method = "fused"\n' + heart.LOGISTIC
    made = heart.organiser(tmp_path / "logistic", logistic, names=("north", "south"))
    site = heart.enrolled(made, "north", heart.write_deaths(tmp_path / "t.csv"), tmp_path / "logistic" / "north")
    with pytest.raises(ParameterError, match="--epsilon is for the linear and the mean loss"):
        sharing.share_with_neighbours(site, 8.0)
    chosen = heart.organiser(tmp_path / "cv", FUSED.replace("lam = 0.1", 'lam = "cv"'), names=("north", "south"))
    north = heart.admitted(chosen, "north", n=100)
    sharing.share_with_neighbours(north, 8.0)
    assert run_site(None, [str(north), "--give-up", "0.1"]) == 2
    assert "no rows can be held out to choose lam" in capfd.readouterr().err
    ((order, _),) = chosen.order(lam=0.1)
    Site.read(north).accept(order)
    assert run_site(None, [str(north), "--give-up", "0.1", "--linger", "0"]) == 4


@pytest.mark.parametrize("noise", [0.01, 100.0])
def test_a_table_with_the_noisy_sums_of_means_has_their_means(noise: float) -> None:
    rng = np.random.default_rng(0)
    rows, budget = Rows(rng.uniform(-1, 1, (50, 3))), Budget(1.0)
    drawn = SmallerNoise(rng, noise)
    summary = private_summary("a", rows, MeanLoss(), budget, feature_names=("x", "y", "z"), by_fold=False, rng=drawn)
    table = table_of_sums(summary)
    np.testing.assert_allclose(table.X.sum(axis=0), -summary.gradient.sum(axis=0), atol=1e-9)
    if noise < 1.0:  # else what noise has made negative is 0
        np.testing.assert_allclose(table.X.T @ table.X, Summaries.stack([summary]).repaired().scores[0].sum(axis=0))


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-5), (4.0, 1e-7)])
def test_noise_is_that_of_dp_accounting_also_for_several_messages(epsilon: float, delta: float) -> None:
    dp = pytest.importorskip("dp_accounting")
    rows, budget = Rows(np.linspace(-1, 1, 10)[:, None], np.ones(10)), Budget(epsilon, delta)
    made = private_summary("a", rows, LinearLoss(), budget, feature_names=("x",), by_fold=False)
    event = dp.GaussianDpEvent(made.privacy.noise / np.sqrt(3))  # the largest change of x^2, x y and y^2
    accountant = dp.pld.PLDAccountant(dp.NeighboringRelation.REPLACE_ONE)
    for messages in (1, 2, 3):
        accountant.compose(event)
        expected = pytest.approx(accountant.get_epsilon(delta), rel=1e-5)
        assert composed_epsilon([(epsilon, delta)] * messages) == expected


def test_messages_with_noise_are_added_up_to_the_budget_of_the_site(tmp_path: Path) -> None:
    made = heart.organiser(tmp_path)
    north = heart.admitted(made, "north", n=100)
    change_settings(north, epsilon=2.0)
    with pytest.raises(DataError, match="epsilon is 3, but this site may spend 2 at most"):
        sharing.share(north, epsilon=3.0)
    first = sharing.share(north, epsilon=1.0).summary
    second = sharing.share(north, epsilon=1.0).summary
    assert not np.array_equal(first.hessian, second.hessian)
    assert 1.0 < composed_epsilon([(1.0, 1e-5)] * 2) < 2.0 < composed_epsilon([(1.0, 1e-5)] * 4)
    with pytest.raises(DataError, match=r"epsilon .* together, and at most 2 may be spent"):
        for _ in range(2):
            sharing.share(north, epsilon=1.0)
    with pytest.raises(DataError, match="would reveal more"):
        sharing.share(north)


def test_other_ranges_in_the_contract_do_not_hide_that_a_table_has_one_more_row(tmp_path: Path) -> None:
    """Rows were recognised as they are prepared: a wider range made all of them new."""
    north = heart.admitted(heart.organiser(tmp_path), "north")
    sharing.share(north)
    text = heart.CONTRACT.replace("low = 20", "low = 10").replace('["A", "B", "C"]', '["C", "A", "B"]')
    made = heart.organiser(tmp_path / "other", text)
    sites = {}
    for name, table in {"south": add_row(north), "east": tmp_path / "north.csv"}.items():
        sites[name] = heart.enrolled(made, name, table, tmp_path / "other" / name)
    with pytest.raises(DataError, match=r"but not exactly these, have left before \(as north"):
        sharing.share(sites["south"])
    with pytest.raises(DataError, match="noise would protect nothing"):
        sharing.share(sites["east"], epsilon=1.0)
    sharing.share(sites["east"], folds=0)  # the same rows: nothing new


def test_sums_at_another_own_estimate_do_not_leave_under_another_contract(tmp_path: Path) -> None:
    table, sites = heart.write_deaths(tmp_path / "t.csv"), []
    for place, low in (("one", 20), ("two", 10)):
        made = heart.organiser(tmp_path / place, heart.LOGISTIC.replace("low = 20", f"low = {low}"))
        sites.append(heart.enrolled(made, "north", table, tmp_path / place / "north"))
    made.write_queries([Query("north", 2, np.full(4, 0.1), np.zeros(4))], {})
    change_settings(sites[1], below_minima=True)
    sharing.share(sites[1])
    with pytest.raises(DataError, match="contract with other columns or another loss"):
        sharing.share(sites[0], folds=0)
    change_settings(sites[0], below_minima=True)
    sharing.share(sites[0], folds=0)
    change_settings(sites[1], below_minima=False)
    with pytest.raises(DataError, match="contract with other columns or another loss"):
        sharing.answer(sites[1], made.directory / "asks" / "north@2.ask")


def test_a_table_with_one_more_row_is_refused_under_a_contract_with_other_columns(tmp_path: Path) -> None:
    north = heart.admitted(heart.organiser(tmp_path), "north")
    sharing.share(north)
    text = heart.CONTRACT.replace('ward = {levels = ["A", "B", "C"]}\n', "").replace("days", "stay")
    made = heart.organiser(tmp_path / "other", text)
    sites = {}
    for name, table in {"south": add_row(north), "west": tmp_path / "north.csv", "east": None}.items():
        table = heart.write_table(tmp_path / "east.csv", seed=7) if table is None else table
        (path := tmp_path / f"{name}-stay.csv").write_text(table.read_text().replace("days", "stay"))
        sites[name] = heart.enrolled(made, name, path, tmp_path / "other" / name)
    with pytest.raises(DataError, match=r"but not exactly these, have left before \(as north"):
        sharing.share(sites["south"])
    with pytest.raises(DataError, match=r"contract with other columns or another loss \(as north"):
        sharing.share(sites["west"])  # the same patients
    sharing.share(sites["east"])  # others


def test_curves_with_other_knots_of_the_same_table_do_not_span_one_patients_age(tmp_path: Path) -> None:
    """Five contracts with knots about 47, of which each was harmless, gave the row of the only patient of that age."""
    rng, sites = np.random.default_rng(0), []
    years = (np.arange(30, 80) + rng.uniform(-0.2, 0.2, 50)).round(4)
    years[17] = 47.0
    age = np.append(np.repeat(np.delete(years, 17), 2), 47)
    lines = [f"{one},{rng.normal(80, 12):.1f},{rng.normal(10, 3):.1f}" for one in age]
    (tmp_path / "t.csv").write_text("age,weight,days\n" + "\n".join(lines) + "\n")
    for k, knot in enumerate((46.1, 46.5, 47.0, 47.5, 47.9, 46.1)):
        text = f'name = "heart"\nloss = "linear"\nfeatures.age.knots = [20, {knot}, 100]\n'
        text += f'features.weight = {{low = 0, high = {160 + 10 * k}}}\ntarget.name = "days"\n'
        made = heart.organiser(tmp_path / str(k), text)
        sites.append(heart.enrolled(made, "north", tmp_path / "t.csv", tmp_path / str(k) / "north"))
    made = [natural_basis(years, (20.0, knot, 100.0)) for knot in (46.1, 46.5, 47.0, 47.5, 47.9)]
    curves, alone = np.column_stack([np.ones(50), *made]), years == 47
    spanned = curves @ np.linalg.lstsq(curves, alone.astype(float), rcond=1e-15)[0]
    np.testing.assert_allclose(spanned, alone, atol=0.1)  # of five contracts
    sharing.share(sites[0], folds=0)
    for one in sites[1:5]:
        with pytest.raises(DataError, match=r"other columns or another loss .* --below-minima"):
            sharing.share(one, folds=0)
    sharing.share(sites[5], folds=0)  # the same columns in another federation
    change_settings(sites[1], below_minima=True)
    sharing.share(sites[1], folds=0)
    assert Site.read(sites[1]).ledger.entries()[0].note == "the custodian lifts the hard minima"


def exported(row: str) -> str:
    """Return a patient as another program writes it."""
    age, ward, days = row.split(",")
    return f"{float(np.float32(age)):.12g},{ward},{float(days):.1f}"


STORIES = {
    "everything twice and one more row": lambda a, b, one: [a, [*a, *a, one]],
    "one column with more digits": lambda a, b, one: [a, [f"{row}4" for row in a[1:]]],
    "one column shifted": lambda a, b, one: [a, [f"1{row}" for row in a[1:]]],
    "another export, rounded and in single precision": lambda a, b, one: [a, [*map(exported, a), one]],
    "thirty more": lambda a, b, one: [a, [*a, *b[:30]]],
    "one patient in common": lambda a, b, one: [a, [*b, a[7]]],
    "another value of one patient": lambda a, b, one: [a, [*a[1:], f"{a[0]}4"]],
}


def joined(
    folder: Path, number: int, rows: list[str], contract: str = heart.CONTRACT, header: str = "age,ward,days"
) -> Path:
    """Return the directory of a site with these rows, in a federation of its own."""
    made = heart.organiser(folder / f"f{number}", contract)
    (folder / f"t{number}.csv").write_text(f"{header}\n" + "\n".join(rows) + "\n")
    return heart.enrolled(made, "north", folder / f"t{number}.csv", folder / f"f{number}" / "north")


def patients(seed: int, n: int = 100) -> list[str]:
    rng = np.random.default_rng(seed)
    return [f"{rng.uniform(30, 79):.1f},{'ABC'[k % 3]},{rng.uniform(1, 9):.2f}" for k in range(n)]


@pytest.mark.parametrize("story", STORIES)
def test_tables_with_some_of_the_same_patients_are_not_shared_without_noise(tmp_path: Path, story: str) -> None:
    first, last = STORIES[story](patients(1), patients(2), "41.3,A,5.11")
    wide = heart.CONTRACT.replace("high = 100", "high = 1000")
    sharing.share(joined(tmp_path, 0, first, wide), folds=0)
    again = joined(tmp_path, 1, last, wide)
    with pytest.raises(DataError, match=r"some of these patients, but not exactly these"):
        sharing.share(again, folds=0)
    sharing.share(again, epsilon=1.0)  # noise protects the others


@pytest.mark.parametrize("loss", ["linear", "logistic"])
def test_two_exports_do_not_give_the_patients_who_are_in_one_only(tmp_path: Path, loss: str) -> None:
    """Twelve patients differed, which was enough; one of them was in ward C, or sums at several points gave all."""
    old, contract, header = patients(1, 160), heart.CONTRACT, "age,ward,days"
    if loss == "logistic":
        old = [f"{row},{'no' if k % 5 < 2 else 'yes'}" for k, row in enumerate(old)]
        contract = heart.LOGISTIC.replace("[target]", "days = {low = 0, high = 10}\n[target]")
        header += ",died"
    sharing.share(joined(tmp_path, 0, old[:148], contract, header), folds=0)
    with pytest.raises(DataError, match="Share the new patients alone, as a site of their own, or share with noise"):
        sharing.share(again := joined(tmp_path, 1, old, contract, header), folds=0)
    change_settings(again, below_minima=True)
    sharing.share(again, folds=0)


SMOKER = heart.CONTRACT.replace("[target]", 'smoker = {levels = ["no", "yes"]}\n[target]')


def test_categories_alone_do_not_hide_one_more_patient_under_another_contract(tmp_path: Path) -> None:
    rng, header = np.random.default_rng(1), "sex,ward,smoker,days"
    rows = [f"{rng.choice(['f', 'm'])},{'ABC'[k % 3]},{rng.choice(['no', 'yes'])},{rng.integers(0, 3)}"
            for k in range(100)]  # fmt: skip
    age = 'age = {unit = "years", low = 20, high = 100}'
    narrow, wide = (one.replace(age, 'sex = {levels = ["f", "m"]}') for one in (heart.CONTRACT, SMOKER))
    sharing.share(joined(tmp_path, 0, rows, narrow, header), folds=0)
    with pytest.raises(DataError, match="some of these patients, but not exactly these"):
        sharing.share(joined(tmp_path, 1, [*rows, "m,C,yes,2"], wide, header), folds=0)
    with pytest.raises(DataError, match="other columns or another loss"):
        sharing.share(joined(tmp_path, 2, rows, wide, header), folds=0)


def test_a_few_patients_in_common_are_known_under_other_columns(tmp_path: Path) -> None:
    """Exact sums of 27 patients left after noise, since they were less than a tenth of both tables."""
    rng, header = np.random.default_rng(1), "age,ward,smoker,days"
    rows = [f"{rng.uniform(30, 90):.3f},{'ABC'[k % 3]},{'yes' if k % 2 else 'no'},{rng.uniform(1, 20):.3f}"
            for k in range(580)]  # fmt: skip
    sharing.share(joined(tmp_path, 0, rows[:300], heart.CONTRACT, header), epsilon=1.0)
    again = joined(tmp_path, 1, rows[273:], SMOKER, header)
    for epsilon in (None, 1.0):
        with pytest.raises(DataError, match="would reveal more than was promised"):
            sharing.share(again, folds=0, epsilon=epsilon)


def test_other_patients_with_small_whole_numbers_are_shared_in_turn(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number, contract in enumerate([heart.CONTRACT] * 3 + [SMOKER] * 2):
        rows = [f"{rng.integers(40, 80)},{'ABC'[k % 3]},{rng.integers(1, 9)},{rng.choice(['no', 'yes'])}"
                for k in range(100)]  # fmt: skip
        sharing.share(joined(tmp_path, number, rows, contract, "age,ward,days,smoker"), folds=0)


def test_messages_about_the_same_patients_are_counted_in_all_federations(tmp_path: Path) -> None:
    table, answered = heart.write_deaths(tmp_path / "t.csv"), 0
    for name in ("one", "two"):
        made = heart.organiser(tmp_path / name, f"messages = 3\n{heart.LOGISTIC}")
        site = heart.enrolled(made, "north", table, tmp_path / name / "north")
        start = sharing.share(site, folds=0).summary.at
        for number in (2, 3):
            shift = 0.1 * number if name == "one" else 0.05 * number + 0.01
            made.write_queries([Query("north", number, start + shift, np.zeros(4))], {})
            path = made.directory / "asks" / f"north@{number}.ask"
            if name == "one":
                answered += sharing.answer(site, path).path is not None
            else:
                with pytest.raises(DataError, match="3 messages have left this site"):
                    sharing.answer(site, path)
    assert answered == 2


def test_the_same_patients_in_another_order_are_not_shared_in_other_folds(tmp_path: Path) -> None:
    rows = patients(1)
    sharing.share(joined(tmp_path, 0, rows))
    sharing.share(joined(tmp_path, 1, rows))  # nothing new
    again = joined(tmp_path, 2, rows[::-1])
    with pytest.raises(DataError, match="folds would reveal more about single rows"):
        sharing.share(again)
    sharing.share(again, folds=0)


def test_other_patients_are_shared_in_turn(tmp_path: Path) -> None:
    a, b = patients(1), patients(2)
    for number, rows in enumerate([a, b[:30], b[30:60], b[60:], patients(3)]):
        sharing.share(joined(tmp_path, number, rows), folds=0)


@pytest.mark.parametrize(
    "then",
    [
        pytest.param(lambda a, b: [*a, *b[:30]], id="thirty more"),
        pytest.param(lambda a, b: a[:50], id="half"),
        pytest.param(lambda a, b: [f"{row}4" for row in a], id="another column"),
    ],
)
def test_noise_is_for_patients_and_not_for_a_table(tmp_path: Path, then) -> None:
    a = patients(1)
    sharing.share(joined(tmp_path, 0, a), epsilon=4.0)
    other = then(a, patients(2))
    with pytest.raises(DataError, match="would reveal more than was promised"):
        sharing.share(joined(tmp_path, 1, other), folds=0)
    with pytest.raises(DataError, match="would reveal more than was promised"):
        sharing.share(joined(tmp_path, 2, other), epsilon=4.0)
    sharing.share(joined(tmp_path, 3, patients(3)), epsilon=4.0)


def test_a_ledger_that_lost_a_file_does_not_forget(tmp_path: Path) -> None:
    rows = patients(1)
    site = joined(tmp_path, 0, rows)
    sharing.share(site, folds=0)
    folder = Site.read(site).ledger.folder
    (line,) = folder.glob("*.jsonl")
    text = line.read_bytes()
    line.write_bytes(b"")
    with pytest.raises(DataError, match=r"but not exactly these, have left before .the line in the ledger is lost"):
        sharing.share(joined(tmp_path, 1, rows[1:]), folds=0)
    line.write_bytes(text)
    for path in folder.glob("*.rows"):
        path.unlink()
    with pytest.raises(DataError, match="is missing or damaged, so it is not known which rows were shared"):
        sharing.share(joined(tmp_path, 2, patients(2)), folds=0)


def test_a_fingerprint_that_another_site_is_writing_is_not_a_damaged_one(tmp_path: Path) -> None:
    sharing.share(joined(tmp_path, 0, patients(0)), folds=0)
    second = joined(tmp_path, 1, patients(1))
    folder = Site.read(second).ledger.folder
    (known,) = folder.glob("*.rows")
    with replacing(folder / f"{'0' * 64}.rows", private=True) as unfinished:
        unfinished.write_bytes(known.read_bytes()[:10])
        sharing.share(second, folds=0)
