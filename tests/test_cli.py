"""The command line, used as a person would: what goes well."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import fedkin
from clinics import FIT, NORTH, SOUTH, clinic_rows, failing, write
from fedkin.cli import main
from fedkin.cli.console import flag
from fedkin.fitting import FitOptions, compare, fit


def test_fit_shows_errors_groups_and_place(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "sites.csv", *FIT, "--out", "model"]) == 0
    shown = capsys.readouterr()
    for words in ("Local", "Global", "Fedkin", "2 groups", "[red]Basel[/]", "東京", "lam", "gap", "model, fitted on"):
        assert words in shown.out
    model = fedkin.load(place / "model")
    assert {frozenset(group) for group in model.members()} == {frozenset(NORTH), frozenset(SOUTH)}
    assert model.n_samples.tolist() == [24] * 6  # all rows, not the training part


def test_fit_as_json_agrees_with_the_library(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "sites.csv", *FIT, "--test-size", "0.5", "--seed", "3", "--json", "--out", "model"]) == 0
    document = json.loads(capsys.readouterr().out)
    federation = fedkin.Federation.read("sites.csv", site="clinic", target="outcome")
    options = FitOptions(lam=0.01, seed=3)
    expected = compare(federation, None, options, test_size=0.5)
    assert document["comparison"] == json.loads(json.dumps(expected.plain()))
    model = fedkin.load(document["model"])
    assert model.comparison == document["comparison"]
    assert (document["lam"], document["gap"], document["n_groups"]) == (model.fused.lam, model.fused.gap, 2)
    assert sorted(map(len, document["groups"])) == [3, 3]
    assert document["selection"]["candidates"] == 15


def test_sites_that_a_graph_does_not_name_have_no_edges(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(place / "graph.csv", ["source", "target"], [["Bern", "Zürich"], ["Lugano", "Como"]])
    assert main(["fit", "sites.csv", *FIT, "--graph", "graph.csv", "--test-size", "0", "--out", "model"]) == 0
    assert "note: the graph does not name 2 sites" in capsys.readouterr().err
    model = fedkin.load(place / "model")
    degree = dict(zip(model.sites, model.graph.degree.tolist(), strict=True))
    assert degree == {"Bern": 1, "Zürich": 1, "Lugano": 1, "Como": 1, "[red]Basel[/]": 0, "東京": 0}





def test_the_defaults_are_those_of_python(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = ["--site", "clinic", "--target", "outcome"]
    table = np.array([row[1:] for row in clinic_rows()], dtype=float)
    ids = [row[0] for row in clinic_rows()]
    federation = fedkin.Federation.read("sites.csv", site="clinic", target="outcome")
    for options, words in (
        ({"method": "fused"}, ["--select", "bonferroni"]),
        ({"select": "none"}, ["--select", "none"]),
        ({"select": None}, ["--select", "none"]),
        ({}, []),
    ):
        assert main(["fit", "sites.csv", *columns, *words]) == 0
        model = fedkin.load("fedkin-model")
        fitted = fit(federation, None, FitOptions(**options))
        face = fedkin.FedADMMRegressor if options else fedkin.KinRegressor
        own = {name: value for name, value in options.items() if name != "method"}
        estimator = face(**own).fit(table[:, :2], table[:, 2], site=ids)
        for other in (fitted, estimator.model_):
            assert model.sites == other.sites
            np.testing.assert_array_equal(model.coef, other.coef)
            np.testing.assert_array_equal(model.intercept, other.intercept)
        assert model.graph.n_edges == (0 if not options else 6 if "method" in options else 15)


def test_every_option_of_a_fit_is_an_option_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    from typer.main import get_command

    from fedkin.cli.app import make_app

    command = get_command(make_app(["fit"])).commands["fit"]
    known = {one.name: one for one in command.params}
    for item in fields(FitOptions):
        assert flag(item.name) in known[item.name].opts
        words = {"fuse_intercept": "yes", "ridge": "0.0"}  # where values are of several types
        if item.name != "cv_rule":  # a flag for one of two rules
            assert known[item.name].default == words.get(item.name, item.default)





def test_zero_one_targets_are_classes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[k % 2, k % 7, (k * 5) % 3 % 2] for k in range(40)]
    write(place / "binary.csv", ["site", "x", "state"], rows)
    assert main(["fit", "binary.csv", "--site", "site", "--target", "state", "--lam", "0.1"]) == 0
    shown = capsys.readouterr()
    assert "--loss linear fits numbers" in shown.err and "logistic loss, target state" in shown.out


def test_degenerate_sites_are_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(2)
    ages = rng.normal(size=120).tolist()
    rows = [[f"s{k % 3}", x, "yes" if k % 3 == 2 or x + rng.logistic() > 0 else "no"] for k, x in enumerate(ages)]
    write(place / "one_class.csv", ["site", "x", "state"], rows)
    fit = ["fit", "one_class.csv", "--site", "site", "--target", "state", "--lam", "0.1", "--select", "holm"]
    assert main(fit) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert any("s2" in line for line in notes)
    assert len(notes) == len(set(notes)) == sum("s2" in line for line in notes)  # once, not for every fit
    assert main(["inspect", "fedkin-model"]) == 0
    assert "s2" in capsys.readouterr().out.partition("Notes")[2]






def test_columns_are_left_out(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit = ["fit", "sites.csv", *FIT, "--test-size", "0", "--json"]
    assert main([*fit, "--drop", "dose"]) == 0
    assert json.loads(capsys.readouterr().out)["features"] == ["age"]
    assert main([*fit, "--features", "age", "--features", "dose"]) == 0  # one option for each, or commas
    assert json.loads(capsys.readouterr().out)["features"] == ["age", "dose"]
    assert main(["predict", "fedkin-model", "sites.csv"]) == 0
    capsys.readouterr()
    assert "no column 'doze' to drop (did you mean 'dose'?)" in failing(capsys, *fit, "--drop", "doze")
    assert "'outcome' cannot be both the target and dropped" in failing(capsys, *fit, "--drop", "outcome")
    both = failing(capsys, *fit, "--features", "age,dose", "--drop", "dose")
    assert "'dose' cannot be both a feature and dropped" in both
    assert "unexpected 'dose': lists have commas" in failing(capsys, *fit, "--features", "age", "dose")


def test_many_groups_and_features_are_summarised(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(4)
    rows = [[k // 20, *rng.normal(size=12).tolist(), 10.0 * (k // 20) + rng.normal()] for k in range(300)]
    write(place / "wide.csv", ["site", *(f"x{k}" for k in range(12)), "y"], rows)
    fit = ["fit", "wide.csv", "--site", "site", "--target", "y", "--lam", "0", "--select", "none", "--test-size", "0"]
    assert main(fit) == 0
    assert re.search(r"groups +15 among 15 sites", capsys.readouterr().out)
    assert main(["inspect", "fedkin-model"]) == 0
    shown = capsys.readouterr().out
    assert "in 3 smaller groups" in shown
    assert "the intercept and the 10 largest of 12" in shown
    table = shown[shown.index("10 largest of 12") :].splitlines()
    sizes = [abs(float(line.split()[1])) for line in table if line.strip().startswith("x")]
    assert len(sizes) == 10
    assert sizes == sorted(sizes, reverse=True)
    assert "average" in shown
    assert "least" in shown


def test_without_edges_every_site_has_its_exact_solution(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """40 sites x 140 rows x 20 nearly collinear features, all edges dropped: as good as each site's least squares."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=(40, 140, 1))
    X = common + 1e-6 * rng.normal(size=(40, 140, 20))
    # slopes so different that every edge is dropped
    y = common[:, :, 0] * np.arange(40)[:, None] + 0.1 * rng.normal(size=(40, 140))
    rows = [[f"s{u}", *x, z] for u in range(40) for x, z in zip(X[u].tolist(), y[u].tolist(), strict=True)]
    write(place / "wide.csv", ["site", *(f"x{k}" for k in range(20)), "y"], rows)
    assert main(["fit", "wide.csv", "--site", "site", "--target", "y", "--method", "fused", "--test-size", "0"]) == 0
    assert "0 of 780 edges kept" in capsys.readouterr().out
    model = fedkin.load("fedkin-model")
    for u in range(40):
        own = np.column_stack([np.ones(140), X[u]])
        best = y[u] - own @ np.linalg.lstsq(own, y[u], rcond=None)[0]
        ours = y[u] - model.predict(X[u], f"s{u}")
        assert (ours**2).mean() <= (1 + 1e-6) * (best**2).mean()


def test_files_that_do_not_fit_into_memory_are_fitted_where_they_are(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pandas = pytest.importorskip("pandas")
    pandas.read_csv("sites.csv").to_parquet("sites.parquet")
    columns = ["--site", "clinic", "--target", "outcome"]
    assert main(["fit", "sites.parquet", *columns, "--test-size", "0", "--out", "whole"]) == 0
    assert "stay in their files" not in capsys.readouterr().err
    monkeypatch.setattr("fedkin.cli.reading.free_memory", lambda: 20_000.0)
    assert main(["fit", "sites.parquet", *columns, "--json", "--out", "streamed", "--report", "page.html"]) == 0
    shown = capsys.readouterr()
    assert "they stay in their files, read in one pass" in shown.err
    assert json.loads(shown.out)["comparison"]["kind"] == "folds"
    whole, streamed = fedkin.load("whole"), fedkin.load("streamed")
    assert whole.feature_names == streamed.feature_names and whole.target_name == streamed.target_name
    order = [whole.index[site] for site in streamed.sites]
    np.testing.assert_allclose(streamed.coef, whole.coef[order], atol=1e-8)
    assert streamed.origin is None and streamed.history["data"]["name"] == "sites.parquet"
    assert main(["predict", "streamed", "sites.parquet", "--out", "predicted.csv"]) == 0
    assert main(["fit", "sites.parquet", *columns, "--loss", "huber", "--out", "huber"]) == 0
    assert "read once for every Newton step" in capsys.readouterr().err
    for more in (["--time", "age"], ["--repeats", "3"], ["--keep-best"]):
        assert more[0] in failing(capsys, "fit", "sites.parquet", *columns, *more)
    monkeypatch.setattr("fedkin.cli.reading.free_memory", lambda: 5_000.0)
    assert "--method kin" in failing(capsys, "fit", "sites.parquet", *columns, "--loss", "huber", "--lam", "0.1")
