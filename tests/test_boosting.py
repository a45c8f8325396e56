"""The column of a boosting model: out of fold, saved and loaded, compared with its absence, refused elsewhere."""

from __future__ import annotations

import builtins
from dataclasses import replace

import numpy as np
import pytest

import fedkin
from fedkin import KinClassifier, KinRegressor
from fedkin.data import Federation
from fedkin.errors import DataError, MissingDependencyError, ModelFileError, ParameterError
from fedkin.fitting import FitOptions, compare, fit
from fedkin.fitting.boosting import BOOSTING, fit_boosting
from fedkin.losses import LOSSES

lightgbm = pytest.importorskip("lightgbm")


def rows(n=600, sites=8, loss="linear", seed=0, offset=False):
    """Effects of two columns that no line has, and an intercept that differs between sites."""
    rng = np.random.default_rng(seed)
    X, site = rng.uniform(-2, 2, (n, 3)), rng.integers(0, sites, n)
    eta = 2.0 * (X[:, 0] * X[:, 1] > 0) - 1 + rng.normal(0, 0.5, sites)[site]
    shift = rng.normal(0, 1, n) if offset else None
    total = eta if shift is None else eta + shift
    made = {
        "linear": lambda: total + 0.5 * rng.normal(size=n),
        "poisson": lambda: rng.poisson(np.exp(total)).astype(float),
        "logistic": lambda: np.where(rng.logistic(size=n) < 2 * total, "yes", "no"),
    }
    return Federation.from_arrays(X, made[loss](), site.tolist(), offset=shift)


@pytest.mark.filterwarnings("ignore:Overriding the parameters")  # of bins, which are the same
def test_every_row_has_the_prediction_of_the_part_that_has_not_seen_it():
    federation = rows()
    boosting, column, codes = fit_boosting(federation, LOSSES["linear"](), seed=3)
    assert codes is None  # kin knows better how sites differ
    fold = federation.folds(5, 3)
    # trees have the size with the smaller error on the first fold
    first, errors = [(np.flatnonzero(fold != 0), np.flatnonzero(fold == 0))], {}
    about = {"objective": "regression", "learning_rate": 0.1, "max_bin": 63, "seed": 3}
    about |= {"num_threads": 1, "verbosity": -1, "deterministic": True, "force_col_wise": True}
    for leaves in (7, 31):
        whole = lightgbm.Dataset(federation.X, federation.y, params=about, free_raw_data=False)
        errors[leaves] = min(lightgbm.cv(about | {"num_leaves": leaves}, whole, 300, folds=first)["valid l2-mean"])
    about["num_leaves"] = min(errors, key=errors.__getitem__)
    found = []
    for k in range(5):
        # bins of LightGBM are those of all rows; the part itself is a fit of the other folds
        whole = lightgbm.Dataset(federation.X, federation.y, params=about, free_raw_data=False)
        n_trees = int(boosting.parts[k + 1] - boosting.parts[k])
        part = lightgbm.train(about, whole.subset(np.flatnonzero(fold != k)), n_trees)
        np.testing.assert_allclose(boosting.predict_part(k, federation.X), part.predict(federation.X), atol=1e-12)
        np.testing.assert_array_equal(column[fold == k], boosting.predict_part(k, federation.X[fold == k]))
        found.append(part.predict(federation.X[:9]))
    np.testing.assert_allclose(boosting.predict(federation.X[:9]), np.mean(found, axis=0))
    assert boosting.predict(federation.X[:0]).shape == (0,)


@pytest.mark.filterwarnings("ignore:counts vary")  # that is what is missing without boosting
@pytest.mark.parametrize("offset", [True, False])
@pytest.mark.parametrize("loss", ["linear", "poisson", "logistic"])
def test_it_wins_where_effects_are_not_linear_and_comes_back_from_files(loss, offset, tmp_path):
    federation = rows(loss=loss, offset=offset)
    found = compare(federation, None, FitOptions(loss=loss, boost=True), repeats=2)
    assert list(found.errors) == ["Local", "Global", "Site intercepts", "Without boosting", "Fedkin"]
    assert found.verdict.startswith("Use Fedkin: ")
    model = found.models[0]["Fedkin"]
    assert model.feature_names[-1] == BOOSTING and found.models[0]["Without boosting"].boosting is None
    model.save(tmp_path / "model")
    loaded, shift = fedkin.load(tmp_path / "model"), None if federation.offset is None else federation.offset[:40]
    ids = [federation.sites[u] for u in federation.site_index[:40]]
    ours, theirs = (one.predict(federation.X[:40], ids, shift) for one in (model, loaded))
    np.testing.assert_array_equal(ours, theirs)
    (tmp_path / "model" / "boosting.npz").unlink()
    with pytest.raises(ModelFileError, match=r"boosting\.npz"):
        fedkin.load(tmp_path / "model")


def test_trees_know_sites_where_their_effects_have_no_form(tmp_path):
    rng = np.random.default_rng(0)
    X, site = rng.uniform(size=(1500, 2)), rng.integers(0, 5, 1500)
    y = rng.normal(size=(5, 6))[site, (6 * X[:, 0]).astype(int)] + 0.1 * rng.normal(size=1500)
    model = fit(Federation.from_arrays(X, y, site.tolist()), None, FitOptions(boost=True))
    assert len(model.site_codes) == 5
    assert np.mean((model.predict(X, site.tolist()) - y) ** 2) < 0.1 < 0.2 * y.var()
    model.save(tmp_path / "model")
    loaded = fedkin.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.predict(X[:50], site[:50].tolist()), model.predict(X[:50], site[:50].tolist()))
    own = np.flatnonzero(site == 3)[:20]
    np.testing.assert_allclose(loaded.part([3]).predict(X[own]), model.predict(X[own], 3))
    # a site that the trees do not know is an average one, also once it has rows and comes back from files
    new = loaded.predict(X[:50], "new", unseen="population")
    assert np.mean((new - y[:50]) ** 2) < 1.5 * y.var()
    joined = loaded.join((X[own], y[own]), name="new").model
    joined.save(tmp_path / "joined")
    np.testing.assert_array_equal(fedkin.load(tmp_path / "joined").predict(X[:50]), joined.predict(X[:50]))
    damaged = tmp_path / "model" / "model.json"
    damaged.write_text(damaged.read_text().replace('"site_codes": [', '"site_codes": [[0.5],', 1))
    with pytest.raises(ModelFileError, match="its codes do not match its sites"):
        fedkin.load(tmp_path / "model")


def test_where_effects_are_linear_the_simpler_model_is_recommended():
    rng = np.random.default_rng(0)
    X, site = rng.normal(size=(800, 3)), rng.integers(0, 8, 800)
    y = X @ [1.0, -1.0, 0.5] + rng.normal(0, 1, 8)[site] + rng.normal(size=800)
    found = compare(Federation.from_arrays(X, y, site.tolist()), None, FitOptions(boost=True))
    assert "the model without boosting" in found.verdict or "site intercepts" in found.verdict


def test_estimators_and_tables_with_gaps():
    federation = rows()
    X, site = federation.X, [federation.sites[u] for u in federation.site_index]
    plain, boosted = (KinRegressor(boost=one).fit(X, federation.y, site=site) for one in (False, True))
    assert boosted.score(X, federation.y, site) > plain.score(X, federation.y, site) + 0.1
    assert boosted.predict(X[:5], "new", unseen="population").shape == (5,)
    table = {"site": site, "a": X[:, 0].copy(), "b": X[:, 1], "y": federation.y}
    table["a"][::50] = np.nan
    gaps = Federation.from_frame(table, site="site", target="y", missing="indicator")
    model = fit(gaps, None, FitOptions(boost=True))
    assert model.feature_names == ("a", "b", "a missing", BOOSTING)
    assert np.isfinite(model.predict({"a": [np.nan, 1.0], "b": [1.0, 1.0]}, site[0])).all()
    joined = model.join({"a": [1.0] * 20, "b": [1.0] * 20, "y": [3.0] * 20})
    assert joined.model.predict({"a": [1.0], "b": [1.0]}) > model.population.predict({"a": [1.0], "b": [1.0]})


def test_where_it_has_no_place_it_is_refused(monkeypatch):
    with pytest.raises(ParameterError, match="is for the loss linear or logistic or poisson, not for huber"):
        fit(rows(), None, FitOptions(loss="huber", boost=True))
    three = Federation.from_arrays(rows().X, ["a", "b", "c"] * 200, [0, 1] * 300)
    with pytest.raises(ParameterError, match="not for multinomial"):
        fit(three, None, FitOptions(loss="logistic", boost=True))
    with pytest.raises(ParameterError, match="needs all rows in memory"):
        fit(fedkin.summarise(rows().with_intercept()), None, FitOptions(boost=True))
    with pytest.raises(DataError, match="needs 100 rows, got 60"):
        fit(rows(60), None, FitOptions(boost=True))
    known = builtins.__import__

    def without(name, *others):
        if name == "lightgbm":
            raise ImportError(name)
        return known(name, *others)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependencyError, match=r"pip install 'fedkin\[boost\]'"):
        KinClassifier(boost=True).fit(rows().X, rows(loss="logistic").y, site=[0, 1] * 300)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("left", 0),
        ("right", 10**9),
        ("roots", -1),
        ("value", np.nan),
        ("parts", 0),
        ("left", 0.5),
    ],
)
def test_arrays_that_are_no_trees_are_refused(entry, value, tmp_path):
    """Following them would not end, or would read memory that is not the model's."""
    model = fit(rows(), None, FitOptions(boost=True))
    arrays = {name: getattr(model.boosting, name) for name in ("feature", "value", "left", "right", "roots", "parts")}
    arrays[entry] = np.full_like(arrays[entry], value, dtype=np.array(value).dtype)
    with pytest.raises(ValueError, match="inconsistent"):
        replace(model.boosting, **arrays)


def test_trees_of_columns_that_a_model_does_not_have_are_refused(tmp_path):
    model = fit(rows(), None, FitOptions(boost=True))
    boosting = replace(model.boosting, feature=np.where(model.boosting.feature < 0, -1, 3))
    replace(model, boosting=boosting).save(tmp_path / "model")
    with pytest.raises(ModelFileError, match=r"boosting\.npz.*columns that the model does not have"):
        fedkin.load(tmp_path / "model")
