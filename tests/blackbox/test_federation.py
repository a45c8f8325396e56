"""From a contract to certificates: what organiser and sites write, tell and refuse, by the commands people type."""

from __future__ import annotations

import csv
import json
import re
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest

import fedkin

from .federations import (
    CONTRACT,
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
    organise,
    process,
    share,
    write_all,
    write_ring,
    write_table,
)

FINGERPRINT = r"(?:[0-9a-f]{4}-){7}[0-9a-f]{4}"


@pytest.fixture(scope="module")
def heart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The organiser's directory of four admitted sites; tests change copies of it only."""
    made = organise(tmp_path_factory.mktemp("admitted"))
    enrol(made, *SITES)
    return made


def standings(heart: Path) -> dict[str, dict[str, object]]:
    return {one["name"]: one for one in document("federation", "status", heart, "--json")["sites"]}


def content_of(folder: Path) -> str:
    """All files of a directory as text."""
    return "\n".join(path.read_bytes().decode(errors="replace") for path in folder.rglob("*") if path.is_file())


# --- the whole sequence -----------------------------------------------------------------------------------------------


def test_the_sequence_of_the_readme_ends_with_a_model_at_each_site(tmp_path: Path) -> None:
    """Organiser and sites have a directory each, and files travel by copy."""
    office = tmp_path / "office"
    office.mkdir()
    write_ring(office / "edges.csv")
    (office / "sites.csv").write_text(
        "site,host,port\n" + "".join(f"{name},127.0.0.1,{7447 + k}\n" for k, name in enumerate(SITES))
    )
    cli("federation", "draft", write_all(tmp_path / "example.csv"), "--target", "days", "--site", "site",
        "--out", office / "heart.toml")  # fmt: skip
    new = cli("federation", "new", "heart.toml", "--sites", "sites.csv", "--graph", "edges.csv", cwd=office)
    authority = re.search(FINGERPRINT, new)[0]
    cli("federation", "invite", "heart", cwd=office)
    for k, name in enumerate(SITES):
        own = tmp_path / name
        own.mkdir()
        write_table(own / "patients.csv", k)
        shutil.copy(office / "heart/invites" / f"{name}.invite", own)
        said = cli("site", "join", f"{name}.invite", "--data", "patients.csv", "--fingerprint", authority, cwd=own)
        key = re.search(FINGERPRINT, said)[0]
        shutil.copy(own / name / f"{name}.request", office)
        cli("federation", "admit", "heart", f"{name}.request", "--fingerprint", key, cwd=office)
        shutil.copy(office / "heart/admitted" / f"{name}.admit", own)
        cli("site", "accept", name, f"{name}.admit", cwd=own)
        cli("site", "share", name, "--yes", cwd=own)
        shutil.copy(own / name / "sent" / f"{name}.summary", office / "heart/summaries")
    assert all(one["until"] and one["summaries"] == 1 for one in standings(office / "heart").values())
    cli("fit", "heart/summaries", "--out", "model", cwd=office)
    cli("federation", "deliver", "heart", "model", cwd=office)
    whole = fedkin.load(office / "model")
    assert sorted(whole.members()) == sorted([SITES[:2], SITES[2:]])
    for k, name in enumerate(SITES):
        own = tmp_path / name
        shutil.copy(office / "heart/models" / f"{name}.model", own)
        cli("site", "accept", name, f"{name}.model", cwd=own)
        cli("predict", f"{name}/model", "patients.csv", "--out", "predicted.csv", cwd=own)
        with (own / "predicted.csv").open() as stream:
            predicted = np.array([float(line["prediction"]) for line in csv.DictReader(stream)])
        X, days = design(k)
        alone = X @ np.linalg.lstsq(X, days, rcond=None)[0]
        assert predicted.shape == (ROWS,) and np.abs(predicted - alone).mean() < 0.5
    assert not list(office.rglob("rows*")) and not list(office.rglob("patients*"))


@pytest.mark.processes
def test_the_program_ends_with_codes_and_writes_errors_to_the_other_stream(tmp_path: Path) -> None:
    (tmp_path / "heart.toml").write_text(CONTRACT)
    table = write_table(tmp_path / "t.csv", extra=["50,Z,3,no"])
    said = process("federation", "check", tmp_path / "heart.toml", "--data", table, code=2)
    assert "ward" in said.stdout + said.stderr and "'Z'" in said.stdout + said.stderr
    said = process("federation", "status", tmp_path, code=2)
    assert said.stdout == "" and len(said.stderr.splitlines()) == 1 and str(tmp_path) in said.stderr


# --- the contract -----------------------------------------------------------------------------------------------------


def test_a_draft_fits_its_table_and_tells_nothing_of_single_rows(tmp_path: Path) -> None:
    table = write_table(tmp_path / "t.csv", extra=["33.3333,D,21.4321,no"])
    path = tmp_path / "heart.toml"
    cli("federation", "draft", table, "--target", "days", "--out", path)
    contract = tomllib.loads(path.read_text())
    assert contract["target"]["name"] == "days" and contract["loss"] == "linear"
    assert contract["features"]["ward"]["levels"] == ["A", "B", "C"]  # of D there is a single row
    ages = [float(line.split(",")[0]) for line in table.read_text().splitlines()[1:]]
    age = contract["features"]["age"]
    assert age["low"] < min(ages) and max(ages) < age["high"] and not {age["low"], age["high"]} & set(ages)
    assert "33.3333" not in path.read_text() and "21.4321" not in path.read_text()
    cli("federation", "check", path, "--data", write_table(tmp_path / "rest.csv"))
    cli("federation", "draft", table, "--target", "died", "--out", tmp_path / "died.toml")
    assert tomllib.loads((tmp_path / "died.toml").read_text())["loss"] == "logistic"


def test_everything_that_does_not_fit_is_told_at_once_with_column_and_line(tmp_path: Path) -> None:
    (tmp_path / "heart.toml").write_text(CONTRACT)
    table = write_table(tmp_path / "t.csv", extra=["x7,B,5,no", "50,D,5,no", "500,A,5,no", ",A,5,no", "50,A,-3,no"])
    for command in (("federation", "check"), ("site", "check")):
        told = cli(*command, tmp_path / "heart.toml", "--data", table, code=2).splitlines()
        for k, (column, value) in enumerate(
            [("age", "'x7'"), ("ward", "'D'"), ("age", "500"), ("age", "missing"), ("days", "-3")]
        ):
            line = rf"line {ROWS + 2 + k}\b"  # the header is line 1
            assert any(column in one and value in one and re.search(line, one) for one in told), (column, told)


# --- joining ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "extra", "culprits"),
    [
        (11, [], [r"\b11 rows", r"\b15\b"]),  # three for each of five parameters
        (ROWS, ["50,D,5,no", "60,D,5,no"], ["ward", "'D'", r"\b2 rows", r"\b3\b"]),
        (ROWS, ["500,A,5,no"], ["age", "500", rf"line {ROWS + 2}"]),
    ],
)
def test_rows_below_a_threshold_or_outside_the_contract_do_not_join(
    tmp_path: Path, n: int, extra: list[str], culprits: list[str]
) -> None:
    heart = organise(tmp_path, CONTRACT.replace('"C"]', '"C", "D"]'))
    said = join(heart, "north", write_table(tmp_path / "t.csv", n=n, extra=extra), code=2)
    assert all(re.search(culprit, said) for culprit in culprits), said
    assert not (tmp_path / "north").exists()


def test_keys_and_rows_stay_at_the_site(heart: Path) -> None:
    office = content_of(heart)
    assert office.count("-----BEGIN PRIVATE KEY") <= 1  # the authority's own
    for name in SITES:
        place = heart.parent / name
        assert (place / "site.key").read_text().splitlines()[1] not in office
        for path in (place / "site.key", place / "rows.npz"):
            assert path.stat().st_mode & 0o777 == 0o600
        assert place.stat().st_mode & 0o777 == 0o700
        for line in (heart.parent / f"{name}.csv").read_text().splitlines()[1:]:
            assert not any(cell in office for cell in line.split(",")[::2])
    assert heart.stat().st_mode & 0o777 == 0o700 and (heart / "authority.key").stat().st_mode & 0o777 == 0o600


def test_an_invite_names_the_sites_own_neighbours_and_nobody_else(heart: Path) -> None:
    invite = (heart / "invites" / "north.invite").read_text()
    assert "south" in invite and "west" in invite and '"east"' not in invite


def test_status_tells_who_is_invited_admitted_and_out(heart: Path, tmp_path: Path) -> None:
    made = copied(heart, tmp_path)
    assert all(one["invited"] and one["until"] and not one["out"] for one in standings(made).values())
    cli("federation", "expel", made, "south")
    cli("site", "leave", made.parent / "north", "--yes")
    cli("federation", "admit", made, made.parent / "north" / "notices" / "north.notice")
    assert {name for name, one in standings(made).items() if one["out"]} == {"north", "south"}
    said = cli("federation", "admit", made, made.parent / "south" / "south.request", "--yes", code=2)
    assert "south" in said
    assert "north" in cli("site", "share", made.parent / "north", code=2)
    # a neighbour takes both notices: the organiser's, and the one that the site signed itself
    for name, place in (("south", made), ("north", made.parent / "north")):
        assert name in cli("site", "accept", made.parent / "west", place / "notices" / f"{name}.notice")


# --- what was changed, or is somebody else's --------------------------------------------------------------------------


def test_a_contract_that_was_edited_afterwards_is_named(heart: Path, tmp_path: Path) -> None:
    for file, old, new in (
        ("contract.toml", "high = 60", "high = 61"),
        ("graph.csv", "north", "east"),
        ("sites.csv", "127.0.0.1", "127.0.0.2"),
        ("federation.json", "heart", "heard"),
    ):
        made = copied(heart, tmp_path / file)
        path = made / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))
        assert file in cli("federation", "invite", made, code=2)


def test_an_edited_invite_is_refused(heart: Path, tmp_path: Path) -> None:
    invite = Path(shutil.copy(heart / "invites" / "north.invite", tmp_path))
    edit(invite, lambda body: body.update(n_sites=7))
    table = write_table(tmp_path / "t.csv")
    assert "north.invite" in cli("site", "join", invite, "--data", table, "--into", tmp_path / "north", "--yes", code=2)
    assert not (tmp_path / "north").exists()


def test_an_edited_request_is_refused_and_nobody_is_admitted(tmp_path: Path) -> None:
    heart = organise(tmp_path)
    join(heart, "north")
    request = tmp_path / "north" / "north.request"
    edit(request, lambda body: body.update(site="south"))
    assert "north.request" in cli("federation", "admit", heart, request, "--yes", code=2)
    assert not any(one["until"] for one in standings(heart).values())


@pytest.mark.parametrize("kind", ["admit", "order", "notice"])
def test_edited_answers_of_the_organiser_are_refused(heart: Path, tmp_path: Path, kind: str) -> None:
    made = copied(heart, tmp_path)
    cli("federation", "order", made, "--lam", 0.1)
    cli("federation", "expel", made, "west")
    file = {"admit": "admitted/north.admit", "order": "order.json", "notice": "notices/west.notice"}[kind]
    path = made / file
    cli("site", "accept", made.parent / "north", path)
    path.write_text(path.read_text().replace(body_of(path)["run"], "0" * 16))
    assert path.name in cli("site", "accept", made.parent / "north", path, code=2)


def test_changed_line_ends_and_blanks_do_no_harm(heart: Path, tmp_path: Path) -> None:
    made = copied(heart, tmp_path)
    path = made / "admitted" / "north.admit"
    path.write_bytes(json.dumps(json.loads(path.read_text()), indent=4).replace("\n", "\r\n").encode())
    cli("site", "accept", made.parent / "north", path)


def test_files_of_another_site_or_federation_are_refused(heart: Path, tmp_path: Path) -> None:
    made = copied(heart, tmp_path)
    north = made.parent / "north"
    said = cli("site", "accept", north, made / "admitted" / "south.admit", code=2)
    assert "south" in said and "north" in said
    other = organise(tmp_path / "other")
    enrol(other, "north")
    assert "north.request" in cli(
        "federation", "admit", made, other.parent / "north" / "north.request", "--yes", code=2
    )
    cli("federation", "order", other, "--lam", 0.1)
    cli("federation", "expel", other, "west")
    for file in ("admitted/north.admit", "order.json", "notices/west.notice"):
        assert Path(file).name in cli("site", "accept", north, other / file, code=2)
    # nor does a site's directory change its federation
    said = join(other, "north", into=north, code=2)
    assert "north" in said


def test_a_fingerprint_that_differs_is_refused_on_both_sides(tmp_path: Path) -> None:
    heart = organise(tmp_path)
    table, wrong = write_table(tmp_path / "t.csv"), "-".join(["1234"] * 8)
    words = ("site", "join", heart / "invites" / "north.invite", "--data", table, "--into", tmp_path / "north", "--yes")
    refused = cli(*words, "--fingerprint", wrong, code=2)
    assert wrong in refused and len(re.findall(r"(?:[0-9a-f]{4}-){7}[0-9a-f]{4}", refused)) == 1  # not the right one
    assert not (tmp_path / "north").exists()
    cli(*words)
    request = tmp_path / "north" / "north.request"
    assert wrong in cli("federation", "admit", heart, request, "--fingerprint", wrong, code=2)
    assert not (heart / "admitted" / "north.admit").exists()


def test_a_second_key_of_a_site_needs_the_organisers_word(heart: Path, tmp_path: Path) -> None:
    made = copied(heart, tmp_path)
    share(made, "north")
    again = tmp_path / "again"
    join(made, "north", into=again)
    assert "--again" in cli("federation", "admit", made, again / "north.request", "--yes", code=2)
    cli("federation", "admit", made, again / "north.request", "--again", "--yes")
    cli("site", "accept", again, made / "admitted" / "north.admit")
    assert "key" in cli("site", "accept", made.parent / "north", made / "admitted" / "north.admit", code=2)
    # what the lost key signed counts no more
    assert "north.summary" in cli("fit", made / "summaries", "--out", tmp_path / "model", code=2)
    assert not (tmp_path / "model").exists()


def test_a_request_that_answers_a_replaced_invite_is_refused_until_the_site_joins_again(tmp_path: Path) -> None:
    heart = organise(tmp_path)
    join(heart, "north")
    key = (tmp_path / "north" / "site.key").read_bytes()
    cli("federation", "invite", heart, "north")
    request = tmp_path / "north" / "north.request"
    assert "north.invite" in cli("federation", "admit", heart, request, "--yes", code=2)
    join(heart, "north")
    assert (tmp_path / "north" / "site.key").read_bytes() == key
    cli("federation", "admit", heart, request, "--yes")
    assert standings(heart)["north"]["until"]


def test_a_renewed_key_replaces_the_old_one_once_it_is_accepted(heart: Path, tmp_path: Path) -> None:
    made = copied(heart, tmp_path)
    north = made.parent / "north"
    key = (north / "site.key").read_bytes()
    cli("site", "renew", north)
    assert (north / "site.key").read_bytes() == key
    cli("federation", "admit", made, north / "north.request", "--yes")
    cli("site", "accept", north, made / "admitted" / "north.admit")
    assert (north / "site.key").read_bytes() != key
    share(made, "north")
    assert standings(made)["north"]["summaries"] == 1


def test_the_key_of_another_site_is_refused(heart: Path, tmp_path: Path) -> None:
    made = copied(heart, tmp_path)
    shutil.copy(made.parent / "south" / "site.key", made.parent / "north" / "site.key")
    assert "site.key" in cli("site", "share", made.parent / "north", code=2)
    (made.parent / "west" / "rows.npz").chmod(0o644)
    assert "rows.npz" in cli("site", "share", made.parent / "west", code=2)


def test_a_site_may_be_stricter_than_the_contract_and_not_laxer(heart: Path, tmp_path: Path) -> None:
    north = copied(heart, tmp_path).parent / "north"
    assert "5" in cli("site", "settings", north, "--cell", 5)
    assert tomllib.loads((north / "site.toml").read_text())["cell"] == 5
    said = cli("site", "settings", north, "--cell", 2, code=2)
    assert "cell" in said and "3" in said
    path = north / "site.toml"
    path.write_text(path.read_text().replace("cell = 5", "cell = 4"))
    assert "--confirm" in cli("site", "share", north, code=2)
    cli("site", "settings", north, "--confirm")
    cli("site", "share", north, "--yes")


@pytest.mark.processes
def test_without_a_graph_sites_share_and_do_not_run(tmp_path: Path) -> None:
    (tmp_path / "heart.toml").write_text(KIN)
    (tmp_path / "sites.csv").write_text("site\nnorth\nsouth\n")
    cli("federation", "new", "heart.toml", "--sites", "sites.csv", cwd=tmp_path)
    heart = tmp_path / "heart"
    cli("federation", "invite", heart, "south")
    assert [path.name for path in (heart / "invites").iterdir()] == ["south.invite"]
    place = enrol(heart, "south")
    cli("site", "share", place, "--yes")
    assert (place / "sent" / "south.summary").exists()
    assert "fused" in process("site", "run", place, code=2).stderr
