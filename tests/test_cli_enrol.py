"""``fedkin federation`` and ``fedkin site``: from a contract to certificates, with the commands people type."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import heart
from fedkin.federate import Site

FINGERPRINT = r"([0-9a-f]{4}-){7}[0-9a-f]{4}"


@pytest.fixture
def run(run):
    """As everywhere, with a contract, a graph, a list of sites and a table in the folder."""
    Path("heart.toml").write_text(heart.CONTRACT)
    heart.write_graph(Path("ring.csv"))
    heart.write_sites(Path("list.csv"))
    heart.write_table(Path("patients.csv"))
    return run


def test_from_contract_to_certificate_as_people_type_it(run):
    said = run("federation", "new", "heart.toml", "--graph", "ring.csv", "--sites", "list.csv")
    mark = re.search(FINGERPRINT, said)[0]
    assert "4 sites, 4 candidate edges" in said and "the organiser's" in said
    assert "4 invites" in run("federation", "invite", "heart")
    said = run("site", "join", "heart/invites/north.invite", "--data", "patients.csv", "--fingerprint", mark)
    key = re.search(FINGERPRINT, said)[0]
    assert "40 rows fit the contract" in said and "Send north/north.request to the organiser" in said
    said = run("federation", "admit", "heart", "north/north.request", "--fingerprint", key)
    assert "Send heart/admitted/north.admit to north; there: fedkin site accept north north.admit" in said
    assert "admitted until" in run("site", "accept", "north", "heart/admitted/north.admit")
    run("federation", "order", "heart", "--lam", "0.25")
    assert "lam 0.25" in run("site", "accept", "north", "heart/order.json")
    said = run("federation", "expel", "heart", "south")
    assert "'north', 'east'" in said and "for good" in said
    assert "south was expelled" in run("site", "accept", "north", "heart/notices/south.notice")
    assert "admit DIR north.request" in run("site", "renew", "north")
    assert "north is renewed until" in run("federation", "admit", "heart", "north/north.request")
    run("site", "accept", "north", "heart/admitted/north.admit")
    states = {one["name"]: one for one in json.loads(run("federation", "status", "heart", "--json"))["sites"]}
    assert states["north"]["until"] and states["south"]["out"] and not states["east"]["until"]
    run("site", "leave", "north", "--yes")
    assert "north has left" in run("federation", "admit", "heart", "north/notices/north.notice")
    assert "west" in run("federation", "status", "heart")


def test_mistakes_get_one_line_with_the_cure(run):
    assert "--sites FILE.csv" in run("federation", "new", "heart.toml", code=2)
    assert "go together" in run("federation", "new", "heart.toml", "--ca-cert", "x", code=2)
    run("federation", "new", "heart.toml", "--graph", "ring.csv")
    assert "not empty" in run("federation", "new", "heart.toml", "--graph", "ring.csv", code=2)
    assert "has no site 'nobody'" in run("federation", "invite", "heart", "nobody", code=2)
    run("federation", "invite", "heart")
    wrong = ["site", "join", "heart/invites/north.invite", "--data", "patients.csv", "--fingerprint", "12"]
    assert "do not join" in run(*wrong, code=2)
    assert "is not a site's directory" in run("site", "accept", "north", "heart/invites/north.invite", code=2)
    assert "not an organiser's directory" in run("federation", "status", ".", code=2)


def test_rows_are_checked_in_words_without_writing(run):
    run("federation", "new", "heart.toml", "--graph", "ring.csv")
    run("federation", "invite", "heart", "north")
    for what in ("heart.toml", "heart/invites/north.invite"):
        assert "fits the contract" in run("site", "check", what, "--data", "patients.csv")
    heart.write_table(Path("few.csv"), n=7)
    said = run("site", "check", "heart.toml", "--data", "few.csv", code=2)
    assert "7 rows, but at least 12 are needed" in said and "only 2 rows with 'B'" in said
    heart.write_table(Path("wrong.csv"), extra="60,Z,3\n")
    assert "unknown level 'Z'" in run("site", "check", "heart.toml", "--data", "wrong.csv", code=2)
    assert "unknown level 'Z'" in run("site", "join", "heart/invites/north.invite", "--data", "wrong.csv", code=2)
    assert "at least 12 are needed" in run("site", "join", "heart/invites/north.invite", "--data", "few.csv", code=2)
    assert not Path("north").exists()


def test_the_rules_of_a_site_are_shown_changed_and_confirmed(run):
    run("federation", "new", "heart.toml", "--graph", "ring.csv")
    run("federation", "invite", "heart", "north")
    run("site", "join", "heart/invites/north.invite", "--data", "patients.csv")
    assert "cell = 5" in run("site", "settings", "north", "--cell", "5", "--share-result")
    assert "share_result = true" in run("site", "settings", "north")
    assert "laxer than the 3" in run("site", "settings", "north", "--cell", "2", code=2)
    path = Path("north/site.toml")
    path.write_text(path.read_text().replace("cell = 5", "cell = 4"))
    assert "--confirm" in run("site", "settings", "north", code=2)
    assert "cell = 4" in run("site", "settings", "north", "--confirm")
    assert Site.read(Path("north")).settings.cell == 4
