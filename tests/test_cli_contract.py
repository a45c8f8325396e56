"""Contracts on the command line: drafted, checked, fitted by, and the models that come of them."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("msgspec")
import fedkin
from fedkin.cli import main
from fedkin.cli.reading import contract_options
from fedkin.data import Federation, read_columns
from fedkin.federate import Contract
from fedkin.fitting import FitOptions, model_from_theta

HEART = Path(__file__).resolve().parent.parent / "examples" / "heart"


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heart")
    runpy.run_path(str(HEART / "make_tables.py"))["main"](folder, 40)
    return folder


def run(*arguments):
    return main([str(one) for one in arguments])


def fit(tables, out, *more):
    graph = ("--graph", tables / "graph.csv", "--test-size", 0, "--lam", 0.01, "--select", "none")
    contract = ("--contract", HEART / "heart.toml", "--site", "hospital", "--out", out)
    return run("fit", tables / "all.csv", *contract, *graph, *more)


def test_the_pooled_fit_prepares_rows_as_the_contract_says(tables, tmp_path, capsys):
    assert fit(tables, tmp_path / "model") == 0
    capsys.readouterr()
    model = fedkin.load(tmp_path / "model")
    contract = Contract.read(HEART / "heart.toml")
    columns = read_columns(tables / "all.csv")
    rows = contract.prepare(columns)
    prepared = fedkin.Federation.from_arrays(rows.X, rows.y, columns["hospital"])
    how = FitOptions(lam=0.01, select="none", fit_intercept=False, standardize=False)
    same = fedkin.fit(prepared, fedkin.Graph.read(tables / "graph.csv", prepared.sites), how)
    ids = columns["hospital"].tolist()
    np.testing.assert_allclose(model.predict(columns, ids), same.predict(rows.X, ids), atol=1e-6)
    assert model.schema == contract.schema
    assert model.groups.tolist() == same.groups.tolist()
    assert model.options["site_column"] == "hospital"


def test_parameters_of_prepared_rows_make_the_pooled_model(tables, tmp_path, capsys):
    """What site run and summaries end in: the way of `Problem` on prepared rows, and back."""
    fit(tables, tmp_path / "model", "--tol", 1e-9)
    capsys.readouterr()
    pooled = fedkin.load(tmp_path / "model")
    text = (HEART / "heart.toml").read_text()
    contract = Contract.from_toml(text)
    columns = read_columns(tables / "all.csv")
    rows = contract.prepare(columns)
    sites = fedkin.Federation.from_arrays(rows.X, rows.y, columns["hospital"])
    graph = fedkin.Graph.read(tables / "graph.csv", sites.sites)
    ridge = contract.per_parameter(contract.ridge)
    problem = fedkin.Problem(sites, graph, contract.loss_object(), contract.penalty, 0.01, ridge=ridge)
    theta = dict(zip(sites.sites, fedkin.solve(problem, 1e-9).theta, strict=True))
    counts = dict(zip(sites.sites, sites.n_samples.tolist(), strict=True))
    agreed = {"schema": contract.schema, "loss": contract.loss_object(), "intercept": contract.intercept}
    model = model_from_theta(theta, graph, n_samples=counts, **agreed)
    np.testing.assert_allclose(model.coef, pooled.coef, atol=1e-7)
    np.testing.assert_allclose(model.intercept, pooled.intercept, atol=1e-5)
    assert model.groups.tolist() == pooled.groups.tolist()


def test_summaries_of_prepared_rows_give_the_pooled_model(tables):
    contract = Contract.read(HEART / "heart.toml")
    columns = read_columns(tables / "all.csv")
    options = contract_options({}, contract)
    federation = Federation.from_schema(columns, contract.schema, site="hospital")
    pooled = fedkin.fit(federation, None, options, schema=contract.schema)
    rows = contract.prepare(columns)
    names = contract.parameter_names
    sites = fedkin.Federation.from_arrays(rows.X, rows.y, columns["hospital"], feature_names=names)
    summaries = fedkin.summarise(sites, contract.loss_object(), folds=contract.folds, seed=contract.seed)
    model = fedkin.fit(summaries, None, options, schema=contract.schema)
    np.testing.assert_allclose(model.coef, pooled.coef, rtol=1e-9, atol=1e-10)
    assert model.members() == pooled.members()
    assert model.schema == pooled.schema


def test_the_intercept_has_no_ridge():
    text = (HEART / "heart.toml").read_text()
    assert Contract.from_toml(text).per_parameter(2.0).tolist() == [0, 2, 2, 2, 2, 2, 2]
    graded = text.replace('"linear"', '"multinomial"').replace(
        'unit = "days"\nlow = 0\nhigh = 60', 'levels = ["a", "b", "c"]'
    )
    assert Contract.from_toml(graded).per_parameter(1.0).tolist() == 2 * [0, 1, 1, 1, 1, 1, 1]


def test_models_with_a_schema_predict_raw_tables(tables, tmp_path, capsys):
    fit(tables, tmp_path / "model")
    capsys.readouterr()
    assert run("predict", tmp_path / "model", tables / "all.csv") == 0
    pooled = capsys.readouterr().out.splitlines()
    assert pooled[0] == "row,hospital,prediction"
    # a site's own part needs no column of sites
    fedkin.load(tmp_path / "model").part(["hill"]).save(tmp_path / "own")
    assert run("predict", tmp_path / "own", tables / "sites" / "hill.csv") == 0
    own = capsys.readouterr().out.splitlines()
    assert [line.split(",")[2] for line in own[1:]] == [
        line.split(",")[2] for line in pooled[1:] if line.split(",")[1] == "hill"
    ]
    # files by site
    assert run("predict", tmp_path / "model", tables / "sites") == 0
    assert len(capsys.readouterr().out.splitlines()) == len(pooled)


def test_tables_that_break_the_schema_are_not_predicted(tables, tmp_path, capsys):
    fit(tables, tmp_path / "model")
    capsys.readouterr()
    bad = tmp_path / "bad.csv"
    bad.write_text("hospital,age,weight,presure,ward,smoker\nhill,50,70000,130,Z,no\nhill,60,80000,130,A,no\n")
    assert run("predict", tmp_path / "model", bad) == 2
    error = capsys.readouterr().err
    for words in ("by 1000 they fit", "is 'presure' what is meant?", "unknown level 'Z' (1 row), first in line 2"):
        assert words in error


@pytest.mark.parametrize("option", ["--target", "--features", "--offset"])
def test_what_the_contract_says_is_not_said_twice(option, tables, tmp_path, capsys):
    assert fit(tables, tmp_path / "model", option, "days") == 2
    assert f"{option} is for the contract to say" in capsys.readouterr().err
