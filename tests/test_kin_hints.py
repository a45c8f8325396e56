"""What is known beside the rows: covariates of sites in every face of kin, and groups to start from."""

from __future__ import annotations

import csv

import numpy as np
import pandas as pd
import pytest
from sklearn import config_context
from sklearn.model_selection import cross_validate

import fedkin
from fedkin import KinClassifier, KinRegressor, WithinSiteKFold, find_kin
from fedkin.datasets import paper_design
from fedkin.errors import DataError, ParameterError
from fedkin.fitting import FitOptions, fit
from fedkin.kin import covariate_graph, covariate_names, read_covariates

NAMES = [f"site {u}" for u in range(24)]


@pytest.fixture(scope="module")
def made():
    """Groups so weak that rows alone do not show them, and a region and a size that do."""
    design = paper_design(n_sites=24, n_samples=20, n_features=5, n_clusters=3, signal=0.45, seed=1)
    fed = design.federation
    rng = np.random.default_rng(0)
    rows = [{"region": "abc"[k], "size": 10.0 * k + rng.normal()} for k in design.labels]
    return design, fed.X, fed.y, np.array(NAMES)[fed.site_index], dict(zip(NAMES, rows, strict=True))


def squares(coef, design):
    return float(((coef - design.theta_star) ** 2).sum())


# --- covariates -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sites", "labels", "seed"), [(12, 2, 0), (12, 3, 1), (30, 2, 2)])
def test_labels_that_mean_nothing_make_no_groups_of_a_continuum(sites, labels, seed):
    """A graph with plain blocks has plain groups, whatever sites do: these are kin only if their parameters say so."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(sites, 40, 3))
    truth = 1 + 0.5 * rng.normal(size=(sites, 3))
    y = np.einsum("unp,up->un", X, truth) + rng.normal(size=(sites, 40))
    fed = fedkin.Federation({u: (X[u], y[u]) for u in range(sites)})
    found = find_kin(fed, covariates={u: f"label {u % labels}" for u in range(sites)})
    alone = find_kin(fed)
    assert found.graph_use == "ignored" and not found.resolved
    others = ~np.eye(sites, dtype=bool)
    assert np.asarray(found.probability)[others].max() < 0.2
    np.testing.assert_allclose(found.theta, alone.theta, atol=0.05)


def test_labels_and_numbers_become_one_graph_with_weights(made):
    _, _, _, _, known = made
    graph = covariate_graph(known, NAMES)
    inside = np.array([known[NAMES[i]]["region"] == known[NAMES[j]]["region"] for i, j in graph.edges])
    assert set(graph.weights.tolist()) == {0.5, 1.0}
    assert inside[graph.weights == 1.0].all()
    by_region = covariate_graph({name: row["region"] for name, row in known.items()}, NAMES)
    by_size = covariate_graph({name: [row["size"]] for name, row in known.items()}, NAMES)
    pairs = [{tuple(sorted(edge)) for edge in one.edges.tolist()} for one in (graph, by_region, by_size)]
    assert pairs[0] == pairs[1] | pairs[2]
    assert covariate_names(known) == ("region", "size")


def test_a_pandas_table_is_read_by_its_index(made):
    _, _, _, _, known = made
    table = pd.DataFrame.from_dict(known, orient="index").sample(frac=1.0, random_state=0)
    graph, same = covariate_graph(known, NAMES), covariate_graph(table, NAMES)
    assert np.array_equal(graph.edges, same.edges)
    assert np.array_equal(graph.weights, same.weights)
    assert covariate_names(table) == ("region", "size")
    assert covariate_graph(table["region"], NAMES).n_edges == 3 * 28
    with pytest.raises(DataError, match="two rows of site 'site 3'"):
        covariate_graph(pd.concat([table, table.loc[["site 3"]]]), NAMES)


@pytest.mark.parametrize("way", ["estimator", "rows", "summaries", "later rows"])
def test_covariates_help_in_every_face(made, way):
    design, X, y, site, known = made
    bare = KinRegressor(fit_intercept=False).fit(X, y, site=site).model_
    fed = fedkin.Federation.from_arrays(X, y, site)
    options = FitOptions(fit_intercept=False)
    if way == "estimator":
        model = KinRegressor(fit_intercept=False).fit(X, y, site=site, covariates=known).model_
    elif way == "later rows":
        some = np.arange(len(y)) % 2 == 0
        one = KinRegressor(fit_intercept=False).fit(X[some], y[some], site=site[some])
        model = one.partial_fit(X[~some], y[~some], site=site[~some], covariates=known).model_
    elif way == "rows":
        model = fit(fed, None, options, covariates=known)
    else:
        model = fit(fedkin.summarise(fed), None, options, covariates=known)
    assert model.kin.graph_use == "used"
    assert model.options["covariates"] == ["region", "size"]
    assert squares(model.coef[:, 0], design) < 0.8 * squares(bare.coef[:, 0], design)
    assert model.graph.n_edges == covariate_graph(known, NAMES).n_edges
    assert "covariates" not in bare.options


def test_covariates_are_routed_through_cross_validation(made):
    _, X, y, site, known = made
    more = known | {"site without rows": {"region": "a", "size": 3.0}}
    with config_context(enable_metadata_routing=True):
        found = cross_validate(
            KinClassifier(),
            X,
            y > 0,
            cv=WithinSiteKFold(3),
            params={"site": site, "groups": site, "covariates": more},
            return_estimator=True,
            error_score="raise",
        )
    assert [one.model_.options["covariates"] for one in found["estimator"]] == [["region", "size"]] * 3


def test_a_graph_and_covariates_are_one_too_many(made):
    _, X, y, site, known = made
    with pytest.raises(ParameterError, match="not both"):
        KinRegressor().fit(X, y, site=site, graph=fedkin.Graph.complete(NAMES), covariates=known)
    with pytest.raises(DataError, match=r"no covariates of site 'site 2' \(did you mean"):
        KinRegressor().fit(X, y, site=site, covariates={name: 1.0 for name in NAMES if name != "site 2"})


def table_of_rows(place, made):
    _, X, y, site, _ = made
    with (place / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["hospital", "days", *(f"x{k}" for k in range(X.shape[1]))])
        writer.writerows([name, out, *row] for name, out, row in zip(site, y.tolist(), X.tolist(), strict=True))


def table_of_sites(place, known, *, changed=None):
    lines = [[name, row["region"], row["size"]] for name, row in known.items()]
    lines = lines if changed is None else changed(lines)
    with (place / "sites.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["hospital", "region", "size"], *lines])


FIT = ["fit", "rows.csv", "--site", "hospital", "--target", "days", "--covariates", "sites.csv"]


def test_what_is_wrong_with_a_table_of_sites_is_said(run, made, tmp_path):
    _, _, _, _, known = made
    table_of_rows(tmp_path, made)
    wrong = {
        "no line for site 'site 23'": lambda lines: lines[:-1],
        "site 'site 0' has two lines, 2 and 26: keep one": lambda lines: [*lines, lines[0]],
        "line 2: 'region' of site 'site 0' is missing": lambda lines: [["site 0", "", 1.0], *lines[1:]],
        "line 3: 'size' of site 'site 1' is missing": lambda lines: [lines[0], ["site 1", "a", "NA"], *lines[2:]],
    }
    for words, changed in wrong.items():
        table_of_sites(tmp_path, known, changed=changed)
        found = run(*FIT, code=2)
        assert words in " ".join(found.split())
        assert "sites.csv" in found
    table_of_sites(tmp_path, known)
    assert "--graph or --covariates, not both" in run(*FIT, "--graph", "edges.csv", code=2)
    (tmp_path / "sites.csv").write_text("clinic,size\nsite 0,1\n")
    assert "no column 'hospital' for the site" in " ".join(run(*FIT, code=2).split())


def test_ids_that_are_numbers_in_one_file_and_text_in_the_other(tmp_path):
    (tmp_path / "sites.csv").write_text("site,region\n1,north\n2,south\n")
    assert read_covariates(tmp_path / "sites.csv", ["1", "2"])["2"] == {"region": "south"}
    assert read_covariates(tmp_path / "sites.csv", [1, 2])[1] == {"region": "north"}


# --- where chains start ---------------------------------------------------------------------------------------


def test_groups_to_start_from_are_a_start_and_no_data():
    made = paper_design(n_sites=20, n_samples=40, n_features=5, n_clusters=3, signal=1.0, seed=0)
    bare = find_kin(made.federation)
    labels = find_kin(made.federation, start=[f"group {k}" for k in made.labels], chains=8)
    assert "given" in labels.diagnostics.starts
    assert labels.graph_use == "none"
    for start in (made.labels, dict(zip(made.federation.sites, made.labels, strict=True))):
        again = find_kin(made.federation, start=start, chains=8)
        assert np.array_equal(again.theta, labels.theta)
    bad = find_kin(made.federation, start=np.arange(20) % 4)
    assert bad.groups.tolist() == bare.groups.tolist() == made.labels.tolist()
    assert bad.theta == pytest.approx(bare.theta, abs=0.02)


def test_starts_that_cannot_be_read():
    made = paper_design(n_sites=6, n_samples=20, n_features=2, n_clusters=2, seed=0)
    with pytest.raises(DataError, match="no label of site 5"):
        find_kin(made.federation, start=dict.fromkeys(range(5), "a"))
    with pytest.raises(DataError, match="a label for each of the 6 sites"):
        find_kin(made.federation, start=[1, 2])
