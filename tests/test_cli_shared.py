"""``fedkin fit`` on a folder of summaries: the model of the rows, without the rows."""

from __future__ import annotations

import json
from pathlib import Path

import fedkin
import heart
from fedkin.federate import sharing


def four_sites() -> None:
    """The organiser's directory, with the summaries of all sites."""
    made = heart.organiser(Path())
    for name in heart.SITES:
        path = sharing.share(heart.admitted(made, name, n=150)).path
        (made.directory / "summaries" / path.name).write_bytes(path.read_bytes())


def test_a_model_of_summaries_keeps_its_comparison_and_command(run) -> None:
    four_sites()
    document, _ = json.JSONDecoder().raw_decode(run("fit", "heart/summaries", "--out", "ours", "--json"))
    ours = fedkin.load("ours")
    assert ours.kin is not None
    assert ours.comparison == document["comparison"]
    assert ours.history["command"] == "fedkin fit heart/summaries --out ours --json"
    assert ours.comparison["verdict"] in run("inspect", "ours").replace("\n", " ")
    assert "5 folds; lower is better" in run("inspect", "ours", "--card")
    run("report", "ours", "--out", "page.html")
    page = Path("page.html").read_text()
    assert ours.history["command"] in page and ours.comparison["metric"] in page
    assert ours.part(["north"]).comparison is None


def test_options_of_tables_are_refused_with_summaries(run) -> None:
    four_sites()
    assert "--target is for tables" in run("fit", "heart/summaries", "--target", "days", code=2)
    assert "--repeats is not for summaries" in run("fit", "heart/summaries", "--repeats", "3", code=2)
    assert "--federation is for a directory of summaries" in run(
        "fit", "north.csv", "--site", "ward", "--target", "days", "--federation", "heart/federation.json", code=2
    )
