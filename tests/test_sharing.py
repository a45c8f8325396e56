"""Sums as signed files: what a site shares and refuses to share, and what the organiser takes and fits."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

import fedkin
import heart
from fedkin.cli import main
from fedkin.core import Query, summarise
from fedkin.data import Federation, read_columns
from fedkin.errors import DataError, FedkinError
from fedkin.federate import (
    Organiser,
    SecurityError,
    Site,
    SiteSettings,
    change_settings,
    check_disclosure,
    received,
    sharing,
    site_plan,
)
from fedkin.federate.messages import seal
from fedkin.federate.trust import Pair

N = 150


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Organiser:
    """A federation whose four sites have shared their sums; tests do not change it."""
    made = heart.organiser(tmp_path_factory.mktemp("four"))
    for name in heart.SITES:
        send(made, sharing.share(heart.admitted(made, name, n=N)).path)
    return made


def send(made: Organiser, path: Path) -> Path:
    """Carry a file to the organiser's summaries."""
    there = made.directory / "summaries" / path.name
    there.write_bytes(path.read_bytes())
    return there


def body_of(path: Path) -> dict:
    return json.loads(path.read_text())["body"]


def two(folder: Path, contract: str = heart.CONTRACT) -> tuple[Organiser, Path, Path]:
    """An organiser, and north and south admitted."""
    made = heart.organiser(folder, contract)
    return made, heart.admitted(made, "north", n=N), heart.admitted(made, "south", n=N)


def signer_of(place: Path) -> Pair:
    return Site.read(place).pair()


def test_ids_that_are_numbers_or_no_file_names(tmp_path):
    names = ("7", "8", "9")
    made = heart.organiser(tmp_path, names=names)
    for name in names:
        send(made, sharing.share(heart.admitted(made, name, n=N)).path)
    found = received.read_summaries(made.directory / "summaries")
    assert list(found.summaries) == list(names)
    rows = {int(name): made.contract.prepare(read_columns(tmp_path / f"{name}.csv")) for name in names}
    pooled = summarise(Federation(rows, ["(intercept)", *made.contract.schema.names]))
    np.testing.assert_array_equal(found.summaries["8"].count, pooled[8].count)  # the same folds as in a pooled table
    np.testing.assert_array_equal(found.summaries["8"].value, pooled[8].value)
    odd = heart.organiser(tmp_path / "odd", names=("a b", "c/d"))
    send(odd, sharing.share(heart.admitted(odd, "site-1", n=N)).path)
    found = received.read_summaries(odd.directory / "summaries")
    assert list(found.summaries) == ["c/d"] and found.missing == ("site-0",)


def joined_with(made: Organiser, table: Path) -> Path:
    return heart.enrolled(made, "north", table)


@pytest.mark.parametrize(
    ("n", "extra", "words"),
    [(9, "", "9 rows, but at least 15 are needed"), (N, "50,D,5\n60,D,5\n", "ward: only 2 rows with 'D'")],
)
def test_too_little_is_refused_in_words(tmp_path, n, extra, words):
    """When joining; and when sharing or running, whatever became of the rows since."""
    made = heart.organiser(tmp_path, heart.CONTRACT.replace('"C"', '"C", "D"') + "[rounds]\nlam = 0.1\n")
    small = heart.write_table(tmp_path / "small.csv", n=n, extra=extra)
    with pytest.raises(DataError, match=words):
        joined_with(made, small)
    assert not (tmp_path / "north").exists()
    place = joined_with(made, heart.write_table(tmp_path / "t.csv", n=N))
    made.contract.prepare(read_columns(small)).save(place / "rows.npz")
    with pytest.raises(DataError, match=f"(?s)nothing is shared.*{words}"):
        sharing.share(place)
    assert not (place / "sent").exists()
    with pytest.raises(DataError, match=f"(?s)no rounds, because single rows could be recognised.*{words}"):
        site_plan(place)


def test_sums_at_the_estimate_that_share_would_refuse_are_refused_before_a_key_is_made(tmp_path, capsys):
    """Only one smoking man is in ward A: with all pairs in many rows, the counts say nothing of it."""
    features = 'smoker = {levels = ["no", "yes"]}\nsex = {levels = ["f", "m"]}'
    contract = heart.LOGISTIC.replace('age = {unit = "years", low = 20, high = 100}', features)
    k = np.arange(120)
    ward, smoker, sex = k % 3, k // 3 % 2, k // 6 % 2
    sex[np.flatnonzero((ward == 0) & (smoker == 1) & (sex == 1))[1:]] = 0
    died = np.random.default_rng(1).random(120) < 0.5
    table = tmp_path / "t.csv"
    cells = zip(ward, smoker, sex, died, strict=True)
    lines = [f"{'ABC'[w]},{'ny'[s]},{'fm'[m]},{'ny'[int(d)]}" for w, s, m, d in cells]
    table.write_text("ward,smoker,sex,died\n" + "\n".join(lines).replace("n", "no").replace("y", "yes") + "\n")
    made = heart.organiser(tmp_path, contract)
    invite = str(heart.invite_of(made, "north"))
    for words in (["check", invite], ["join", invite, "--yes", "--into", str(tmp_path / "north")]):
        assert main(["site", *words, "--data", str(table)]) == 2
        said = " ".join("".join(capsys.readouterr()).replace("must be fixed", "").split())
        assert "the sums at the estimate from these rows alone could single rows out" in said
        assert "some values have only 1 row" in said
    assert not (tmp_path / "north").exists()
    rounds = heart.organiser(tmp_path / "rounds", 'method = "fused"\n' + contract)
    assert not rounds.contract.check(read_columns(table))  # rounds have checks of their own


def test_numbers_that_were_written_before_and_a_ledger_that_is_missing_are_named(tmp_path, capsys):
    north = heart.admitted(heart.organiser(tmp_path), "north", n=N)
    share = ["site", "share", str(north), "--yes"]
    assert main(share) == 0
    said = capsys.readouterr()
    assert "before" not in said.err and "missing" not in said.err
    day = Site.read(north).ledger.entries()[0].time[:10]
    assert main(share) == 0
    said = capsys.readouterr()
    assert f"exactly these numbers were written for the organiser before, on {day}" in " ".join(said.err.split())
    (north / "ledger.jsonl").unlink()
    assert main(["site", "ledger", str(north)]) == 0
    said = capsys.readouterr()
    assert "ledger.jsonl is missing: its second copy" in " ".join(said.err.split()) and "2 lines" in said.err


def test_small_folds_small_classes_and_columns_of_two_values_are_cells_too(tmp_path):
    made = heart.organiser(tmp_path, heart.LOGISTIC)
    lines = [f"{30 + k % 2},A,no" for k in range(100)]
    lines[3] = "77,A,no"
    (tmp_path / "t.csv").write_text("age,ward,died\n" + "\n".join([*lines, "30,A,yes", "31,A,yes"]) + "\n")
    with pytest.raises(DataError, match="died: only 2 rows with 'yes'"):
        joined_with(made, tmp_path / "t.csv")
    contract, rows = made.contract, made.contract.prepare(read_columns(tmp_path / "t.csv"))
    few = rows.take(np.arange(4, 16))
    findings = check_disclosure(contract, few, site="x", folds=5)
    assert any("12 rows in 5 folds" in str(one) for one in findings)
    two_values = rows.take(np.flatnonzero(rows.X[:, 1] != rows.X[3, 1]))
    two_values.X[5:, 1] = two_values.X[0, 1]
    words = [str(one) for one in check_disclosure(contract, two_values)]
    assert any(one.startswith("age: only 2 rows with '31'") for one in words)


def test_sums_that_a_site_did_not_sign_for_itself_under_this_contract_are_refused(tmp_path):
    made, north, south = two(tmp_path)
    honest = sharing.share(north).path
    place = send(made, honest)
    body, folder = body_of(honest), made.directory / "summaries"
    other = heart.organiser(tmp_path / "other")
    for forged, signer, words in (
        (body, signer_of(south), "south signed it, but it is about north"),
        (body | {"site": "south"}, signer_of(north), "north signed it, but it is about south"),
        (body, made.signing(), "organiser signed it, but only the site itself"),
        (body | {"contract": "0" * 64}, signer_of(north), "for another contract"),
        (body | {"run": "0" * 16}, signer_of(north), "another federation"),
        (body | {"summary": body["summary"] | {"site": "south"}}, signer_of(north), "name the site 'south'"),
        (body | {"summary": body["summary"] | {"seed": 5}}, signer_of(north), "not those of the contract"),
        (body | {"summary": {}}, signer_of(north), "missing required field"),
        (body, signer_of(heart.admitted(other, "north", tmp_path / "other")), "not issued by the authority"),
    ):
        place.write_bytes(seal("summary", forged, signer))
        with pytest.raises(FedkinError, match=rf"north\.summary.*{words}"):
            received.read_summaries(folder)
    place.write_bytes(honest.read_bytes())
    assert list(received.read_summaries(folder).summaries) == ["north"]


def test_sums_count_while_the_certificate_lasts_or_as_of_a_day(four):
    folder = four.directory / "summaries"
    with pytest.raises(SecurityError, match=r"\.summary: the certificate of \w+ ended on"):
        received.read_summaries(folder, now=datetime.now(UTC) + timedelta(days=100))
    assert len(received.read_summaries(folder, now=datetime.now(UTC) + timedelta(days=80)).summaries) == 4


@pytest.fixture
def asked(tmp_path) -> tuple[Organiser, Path, Path]:
    """North and south have shared first sums of a logistic loss; the organiser has asked both."""
    made = heart.organiser(tmp_path, heart.LOGISTIC, names=("north", "south"))
    places = []
    for seed, name in enumerate(("north", "south")):
        done = heart.enrolled(made, name, heart.write_deaths(tmp_path / f"{name}.csv", N, seed))
        send(made, sharing.share(done).path)
        places.append(done)
    made.write_queries([ask(name, 2) for name in ("north", "south")], {"round": 2})
    return made, *places


def ask(name: str, number: int, at: float = 0.1) -> Query:
    return Query(name, number, np.full(4, at), np.zeros(4), 10.0)


def ask_file(made: Organiser, name: str, number: int = 2) -> Path:
    return made.directory / "asks" / f"{name}@{number}.ask"


def test_questions_for_others_of_others_and_of_old_rounds_are_refused(asked, tmp_path):
    made, north, south = asked
    with pytest.raises(SecurityError, match="it is for south, but this is north"):
        sharing.answer(north, ask_file(made, "south"))
    body = body_of(ask_file(made, "north"))
    path = tmp_path / "forged.ask"
    for forged, signer, words in (
        (body, signer_of(south), "south signed it, but only the organiser"),
        (body | {"contract": "0" * 64}, made.signing(), "another contract"),
        (body | {"run": "0" * 16}, made.signing(), "another federation"),
        (body | {"ask": body["ask"] | {"theta": [0.1]}}, made.signing(), "expected 1|4"),
    ):
        path.write_bytes(seal("ask", forged, signer))
        with pytest.raises(FedkinError, match=words):
            sharing.answer(north, path)
    sharing.answer(north, ask_file(made, "north"))
    sharing.answer(north, ask_file(made, "north"))  # the same question again gives the same answer
    made.write_queries([ask("north", 2, at=0.2)], {})
    with pytest.raises(DataError, match="query 2 was already answered"):
        sharing.answer(north, ask_file(made, "north"))
    made.write_queries([ask("north", 3)], {})
    sharing.answer(north, ask_file(made, "north", 3))
    with pytest.raises(DataError, match=r"query \d was already answered"):
        sharing.answer(north, ask_file(made, "north"))


def test_thresholds_and_rows_are_looked_at_again_before_an_answer(asked):
    made, north, _ = asked
    change_settings(north, cell=N)
    with pytest.raises(DataError, match="nothing is shared"):
        sharing.answer(north, ask_file(made, "north"))
    settings = SiteSettings.from_contract(made.contract)
    settings.write(north / "site.toml")
    table = north.parent / "north.csv"
    table.write_text(table.read_text() + "44.5,A,yes\n")
    Site.join(heart.invite_of(made, "north"), table, north)
    with pytest.raises(DataError, match="rows that changed"):
        sharing.answer(north, ask_file(made, "north"))


def test_nobody_answers_before_sharing_nor_after_noisy_sums(tmp_path):
    made, north, _ = two(tmp_path)
    made.write_queries([ask("north", 2)], {})
    with pytest.raises(DataError, match="has not shared a first summary yet"):
        sharing.answer(north, ask_file(made, "north"))
    shared = sharing.share(north, epsilon=2.0, delta=1e-6)
    # age from 20 to 100 becomes -1 to 1; days are 0 to 100
    assert shared.summary.privacy.limits.tolist() == [1.0, 1.0, 1.0, 1.0, 100.0]
    rows = Site.read(north).rows()
    assert not np.allclose(shared.summary.hessian.sum(axis=0), rows.X.T @ rows.X, atol=1e-3)
    with pytest.raises(DataError, match="To answer would reveal more"):
        sharing.answer(north, ask_file(made, "north"))


def test_a_model_of_summaries_keeps_its_comparison_and_command_and_options_of_tables_are_refused(run) -> None:
    made = heart.organiser(Path())
    for name in heart.SITES:
        send(made, sharing.share(heart.admitted(made, name, n=N)).path)
    document, _ = json.JSONDecoder().raw_decode(run("fit", "heart/summaries", "--out", "ours", "--json"))
    ours = fedkin.load("ours")
    assert ours.comparison == document["comparison"]
    assert ours.history["command"] == "fedkin fit heart/summaries --out ours --json"
    run("report", "ours", "--out", "page.html")
    page = Path("page.html").read_text()
    assert ours.history["command"] in page and ours.comparison["metric"] in page
    assert ours.part(["north"]).comparison is None
    assert "--target is for tables" in run("fit", "heart/summaries", "--target", "days", code=2)
    assert "--repeats is for rows in memory" in run("fit", "heart/summaries", "--repeats", "3", code=2)
    assert "--federation is for a directory of summaries" in run(
        "fit", "north.csv", "--site", "ward", "--target", "days", "--federation", "heart/federation.json", code=2
    )
