"""The comparison on held-out rows: by hand with scikit-learn, standard errors, the verdict, what travels as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from sklearn.linear_model import RidgeCV
from sklearn.metrics import (
    accuracy_score,
    log_loss,
    mean_absolute_error,
    mean_poisson_deviance,
    mean_squared_error,
    r2_score,
    roc_auc_score,
)
from sklearn.preprocessing import StandardScaler

from fedkin import Federation
from fedkin.errors import DataError, ParameterError
from fedkin.fitting import Comparison, FitOptions, baseline_models, compare, fit
from fedkin.fitting.baselines import RIDGES
from fedkin.fitting.decision import decide
from fedkin.fitting.scoring import check_held_out, more_scores, responses, row_errors
from fedkin.losses import UserLoss

PLAIN = FitOptions(method="fused", lam=0.02, select="none")


def sites(kind="linear", sizes=(60, 40, 30), slope=(1.0, 1.0, 1.0), spread=1.0, seed=0):
    rng = np.random.default_rng(seed)
    site = np.repeat([f"s{u}" for u in range(len(sizes))], sizes)
    n = len(site)
    X = rng.normal(size=(n, 2))
    eta = np.repeat(slope, sizes) * X[:, 0] + spread * np.repeat(rng.normal(size=len(sizes)), sizes)
    y: np.ndarray = eta + 0.5 * rng.normal(size=n)
    if kind == "poisson":
        y = rng.poisson(np.exp(0.5 * eta)).astype(float)
    elif kind == "logistic":
        y = np.where(eta + rng.logistic(size=n) > 0, "yes", "no")
    elif kind == "multinomial":
        y = np.array(["a", "b", "c"])[np.digitize(eta + rng.logistic(size=n), [-1, 1])]
    return Federation.from_arrays(X, y, site)


def ids(federation):
    return [federation.sites[u] for u in federation.site_index]


# --- by hand --------------------------------------------------------------------------------------------------


def test_every_number_by_hand():
    fed = sites()
    found = compare(fed, None, PLAIN, repeats=2, test_size=0.3)
    alphas = RidgeCV(RIDGES)
    local, pooled, ours = [], [], []
    for seed in (0, 1):
        train, test = fed.split(0.3, seed)
        scaled = StandardScaler().fit(train.X).transform
        own = np.concatenate([alphas.fit(scaled(train[u].X), train[u].y).predict(scaled(test[u].X)) for u in fed.sites])
        local.append(mean_squared_error(test.y, own))
        pooled.append(mean_squared_error(test.y, alphas.fit(scaled(train.X), train.y).predict(scaled(test.X))))
        ours.append(mean_squared_error(test.y, fit(train, None, PLAIN).predict(test.X, ids(test))))
        at_site = mean_squared_error(test["s1"].y, own[60 * 3 // 10 : 60 * 3 // 10 + 12])
        assert found.site_errors["Local"][seed][1] == pytest.approx(at_site, rel=1e-8)
    assert found.metric == "mean squared error"
    assert found.errors["Local"] == pytest.approx(local, rel=1e-8)
    assert found.errors["Global"] == pytest.approx(pooled, rel=1e-8)
    assert found.errors["Fedkin"] == pytest.approx(ours, rel=1e-8)
    assert found.mean("Local") == pytest.approx(np.mean(local))
    assert found.difference("Local") == pytest.approx(np.mean(local) - np.mean(ours))


@pytest.mark.parametrize("kind", ["linear", "huber", "poisson", "logistic", "multinomial"])
def test_metrics_agree_with_scikit_learn(kind):
    train, test = sites(kind).split(0.3, seed=1)
    models = baseline_models(train, FitOptions(loss=kind))
    weight = np.random.default_rng(0).uniform(0.5, 2, len(test.y))
    for model in models.values():
        response = responses(model, test)
        error = np.average(row_errors(model, test, response), weights=weight)
        more = more_scores(model, test, response, weight)
        if model.classes is None:
            metric = {"linear": mean_squared_error, "huber": mean_absolute_error, "poisson": mean_poisson_deviance}
            assert error == pytest.approx(metric[kind](test.y, response, sample_weight=weight), rel=1e-12)
            if kind != "poisson":
                assert more["explained variance"] == pytest.approx(r2_score(test.y, response, sample_weight=weight))
            continue
        labels = test.y.astype(str)
        assert error == pytest.approx(log_loss(labels, response, sample_weight=weight), rel=1e-12)
        chosen = model.predict(test.X, ids(test)).astype(str)
        assert more["accuracy"] == pytest.approx(accuracy_score(labels, chosen, sample_weight=weight))
        if kind == "logistic":
            areas = [roc_auc_score(test[u].y == "yes", model.predict_proba(test[u].X, u)[:, 1]) for u in test.sites]
            assert more["AUC per site"] == pytest.approx(np.mean(areas), rel=1e-12)


# --- standard errors and the verdict --------------------------------------------------------------------------


def made(**errors):
    """A comparison with these errors by split."""
    values = {name.replace("_", " "): np.array(each, dtype=float) for name, each in errors.items()}
    sites = {name: np.column_stack([each, each]) for name, each in values.items()}
    held = np.full(len(values["Fedkin"]), 5.0)
    return Comparison("log-loss", "splits", ("a", "b"), np.array([10, 10]), values, sites, held)


def test_standard_errors_are_corrected_for_rows_that_splits_share():
    found = made(Local=[1.2, 1.4, 1.3], Global=[2.0, 2.0, 2.3], Fedkin=[1.0, 1.1, 1.2])
    plain = np.std([0.2, 0.3, 0.1], ddof=1)
    assert found.difference_error("Local") == pytest.approx(plain * math.sqrt(1 / 3 + 1 / 3))
    assert found.difference_error("Fedkin") == 0
    assert found.difference("Local", "Global") == pytest.approx(1.3 - 2.1)
    apart = np.std([0.8, 0.6, 1.0], ddof=1) * math.sqrt(2 / 3)
    assert (
        found.difference_error("Local", "Global") == found.difference_error("Global", "Local") == pytest.approx(apart)
    )
    (pair,) = found.plain()["pairs"]
    assert (pair["name"], pair["other"], pair["difference_error"]) == ("Local", "Global", pytest.approx(apart))
    assert found.standard_error("Global") == pytest.approx(np.std([2.0, 2.0, 2.3], ddof=1) * math.sqrt(2 / 3))
    rows = replace(found, row_error={frozenset({"Local", "Fedkin"}): 1.0})
    assert rows.difference_error("Local") == pytest.approx(1 / math.sqrt(3))  # splits that agree by luck
    single = replace(made(Local=[1.2], Global=[2.0], Fedkin=[1.0]), row_error={frozenset({"Local", "Fedkin"}): 0.3})
    assert math.isnan(single.standard_error("Local"))
    assert single.difference_error("Local") == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("apart", "error", "start"),
    [
        (0.9, 1.0, "Use one model for all sites, or Fedkin: MSE 0.9% higher than Fedkin's"),  # 0.9 + 2 is below 5
        (1.1, 1.0, "Use Fedkin; these rows"),  # more than a standard error
        (0.9, 2.2, "Use Fedkin; these rows"),  # 0.9 + 4.4 is not below 5
        (-0.5, 2.2, "Use one model for all sites, or Fedkin: MSE 0.5% lower than"),
        (-3.0, 2.2, "Use one model for all sites: simpler than Fedkin, and as good or"),  # not clearly better
        (-9.0, 8.0, "Use Fedkin; these rows"),
        (-9.0, 4.4, "Use one model for all sites: MSE 9.0% lower than Fedkin's."),
        (9.0, 4.4, "Use Fedkin: MSE 8.3% lower than the next best (one model for all sites)."),
        (9.0, 4.6, "Use Fedkin; these rows cannot tell it from one model for all sites (MSE could be"),
    ],
)
def test_what_decides_between_fedkin_and_a_simpler_model(apart, error, start):
    for scale in (1.0, 0.01):
        found = decide(100 * scale, {"Global": apart * scale}, {"Global": error * scale}, "MSE")
        assert found.text.startswith(start) and (found.use == "Fedkin") == start.startswith("Use Fedkin")


def test_of_simpler_models_that_do_as_well_the_best_is_named_if_it_is_clear():
    error = {"Global": 1.0, "Site intercepts": 1.0}
    assert decide(100, {"Global": 0.9, "Site intercepts": -0.4}, error).use == "Global"
    assert decide(100, {"Global": 0.9, "Site intercepts": -0.6}, error).use == "Site intercepts"


def test_the_verdict_says_when_one_site_outweighs_the_rest():
    rows = np.array([20, 20, 20, 900])
    fedkin, local = np.array([1.0, 1.0, 1.0, 1.2]), np.array([1.3, 1.3, 1.3, 1.0])

    def of(fedkin, local, rows=rows):
        sites = {"Local": np.tile(local, (2, 1)), "Fedkin": np.tile(fedkin, (2, 1))}
        errors = {name: each @ rows / rows.sum() for name, each in sites.items()}
        held = np.full(len(errors["Fedkin"]), rows.sum() / 4)
        return Comparison("error", "splits", tuple("abcd"), rows, errors, sites, held)

    assert "4 of 4" not in of(fedkin, local).verdict and "3 of 4 sites" in of(local, fedkin).remarks[0]
    assert "site d with its 900 rows outweighs" in " ".join(of(fedkin, local).remarks)
    assert "site d with its 900 rows outweighs" in " ".join(of(local, fedkin).remarks)
    assert "outweighs" not in " ".join(of(fedkin, local, np.array([20, 20, 20, 20])).remarks)


def test_differences_that_round_to_nothing_are_level():
    for apart in (0.04, -0.04):  # ten standard errors, and 0.0% of the error
        assert "equal to Fedkin's, no clear difference" in decide(100, {"Local": apart}, {"Local": 0.004}).text
    assert decide(100, {"Local": 0.06}, {"Local": 0.004}).text.startswith("Use Fedkin: error 0.1% lower")


def test_models_without_errors_are_level():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(120, 2))
    found = compare(Federation.from_arrays(X, X @ [1.0, 2.0] + 3, np.repeat(list("abcd"), 30)), repeats=1)
    assert found.verdict.startswith("Use one model for all sites, or Fedkin: mean squared error equal to Fedkin's")


def test_one_site_where_a_method_explodes_does_not_decide():
    rng = np.random.default_rng(0)
    fedkin = 1 + 0.05 * rng.normal(size=(5, 20))
    local = fedkin + 0.2 + 0.05 * rng.normal(size=(5, 20))
    rows, held = np.full(20, 40), np.full(5, 200.0)

    def found(local, fedkin=fedkin):
        each = {"Local": local, "Fedkin": fedkin}
        errors = {name: values.mean(axis=1) for name, values in each.items()}
        return Comparison("error", "splits", tuple(range(20)), rows, errors, each, held)

    gained = "lower than the next best (the sites' own models); 20 of 20 sites gain over it."
    assert found(local).verdict.startswith("Use Fedkin: error ") and found(local).verdict.endswith(gained)
    assert not found(local).remarks
    wild = local.copy()
    wild[2, 7] = 500.0
    assert found(wild).difference("Local") < 2 * found(wild).difference_error("Local")  # the plain mean cannot tell
    assert found(wild).verdict.startswith("Use Fedkin: ")
    assert found(wild).remarks == ["Site 7 counts for less: the sites' own models and Fedkin are very far apart there."]
    # nor does one site where the others lose make Fedkin the best
    assert found(fedkin, wild).verdict.startswith("Use the sites' own models: ")


def test_a_column_that_hardly_varies_at_a_site_does_not_explode_there():
    rng = np.random.default_rng(3)
    site, X = np.repeat(np.arange(6), 40), rng.normal(size=(240, 2))
    X[site == 0, 1] = 1e-3 * rng.normal(size=40)
    y = X[:, 0] + rng.normal(size=240)
    train = Federation.from_arrays(X, y, site)
    far = baseline_models(train)["Local"].predict([[0.0, 1.0]], 0)  # a thousand deviations of site 0's own
    assert abs(far[0]) < 3


def test_the_other_models_are_said_to_be_outside_the_ball():
    fed = sites()
    held = compare(fed, None, FitOptions(method="fused", lam=0.02, select="none", radius=2.0), repeats=1)
    assert held.remarks[-1] == "The other models are not constrained to the ball of radius 2."
    assert "ball" not in " ".join(compare(fed, None, PLAIN, repeats=1).remarks)


def test_who_gains_and_who_loses():
    fed = sites(sizes=(200, 12, 12, 12), slope=(1.0,) * 4, spread=0.0)
    found = compare(fed, None, FitOptions(method="fused", lam=10.0, select="none"), repeats=6)
    gain, error = found.gains()
    assert gain == pytest.approx(found.site_means("Local") - found.site_means("Fedkin"))
    assert (gain[1:] > 0).all()  # small sites learn from the large one
    assert abs(gain[0]) < gain[1:].min()
    assert (error > 0).all()


# --- what it takes and what it gives --------------------------------------------------------------------------


def test_plain_values_are_json():
    fed = sites("logistic", sizes=(30, 30, 1))
    document = json.loads(json.dumps(compare(fed, None, PLAIN, repeats=2).plain(), allow_nan=False))
    assert [one["name"] for one in document["methods"]] == ["Local", "Global", "Site intercepts", "Fedkin"]
    assert (document["repeats"], document["lower_is_better"]) == (2, True)
    single = document["sites"][2]
    assert (single["site"], single["rows"], single["Fedkin"], single["gain"]) == ("s2", 1, None, None)
    assert set(document["more"]) == {"accuracy", "AUC per site"}


def test_splits_of_ones_own():
    fed = sites()
    masks = [np.arange(len(fed.y)) % 4 == k for k in range(4)]
    found = compare(fed, None, PLAIN, splits=masks)
    assert found.repeats == 4
    assert found.test_size == pytest.approx(0.25, abs=0.01)
    train, test = fed.take(~masks[2]), fed.take(masks[2])
    expected = mean_squared_error(test.y, baseline_models(train)["Site intercepts"].predict(test.X, ids(test)))
    assert found.errors["Site intercepts"][2] == pytest.approx(expected)
    with pytest.raises(ParameterError, match="splits is empty"):
        compare(fed, splits=[])
    for wrong in ({"repeats": 0}, {"test_size": 1.0}):
        with pytest.raises(ParameterError):
            compare(fed, **wrong)


def test_comparisons_that_cannot_be_made():
    train, _ = sites("logistic").split(0.3, seed=1)
    model = fit(train, None, PLAIN)
    with pytest.raises(DataError, match="'w' of the test"):
        check_held_out(model, Federation({"w": train["s0"]}))
    with pytest.raises(DataError, match="no held-out rows"):
        compare(train, None, PLAIN, splits=[np.zeros(len(train.y), dtype=bool)])
    other = Federation({"s0": ([[0.0, 0.0]], ["maybe"])})
    with pytest.raises(DataError, match="class 'maybe'"):
        row_errors(model, other, responses(model, other))


def test_custom_losses_are_compared_by_their_own_value():
    def value(theta, X, y, offset):
        return float(np.mean((y - X @ theta) ** 2))

    def gradient(theta, X, y, offset):
        return -2 * X.T @ (y - X @ theta) / len(y)

    fed = sites()
    mine = UserLoss(value, gradient, name="squares", strong_convexity=1e-4)
    found = compare(fed, None, FitOptions(method="fused", loss=mine, lam=0.0), repeats=1)
    known = compare(fed, None, FitOptions(method="fused", lam=0.0, select="none"), repeats=1)
    assert found.metric == "loss"
    assert list(found.errors) == ["Local", "Global", "Fedkin"]
    assert found.errors["Fedkin"] == pytest.approx(known.errors["Fedkin"], rel=1e-3)


def test_sentences_give_the_differences_of_the_table_where_they_agree_in_sign():
    error = {"Local": 1.0}
    assert "error 9.1% lower than the next best" in decide(100, {"Local": 5.0}, error, plain={"Local": 10.0}).text
    assert "error 4.8% lower than the next best" in decide(100, {"Local": 5.0}, error, plain={"Local": -10.0}).text


def test_a_model_is_not_recommended_where_a_simpler_one_has_the_lower_error():
    apart, error = {"Site intercepts": 0.9, "Local": 1.0}, {"Site intercepts": 0.4, "Local": 1.5}
    assert decide(100, apart, error).use == "Fedkin"
    assert decide(100, {**apart, "Site intercepts": 1.1}, error).use == "Local"
