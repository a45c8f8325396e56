"""``fedkin fit`` on a folder of summaries: the model of the rows, without the rows."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

import fedkin
import heart
from fedkin.federate import Organiser, Site, sharing

DIED = heart.CONTRACT.split("[target]")[0].replace('"linear"', '"logistic"') + (
    '[target]\nname = "died"\nkind = "category"\nlevels = ["no", "yes"]\n'
)


def send(made: Organiser, shared: sharing.Shared) -> None:
    assert shared.path is not None
    (made.directory / "summaries" / shared.path.name).write_bytes(shared.path.read_bytes())


def four_sites(contract: str = heart.CONTRACT, rank: int | None = None) -> tuple[Organiser, dict[str, Path]]:
    """The organiser's directory and the directories of sites that have shared their sums; and ``all.csv``."""
    made = heart.organiser(Path(), contract)
    rng = np.random.default_rng(0)
    places, everything = {}, []
    for k, name in enumerate(heart.SITES):
        age, ward = rng.uniform(30, 90, 200).round(3), rng.choice(["A", "B", "C"], 200)
        eta = (0.02 + 0.05 * (k // 2)) * (age - 60) + 1.0 * (ward == "B")
        lines = []
        for a, w, e in zip(age, ward, eta, strict=True):
            died = "yes" if rng.random() < 1 / (1 + np.exp(-e)) else "no"
            lines.append([repr(float(a)), str(w), repr(round(float(20 + 3 * e + rng.normal()), 4)), died])
        table = Path(f"{name}.csv")
        table.write_text("age,ward,days,died\n" + "\n".join(",".join(line) for line in lines) + "\n")
        join = Site.join(heart.invite_of(made, name), table, Path(name))
        Site.read(join.directory).accept(made.admit(join.request).path)
        places[name] = join.directory
        send(made, sharing.share(join.directory, rank=rank))
        everything += [[name, *line] for line in lines]
    with Path("all.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["site", "age", "ward", "days", "died"], *everything])
    return made, places


def test_the_model_of_summaries_is_that_of_the_pooled_table(run) -> None:
    four_sites()
    said = run("fit", "heart/summaries", "--method", "fused", "--out", "ours")
    for words in ("summaries of 4 sites, 800 rows, which stayed there", "each predicted without its fold", "Local"):
        assert words in said
    assert "s.e. of it" in said and re.search(r"Fedkin's model|Fedkin predicts best|better than Fedkin", said)
    run(
        "fit", "all.csv", "--contract", "heart.toml", "--site", "site", "--graph", "ring.csv", "--test-size", "0",
        "--method", "fused", "--out", "theirs",
    )  # fmt: skip
    ours, theirs = fedkin.load("ours"), fedkin.load("theirs")
    np.testing.assert_allclose(ours.coef, theirs.coef, rtol=0, atol=1e-10)
    np.testing.assert_allclose(ours.intercept, theirs.intercept, rtol=0, atol=1e-9)
    assert ours.lam == pytest.approx(theirs.lam, rel=1e-10)
    assert ours.groups() == theirs.groups() == (("north", "south"), ("east", "west"))
    assert ours.origin == {"from": "summaries", "rounds": 1}
    run("predict", "ours", "all.csv", "--site", "site", "--out", "predictions.csv")
    shown = run("inspect", "ours")
    assert "summaries" in shown and "Error of predictions of rows that were held out" in shown
    # how it came about is kept as with rows: the curve, the path, the edges that were dropped, the command
    assert ours.history["choice"]["lams"] == pytest.approx(theirs.history["choice"]["lams"], rel=1e-8)
    assert ours.history["path"]["labels"] == theirs.history["path"]["labels"]
    assert ours.history["dropped"] == theirs.history["dropped"]
    assert ours.history["data"]["rows"] == 800 and len(ours.history["data"]["sha256"]) == 64


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


def test_share_shows_every_number_of_the_file(run) -> None:
    _, places = four_sites()
    said = run("site", "share", str(places["north"]), "--dry-run")
    summary = sharing.share(places["north"], dry_run=True).summary
    assert "how many rows there are, in each of 5 folds" in said
    assert "fold 1: 40, fold 2: 40, fold 3: 40, fold 4: 40, fold 5: 40\n" in said
    for k in range(5):
        assert f"{summary.value[k]:.6g}" in said
        for j, name in enumerate(summary.parameter_names):
            assert f"    {name}  {summary.gradient[k, j]:.6g}\n" in said
            assert f"    {name}  " + "  ".join(f"{number:.6g}" for number in summary.hessian[k, j, j:]) + "\n" in said
    said = run("fit", "heart", "--out", "again", "--json")
    document, _ = json.JSONDecoder().raw_decode(said)  # progress, where it takes long, is on the other stream
    assert document["comparison"]["verdict"] and document["comparison"]["methods"][0]["difference_error"] > 0
    assert document["comparison"]["errors"].keys() == {"Local", "Global", "Site intercepts", "Fedkin"}


def test_a_short_message_takes_the_place_of_all_products(run) -> None:
    _, places = four_sites(rank=2)
    north = places["north"]
    said = run("site", "share", str(north), "--rank", "2")
    assert "products of every two columns, in all, as a diagonal (first) plus 2 directions" in said
    assert "hessian" not in next((north / "sent").glob("*.summary")).read_text()
    assert sharing.share(north, dry_run=True).summary.curvature.rank == 2  # the same as before
    assert "rank 2 were shared before" in run("site", "share", str(north), "--rank", "3", code=2)
    run("fit", "heart/summaries", "--out", "ours")
    run("fit", "all.csv", "--contract", "heart.toml", "--site", "site", "--test-size", "0", "--out", "theirs")
    ours, theirs = fedkin.load("ours"), fedkin.load("theirs")
    assert ours.kin is not None
    assert 0 < np.abs(ours.coef - theirs.coef).max() < 0.3 * np.abs(theirs.coef).max()


def test_losses_that_need_more_messages_ask_for_them(run) -> None:
    made, places = four_sites(DIED)
    fit = ["fit", "heart/summaries", "--method", "fused", "--out", "ours"]
    said = run(*fit)
    assert "No model yet: one more message of every site is needed (number 2)" in said
    assert "fedkin site answer" in said
    assert not Path("ours").exists()
    assert "no answer is here yet: wait for the files of 'north'" in run("fit", "heart/summaries", code=2)
    for number in range(2, 8):
        for name, place in places.items():
            question = next((made.directory / "asks").glob(f"{name}*{number}*"))
            send(made, sharing.answer(place, question))
        said = run(*fit)
        if "No model yet" not in said:
            break
    ours = fedkin.load("ours")
    assert ours.origin == {"from": "summaries", "rounds": number}
    assert number <= 6
    assert ours.gap <= 1e-6
    assert "loss, expanded around the fit" in said
    run(
        "fit", "all.csv", "--contract", "heart.toml", "--site", "site", "--graph", "ring.csv", "--test-size", "0",
        "--lam", repr(ours.lam), "--out", "theirs",
    )  # fmt: skip
    theirs = fedkin.load("theirs")
    assert ours.classes == theirs.classes == ("no", "yes")
    assert ours.groups() == theirs.groups()
    np.testing.assert_allclose(ours.coef, theirs.coef, atol=0.01)


def test_options_of_tables_are_refused_with_summaries(run) -> None:
    four_sites()
    assert "--target is for tables" in run("fit", "heart/summaries", "--target", "days", code=2)
    assert "--repeats is not for summaries" in run("fit", "heart/summaries", "--repeats", "3", code=2)
    assert "--federation is for a directory of summaries" in run(
        "fit", "all.csv", "--site", "site", "--target", "days", "--federation", "heart/federation.json", code=2
    )


@pytest.mark.parametrize("data", ["heart/summaries", "heart"])
def test_a_folder_without_summaries_says_whose_are_missing(run, data: str) -> None:
    heart.organiser(Path())
    said = run("fit", data, "--out", "model", code=2)
    assert "no summaries have arrived in heart/summaries" in said
    assert all(repr(name) in said for name in heart.SITES)
