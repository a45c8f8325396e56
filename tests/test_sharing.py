"""Sums as signed files: what a site shares and refuses to share, and what the organiser takes."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

import heart
from fedkin.core import Problem, Query, Summaries, summarise
from fedkin.data import Federation, read_columns
from fedkin.errors import DataError, FedkinError, ParameterError
from fedkin.federate import Organiser, Site, SiteSettings, change_settings, check_disclosure, sharing, site_view
from fedkin.federate.envelope import Signer, seal
from fedkin.federate.trust import SecurityError
from fedkin.solvers import solve

N = 150
LOGISTIC = heart.CONTRACT.split("[target]")[0].replace('"linear"', '"logistic"') + (
    '[target]\nname = "died"\nkind = "category"\nlevels = ["no", "yes"]\n'
)


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


def signer_of(place: Path) -> Signer:
    return Signer.site(Site.read(place).pair())


# --- what is shared ---------------------------------------------------------------------------------------------------


def test_files_of_sums_say_what_the_rows_say(four):
    found = sharing.read_summaries(four.directory / "summaries")
    assert list(found.summaries) == list(heart.SITES) and found.round == 1 and found.missing == ()
    contract, folder = four.contract, four.directory.parent
    rows = {name: contract.prepare(read_columns(folder / f"{name}.csv")) for name in heart.SITES}
    federation = Federation(rows, ["(intercept)", *contract.schema.names])
    expected = summarise(federation, contract.loss_object(), folds=contract.folds, seed=contract.seed)
    for name, summary in found.summaries.items():
        np.testing.assert_array_equal(summary.hessian, expected[name].hessian)
        np.testing.assert_array_equal(summary.gradient, expected[name].gradient)
    graph = four.graph
    from_files = solve(Problem(Summaries.stack(found.summaries.values()), graph, lam=0.01)).theta
    np.testing.assert_allclose(from_files, solve(Problem(federation, graph, lam=0.01)).theta, rtol=0, atol=1e-10)


def test_no_value_of_a_row_is_in_what_leaves(four):
    for name in heart.SITES:
        table = (four.directory.parent / f"{name}.csv").read_text()
        values = {cell for line in table.split()[1:] for cell in line.split(",") if len(cell) > 4}
        sent = (four.directory / "summaries" / f"{name}.summary").read_text()
        assert len(values) > N and not any(value in sent for value in values)
        prepared = Site.read(four.directory.parent / name).rows()
        numbers = set(re.findall(r"-?[0-9.]+(?:e-?[0-9]+)?", sent))
        assert not numbers & {repr(float(value)) for value in prepared.X[:, 1]}


def test_a_dry_run_shows_all_and_writes_nothing(tmp_path):
    _, north, _ = two(tmp_path)
    shown = sharing.share(north, dry_run=True)
    assert shown.path is None and not (north / "sent").exists()
    assert {told.name for told in shown.summary.described()} >= {"rows", "gradient", "hessian", "column_sums"}
    for folds, parts in ((0, ["all rows"]), (3, ["fold 1", "fold 2", "fold 3"])):
        rows = sharing.share(north, folds=folds, dry_run=True).summary.described()[0]
        assert list(rows.parts) == parts and len(rows.numbers) == len(parts)
        assert sum(rows.numbers) == shown.summary.n_samples
        assert rows.what == f"how many rows there are, {'in each of 3 folds' if folds else 'in all'}"
    assert sharing.share(north).path == north / "sent" / "north.summary"
    assert sharing.share(north).path.stat().st_mode & 0o777 == 0o600  # the same again is the same


def test_ids_that_are_numbers_or_no_file_names(tmp_path):
    names = ("7", "8", "9")
    made = heart.organiser(tmp_path, names=names)
    for name in names:
        send(made, sharing.share(heart.admitted(made, name, n=N)).path)
    found = sharing.read_summaries(made.directory / "summaries")
    assert list(found.summaries) == list(names)
    rows = {int(name): made.contract.prepare(read_columns(tmp_path / f"{name}.csv")) for name in names}
    pooled = summarise(Federation(rows, ["(intercept)", *made.contract.schema.names]))
    np.testing.assert_array_equal(found.summaries["8"].count, pooled[8].count)  # the same folds as in a pooled table
    np.testing.assert_array_equal(found.summaries["8"].value, pooled[8].value)
    odd = heart.organiser(tmp_path / "odd", names=("a b", "c/d"))
    send(odd, sharing.share(heart.admitted(odd, "site-1", n=N)).path)
    found = sharing.read_summaries(odd.directory / "summaries")
    assert list(found.summaries) == ["c/d"] and found.missing == ("site-0",)


# --- thresholds -------------------------------------------------------------------------------------------------------


def joined_with(made: Organiser, table: Path) -> Path:
    done = Site.join(heart.invite_of(made, "north"), table, table.parent / "north")
    Site.read(done.directory).accept(made.admit(done.request).path)
    return done.directory


@pytest.mark.parametrize(
    ("n", "extra", "words"),
    [
        (9, "", "9 rows, but at least 15 are needed"),
        (N, "50,D,5\n60,D,5\n", "ward: only 2 rows with 'D'"),
    ],
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
        site_view(place)


def test_small_folds_small_classes_and_columns_of_two_values_are_cells_too(tmp_path):
    made = heart.organiser(tmp_path, LOGISTIC)
    lines = [f"{30 + k % 2},A,no" for k in range(100)]
    lines[3] = "77,A,no"
    (tmp_path / "t.csv").write_text("age,ward,died\n" + "\n".join([*lines, "30,A,yes", "31,A,yes"]) + "\n")
    with pytest.raises(DataError, match="died: only 2 rows with 'yes'"):
        joined_with(made, tmp_path / "t.csv")
    contract, rows = made.contract, made.contract.prepare(read_columns(tmp_path / "t.csv"))
    few = rows.take(np.arange(12))
    findings = check_disclosure(contract, few, site="x", folds=5)
    assert any("12 rows in 5 folds" in str(one) for one in findings)
    two_values = rows.take(np.flatnonzero(rows.X[:, 1] != rows.X[3, 1]))
    two_values.X[5:, 1] = two_values.X[0, 1]
    words = [str(one) for one in check_disclosure(contract, two_values)]
    assert any(one.startswith("age: only 2 rows with '31'") for one in words)


def test_a_site_that_is_too_small_for_folds_shares_sums_over_all_rows(tmp_path):
    made = heart.organiser(tmp_path)
    small = heart.admitted(made, "north", n=30)
    with pytest.raises(DataError, match=r"(?s)30 rows in 5 folds are only 6.*ward: 10 rows with 'A'"):
        sharing.share(small, folds=5)
    assert sharing.share(heart.admitted(made, "west", n=60)).summary.count[:3].tolist() == [30, 30, 0]
    summary = sharing.share(small, folds=0).summary
    assert summary.count.tolist() == [0, 0, 0, 0, 0, 30]
    send(made, small / "sent" / "north.summary")
    send(made, sharing.share(heart.admitted(made, "south", n=N)).path)
    found = sharing.read_summaries(made.directory / "summaries").summaries
    np.testing.assert_array_equal(found["north"].hessian, summary.hessian)
    rows = Site.read(small).rows()
    np.testing.assert_allclose(found["north"].hessian.sum(axis=0), rows.X.T @ rows.X)


def test_sums_are_not_shared_in_other_folds_once_more(tmp_path):
    _, north, _ = two(tmp_path)
    for wrong in (1, 6, -1):
        with pytest.raises(ParameterError, match="--folds must be 0 or a whole number from 2 to 5"):
            sharing.share(north, folds=wrong)
    assert sharing.share(north, folds=3).summary.count.tolist() == [50, 50, 50, 0, 0, 0]
    with pytest.raises(DataError, match="sums in 3 folds were shared before"):
        sharing.share(north, folds=5)
    assert (sharing.share(north).summary.count[:3] == 50).all()


def test_the_sites_own_thresholds_count_where_they_are_stricter(tmp_path):
    _, north, _ = two(tmp_path)
    change_settings(north, rows=N + 1)
    with pytest.raises(DataError, match=f"{N} rows, but at least {N + 1} are needed"):
        sharing.share(north)


def test_sums_of_rows_that_changed_are_not_shared_again(tmp_path):
    made, north, _ = two(tmp_path)
    sharing.share(north)
    table = tmp_path / "north.csv"
    table.write_text(table.read_text() + "44.5,A,9\n")
    Site.join(heart.invite_of(made, "north"), table, north)
    with pytest.raises(DataError, match="the difference would give away the rows that changed"):
        sharing.share(north)
    (north / "sent" / "rows.json").write_text("{")
    with pytest.raises(DataError, match=r"rows\.json is damaged"):
        sharing.share(north)


def test_who_is_not_admitted_or_is_out_or_expired_shares_nothing(tmp_path):
    made = heart.organiser(tmp_path)
    place = heart.joined(made, "north", n=N).directory
    with pytest.raises(SecurityError, match="not admitted yet"):
        sharing.share(place)
    place = heart.admitted(made, "south", n=N)
    Site.read(place).leave()
    with pytest.raises(SecurityError, match="has left"):
        sharing.share(place)


# --- what the organiser takes -----------------------------------------------------------------------------------------


def test_sums_that_a_site_did_not_sign_for_itself_under_this_contract_are_refused(tmp_path):
    made, north, south = two(tmp_path)
    honest = sharing.share(north).path
    place = send(made, honest)
    body, folder = body_of(honest), made.directory / "summaries"
    other = heart.organiser(tmp_path / "other")
    for forged, signer, words in (
        (body, signer_of(south), "south signed it, but it is about north"),
        (body | {"site": "south"}, signer_of(north), "north signed it, but it is about south"),
        (body, Signer.authority(made.signing()), "organiser signed it, but only the site itself"),
        (body | {"contract": "0" * 64}, signer_of(north), "for another contract"),
        (body | {"run": "0" * 16}, signer_of(north), "another federation"),
        (body | {"summary": body["summary"] | {"site": "south"}}, signer_of(north), "say that they are of 'south'"),
        (body | {"summary": body["summary"] | {"seed": 5}}, signer_of(north), "not those of the contract"),
        (body | {"summary": {}}, signer_of(north), "missing required field"),
        (body, signer_of(heart.admitted(other, "north", tmp_path / "other")), "not issued by the authority"),
    ):
        place.write_bytes(seal("summary", forged, signer))
        with pytest.raises(FedkinError, match=rf"north\.summary.*{words}"):
            sharing.read_summaries(folder)
    place.write_bytes(honest.read_bytes())
    assert list(sharing.read_summaries(folder).summaries) == ["north"]


def test_two_files_of_one_site_are_both_named(tmp_path):
    made, north, _ = two(tmp_path)
    first = send(made, sharing.share(north).path)
    (first.parent / "copy.summary").write_bytes(first.read_bytes())
    with pytest.raises(DataError, match=r"north\.summary and .*copy\.summary are both of north"):
        sharing.read_summaries(first.parent)


def test_sums_of_a_site_that_is_out_count_no_more(tmp_path):
    made, north, south = two(tmp_path)
    for place in (north, south):
        send(made, sharing.share(place).path)
    made.expel("south")
    with pytest.raises(DataError, match=r"south\.summary: south has left or was expelled.*remove"):
        sharing.read_summaries(made.directory / "summaries")
    (made.directory / "summaries" / "south.summary").unlink()
    assert sharing.read_summaries(made.directory / "summaries").missing == ("east", "west")


def test_sums_that_a_lost_key_signed_count_no_more(tmp_path):
    made, north, _ = two(tmp_path)
    send(made, sharing.share(north).path)
    fresh = heart.joined(made, "north", tmp_path / "elsewhere", n=N)
    Site.read(fresh.directory).accept(made.admit(fresh.request, again=True).path)
    with pytest.raises(SecurityError, match=r"north\.summary: north lost the key"):
        sharing.read_summaries(made.directory / "summaries")
    send(made, sharing.share(fresh.directory).path)
    assert list(sharing.read_summaries(made.directory / "summaries").summaries) == ["north"]


def test_sums_count_while_the_certificate_lasts_or_as_of_a_day(four):
    folder = four.directory / "summaries"
    with pytest.raises(SecurityError, match=r"\.summary: the certificate of \w+ ended on"):
        sharing.read_summaries(folder, now=datetime.now(UTC) + timedelta(days=100))
    assert len(sharing.read_summaries(folder, now=datetime.now(UTC) + timedelta(days=80)).summaries) == 4


def test_whoever_has_the_charter_can_check_sums_elsewhere(four, tmp_path):
    for path in (four.directory / "summaries").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(DataError, match=r"federation\.json.*ask the organiser"):
        sharing.read_summaries(tmp_path)
    charter = four.directory / "federation.json"
    (tmp_path / "federation.json").write_bytes(charter.read_bytes())
    alone = sharing.read_summaries(tmp_path)
    assert sorted(alone.summaries) == sorted(heart.SITES) and alone.missing == ()
    (tmp_path / "federation.json").unlink()
    assert len(sharing.read_summaries(tmp_path, charter).summaries) == 4
    with pytest.raises(DataError, match="no summaries"):
        sharing.read_summaries(four.directory / "asks", four.directory)


# --- questions and answers --------------------------------------------------------------------------------------------


def logistic_tables(folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("north", "south"):
        age, ward = rng.uniform(30, 90, N).round(2), np.array(["A", "B", "C"])[np.arange(N) % 3]
        died = np.where(rng.random(N) < 0.5, "yes", "no")
        lines = [f"{a},{w},{d}" for a, w, d in zip(age, ward, died, strict=True)]
        (folder / f"{name}.csv").write_text("age,ward,died\n" + "\n".join(lines) + "\n")


@pytest.fixture
def asked(tmp_path) -> tuple[Organiser, Path, Path]:
    """North and south have shared first sums of a logistic loss; the organiser has asked both."""
    made = heart.organiser(tmp_path, LOGISTIC + "\n", names=("north", "south"))
    logistic_tables(tmp_path)
    places = []
    for name in ("north", "south"):
        done = Site.join(heart.invite_of(made, name), tmp_path / f"{name}.csv", tmp_path / name)
        Site.read(done.directory).accept(made.admit(done.request).path)
        send(made, sharing.share(done.directory).path)
        places.append(done.directory)
    made.write_queries([ask(name, 2) for name in ("north", "south")], {"round": 2})
    return made, *places


def ask(name: str, number: int, at: float = 0.1) -> Query:
    return Query(name, number, np.full(4, at), np.zeros(4), 10.0)


def ask_file(made: Organiser, name: str, number: int = 2) -> Path:
    return made.directory / "asks" / f"{name}@{number}.ask"


def test_questions_are_answered_and_read_when_all_have(asked):
    made, north, south = asked
    folder = made.directory / "summaries"
    answer = sharing.answer(north, ask_file(made, "north"))
    assert answer.round == 2 and answer.path.name == "north@2.summary" and answer.summary.gap >= 0
    send(made, answer.path)
    with pytest.raises(DataError, match=r"north@2\.summary is the answer of north to question 2, which 'south'"):
        sharing.read_summaries(folder)
    send(made, sharing.answer(south, ask_file(made, "south")).path)
    found = sharing.read_summaries(folder)
    assert found.round == 2 and list(found.summaries) == ["north", "south"]
    assert all((one.at == 0.1).all() and one.gap is not None for one in found.summaries.values())
    assert made.read_state() == {"round": 2}


def test_questions_for_others_of_others_and_of_old_rounds_are_refused(asked, tmp_path):
    made, north, south = asked
    with pytest.raises(SecurityError, match="it is for south, but this is north"):
        sharing.answer(north, ask_file(made, "south"))
    body = body_of(ask_file(made, "north"))
    path = tmp_path / "forged.ask"
    for forged, signer, words in (
        (body, signer_of(south), "south signed it, but only the organiser"),
        (body | {"contract": "0" * 64}, Signer.authority(made.signing()), "another contract"),
        (body | {"run": "0" * 16}, Signer.authority(made.signing()), "another federation"),
        (body | {"ask": body["ask"] | {"theta": [0.1]}}, Signer.authority(made.signing()), "expected 1|4"),
    ):
        path.write_bytes(seal("ask", forged, signer))
        with pytest.raises(FedkinError, match=words):
            sharing.answer(north, path)
    sharing.answer(north, ask_file(made, "north"))
    sharing.answer(north, ask_file(made, "north"))  # the same question again gives the same answer
    made.write_queries([ask("north", 2, at=0.2)], {})
    with pytest.raises(DataError, match="question 2 was answered already"):
        sharing.answer(north, ask_file(made, "north"))
    made.write_queries([ask("north", 3)], {})
    sharing.answer(north, ask_file(made, "north", 3))
    with pytest.raises(DataError, match=r"question \d was answered already"):
        sharing.answer(north, ask_file(made, "north"))


def test_no_more_answers_than_the_contract_allows(asked):
    made, north, _ = asked
    most = made.contract.messages
    made.write_queries([ask("north", most), ask("north", most + 1)], {})
    sharing.answer(north, ask_file(made, "north", most))
    with pytest.raises(DataError, match=f"allows {most} messages"):
        sharing.answer(north, ask_file(made, "north", most + 1))


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


def test_nobody_answers_before_sharing(tmp_path):
    made = heart.organiser(tmp_path)
    north = heart.admitted(made, "north", n=N)
    made.write_queries([ask("north", 2)], {})
    with pytest.raises(DataError, match="has shared no summary yet"):
        sharing.answer(north, ask_file(made, "north"))


# --- noise ------------------------------------------------------------------------------------------------------------


def test_noisy_sums_are_shared_once_and_say_what_they_promise(tmp_path):
    pytest.importorskip("dp_accounting")
    made, north, south = two(tmp_path)
    shared = sharing.share(north, epsilon=2.0, delta=1e-6)
    exact = sharing.share(south).summary
    assert exact.privacy is None and shared.summary.privacy.epsilon == 2.0
    # age from 20 to 100 becomes -1 to 1; days are 0 to 100
    assert shared.summary.privacy.limits.tolist() == [1.0, 1.0, 1.0, 1.0, 100.0]
    assert shared.summary.n_samples == N
    rows = Site.read(north).rows()
    assert not np.allclose(shared.summary.hessian.sum(axis=0), rows.X.T @ rows.X, atol=1e-3)
    send(made, shared.path)
    found = sharing.read_summaries(made.directory / "summaries").summaries["north"]
    assert found.privacy.delta == 1e-6
    for again in ({}, {"epsilon": 2.0}):
        with pytest.raises(DataError, match=r"sums with noise were shared before: send .*north\.summary"):
            sharing.share(north, **again)
    with pytest.raises(DataError, match="sums without noise were shared before"):
        sharing.share(south, epsilon=1.0)
    made.write_queries([ask("north", 2)], {})
    with pytest.raises(DataError, match="an answer has none"):
        sharing.answer(north, ask_file(made, "north"))


def test_noise_needs_ranges_in_the_contract(tmp_path):
    made = heart.organiser(tmp_path, heart.CONTRACT.replace(", low = 20, high = 100", ""))
    with pytest.raises(DataError, match="gives 'age' no plausible range"):
        sharing.share(heart.admitted(made, "north", n=N), epsilon=1.0)
