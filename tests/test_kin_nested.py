"""Sites within districts: variances at both levels, and new sites of a known district."""

import warnings

import numpy as np
import pandas as pd
import pytest
from statsmodels.regression.mixed_linear_model import MixedLM

import heart
from fedkin import Federation, KinRegressor, find_kin, load
from fedkin.cli import main
from fedkin.errors import DataError, FedkinWarning, ParameterError
from fedkin.federate import Contract, ContractError, Site
from fedkin.fitting import FitOptions
from fedkin.kin import Priors, QuadraticLikelihoods, fit_mixed
from fedkin.kin.evidence import Evidence
from fedkin.kin.mixed import fit_population

K, S, N = 12, 5, 12
V = K * S
DISTRICT = np.repeat(np.arange(K), S)


def rows(seed=1):
    rng = np.random.default_rng(seed)
    site, w = np.repeat(np.arange(V), N), rng.normal(size=K)[DISTRICT]
    x = rng.normal(size=(V * N, 2))
    X = np.column_stack([np.ones(V * N), x, w[site]])
    own = rng.normal(size=(V, 2)) * [0.6, 0.3] + (rng.normal(size=(K, 2)) * [0.8, 0.4])[DISTRICT]
    return X, X @ [1, 0.5, -0.3, 0.4] + own[site, 0] + own[site, 1] * x[:, 0] + rng.normal(size=V * N), site


def sums_of(X, y, site):
    each, target = ([part[site == u] for u in range(V)] for part in (X, y))
    G = np.stack([A.T @ A for A in each])
    c = np.stack([A.T @ b for A, b in zip(each, target, strict=True)])
    yy, n = np.array([b @ b for b in target]), np.full(V, float(N))
    return QuadraticLikelihoods.from_products(
        G, c, yy, n, fixed=np.array([False, False, True, True]), district=DISTRICT
    )


def test_both_levels_are_those_of_statsmodels():
    X, y, site = rows()
    table = pd.DataFrame({"y": y, "a": X[:, 1], "b": X[:, 2], "w": X[:, 3], "site": site, "d": DISTRICT[site]})
    parts = {"slope": "0+a", "sites": "0+C(site)", "slopes": "0+C(site):a"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MixedLM.from_formula("y~a+b+w", table, groups="d", re_formula="1", vc_formula=parts)
        theirs = model.fit(reml=True)
    ours = fit_population(sums_of(X, y, site), np.full(V, theirs.scale), np.array([0.3, 0.1, 0, 0]), learned=True)
    np.testing.assert_allclose(ours.mean, theirs.fe_params, rtol=1e-3)
    np.testing.assert_allclose(np.sqrt(np.diag(ours.covariance)), theirs.bse_fe, rtol=1e-2)
    slope, sites, slopes = theirs.vcomp[
        np.argsort([["slope", "sites", "slopes"].index(one) for one in model.exog_vc.names])
    ]
    np.testing.assert_allclose(ours.variance, [sites, slopes, 0, 0], rtol=0.02)
    np.testing.assert_allclose(ours.outer_variance, [theirs.cov_re.iloc[0, 0], slope, 0, 0], rtol=0.02)
    np.testing.assert_allclose(ours.log_likelihood, theirs.llf, rtol=1e-6)
    # a column that is constant within districts has at most their degrees of freedom
    assert ours.degrees(np.eye(4))[[0, 3]].max() < K < V < ours.degrees(np.eye(4))[2]


def test_estimates_are_those_of_the_dense_posterior():
    X, y, site = rows()
    model = fit_mixed(sums_of(X, y, site), np.array([True, False, False, False]))
    size = 4 + 2 * K + 2 * V
    prior = np.array([1e-8, np.exp(-model.parameters[2]), 0.0, 0.0])
    each = [1 / model.nested.variance[:2]] * K + [1 / model.variance[:2]] * V
    H, right, maps = np.diag(np.concatenate([prior, *each])), np.zeros(size), []
    for u in range(V):
        T = np.zeros((4, size))
        T[:, :4] = np.eye(4)
        for j in range(2):
            T[j, 4 + 2 * DISTRICT[u] + j] = 1.0
        maps.append((T.copy(), T))
        for j in range(2):
            T[j, 4 + 2 * K + 2 * u + j] = 1.0
        Z = X[site == u] @ T
        H, right = H + Z.T @ Z / model.noise[u], right + Z.T @ y[site == u] / model.noise[u]
    C = np.linalg.inv(H)
    whole, centres = C @ right, model.nested.covariance(model.mean_covariance)
    for u, (T, own) in enumerate(maps):
        np.testing.assert_allclose(model.theta[u], own @ whole, atol=1e-10)
        np.testing.assert_allclose(model.covariance[u], own @ C @ own.T, atol=1e-10)
        np.testing.assert_allclose(model.nested.mean[DISTRICT[u]], T @ whole, atol=1e-10)
        np.testing.assert_allclose(centres[DISTRICT[u]], T @ C @ T.T, atol=1e-10)


@pytest.mark.parametrize("learned", [True, False])
def test_gradients_are_those_of_differences(learned):
    sums = sums_of(*rows())
    evidence = Evidence(sums, np.array([True, False, False, False]), None if learned else 1.0, Priors())
    at = np.array([-0.5, -1.0, -1.0, -0.1 if learned else 0.0, -0.3, -0.8])
    steps = 1e-5 * np.eye(len(at))
    found = [(evidence._negative(at + one)[0] - evidence._negative(at - one)[0]) / 2e-5 for one in steps]
    kept = np.arange(len(at)) != (-1 if learned else 3)
    np.testing.assert_allclose(evidence._negative(at)[1][kept], np.array(found)[kept], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss", ["linear", "logistic"])
def test_a_new_site_is_like_its_district(loss):
    X, y, site = rows()
    y = y if loss == "linear" else (y > 1).astype(float)
    names = ["(intercept)", "a", "b", "w"]
    federation = Federation.from_arrays(X, y, site, feature_names=names)
    within = {u: f"d{DISTRICT[u]}" for u in range(V)}
    kin = find_kin(federation, loss=loss, fixed=["b"], within=within)
    members = kin.theta[DISTRICT == 3]
    known, other, unknown = (kin.join(within=one) for one in ("d3", "new", None))
    assert members[:, 0].min() < known.theta[0] < members[:, 0].max()
    np.testing.assert_array_equal(other.theta, unknown.theta)
    assert (np.diag(known.covariance)[:2] < np.diag(unknown.covariance)[:2]).all()
    apart = [kin.contrast(0, u).standard_error[0] for u in (1, V - 1)]
    assert apart[0] < apart[1]  # of one district, and of two
    np.testing.assert_allclose(kin.difference_errors()[[0, 0], [1, V - 1], 0], apart, rtol=1e-9)
    assert "between districts" in kin.summary() and not kin.resolved
    # the rows of a site of the fit, as those of a new one, make nearly the same model
    again = kin.join(federation[7], within="d1")
    assert (np.abs(again.theta - kin.theta[7]) <= 0.05 * np.sqrt(np.diag(kin.covariance[7]))).all()


def test_districts_are_checked():
    X, y, site = rows()
    federation = Federation.from_arrays(X, y, site)
    for within, message in (
        ({0: "a"}, "no district of site"),
        (["a"] * V, "all sites are in one district"),
        (list(range(V)), "its own district"),
        (["a", "b"], "a district for each"),
    ):
        with pytest.raises(DataError, match=message):
            find_kin(federation, within=within)
    kin = find_kin(Federation.from_arrays(X[:, :2], y, site))
    with pytest.raises(ParameterError, match="no districts"):
        kin.join(within="a")


def test_estimators_predict_unseen_sites_by_their_district(tmp_path):
    X, y, site = rows()
    within = {u: f"d{DISTRICT[u]}" for u in range(V)} | {"new": "d3", "other": "elsewhere"}
    model = KinRegressor(fixed=["x1"], within=within, unseen="population")
    with pytest.warns(FedkinWarning, match="'x2' is constant"):
        model.fit(X[:, 1:], y, site=site)
    model.model_.save(tmp_path / "model")
    for one in (model.model_, load(tmp_path / "model")):
        new, direct = (one.predict(X[:3, 1:], u, unseen="population") for u in ("new", "never heard of"))
        np.testing.assert_allclose(new, one.join(within="d3").model.predict(X[:3, 1:]))
        np.testing.assert_allclose(direct, one.population.predict(X[:3, 1:]))
        each = one.predict_interval(X[:3, 1:], ["new", 0, "other"], unseen="population")
        np.testing.assert_allclose(each.mean, [new[0], one.predict(X[1:2, 1:], 0)[0], direct[2]])
        widths = each.high - each.low
        assert widths[1] < widths[0] < widths[2]
    with pytest.raises(ParameterError, match="within= is for kin"):
        FitOptions(method="fused", within=within, lam=0.1)


def test_the_command_line_reads_districts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    X, y, site = rows()
    table = pd.DataFrame({"school": site, "district": DISTRICT[site], "a": X[:, 1], "b": X[:, 2], "y": y})
    table[site < V - 1].to_csv("rows.csv", index=False)
    table[site == V - 1].to_csv("new.csv", index=False)
    fit = ["fit", "rows.csv", "--site", "school", "--target", "y", "--within", "district", "--fixed", "b"]
    assert main([*fit, "--test-size", "0"]) == 0
    model = load("fedkin-model")
    assert model.feature_names == ("a", "b") and model.kin.fixed == ("b",)
    assert set(model.kin.districts) == set(range(K))
    capsys.readouterr()
    assert main(["predict", "fedkin-model", "new.csv", "--new-site"]) == 0
    told = [float(line.split(",")[2]) for line in capsys.readouterr().out.splitlines()[1:]]
    expected = model.join(within=K - 1).model.predict(X[site == V - 1][:, 1:3])
    np.testing.assert_allclose(told, expected)
    table.assign(district=np.arange(len(table)) % 3).to_csv("crossed.csv", index=False)
    fit[1] = "crossed.csv"
    assert main(fit) != 0 and "must be nested in districts" in capsys.readouterr().err


CONTRACT = """
name = "schools"
loss = "linear"
within = "district"
fixed = ["b"]
[features]
a = {low = -5, high = 5}
b = {low = -5, high = 5}
[target]
name = "y"
"""


def test_sites_of_a_federation_state_their_district(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    X, y, site = rows()
    table = pd.DataFrame({"school": site, "district": DISTRICT[site], "a": X[:, 1], "b": X[:, 2], "y": y})
    few = (DISTRICT < 5) & (np.arange(V) % S < 2)  # two sites of each of five districts
    table[few[site]].to_csv("rows.csv", index=False)
    table[site == 2].to_csv("new.csv", index=False)
    (tmp_path / "schools.toml").write_text(CONTRACT)
    table = ["--data", "rows.csv", "--site", "school"]
    assert main(["federation", "simulate", "schools.toml", *table, "--out", "sim"]) == 0
    assert main(["fit", "rows.csv", *table[2:], "--contract", "schools.toml", "--test-size", "0"]) == 0
    pooled, model = load("fedkin-model"), load("sim/model")
    assert dict(model.kin.within)["6"] == "1"
    np.testing.assert_allclose(model.kin.theta, pooled.kin.theta, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(model.kin.learned.nested.variance, pooled.kin.learned.nested.variance, rtol=1e-5)
    capsys.readouterr()
    told = []
    for one in ("fedkin-model", "sim/model"):
        assert main(["predict", one, "new.csv", "--new-site", "--site", "school"]) == 0
        told.append([float(line.split(",")[2]) for line in capsys.readouterr().out.splitlines()[1:]])
    np.testing.assert_allclose(*told, rtol=1e-5)
    np.testing.assert_allclose(told[0], pooled.join(within=0).model.predict(X[site == 2][:, 1:3]))
    place = tmp_path / "sim" / "sites" / "0"
    assert main(["site", "share", str(place), "--dry-run"]) == 0
    assert "district: 0\n  reveals the site's district" in capsys.readouterr().out
    assert main(["site", "settings", str(place), "--district", 'Nord "1"']) == 0
    capsys.readouterr()
    assert main(["site", "share", str(place), "--dry-run"]) == 0 and 'district: Nord "1"' in capsys.readouterr().out
    assert main(["site", "settings", str(place), "--district", ""]) == 0
    assert main(["site", "share", str(place), "--dry-run"]) != 0
    assert "asks for the district of 0, which is not stated" in capsys.readouterr().err
    assert main(["site", "settings", str(place), "--district", "a\nb"]) != 0
    assert main(["fit", "rows.csv", "--site", "school", "--contract", "schools.toml", "--within", "a"]) != 0
    assert "--within is set by the contract" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('fixed = ["b"]', 'method = "fused"'), "within needs method"),
        (('within = "district"', 'within = "a"'), "a feature or the target"),
    ],
)
def test_contracts_with_districts_hold_together(change, message):
    with pytest.raises(ContractError, match=message):
        Contract.from_toml(CONTRACT.replace(*change))


def test_crossed_groupings_are_refused_when_a_site_joins(tmp_path):
    contract = heart.CONTRACT.replace('loss = "linear"', 'loss = "linear"\nwithin = "region"')
    made = heart.organiser(tmp_path, contract)
    table = heart.write_table(tmp_path / "t.csv", n=60)
    lines = table.read_text().splitlines()
    table.write_text("\n".join([f"{lines[0]},region", *(f"{one},{k % 2}" for k, one in enumerate(lines[1:]))]) + "\n")
    with pytest.raises(DataError, match="crossed groupings are not supported"):
        Site.join(heart.invite_of(made, "north"), table, tmp_path / "north")
    assert not (tmp_path / "north").exists()
