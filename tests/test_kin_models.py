"""Models of kin: which method is meant, files, parts, covariates of sites, and the way back."""

from __future__ import annotations

import csv
from dataclasses import fields, replace
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
from sklearn import config_context
from sklearn.model_selection import cross_validate

import fedkin
from fedkin import KinClassifier, KinRegressor, WithinSiteKFold, find_kin
from fedkin.data import Column, Federation, Schema
from fedkin.datasets import paper_design
from fedkin.errors import DataError, ParameterError
from fedkin.fitting import FitOptions, fit
from fedkin.kin import Kin, Learned, Pairs, States, covariate_graph, covariate_names, read_covariates

NAMES = [f"site {u}" for u in range(24)]


def design(loss="linear", V=12, n=60, p=3, seed=0, **more):
    return paper_design(n_sites=V, n_samples=n, n_features=p, n_clusters=2, signal=2, seed=seed, loss=loss, **more)


@pytest.fixture(scope="module")
def fitted():
    made = design()
    return made, fit(made.federation, made.graph)


def test_options_belong_to_a_method():
    assert FitOptions().method == FitOptions(loss="poisson", seed=3, standardize=False).method == "kin"
    for name, value in {"lam": 0.1, "select": None, "penalty": "l2", "ridge": 1.0, "cv_folds": 3}.items():
        assert FitOptions(method="fused", **{name: value}).method == "fused"
        with pytest.raises(ParameterError, match=f"{name}= is for the fused estimator"):
            FitOptions(**{name: value})
    with pytest.raises(ParameterError, match="method must be one of"):
        FitOptions(method="gibbs")
    with pytest.raises(ParameterError, match="is not for classes"):
        KinClassifier(loss="linear").fit(np.eye(4), [0, 1, 0, 1], site=[0, 0, 1, 1])
    with pytest.raises(ParameterError, match="use it with KinClassifier"):
        KinRegressor(loss="logistic").fit(np.eye(4), [0.0, 1.0, 0.0, 1.0], site=[0, 0, 1, 1])


def same(one: object, other: object) -> bool:
    """Equal to the bit, arrays and dataclasses included."""
    if isinstance(one, Kin | Learned | States | fedkin.kin.Population | fedkin.kin.Units | fedkin.kin.Diagnostics):
        return all(same(getattr(one, item.name), getattr(other, item.name)) for item in fields(one))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and (one == other or one != one)


@pytest.mark.parametrize("loss", ["linear", "logistic", "mean"])
def test_a_model_comes_back_to_the_bit(loss, tmp_path):
    made = design("linear" if loss == "mean" else loss, V=8)
    model = fit(made.federation, made.graph, FitOptions(loss))
    model.save(tmp_path / "model")
    loaded = fedkin.load(tmp_path / "model")
    assert isinstance(loaded.kin, Kin)
    for item in fields(Kin):
        if item.name != "loss":
            assert same(getattr(loaded.kin, item.name), getattr(model.kin, item.name)), item.name
    assert loaded.kin.loss.name == loss
    assert np.array_equal(loaded.coef, model.coef)
    rows = made.federation[0] if loss == "mean" else made.federation.with_intercept()[0]
    ours, theirs = model.kin.join(rows), loaded.kin.join(rows)
    assert np.array_equal(ours.theta, theirs.theta)
    assert np.array_equal(ours.probability, theirs.probability)
    loaded.save(tmp_path / "again")
    for name in ("kin.json", "kin.npz", "model.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "model" / name).read_bytes()


def test_a_part_tells_about_its_sites_only(fitted, tmp_path):
    _, model = fitted
    part = model.part([5, 2])
    assert part.kin.sites == (5, 2)
    assert np.array_equal(part.kin.theta, model.kin.theta[[5, 2]])
    assert part.kin.confint(kind="site") == pytest.approx(model.kin.confint(kind="site")[[5, 2]])
    with pytest.raises(ParameterError, match="a new site can join only the full result"):
        part.kin.join()
    part.save(tmp_path / "part")
    assert fedkin.load(tmp_path / "part").kin.probability.shape == (2, 2)


def test_a_schemas_scale_does_not_matter():
    fed = design().federation
    columns = {name: fed.X[:, j] for j, name in enumerate(fed.feature_names)} | {"y": fed.y}
    columns["site"] = np.array(fed.sites)[fed.site_index]
    features = tuple(Column(name, low=-6.0 - j, high=9.0) for j, name in enumerate(fed.feature_names))
    scaled = Schema(features, Column("y"))
    model = fit(Federation.from_schema(columns, scaled, site="site"), None, schema=scaled)
    plain = fit(fed)
    assert model.kin.names == ("(intercept)", *fed.feature_names)
    assert model.kin.theta == pytest.approx(np.concatenate([model.intercept, model.coef[:, 0]], axis=1))
    deviation = np.sqrt(np.einsum("ujj->uj", plain.kin.covariance))
    # two runs of the sampler: the largest Monte Carlo error of any one is 0.17 to 0.19 of a deviation over twelve seeds
    apart = np.abs(model.kin.theta - plain.kin.theta) / deviation
    assert apart.max() < 0.75 and np.median(apart) < 0.15
    ratio = np.einsum("ujj->uj", model.kin.covariance) / deviation**2
    assert np.median(ratio) == pytest.approx(1, abs=0.25)
    assert 1 / 3 < ratio.min() < ratio.max() < 3  # between two seeds a variance differs by up to twice


def test_parameters_of_classes_are_named_by_label():
    rng = np.random.default_rng(0)
    y = np.array(["low", "mid", "high"])[rng.integers(0, 3, 120)]
    fed = fedkin.Federation.from_arrays(rng.normal(size=(120, 1)), y, np.repeat([0, 1, 2], 40))
    assert fit(fed).kin.names == ("(intercept) [low]", "x0 [low]", "(intercept) [mid]", "x0 [mid]")


def test_probabilities_of_many_sites_are_saved_as_partitions(fitted, tmp_path):
    _, model = fitted
    states = model.kin.learned.states
    pairs = Pairs(states.z.astype(np.int32), states.weight, 0.0)
    replace(model, kin=replace(model.kin, probability=pairs)).save(tmp_path / "model")
    loaded = fedkin.load(tmp_path / "model").kin.probability
    assert isinstance(loaded, Pairs)
    assert np.array_equal(loaded.labels, pairs.labels)
    assert loaded[0, 1] == pairs[0, 1]


def test_kin_weights_the_edges_of_the_fused_estimator():
    made = paper_design(n_sites=20, n_samples=40, n_features=5, n_clusters=4, signal=1.2, seed=1)
    kin = fedkin.find_kin(made.federation)
    weighted = kin.graph("probability")
    assert weighted.n_edges
    assert 0.05 < weighted.weights.min() <= weighted.weights.max() <= 1.0
    options = FitOptions(method="fused", select="none", fit_intercept=False, standardize=False)
    bridged = fit(made.federation, weighted, options)
    assert bridged.fused.gap <= 1e-6
    assert np.array_equal(bridged.graph.weights, weighted.weights)
    tested = fit(made.federation, None, replace(options, select="bonferroni"))
    ours, theirs = (((model.coef[:, 0] - made.theta_star) ** 2).sum() for model in (bridged, tested))
    assert ours < theirs


# --- covariates of sites


@pytest.fixture(scope="module")
def made():
    """Groups so weak that rows alone do not show them, and a region and a size that do."""
    design = paper_design(n_sites=24, n_samples=20, n_features=5, n_clusters=3, signal=0.45, seed=1)
    fed = design.federation
    rng = np.random.default_rng(0)
    rows = [{"region": "abc"[k], "size": 10.0 * k + rng.normal()} for k in design.labels]
    return design, fed.X, fed.y, np.array(NAMES)[fed.site_index], dict(zip(NAMES, rows, strict=True))


@pytest.mark.parametrize(("sites", "labels", "seed"), [(12, 2, 0), (12, 3, 1), (30, 2, 2)])
def test_labels_that_mean_nothing_make_no_groups_of_a_continuum(sites, labels, seed):
    """A graph with plain blocks has plain groups, whatever sites do: these are kin only if their parameters say so."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(sites, 40, 3))
    truth = 1 + 0.5 * rng.normal(size=(sites, 3))
    y = np.einsum("unp,up->un", X, truth) + rng.normal(size=(sites, 40))
    fed = Federation({u: (X[u], y[u]) for u in range(sites)})
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


def test_what_is_wrong_with_a_table_of_sites_is_said(run, made, tmp_path):
    _, X, y, site, known = made
    right = [[name, row["region"], row["size"]] for name, row in known.items()]

    def write(name, header, lines):
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file).writerows([header, *lines])

    write("rows.csv", ["hospital", "days", "x0"], zip(site, y.tolist(), X[:, 0].tolist(), strict=True))
    fit_it = ["fit", "rows.csv", "--site", "hospital", "--target", "days", "--covariates", "sites.csv"]
    for words, lines in {
        "no line for site 'site 23'": right[:-1],
        "has site 'site 0' twice, in line 2 and line 27: keep one": [*right, [], right[0]],
        "line 2: 'region' of site 'site 0' is missing": [["site 0", "", 1.0], *right[1:]],
        "line 3: 'size' of site 'site 1' is missing": [right[0], ["site 1", "a", "NA"], *right[2:]],
    }.items():
        write("sites.csv", ["hospital", "region", "size"], lines)
        assert words in " ".join(run(*fit_it, code=2).split())
    pd.DataFrame({"hospital": ["site 0", "site 1"], "size": [1.0, None]}).to_parquet(tmp_path / "sites.parquet")
    with pytest.raises(DataError, match=r"sites\.parquet, row 2: 'size' of site 'site 1' is missing"):
        read_covariates(tmp_path / "sites.parquet", ["site 0", "site 1"], "hospital")
    write("sites.csv", ["clinic", "size"], [["site 0", 1]])
    assert "no column 'hospital' for the site" in " ".join(run(*fit_it, code=2).split())


def test_ids_that_are_numbers_in_one_file_and_text_in_the_other(tmp_path):
    (tmp_path / "sites.csv").write_text("site,region\n1,north\n2,south\n")
    assert read_covariates(tmp_path / "sites.csv", ["1", "2"])["2"] == {"region": "south"}
    assert read_covariates(tmp_path / "sites.csv", [1, 2])[1] == {"region": "north"}


def test_decimals_are_numbers_and_complex_numbers_are_labels():
    assert covariate_graph({"a": 1j, "b": 2.0, "c": 1j}, "abc").n_edges == 1
    sizes = {"a": Decimal("1.5"), "b": 2.0, "c": 9.0, "d": 9.5}
    assert covariate_graph(sizes, "abcd") == covariate_graph({**sizes, "a": 1.5}, "abcd")


def test_starts_that_cannot_be_read():
    made = paper_design(n_sites=6, n_samples=20, n_features=2, n_clusters=2, seed=0)
    with pytest.raises(DataError, match="no label of site 5"):
        find_kin(made.federation, start=dict.fromkeys(range(5), "a"))
    with pytest.raises(DataError, match="a label for each of the 6 sites"):
        find_kin(made.federation, start=[1, 2])
