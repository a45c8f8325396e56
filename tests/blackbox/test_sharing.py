"""One message of every site: what it shows and holds, what is refused, and the fit that follows from all of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import cvxpy as cp
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

import fedkin

from .federations import (
    CONTRACT,
    DIED,
    KIN,
    ROWS,
    SITES,
    body_of,
    cli,
    copied,
    design,
    document,
    edit,
    enrol,
    join,
    numbers_in,
    organise,
    process,
    rows_of,
    share,
    write_all,
    write_table,
)


@pytest.fixture(scope="module")
def admitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The organiser's directory of four sites that have shared nothing yet; tests change copies of it only."""
    made = organise(tmp_path_factory.mktemp("admitted"))
    enrol(made, *SITES)
    return made


@pytest.fixture(scope="module")
def shared(admitted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same after all have shared, with ``all.csv`` beside it."""
    made = copied(admitted, tmp_path_factory.mktemp("shared"))
    share(made, *SITES)
    write_all(made.parent / "all.csv")
    return made


def fit(heart: Path, out: Path, *options: object, **how: object) -> str:
    return cli("fit", heart / "summaries", "--out", out, *options, **how)


def fit_pooled(heart: Path, out: Path, *options: object) -> Any:
    """The fit of all rows in one table, by the same contract."""
    folder = heart.parent
    words = ("--contract", folder / "heart.toml", "--site", "site", "--test-size", 0)
    cli("fit", folder / "all.csv", *words, *options, "--out", out)
    return fedkin.load(out)


def assert_same(ours: Any, theirs: Any, atol: float) -> None:
    np.testing.assert_allclose(ours.coef, theirs.coef, rtol=0, atol=atol)
    np.testing.assert_allclose(ours.intercept, theirs.intercept, rtol=0, atol=10 * atol)


# --- what leaves a site -----------------------------------------------------------------------------------------------


def test_a_site_sees_every_number_before_it_shares_it(admitted: Path, tmp_path: Path) -> None:
    north = copied(admitted, tmp_path).parent / "north"
    shown = cli("site", "share", north, "--dry-run")
    assert not (north / "sent").exists()
    told = {f"{float(number):.5g}" for number in re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", shown)}
    assert "--yes" in cli("site", "share", north, code=2)  # there is no terminal to ask
    assert not list(north.glob("sent/*.summary"))
    cli("site", "share", north, "--yes")
    summary = body_of(north / "sent" / "north.summary")["summary"]
    sums = {name: summary[name] for name in ("folds", "column_sums", "column_squares")}
    numbers = list(numbers_in(sums))
    assert len(numbers) > 5 * (1 + 1 + 4 + 10)  # rows, value, gradient and half of the products in each fold
    assert {f"{float(f'{number:.6g}'):.5g}" for number in numbers} <= told
    assert all(column in shown for column in ("age", "ward=B", "ward=C"))


def test_a_summary_holds_the_sums_over_the_rows_and_nothing_else(shared: Path) -> None:
    for k, name in enumerate(SITES):
        summary = body_of(shared / "summaries" / f"{name}.summary")["summary"]
        X, days = design(k)
        folds = summary["folds"]
        assert summary["columns"] == ["(intercept)", "age", "ward=B", "ward=C"]
        assert sum(fold["rows"] for fold in folds) == ROWS and min(fold["rows"] for fold in folds) >= 12
        assert sum(fold["value"] for fold in folds) == pytest.approx(days @ days / 2)
        gradient = np.sum([fold["gradient"] for fold in folds], axis=0)
        np.testing.assert_allclose(gradient, -X.T @ days, rtol=1e-10)
        upper = [np.sum([fold["hessian"][i] for fold in folds], axis=0) for i in range(4)]
        for i, line in enumerate(upper):
            np.testing.assert_allclose(line[-(4 - i) :], (X.T @ X)[i, i:], rtol=1e-10, atol=1e-9)
        cells = {str(value) for row in rows_of(k) for value in (row[0], row[2])}
        assert not any(cell in (shared / "summaries" / f"{name}.summary").read_text() for cell in cells)


def test_thresholds_of_the_site_refuse_to_share_and_name_the_numbers(admitted: Path, tmp_path: Path) -> None:
    north = copied(admitted, tmp_path).parent / "north"
    for option, least, culprits in (("--rows", ROWS + 1, [str(ROWS)]), ("--cell", 41, ["ward", "40"])):
        cli("site", "settings", north, option, least)
        said = cli("site", "share", north, code=2)
        assert all(word in said for word in [*culprits, str(least)])
        assert not (north / "sent" / "north.summary").exists()


def test_a_small_site_shares_fewer_folds_and_never_sums_in_others_later(tmp_path: Path) -> None:
    heart = organise(tmp_path)
    small = enrol(heart, "north", table=write_table(tmp_path / "small.csv", n=30))
    said = cli("site", "share", small, "--folds", 5, code=2)
    assert "30" in said and "5 folds" in said
    cli("site", "share", small, "--yes")
    rows = [fold["rows"] for fold in body_of(small / "sent" / "north.summary")["summary"]["folds"]]
    assert sum(rows) == 30 and all(count == 0 or count >= 12 for count in rows)
    large = enrol(heart, "south")
    cli("site", "share", large, "--yes", "--folds", 3)
    before = (large / "sent" / "south.summary").read_bytes()
    assert "3 folds" in cli("site", "share", large, "--folds", 5, code=2)
    cli("site", "share", large, "--yes")  # the same once more is the same
    assert body_of(large / "sent" / "south.summary")["summary"] == json.loads(before)["body"]["summary"]


def test_sums_of_rows_that_changed_are_not_shared(shared: Path, tmp_path: Path) -> None:
    made = copied(shared, tmp_path)
    table = write_table(tmp_path / "more.csv", extra=["44.5,A,9,no"])
    join(made, "north", table)
    before = (made.parent / "north" / "sent" / "north.summary").read_bytes()
    assert "rows" in cli("site", "share", made.parent / "north", code=2)
    assert (made.parent / "north" / "sent" / "north.summary").read_bytes() == before


def test_who_is_not_admitted_shares_nothing(tmp_path: Path) -> None:
    heart = organise(tmp_path)
    join(heart, "north")
    assert "north.request" in cli("site", "share", tmp_path / "north", code=2)
    assert not (tmp_path / "north" / "sent").exists()


# --- what the organiser takes -----------------------------------------------------------------------------------------


def test_an_edited_summary_is_refused_and_named(shared: Path, tmp_path: Path) -> None:
    made = copied(shared, tmp_path)
    edit(made / "summaries" / "east.summary", lambda body: body["summary"]["column_sums"].__setitem__(0, 121.0))
    assert "east.summary" in fit(made, tmp_path / "model", code=2)
    assert not (tmp_path / "model").exists()


def test_summaries_of_others_doubles_and_sites_that_are_out_are_refused(shared: Path, tmp_path: Path) -> None:
    made = copied(shared, tmp_path)
    folder = made / "summaries"
    shutil.copy(folder / "north.summary", folder / "twice.summary")
    said = fit(made, tmp_path / "model", code=2)
    assert "north.summary" in said and "twice.summary" in said
    (folder / "twice.summary").unlink()
    other = organise(tmp_path / "other")
    enrol(other, "north")
    share(other, "north")
    shutil.copy(other / "summaries" / "north.summary", folder)
    assert "north.summary" in fit(made, tmp_path / "model", code=2)
    shutil.copy(shared / "summaries" / "north.summary", folder)
    cli("federation", "expel", made, "south")
    assert "south.summary" in fit(made, tmp_path / "model", code=2)
    (folder / "south.summary").unlink()
    fit(made, tmp_path / "model")
    assert fedkin.load(tmp_path / "model").sites == ("north", "east", "west")


def test_a_folder_without_summaries_names_who_is_missing(admitted: Path, tmp_path: Path) -> None:
    said = fit(admitted, tmp_path / "model", code=2)
    assert all(name in said for name in SITES)


def test_summaries_elsewhere_are_checked_with_the_federations_file(shared: Path, tmp_path: Path) -> None:
    shutil.copytree(shared / "summaries", tmp_path / "moved")
    assert "federation.json" in cli("fit", tmp_path / "moved", "--out", tmp_path / "model", code=2)
    charter = shared / "federation.json"
    cli("fit", tmp_path / "moved", "--federation", charter, "--lam", 0.02, "--out", tmp_path / "model")
    assert len(fedkin.load(tmp_path / "model").sites) == 4


# --- the fit ----------------------------------------------------------------------------------------------------------


def test_the_fused_fit_of_summaries_is_that_of_the_pooled_table(shared: Path, tmp_path: Path) -> None:
    fit(shared, tmp_path / "ours")
    ours = fedkin.load(tmp_path / "ours")
    theirs = fit_pooled(shared, tmp_path / "theirs", "--graph", shared.parent / "edges.csv")
    assert_same(ours, theirs, 1e-10)
    assert ours.fused.lam == pytest.approx(theirs.fused.lam, rel=1e-10)
    assert sorted(ours.members()) == sorted(theirs.members()) == sorted([SITES[:2], SITES[2:]])
    assert ours.origin == {"from": "summaries", "rounds": 1}
    assert json.loads((tmp_path / "ours" / "model.json").read_text())["origin"] == ours.origin


def test_the_fused_fit_of_summaries_is_the_minimiser_that_cvxpy_finds(shared: Path, tmp_path: Path) -> None:
    lam = 0.05
    fit(shared, tmp_path / "model", "--lam", lam, "--select", "none", "--tol", 1e-9)
    model = fedkin.load(tmp_path / "model")
    theta, losses = cp.Variable((4, 4)), []
    for k in range(4):
        X, days = design(k)
        losses.append(cp.sum_squares(X @ theta[k] - days) / (2 * ROWS))
    ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
    fused = sum(cp.norm1(theta[i] - theta[j]) for i, j in ring)
    cp.Problem(cp.Minimize(sum(losses) / 4 + lam * fused)).solve(cp.CLARABEL)
    np.testing.assert_allclose(model.coef.reshape(4, 3) * [10, 1, 1], theta.value[:, 1:], atol=1e-4)
    constant = theta.value[:, 0] - 6 * theta.value[:, 1]  # age 60 is 0 in the rows
    np.testing.assert_allclose(model.intercept.ravel(), constant, atol=1e-3)


def test_the_kin_fit_of_summaries_is_that_of_the_pooled_table(tmp_path: Path) -> None:
    heart = organise(tmp_path, KIN)
    enrol(heart, *SITES)
    share(heart, *SITES)
    write_all(tmp_path / "all.csv")
    told = document("fit", heart / "summaries", "--out", tmp_path / "ours", "--json")
    ours = fedkin.load(tmp_path / "ours")
    assert_same(ours, fit_pooled(heart, tmp_path / "theirs", "--graph", tmp_path / "edges.csv"), 1e-8)
    assert sorted(map(tuple, told["groups"])) == sorted([SITES[:2], SITES[2:]])
    assert {one["name"] for one in told["comparison"]["methods"]} >= {"Local", "Global", "Fedkin"}


def test_each_site_gets_its_own_part_of_the_model(shared: Path, tmp_path: Path) -> None:
    made = copied(shared, tmp_path)
    fit(made, tmp_path / "model")
    cli("federation", "deliver", made, tmp_path / "model")
    whole, north = fedkin.load(tmp_path / "model"), made.parent / "north"
    assert "south" in cli("site", "accept", north, made / "models" / "south.model", code=2)
    edited = Path(shutil.copy(made / "models" / "north.model", tmp_path / "north.model"))
    content = edited.read_text()
    edited.write_text(content.replace(body_of(edited)["run"], "0" * 16))
    assert "north.model" in cli("site", "accept", north, edited, code=2)
    assert not (north / "model").exists()
    row = {"age": [70.0], "ward": ["B"]}
    for name in SITES:
        cli("site", "accept", made.parent / name, made / "models" / f"{name}.model")
        own = fedkin.load(made.parent / name / "model")
        assert own.sites == (name,)
        assert own.predict(row)[0] == pytest.approx(whole.predict(row, [name])[0], rel=1e-12)


# --- questions --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four sites that have shared the first sums of a logistic loss; tests change copies of it only."""
    made = organise(tmp_path_factory.mktemp("died"), DIED)
    enrol(made, *SITES)
    with pytest.MonkeyPatch.context() as patch:  # `shared` has the same patients, under another contract
        patch.setenv("FEDKIN_LEDGERS", str(made.parent / "ledgers"))
        share(made, *SITES)
    write_all(made.parent / "all.csv")
    return made


def answer(heart: Path, name: str, number: int) -> None:
    cli("site", "answer", heart.parent / name, heart / "asks" / f"{name}@{number}.ask", "--yes")
    shutil.copy(heart.parent / name / "sent" / f"{name}@{number}.summary", heart / "summaries")


def test_a_logistic_fit_after_a_few_questions_is_that_of_the_pooled_table(died: Path, tmp_path: Path) -> None:
    made, out = copied(died, tmp_path), tmp_path / "ours"
    number = 1
    while fit(made, out) and not out.exists():
        number += 1
        assert number <= 6
        for name in SITES:
            answer(made, name, number)
    ours = fedkin.load(out)
    assert ours.origin == {"from": "summaries", "rounds": number} and number > 1 and ours.fused.gap <= 1e-6
    theirs = fit_pooled(made, tmp_path / "theirs", "--graph", made.parent / "edges.csv", "--lam", repr(ours.fused.lam))
    assert ours.classes == theirs.classes == ("no", "yes") and sorted(ours.members()) == sorted(theirs.members())
    assert_same(ours, theirs, 0.01)


def test_the_answers_hold_the_gradient_at_the_point_that_was_asked_for(died: Path, tmp_path: Path) -> None:
    made = copied(died, tmp_path)
    fit(made, tmp_path / "model")
    answer(made, "north", 2)
    summary = body_of(made / "summaries" / "north@2.summary")["summary"]
    X = design(0)[0]
    y = np.array([row[3] == "yes" for row in rows_of(0)], dtype=float)
    at = np.array(summary["at"])
    mean = 1 / (1 + np.exp(-X @ at))
    gradient = np.sum([fold["gradient"] for fold in summary["folds"]], axis=0)
    np.testing.assert_allclose(gradient, X.T @ (mean - y), rtol=1e-8, atol=1e-8)
    # the point is near the estimate of all rows or of the site, so that a few questions are enough
    alone = LogisticRegression(C=np.inf, tol=1e-10).fit(X[:, 1:], y)
    assert np.abs(at - [*alone.intercept_, *alone.coef_[0]]).max() < 2


def test_questions_are_answered_once_by_the_site_that_was_asked(died: Path, tmp_path: Path) -> None:
    made = copied(died, tmp_path)
    fit(made, tmp_path / "model")
    north, ask = made.parent / "north", made / "asks" / "north@2.ask"
    said = cli("site", "answer", north, made / "asks" / "south@2.ask", code=2)
    assert "south" in said and "north" in said
    content = ask.read_text()
    ask.write_text(content.replace(body_of(ask)["run"], "0" * 16))
    assert "north@2.ask" in cli("site", "answer", north, ask, code=2)
    assert not (north / "sent" / "north@2.summary").exists()
    ask.write_text(content)
    answer(made, "north", 2)
    said = fit(made, tmp_path / "model", code=2)  # the others are waited for
    assert "south" in said and "west" in said


def test_a_site_sends_no_more_messages_than_the_contract_allows(tmp_path: Path) -> None:
    heart = organise(tmp_path, DIED.replace("[features]", "messages = 2\n[features]", 1))
    enrol(heart, *SITES)
    share(heart, *SITES)
    fit(heart, tmp_path / "model")
    for name in SITES:
        answer(heart, name, 2)
    cli("fit", heart / "summaries", "--out", tmp_path / "model", code=1)
    assert not (tmp_path / "model").exists() and not (heart / "asks" / "north@3.ask").exists()


# --- noise and short messages -----------------------------------------------------------------------------------------


def test_noise_is_added_once_and_its_epsilon_is_in_the_model(admitted: Path, tmp_path: Path) -> None:
    made = copied(admitted, tmp_path)
    share(made, *SITES, options=("--epsilon", 8, "--delta", 1e-6))
    summary = body_of(made / "summaries" / "north.summary")["summary"]
    X, days = design(0)
    gradient = np.sum([fold["gradient"] for fold in summary["folds"]], axis=0)
    assert np.abs(gradient + X.T @ days).max() > 1.0
    assert summary["privacy"]["epsilon"] == 8.0 and summary["privacy"]["delta"] == 1e-6
    for again in ((), ("--epsilon", 8), ("--epsilon", 2)):
        assert "north.summary" in cli("site", "share", made.parent / "north", *again, code=2)
    fit(made, tmp_path / "model", "--lam", 0.02)
    origin = json.loads((tmp_path / "model" / "model.json").read_text())["origin"]
    assert origin["privacy"] == {"epsilon": 8.0, "delta": 1e-6, "sites": 4}
    assert "epsilon" in cli("inspect", tmp_path / "model")


def test_noise_is_refused_after_exact_sums_without_ranges_and_for_other_losses(
    shared: Path, died: Path, tmp_path: Path
) -> None:
    assert "noise" in cli("site", "share", shared.parent / "north", "--epsilon", 1, code=2)
    assert re.search("logistic|died", cli("site", "share", died.parent / "north", "--epsilon", 1, code=2))
    heart = organise(tmp_path, CONTRACT.replace(" low = 20, high = 100,", ""))
    place = enrol(heart, "north")
    assert "'age'" in cli("site", "share", place, "--epsilon", 1, code=2)


def test_a_message_of_low_rank_keeps_the_minimum_and_gives_nearly_the_same_kin(tmp_path: Path) -> None:
    heart = organise(tmp_path, KIN)
    enrol(heart, *SITES)
    write_all(tmp_path / "all.csv")
    refused = cli("site", "share", tmp_path / "north", "--rank", 2, "--folds", 3, code=2)
    assert "a short summary (of rank 2) has no folds" in refused
    share(heart, *SITES, options=("--rank", 2))
    short = (heart / "summaries" / "north.summary").read_text()
    assert "hessian" not in short
    summary = body_of(heart / "summaries" / "north.summary")["summary"]
    X, days = design(0)
    (whole,) = summary["folds"]  # over all rows only
    assert whole["rows"] == ROWS
    factor = np.array(summary["curvature"]["factor"])
    assert sorted(factor.shape) == [2, 4]
    factor = factor if len(factor) == 2 else factor.T
    curvature = np.diag(summary["curvature"]["diagonal"]) + factor.T @ factor
    alone = np.linalg.lstsq(X, days, rcond=None)[0]
    np.testing.assert_allclose(np.linalg.solve(curvature, -np.array(whole["gradient"])), alone, rtol=1e-8)
    assert "rank 2" in cli("site", "share", tmp_path / "north", "--rank", 3, code=2)
    fit(heart, tmp_path / "ours")
    ours, theirs = fedkin.load(tmp_path / "ours"), fit_pooled(heart, tmp_path / "theirs")
    assert 0 < np.abs(ours.coef - theirs.coef).max() < 0.3 * np.abs(theirs.coef).max()


def test_a_summary_of_any_rank_keeps_the_minimum_of_the_sites_loss() -> None:
    X, days = design(0)
    alone = np.linalg.lstsq(X, days, rcond=None)[0]
    for rank in (1, 2, 4, None):
        summary = fedkin.summarise(fedkin.Federation({"north": (X, days)}), rank=rank)["north"]
        found = np.linalg.solve(summary.hessian.sum(axis=0), -summary.gradient.sum(axis=0))
        np.testing.assert_allclose(found, alone, rtol=1e-8)


# --- all of it on one machine -----------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_simulation_by_one_message_ends_with_the_models_of_the_pooled_fit(tmp_path: Path) -> None:
    names = SITES[1:3]
    (tmp_path / "heart.toml").write_text(KIN)
    lines = [",".join([name, *map(str, row)]) for k, name in enumerate(names) for row in rows_of(k)]
    (tmp_path / "all.csv").write_text("\n".join(["site,age,ward,days,died", *lines]) + "\n")
    trial = tmp_path / "trial"
    words = ("federation", "simulate", tmp_path / "heart.toml", "--data", tmp_path / "all.csv", "--site", "site")
    process(*words, "--out", trial)
    theirs = fit_pooled(trial, tmp_path / "theirs")
    assert_same(fedkin.load(trial / "model"), theirs, 1e-8)
    for name in names:
        own = fedkin.load(trial / "sites" / name / "model")
        np.testing.assert_allclose(own.coef.ravel(), theirs.coef[list(theirs.sites).index(name)].ravel(), atol=1e-8)
    assert not list((trial / "organiser").rglob("rows*")) and not list((trial / "sites").glob("*.csv"))
    # cut short before a model arrived, the same command continues, and nobody shares again
    sent = {path: path.stat().st_mtime_ns for path in trial.rglob("*.summary")}
    shutil.rmtree(trial / "sites" / names[0] / "model")
    process(*words, "--out", trial)
    assert {path: path.stat().st_mtime_ns for path in trial.rglob("*.summary")} == sent and len(sent) == 4
    assert (trial / "sites" / names[0] / "model").is_dir()
