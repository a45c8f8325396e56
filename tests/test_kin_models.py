"""Models with kin: which method is meant, their files, summaries instead of rows, a contract's units."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import msgspec.structs
import numpy as np
import pytest

import fedkin
from fedkin.cli.format import model_facts, print_groups
from fedkin.core import site_answer
from fedkin.data import Column, Federation, Schema
from fedkin.datasets import paper_design
from fedkin.errors import ModelFileError, ParameterError
from fedkin.fitting import FitOptions, Queries, compare, fit
from fedkin.kin import Kin, Learned, Pairs, States


def design(loss="linear", V=12, n=60, p=3, seed=0, **more):
    return paper_design(n_sites=V, n_samples=n, n_features=p, n_clusters=2, signal=2, seed=seed, loss=loss, **more)


@pytest.fixture(scope="module")
def fitted():
    made = design()
    return made, fit(made.federation, made.graph)


# --- which method ---------------------------------------------------------------------------------------------


def test_options_of_the_fused_estimator_mean_it():
    assert FitOptions().chosen == FitOptions(loss="poisson", seed=3, standardize=False).chosen == "kin"
    for name, value in {"lam": 0.1, "select": None, "penalty": "l2", "ridge": 1.0, "cv_folds": 3}.items():
        assert FitOptions(**{name: value}).chosen == "fused"
        with pytest.raises(ParameterError, match=f"{name}= is for the fused estimator"):
            FitOptions(method="kin", **{name: value})
    assert FitOptions(method="fused").chosen == "fused"
    with pytest.raises(ParameterError, match="method must be one of"):
        FitOptions(method="gibbs")


def test_models_of_both_methods(fitted):
    made, model = fitted
    assert model.kin is not None
    assert model.kin.resolved
    assert model.groups.tolist() == made.labels.tolist()
    assert model.fused is None and model.status == "converged"
    assert np.array_equal(model.graph.edges, made.graph.edges)
    assert np.array_equal(model.kin.theta[:, 1:], model.coef[:, 0])
    assert np.array_equal(model.kin.theta[:, :1], model.intercept)
    assert set(model.options) == {"method", "loss", "messages", "fit_intercept", "standardize", "seed", "n_jobs"}
    fused = fit(made.federation, made.graph, FitOptions(method="fused"))
    assert fused.kin is None
    assert fused.fused.gap <= 1e-6
    assert fused.options["method"] == "fused"


# --- files ----------------------------------------------------------------------------------------------------


def same(one: object, other: object) -> bool:
    """Equal to the bit, arrays and dataclasses included."""
    if isinstance(one, Kin | Learned | States | fedkin.kin.Units | fedkin.kin.Diagnostics):
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


def test_damaged_files_are_refused(fitted, tmp_path):
    _, model = fitted
    model.save(tmp_path / "model")
    held = (tmp_path / "model" / "kin.npz").read_bytes()
    (tmp_path / "model" / "kin.npz").write_bytes(held[:-10])
    with pytest.raises(ModelFileError, match=r"kin\.npz: its content does not match the checksum"):
        fedkin.load(tmp_path / "model")
    (tmp_path / "model" / "kin.npz").unlink()
    with pytest.raises(ModelFileError, match=r"kin\.npz is missing"):
        fedkin.load(tmp_path / "model")


def test_a_part_tells_about_its_sites_only(fitted, tmp_path):
    _, model = fitted
    part = model.part([5, 2])
    assert part.kin.sites == (5, 2)
    assert np.array_equal(part.kin.theta, model.kin.theta[[5, 2]])
    assert part.kin.confint(kind="site") == pytest.approx(model.kin.confint(kind="site")[[5, 2]])
    with pytest.raises(ParameterError, match="a new one can join only all of them"):
        part.kin.join()
    part.save(tmp_path / "part")
    assert fedkin.load(tmp_path / "part").kin.probability.shape == (2, 2)


# --- summaries ------------------------------------------------------------------------------------------------


def test_one_message_of_a_quadratic_loss():
    fed = design().federation.with_intercept()
    model = fit(fedkin.summarise(fed))
    rows = fit(design().federation)
    assert model.origin == {"from": "summaries", "rounds": 1}
    deviation = np.sqrt(np.einsum("ujj->uj", rows.kin.covariance))
    assert (np.abs(model.kin.theta - rows.kin.theta) < 0.3 * deviation).all()  # Monte Carlo error
    assert model.members() == rows.members()


def test_two_messages_of_a_smooth_loss():
    made = paper_design(n_sites=10, n_samples=120, n_features=2, n_clusters=2, signal=6, seed=0, loss="logistic")
    fed = made.federation.with_intercept()
    said, rounds, asked = fedkin.summarise(fed, "logistic"), 1, None
    while isinstance(found := fit(said, queries=asked), Queries):
        parts = [site_answer(found[u], fed[u], said.loss, feature_names=fed.feature_names) for u in fed]
        said, rounds = fedkin.Summaries.stack(parts), rounds + 1
        asked, again = found, Queries.from_plain(json.loads(json.dumps(renamed(found).to_plain())))
        assert np.array_equal(again.theta, found.theta)
    assert rounds == 2
    assert found.origin["rounds"] == 2
    rows = fit(made.federation, None, FitOptions("logistic"))
    deviation = np.sqrt(np.einsum("ujj->uj", rows.kin.covariance))
    assert np.abs((found.kin.theta - rows.kin.theta) / deviation).mean() < 0.25
    one = fit(fedkin.summarise(fed, "logistic"), None, FitOptions(messages=1))
    assert one.origin["rounds"] == 1
    compared = compare(said, None, FitOptions("logistic"), model=found)
    assert compared.mean("Fedkin") < min(compared.mean("Local"), compared.mean("Global"))


def renamed(asks: Queries) -> Queries:
    return replace(asks, questions=tuple(msgspec.structs.replace(one, site=str(one.site)) for one in asks.questions))


# --- units ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_schemas_scale_does_not_matter(seed):
    made = design(seed=seed)
    fed = made.federation
    columns = {name: fed.X[:, j] for j, name in enumerate(fed.feature_names)} | {"y": fed.y}
    columns["site"] = np.array(fed.sites)[fed.site_index]
    scaled = Schema(
        tuple(Column(name, low=-6.0 - j, high=9.0) for j, name in enumerate(fed.feature_names)), Column("y")
    )
    agreed = Federation.from_schema(columns, scaled, site="site")
    model = fit(agreed, None, schema=scaled)
    plain = fit(fed)
    assert model.kin.names == ("(intercept)", *fed.feature_names)
    assert model.kin.theta[:, 1:] == pytest.approx(model.coef[:, 0])
    assert model.kin.theta[:, :1] == pytest.approx(model.intercept)
    deviation = np.sqrt(np.einsum("ujj->uj", plain.kin.covariance))
    # two runs of the sampler: the largest Monte Carlo error of any one is 0.17 to 0.19 of a deviation over twelve seeds
    apart = np.abs(model.kin.theta - plain.kin.theta) / deviation
    assert apart.max() < 0.75
    assert np.median(apart) < 0.15
    ratio = np.einsum("ujj->uj", model.kin.covariance) / deviation**2
    assert np.median(ratio) == pytest.approx(1, abs=0.25)
    assert 1 / 3 < ratio.min() < ratio.max() < 3  # between two seeds a variance differs by up to twice
    # the slopes have one spread or their own, whichever explains the data better by chains as noisy as these
    assert np.abs(np.log(model.kin.sd / plain.kin.sd)).max() < np.log(2)


def test_parameters_of_classes_are_named_by_label():
    rng = np.random.default_rng(0)
    y = np.array(["low", "mid", "high"])[rng.integers(0, 3, 120)]
    fed = fedkin.Federation.from_arrays(rng.normal(size=(120, 1)), y, np.repeat([0, 1, 2], 40))
    assert fit(fed).kin.names == ("(intercept) [low]", "x0 [low]", "(intercept) [mid]", "x0 [mid]")


# --- command line ---------------------------------------------------------------------------------------------


def test_chains_that_disagree_matter_to_groups_only_where_groups_are_shown(fitted):
    _, model = fitted
    kin = model.kin
    rhat = {**kin.diagnostics.rhat, "parameters, median": 2.0, "parameters, worst": 4.07}
    apart = replace(kin, diagnostics=replace(kin.diagnostics, rhat=rhat))
    assert "another seed may find others" in model_facts(replace(model, kin=apart))["sampler"]
    unresolved = replace(apart, resolved=False, groups=np.zeros_like(kin.groups))
    said = model_facts(replace(model, kin=unresolved))["sampler"]
    assert "disagree about which sites are alike; the estimates are averaged over them" in said and "4.07 worst" in said
    assert "seed" not in said


def test_probabilities_of_many_sites_are_saved_as_partitions(fitted, tmp_path, capsys):
    _, model = fitted
    kin = model.kin
    pairs = Pairs(kin.learned.states.z.astype(np.int32), kin.learned.states.weight, 0.0)
    replace(model, kin=replace(kin, probability=pairs)).save(tmp_path / "model")
    again = fedkin.load(tmp_path / "model")
    loaded = again.kin
    assert isinstance(loaded.probability, Pairs)
    assert np.array_equal(loaded.probability.labels, pairs.labels)
    assert loaded.probability[0, 1] == pairs[0, 1]
    assert model_facts(again)["groups"] == model_facts(model)["groups"]
    print_groups(again)
    assert "2 groups of sites that are alike" in capsys.readouterr().out


# --- the bridge back to the fused estimator -----------------------------------------------------------------------


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
    cliques = fit(made.federation, kin.graph("groups"), options)
    assert cliques.fused.gap <= 1e-6
    assert cliques.graph.n_components >= int(kin.groups.max()) + 1
