"""FittedModel: predictions, the directory that keeps it, and parts that travel between organiser and sites."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

import fedkin
import heart
from fedkin import Federation, Graph
from fedkin.data import Column, Schema
from fedkin.errors import DataError, FedkinWarning, ModelFileError, ParameterError, UnknownSiteError
from fedkin.federate import Organiser, SecurityError, Site, change_settings
from fedkin.fitting import FitOptions, FittedModel, FusedFit, fit, join_parts, load, model_from_theta
from fedkin.losses import HuberLoss, LinearLoss, LogisticLoss, Loss, MultinomialLoss, PoissonLoss, UserLoss, make_loss


def made(
    sites=("a", "b", "c"),
    loss: Loss | None = None,
    q: int = 2,
    k: int = 1,
    seed: int = 0,
    **more,
) -> FittedModel:
    rng = np.random.default_rng(seed)
    v = len(sites)
    names = more.pop("feature_names", tuple(f"x{c}" for c in range(q)))
    graph = Graph.complete(sites)
    return FittedModel(
        sites=tuple(sites),
        coef=rng.normal(size=(v, k, len(names))),
        intercept=rng.normal(size=(v, k)),
        feature_names=names,
        groups=np.arange(v) // 2,
        n_samples=np.arange(v) + 5,
        loss=loss or LinearLoss(),
        fused=FusedFit("l1", 0.1, 1e-7, 12),
        graph=graph.reweighted(rng.uniform(0.5, 2.0, graph.n_edges)),
        **more,
    )


def held(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_same(one: FittedModel, other: FittedModel) -> None:
    assert one.sites == other.sites
    assert [type(site) for site in one.sites] == [type(site) for site in other.sites]
    for name in ("coef", "intercept", "groups", "n_samples"):
        first, second = getattr(one, name), getattr(other, name)
        assert first.dtype == second.dtype and first.shape == second.shape
        assert first.tobytes() == second.tobytes(), name
    for name in ("feature_names", "fit_intercept", "classes", "target_name"):
        assert getattr(one, name) == getattr(other, name), name
    assert repr(one.fused) == repr(other.fused)  # a gap may be NaN
    assert one.graph == other.graph
    assert one.offset_name == other.offset_name
    assert dict(one.notes) == dict(other.notes)
    assert one.loss.name == other.loss.name


# --- predictions ----------------------------------------------------------------------------------------------


def test_predictions_are_those_of_each_rows_site():
    model = made()
    X = np.random.default_rng(1).normal(size=(5, 2))
    ids = ["c", "a", "b", "b", "a"]
    expected = [X[k] @ model.coef["abc".index(u), 0] + model.intercept["abc".index(u), 0] for k, u in enumerate(ids)]
    np.testing.assert_allclose(model.predict(X, ids), expected, rtol=1e-14)
    np.testing.assert_allclose(model.predict(X, np.array(ids)), expected, rtol=1e-14)
    np.testing.assert_allclose(model.predict(X, pd.Series(ids)), expected, rtol=1e-14)
    np.testing.assert_allclose(model.predict(X, "b"), X @ model.coef[1, 0] + model.intercept[1, 0], rtol=1e-14)


def test_responses_of_the_losses():
    X, offset = np.random.default_rng(1).normal(size=(4, 2)), np.array([0.0, 1.0, -1.0, 2.0])
    model = made(loss=PoissonLoss(), offset_name="exposure")
    eta = X @ model.coef[0, 0] + model.intercept[0, 0] + offset
    np.testing.assert_allclose(model.predict(X, "a", offset), np.exp(eta), rtol=1e-13)
    model = made(loss=LogisticLoss(), classes=("no", "yes"))
    eta = X @ model.coef[0, 0] + model.intercept[0, 0]
    np.testing.assert_allclose(model.predict_proba(X, "a")[:, 1], expit(eta), rtol=1e-13)
    assert model.predict(X, "a").tolist() == np.where(eta > 0, "yes", "no").tolist()
    model = made(loss=MultinomialLoss(3), classes=(1, 2, 4), k=2)
    eta = np.column_stack([np.zeros(4), X @ model.coef[2].T + model.intercept[2]])
    odds = np.exp(eta)
    np.testing.assert_allclose(model.predict_proba(X, "c"), odds / odds.sum(axis=1, keepdims=True), rtol=1e-13)
    assert model.predict(X, "c").tolist() == np.array([1, 2, 4])[eta.argmax(axis=1)].tolist()


def test_tables_are_read_by_feature_name():
    model = made(feature_names=("age", "dose"))
    table = {"dose": [1.0, 2.0], "site": ["a", "b"], "age": [40, 50]}
    expected = model.predict(np.array([[40.0, 1.0], [50.0, 2.0]]), ["a", "b"])
    for frame in (table, pd.DataFrame(table), pl.DataFrame(table), pl.DataFrame(table).to_arrow()):
        np.testing.assert_array_equal(model.predict(frame, ["a", "b"]), expected)
    with pytest.raises(DataError, match="missing column 'dose'"):
        model.predict(pd.DataFrame({"age": [1.0]}), "a")
    with pytest.raises(DataError, match="'age' is not numeric"):
        model.predict(pd.DataFrame({"age": ["old"], "dose": [1.0]}), "a")


def test_tuples_are_single_sites_and_lists_are_rows():
    model = made(sites=((0, 0), (0, 1)))
    assert model.predict(np.zeros((3, 2)), (0, 1)).tolist() == [model.intercept[1, 0]] * 3
    assert model.predict(np.zeros((2, 2)), [(0, 1), (0, 0)]).tolist() == model.intercept[[1, 0], 0].tolist()


@pytest.mark.parametrize(
    ("X", "site", "offset", "message"),
    [
        ([[1.0]], "a", None, r"shape \(1, 1\), expected \(n, 2\)"),
        ([1.0, 2.0], "a", None, r"shape \(2,\)"),
        ([[1.0, math.nan]], "a", None, "row 0, feature 'x1' is nan"),
        ([[1.0, 2.0]], ["a", "b"], None, "site has 2 ids, but X has 1 row: "),
        ([[1.0, 2.0]], "a", [1.0, 2.0], r"offset has shape \(2,\)"),
        ([[1.0, 2.0]], "a", [math.inf], "row 0: the offset is inf"),
    ],
)
def test_bad_rows(X, site, offset, message):
    with pytest.raises(DataError, match=message):
        made().predict(X, site, offset)
    with pytest.raises(DataError, match="fitted with an offset"):
        made(offset_name="exposure").predict([[0.0, 0.0]], "a")


# --- files ----------------------------------------------------------------------------------------------------

site_ids = st.one_of(
    st.integers(),
    st.text(st.characters(codec="utf-8"), max_size=8),
    st.booleans(),
    st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: not x.is_integer()),
    st.dates(),
    st.datetimes(),
    st.tuples(st.integers(), st.text(st.characters(codec="utf-8"), max_size=3)),
)


def distinct_ids(ids: list) -> list:
    return list(dict.fromkeys(ids))  # True == 1


@settings(max_examples=40, deadline=None)
@given(
    ids=st.lists(site_ids, min_size=1, max_size=6).map(distinct_ids),
    names=st.lists(st.text(st.characters(codec="utf-8"), max_size=8), min_size=1, max_size=4, unique=True),
    values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=5, max_size=5),
)
def test_any_model_survives_the_files(tmp_path_factory, ids, names, values):
    folder = tmp_path_factory.mktemp("models") / "model"
    model = made(sites=ids, feature_names=tuple(names))
    coef = np.resize(np.array(values), model.coef.shape)
    model = replace(model, coef=coef, intercept=coef[:, :, 0], notes={ids[0]: ("one", "two")}, target_name="Wert")
    model.save(folder)
    assert_same(load(folder), model)


@pytest.mark.parametrize(
    ("loss", "more"),
    [
        (HuberLoss(0.7), {}),
        (PoissonLoss(), {"offset_name": "offset"}),
        (LogisticLoss(), {"classes": ("nein", "ja")}),
        (LogisticLoss(), {"classes": (False, True)}),
        (MultinomialLoss(3), {"classes": (-1, 0, 1), "k": 2}),
    ],
)
def test_losses_and_classes_survive(tmp_path, loss, more):
    model = made(loss=loss, **more)
    model.save(tmp_path / "m")
    again = load(tmp_path / "m")
    assert_same(again, model)
    X, shift = np.random.default_rng(3).normal(size=(6, 2)), (np.ones(6) if model.offset_name else None)
    np.testing.assert_array_equal(again.predict(X, "b", shift), model.predict(X, "b", shift))
    assert getattr(again.loss, "delta", None) == getattr(loss, "delta", None)


def test_what_a_model_need_not_have_survives_too(tmp_path):
    model = fit(Federation({u: [[float(u)]] for u in range(4)}), None, FitOptions(method="fused", loss="mean", lam=0.1))
    told = {"metric": "error", "methods": [{"name": "Local", "mean": 1.5}]}
    replace(model, comparison=told, history={"command": "fedkin fit"}).save(tmp_path / "model")
    again = load(tmp_path / "model")
    assert again.comparison == told and again.history == {"command": "fedkin fit"}
    (tmp_path / "model" / "history.json").write_text("{}")
    with pytest.raises(ModelFileError, match=r"history\.json: its content does not match"):
        load(tmp_path / "model")
    replace(model, fused=FusedFit("l1", 0.1, math.inf)).save(tmp_path / "model")
    assert load(tmp_path / "model").comparison is None and load(tmp_path / "model").fused.gap == math.inf


def test_a_link_to_a_model_stays_a_link(tmp_path):
    made(seed=0).save(tmp_path / "real")
    (tmp_path / "latest").symlink_to(tmp_path / "real")
    made(seed=1).save(tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink()
    assert_same(load(tmp_path / "real"), made(seed=1))


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_disk_that_is_full_leaves_the_old_model(tmp_path, monkeypatch, call):
    made(seed=0).save(tmp_path / "m")
    place, calls = (os, []) if call == "fsync" else (Path, [])
    whole = getattr(place, call)

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 2:  # some files are written, or the old model is out of the way
            raise OSError(28, "No space left on device")
        return whole(*arguments)

    monkeypatch.setattr(place, call, failing)
    with pytest.raises(ModelFileError, match="No space left"):
        made(seed=1).save(tmp_path / "m")
    monkeypatch.undo()
    assert_same(load(tmp_path / "m"), made(seed=0))
    assert held(tmp_path) == ["m"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_entries_of_the_wrong_kind_are_noticed(tmp_path_factory, data):
    """Whatever stands in model.json: a model or ModelFileError, never another exception."""
    folder = tmp_path_factory.mktemp("models") / "m"
    made(loss=MultinomialLoss(3), classes=(0, 1, 2), k=2, notes={"a": ("note",)}).save(folder)
    path = folder / "model.json"
    meta = json.loads(path.read_text())
    key = data.draw(st.sampled_from(sorted(meta)))
    if data.draw(st.booleans()):
        del meta[key]
    else:
        junk = st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda s: st.lists(s, max_size=2))
        meta[key] = data.draw(junk | st.dictionaries(st.text(max_size=3), junk, max_size=2))
    path.write_text(json.dumps(meta))
    try:
        load(folder)
    except ModelFileError as error:
        assert str(path) in str(error) or "coefficients.csv" in str(error)


def test_after_a_crash_between_two_renames_the_older_model_is_found(tmp_path):
    made().save(tmp_path / "m")
    (tmp_path / "m").rename(tmp_path / ".m.0123456789ab.old")
    assert load(tmp_path / "m").sites == made().sites
    made().save(tmp_path / "m")
    assert held(tmp_path) == ["m"]


def test_what_killed_saves_left_behind_is_removed_when_it_is_old(tmp_path):
    for mark in ("old-one", "young"):
        (tmp_path / f".m.{mark}.new").mkdir()
    os.utime(tmp_path / ".m.old-one.new", (0, 0))
    made().save(tmp_path / "m")
    assert held(tmp_path) == [".m.young.new", "m"]


def test_ids_that_no_file_can_keep(tmp_path):
    with pytest.raises(ModelFileError, match="of type frozenset cannot be written"):
        made(sites=(frozenset({1}), "b")).save(tmp_path / "m")
    assert held(tmp_path) == []


def squared(theta, X, y, offset):
    return float(0.5 * np.mean((y - X @ theta) ** 2))


def squared_gradient(theta, X, y, offset):
    return -X.T @ (y - X @ theta) / len(y)


def test_a_loss_of_ones_own(tmp_path):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 2))
    fed = Federation({u: (X[20 * u : 20 * u + 20], rng.normal(size=20)) for u in (0, 1)})
    plain = UserLoss(squared, squared_gradient, name="half squares", strong_convexity=1e-3)
    model = fit(fed, None, FitOptions(method="fused", loss=plain, lam=0.0))
    model.save(tmp_path / "plain")
    np.testing.assert_array_equal(load(tmp_path / "plain").predict(X, 1), model.predict(X, 1))

    doubled = replace(plain, predict_fn=lambda theta, X, offset: 2 * X @ theta)
    model = replace(model, loss=doubled)
    model.save(tmp_path / "doubled")
    with pytest.warns(FedkinWarning, match=r"'half squares'.*load\(\.\.\., loss=\.\.\.\)"):
        again = load(tmp_path / "doubled")
    np.testing.assert_allclose(again.predict(X, 1), 0.5 * model.predict(X, 1))
    np.testing.assert_array_equal(load(tmp_path / "doubled", loss=doubled).predict(X, 1), model.predict(X, 1))
    with pytest.raises(ParameterError, match="only its name"):
        again.loss.value(np.zeros(3), X, X[:, 0])


# --- a schema, and parts ---------------------------------------------------------------------------------------

SCHEMA = Schema(
    (Column("age", unit="years", low=20, high=100), Column("ward", "category", levels=("A", "B", "C"))),
    Column("outcome", "category", levels=("alive", "dead")),
    offset="log_time",
)


def schema_model() -> FittedModel:
    rng = np.random.default_rng(0)
    return model_from_theta(
        {"n": rng.normal(size=4), "s": rng.normal(size=4), "w": rng.normal(size=4)},
        Graph(["n", "s", "w"], [("n", "s"), ("s", "w")]),
        schema=SCHEMA,
        loss=make_loss("logistic"),
        intercept=True,
        n_samples={"n": 40, "s": 50},
        fused=FusedFit("l1", 0.1),
    )


def schema_table(n: int = 12) -> dict[str, object]:
    rng = np.random.default_rng(1)
    ward = rng.choice(["A", "B", "C"], n).astype(object)
    return {"age": rng.uniform(20, 100, n), "ward": ward, "log_time": rng.normal(size=n)}


def test_parameters_of_prepared_rows_become_a_model_in_the_users_units():
    rng = np.random.default_rng(0)
    theta = {name: rng.normal(size=4) for name in "nsw"}
    table = schema_table()
    rows = SCHEMA.rows({**table, "outcome": ["alive"] * 12}, intercept=True)
    model = schema_model()
    eta = rows.X @ theta["s"] + rows.offset
    np.testing.assert_allclose(model.linear_predictor(table, "s")[:, 0], eta, rtol=1e-12)
    assert model.feature_names == ("age", "ward=B", "ward=C")
    assert model.classes == ("alive", "dead")
    assert model.members() == (("n",), ("s",), ("w",))
    assert model.n_samples.tolist() == [40, 50, 0]


def test_a_part_stands_alone(tmp_path):
    model = schema_model()
    part = model.part(["w", "s"])
    assert part.sites == ("w", "s")
    assert part.graph.n_edges == 1
    assert part.groups.tolist() == [0, 1]
    alone = model.part(["s"])
    alone.save(tmp_path / "own")
    back = load(tmp_path / "own")
    np.testing.assert_array_equal(back.predict(schema_table()), model.predict(schema_table(), "s"))
    text = "".join(path.read_text() for path in (tmp_path / "own").iterdir())
    for number in model.coef[0].ravel():
        assert repr(float(number)) not in text
    with pytest.raises(UnknownSiteError, match="'x'"):
        model.part(["x"])
    with pytest.raises(ParameterError):
        model.part([])


@pytest.fixture
def two(tmp_path: Path) -> tuple[Organiser, Path, Path]:
    made = heart.organiser(tmp_path, names=("north", "south"))
    return made, heart.admitted(made, "north"), heart.admitted(made, "south")


def model_of(contract, site: str, theta: float = 0.5, lam: float = 0.1) -> FittedModel:
    return model_from_theta(
        {site: np.full(4, theta)}, fedkin.Graph.empty([site]), schema=contract.schema, loss=contract.loss_object(),
        intercept=True, n_samples={site: 40}, fused=FusedFit("l1", lam), origin={"from": "rounds", "rounds": 7},
    )  # fmt: skip


def test_files_that_no_model_has_are_refused(two, tmp_path: Path) -> None:
    """Nothing is written elsewhere, whatever an organiser that was taken over signs."""
    made, north, _ = two
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "site.key").write_text("mine")
    (path,) = made.deliver({"north": tmp_path / "part"})
    before = (north / "site.key").read_bytes()
    with pytest.raises(SecurityError, match=r"north\.model: .*`\$\.files`"):
        Site.read(north).accept(path)
    assert (north / "site.key").read_bytes() == before and not (north / "model").exists()


def test_a_site_publishes_only_if_its_rules_say_so_and_for_itself(two) -> None:
    made, north, south = two
    with pytest.raises(DataError, match="has no model yet"):
        Site.read(north).publish()
    model_of(made.contract, "north").save(north / "model")
    with pytest.raises(DataError, match=r"the rules of north do not allow sharing its parameters.*--share-result"):
        Site.read(north).publish()
    change_settings(north, share_result=True)
    (table := north / "model" / "predictions.csv").write_text("age,ward\n63,B\n")
    with pytest.raises(DataError, match=r"has predictions\.csv, which is not part of a model of fedkin site run"):
        Site.read(north).publish()
    table.unlink()
    description = north / "model" / "model.json"
    text = description.read_text()
    description.write_text(text.replace('"rounds"', '"rows"', 1))
    with pytest.raises(DataError, match="was not made by rounds"):
        Site.read(north).publish()
    description.write_text(text)
    path = Site.read(north).publish(frozenset({"south"}))
    found = made.read_published(path)
    assert (found.site, found.dropped) == ("north", ("south",))
    model_of(made.contract, "south").save(south / "model")
    change_settings(south, share_result=True)
    other = Site.read(south).publish()
    with pytest.raises(SecurityError, match=str(other)):
        made.read_published(Path(_signed_for(other, "north")))
    made.expel("north")
    with pytest.raises(DataError, match="north has left or was expelled"):
        made.read_published(path)


def _signed_for(path: Path, site: str) -> str:
    content = json.loads(path.read_text())
    content["body"]["site"] = site
    path.write_text(json.dumps(content))
    return str(path)


def test_parts_of_different_rounds_are_not_joined(two) -> None:
    made, *_ = two
    graph = fedkin.Graph(["north", "south"], [("north", "south")])
    one, other = model_of(made.contract, "north"), model_of(made.contract, "south")
    assert join_parts([one, other], graph).members() == (("north", "south"),)
    assert join_parts([one, model_of(made.contract, "south", 0.6)], graph).n_groups == 2
    with pytest.raises(DataError, match="'north' and 'south' differ in lam: they are not from the same rounds"):
        join_parts([one, model_of(made.contract, "south", lam=0.2)], graph)
    with pytest.raises(DataError, match="give each site of the graph once"):
        join_parts([one, one], graph)


def test_joining_the_parts_gives_the_model_back() -> None:
    rng = np.random.default_rng(0)
    schema = Schema((Column("x", low=0, high=4), Column("z", low=-1, high=1)), Column("y"))
    theta = {site: rng.normal(size=3).round(2 if site != "b" else 1) for site in "abc"}
    theta["c"] = theta["a"]
    graph = fedkin.Graph(list("abc"), [("a", "b"), ("b", "c"), ("a", "c")])
    whole = model_from_theta(
        theta, graph, schema=schema, loss=make_loss("linear"), intercept=True, n_samples=dict.fromkeys("abc", 9)
    )
    again = join_parts([whole.part([site]) for site in "cab"], graph)
    assert again.coef.tobytes() == whole.coef.tobytes() and again.intercept.tobytes() == whole.intercept.tobytes()
    assert again.members() == whole.members() == (("a", "c"), ("b",))
    federation = fedkin.Federation({site: [[float(site > "a")]] for site in "abc"})
    means = fit(federation, graph, FitOptions(method="fused", loss="mean", lam=0.01, select="none"))
    assert join_parts([means.part([site]) for site in "abc"], graph).members() == means.members()
