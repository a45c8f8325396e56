"""One fit from rows to a model: classes, intercepts, units, graphs and lam; the fused estimator after kin."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
from sklearn.linear_model import HuberRegressor, LinearRegression, PoissonRegressor, Ridge

import fedkin
from fedkin import Availability, Federation, Graph, Problem, fed_admm, find_kin, solve
from fedkin.datasets import paper_design
from fedkin.errors import DegenerateSiteWarning, ParameterError
from fedkin.fitting import FitOptions, fit, fit_after_kin, prepare
from fedkin.fitting.preparation import Estimate
from fedkin.losses import HuberLoss, UserLoss


def rows(n=60, q=3, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, q)) * np.array([1.0, 10.0, 0.1, 5.0, 2.0])[:q] + np.array([0.0, 3.0, 1.0, -2.0, 4.0])[:q]
    return rng, X, X @ np.array([1.0, -0.2, 3.0, 0.1, 0.5])[:q] + 2.0


def two_sites(loss="linear", n=80, seed=0):
    """Sites u and v with related models; the target fits the loss."""
    rng, X, eta = rows(2 * n, seed=seed)
    site = np.repeat(["u", "v"], n)
    eta = 0.3 * (eta - eta.mean()) + 0.5 * (site == "v")
    if loss == "logistic":
        y = rng.random(2 * n) < 1 / (1 + np.exp(-eta))
    elif loss == "poisson":
        y = rng.poisson(np.exp(eta))
    elif loss == "multinomial":
        y = np.array(["low", "mid", "top"])[np.clip(np.round(eta + rng.logistic(size=2 * n)), -1, 1).astype(int) + 1]
    else:
        y = eta + rng.normal(size=2 * n)
    return Federation.from_arrays(X, y, site)


#: Features as they are, all edges kept.
PLAIN = FitOptions(method="fused", select=None, standardize=False)
ALONE = replace(PLAIN, lam=0.0, tol=1e-10)


# --- units ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("standardize", [False, True])
@pytest.mark.parametrize("fit_intercept", [False, True])
def test_without_penalty_it_is_least_squares(standardize, fit_intercept):
    fed = two_sites()
    model = fit(fed, None, replace(ALONE, standardize=standardize, fit_intercept=fit_intercept))
    for u, site in enumerate(fed.sites):
        own = LinearRegression(fit_intercept=fit_intercept).fit(fed[site].X, fed[site].y)
        np.testing.assert_allclose(model.coef[u, 0], own.coef_, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(model.intercept[u, 0], own.intercept_, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(model.predict(fed[site].X, site), own.predict(fed[site].X), rtol=1e-5, atol=1e-6)


def test_ridge_spares_the_intercept():
    _, X, y = rows()
    model = fit(Federation({"a": (X, y)}), None, replace(ALONE, ridge=0.3))
    own = Ridge(alpha=0.3 * len(y)).fit(X, y)
    np.testing.assert_allclose(model.coef[0, 0], own.coef_, rtol=1e-5)
    np.testing.assert_allclose(model.intercept[0, 0], own.intercept_, rtol=1e-5)


def test_sparsity_spares_the_intercept():
    _, X, y = rows()
    model = fit(Federation({"a": (X, y + 100.0)}), None, FitOptions(method="fused", lam=0.0, sparsity=1e4))
    assert not model.coef.any()
    np.testing.assert_allclose(model.intercept, [[y.mean() + 100.0]], rtol=1e-5)


def test_huber_and_poisson_agree_with_scikit_learn():
    fed = two_sites("poisson")
    own = PoissonRegressor(alpha=0.0, tol=1e-10, max_iter=5000).fit(fed["u"].X, fed["u"].y)
    model = fit(fed, None, replace(ALONE, loss="poisson"))
    np.testing.assert_allclose(model.predict(fed["u"].X, "u"), own.predict(fed["u"].X), rtol=1e-3)
    fed = two_sites()
    own = HuberRegressor(epsilon=1.345, alpha=0.0, tol=1e-10, max_iter=5000).fit(fed["u"].X, fed["u"].y)
    model = fit(fed, None, replace(ALONE, loss=HuberLoss(1.345 * own.scale_)))  # theirs estimates a scale
    np.testing.assert_allclose(model.coef[0, 0], own.coef_, rtol=1e-3, atol=1e-4)


def test_lam_refers_to_standardised_features():
    fed = two_sites()
    model = fit(fed, None, FitOptions(method="fused", lam=0.02, standardize=True))
    shifted = Federation.from_arrays(100 * fed.X + 7, fed.y, [fed.sites[u] for u in fed.site_index])
    other = fit(shifted, None, FitOptions(method="fused", lam=0.02, standardize=True))
    np.testing.assert_allclose(other.coef, model.coef / 100, rtol=1e-4, atol=1e-6)


def test_it_is_the_problem_that_was_announced():
    """The pieces by hand: intercept column, complete graph, lam on the public scale."""
    fed = two_sites()
    model = fit(fed, None, replace(PLAIN, lam=0.05, penalty="l2", tol=1e-9))
    problem = Problem(fed.with_intercept(), Graph.complete(fed.sites), "linear", "l2", lam=0.05)
    theta = solve(problem, 1e-9).theta
    np.testing.assert_allclose(np.hstack([model.intercept, model.coef[:, 0]]), theta, rtol=1e-6, atol=1e-8)
    assert model.fused.gap <= 1e-9 and model.fused.lam == 0.05 and model.status == "converged"


# --- graph, groups, lam ---------------------------------------------------------------------------------------


def test_sites_without_edges_do_not_change_the_choice_of_lam():
    design = paper_design(n_sites=8, n_samples=40, n_features=3, n_clusters=2, seed=3)
    fed = design.federation
    alone = fit(fed, design.graph, PLAIN)
    extra = {u: (fed[u].X, fed[u].y) for u in fed.sites} | {"hermit": (fed[0].X[:1], fed[0].y[:1])}
    edges = list(design.graph.edge_ids())
    joined = fit(Federation(extra), Graph(extra, edges), PLAIN)
    np.testing.assert_allclose(joined.fused.lam * 9, alone.fused.lam * 8, rtol=1e-12)
    np.testing.assert_allclose(joined.coef[:8], alone.coef, rtol=1e-3, atol=1e-4)


def test_nothing_to_choose_with_one_site_or_without_edges():
    fed = two_sites()
    fused = FitOptions(method="fused")
    assert fit(fed, Graph.empty(fed.sites), fused).fused.lam == 0.0
    assert fit(fed.subset(["u"]), None, fused).fused.lam == 0.0
    assert fit(fed, Graph.empty(fed.sites), FitOptions(method="fused", select="by")).fused.selection["kept"] == 0


def test_too_many_pairs_are_refused():
    fed = Federation({u: [[0.0]] for u in range(4000)})
    with pytest.raises(ParameterError, match=r"7998000 pairs.*give a graph"):
        fit(fed, None, FitOptions(method="fused", loss="mean", lam=0.1))


NUMBERS = {"lam": math.nan, "level": 0.0, "cv_folds": 1, "ridge": -0.1, "sparsity": math.inf, "tol": 0.0, "rounds": 0}
NAMES = {"lam": "best", "penalty": "l3", "select": "fdr", "variance": "robust", "cv_rule": "2se", "solver": "magic"}


@pytest.mark.parametrize(("name", "value"), [*NUMBERS.items(), *NAMES.items()])
def test_options_out_of_range(name, value):
    with pytest.raises(ParameterError, match=name):
        FitOptions(**{name: value})


@pytest.mark.parametrize(
    "own",
    [
        {"step": "literal", "kappa": 1.0, "rho": 0.3, "average": "paper"},
        {"gradient": "svrg", "average": "tail", "step": 0.5},
        {"availability": 0.7, "weighting": "estimated"},
        {},
    ],
)
def test_rounds_run_what_was_asked_for(own):
    design = paper_design(n_sites=8, n_samples=40, n_features=3, n_clusters=2, seed=0)
    fedadmm = {**own, "stop": "rounds", "fuse": False}
    exact = FitOptions(method="fused", lam=0.01, select=None, fit_intercept=False, standardize=False)
    found = fit(
        design.federation, design.graph, replace(exact, solver="fedadmm", rounds=50, batch_size=5, fedadmm=fedadmm)
    )
    how = {name: value for name, value in own.items() if name not in ("availability", "weighting")}
    if "availability" in own:
        how["availability"] = Availability.bernoulli(own["availability"], weighting=own["weighting"])
    problem = Problem(design.federation, design.graph, lam=0.01)
    assert np.array_equal(found.coef[:, 0], fed_admm(problem, 50, 5, **how).theta)
    assert found.options["fedadmm"] == fedadmm and found.status == "iteration_limit"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 10}, 'batch_size= is for solver="fedadmm"'),
        ({"fedadmm": {"step": "literal"}}, 'fedadmm= is for solver="fedadmm"'),
        ({"solver": "fedadmm", "fedadmm": {"steps": 1.0}}, "a key of fedadmm= must be one of .*'steps'"),
        ({"solver": "fedadmm", "fedadmm": {"kappa": 1.0}}, "kappa belongs to step='literal'"),
        ({"solver": "fedadmm", "fedadmm": {"gradient": "adam"}}, "gradient must be one of"),
        ({"solver": "fedadmm", "fedadmm": {"stop": "soon"}}, "stop must be one of"),
        ({"solver": "fedadmm", "fedadmm": {"weighting": "known"}}, "give availability"),
    ],
)
def test_options_of_rounds_that_make_no_sense(options, message):
    with pytest.raises(ParameterError, match=message):
        FitOptions(**options)


# --- inputs that go wrong -------------------------------------------------------------------------------------


def test_fewer_rows_than_features_on_some_sites():
    rng = np.random.default_rng(0)
    truth = np.array([1.0, -1.0, 2.0, 0.0, 0.5, 1.5])
    data = {}
    for u, n in enumerate([3, 1, 60, 80, 5]):
        X = rng.normal(size=(n, 6))
        data[u] = (X, X @ truth + 0.1 * rng.normal(size=n))
    fed = Federation(data)
    model = fit(fed, None, FitOptions(method="fused", lam=0.1))
    assert np.abs(model.coef[:, 0] - truth).max() < 0.2  # the short sites learn from the long ones
    for options in (
        FitOptions(method="fused", lam=0.1, select="bonferroni"),
        FitOptions(method="fused", lam=0.0),
        FitOptions(method="fused", lam=0.1, select="bh", refit=True),
    ):
        assert np.isfinite(fit(fed, None, options).coef).all()


def test_a_site_with_one_class_learns_from_its_neighbours():
    fed = two_sites("logistic", n=150)
    only = {"u": fed["u"], "one-sided": (fed["v"].X[fed["v"].y], fed["v"].y[fed["v"].y])}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = fit(Federation(only), None, replace(PLAIN, loss="logistic", lam=1.0))
    assert model.members() == (("u", "one-sided"),)
    cross_validated = fit(Federation(only), None, FitOptions(method="fused", loss="logistic", select=None))
    assert np.abs(cross_validated.coef).max() < 50


def test_a_site_with_one_class_and_no_neighbours_is_held_back():
    fed = two_sites("logistic", n=150)
    only = Federation({"u": fed["u"], "one-sided": (fed["v"].X[fed["v"].y], fed["v"].y[fed["v"].y])})
    with pytest.warns(DegenerateSiteWarning, match="'one-sided'"):
        model = fit(only, Graph.empty(only.sites), FitOptions(loss="logistic", method="fused"))
    assert list(model.notes) == ["one-sided"]
    assert model.predict_proba(only["one-sided"].X, "one-sided")[:, 1].min() > 0.5
    clean = fit(fed.subset(["u"]), None, FitOptions(loss="logistic", method="fused"))
    chances = [made.predict_proba(fed["u"].X, "u") for made in (model, clean)]
    np.testing.assert_allclose(*chances, atol=0.01)  # the others hardly notice


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
@pytest.mark.parametrize("loss", ["logistic", "poisson", "multinomial"])
def test_likelihoods_without_a_maximum_end_in_finite_fits(loss, ridge):
    X = np.arange(12.0)[:, None]
    targets = {"logistic": X[:, 0] > 5, "poisson": np.zeros(12), "multinomial": np.repeat([0, 1, 2], 4)}
    y = targets[loss]
    fed = Federation({"a": (X, y)})
    options = FitOptions(loss=loss, method="fused", ridge=ridge)
    if ridge and loss != "poisson":
        model = fit(fed, None, options)  # the ridge is enough
    else:
        with pytest.warns(DegenerateSiteWarning, match="'a'"):
            model = fit(fed, None, options)
    assert np.isfinite(model.coef).all() and model.fused.gap < 1e-5
    if loss != "poisson":
        assert (model.predict(X) == y).mean() > 0.8


@pytest.mark.parametrize("loss", ["linear", "logistic", "poisson", "huber"])
@pytest.mark.parametrize("standardize", [False, True])
def test_constant_and_repeated_columns(loss, standardize):
    fed = two_sites(loss)
    wide = np.column_stack([fed.X, np.full(len(fed.X), 3.0), fed.X[:, 0]])
    doubled = Federation.from_arrays(wide, fed.y, [fed.sites[u] for u in fed.site_index])
    options = FitOptions(method="fused", loss=loss, lam=0.01, standardize=standardize)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, plain = fit(doubled, None, options), fit(fed, None, options)
    assert np.isfinite(model.coef).all()
    # another column with the same information changes the penalty, but not what can be said
    np.testing.assert_allclose(model.predict(wide[:5], "u"), plain.predict(fed.X[:5], "u"), rtol=0.1, atol=0.1)


def test_losses_with_parameters_of_another_length_are_refused():
    loss = UserLoss(lambda *a: 0.0, lambda t, *a: 0 * t, params=7)
    with pytest.raises(ParameterError, match="7 parameters for 4 columns"):
        fit(two_sites(), None, FitOptions(method="fused", loss=loss, lam=0.1))


# --- the paper's design ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("varrho", [0.1, 0.2])
def test_section_5(varrho):
    """V = 100, n = 100, p = 20, five clusters: edge selection finds the oracle, Fed-ADMM lies between it and Local."""
    design = paper_design(varrho=varrho, seed=1)
    fed, no_intercept = design.federation, replace(PLAIN, fit_intercept=False, tol=1e-4)
    plain = fit(fed, design.graph, no_intercept)
    selected = fit(fed, design.graph, replace(no_intercept, select="bonferroni"))
    oracle = design.error(fedkin.oracle_fit(fed, design.labels.tolist()))
    local = design.error(fedkin.local_fit(fed).theta)
    assert 0.8 * 20 / (100 * 20) < oracle < 1.25 * 20 / (100 * 20)
    assert design.error(selected.coef[:, 0]) <= 1.05 * oracle
    assert 1.5 * oracle < design.error(plain.coef[:, 0]) < 0.8 * local


@pytest.mark.exhaustive
def test_a_refit_tests_groups_before_it_pools_them():
    """Twelve designs of the paper: never worse than Local, and next to the oracle where groups are well apart."""
    for varrho, n, signal in itertools.product((0.1, 0.2, 0.4), (50, 100), (0.3, 1.0)):
        errors = []
        for seed in range(3):
            design = paper_design(40, n, 20, 5, varrho=varrho, signal=signal, seed=seed)
            fed = design.federation
            model = fit(
                fed,
                design.graph,
                FitOptions(method="fused", refit=True, fit_intercept=False, standardize=False, tol=1e-4),
            )
            oracle = fedkin.oracle_fit(fed, design.labels.tolist())
            pooled = fedkin.oracle_fit(fed, model.groups.tolist())
            np.testing.assert_allclose(model.coef[:, 0], pooled, atol=1e-9)
            errors.append([design.error(theta) for theta in (model.coef[:, 0], fedkin.local_fit(fed).theta, oracle)])
        refitted, local, best = np.mean(errors, axis=0)
        assert refitted < 0.5 * local, (varrho, n, signal)
        if signal == 1.0:
            assert refitted < 1.1 * best, (varrho, n)


def test_one_false_edge_joins_no_groups():
    """Groups are equal estimates: a chain of kept edges is none, and a refit does not pool its ends."""
    design = paper_design(12, 80, 4, 2, varrho=0.2, signal=2, seed=0)
    one, other = (int(np.flatnonzero(design.labels == label)[0]) for label in (0, 1))
    same = [(i, j) for i, j in itertools.combinations(range(12), 2) if design.labels[i] == design.labels[j]]
    graph = Graph(range(12), [*same, (one, other)])
    assert graph.n_components == 1
    chained = fit(design.federation, graph, FitOptions(method="fused", lam=0.02, select="holm", level=1e-300))
    assert chained.graph.n_components == 1
    assert chained.groups.tolist() == design.labels.tolist()
    refitted = fit(design.federation, graph, FitOptions(method="fused", select="none", refit=True))
    assert all(len({int(design.labels[u]) for u in group}) == 1 for group in refitted.members())


def test_a_ridge_is_chosen_together_with_lam_and_shrinkage_undone():
    """`cross_validate_ridge` and `solve_debiased` by options, the same from rows and through the estimator."""
    from fedkin import FedADMMRegressor
    from fedkin.solvers import cross_validate_ridge, solve_debiased

    rng = np.random.default_rng(0)
    X, site = rng.normal(size=(60, 8)), np.repeat(np.arange(6), 10)
    y = X @ (0.2 * np.ones(8)) + rng.normal(size=60)
    fed = fedkin.Federation.from_arrays(X, y, site)
    plain = {"select": "none", "standardize": False, "fit_intercept": False}
    model = fit(fed, None, FitOptions(method="fused", ridge="cv", **plain))
    problem = fedkin.Problem(fed, fedkin.Graph.complete(fed.sites))
    best, choice = cross_validate_ridge(problem, [np.full(8, ridge) for ridge in (0.0, 1e-3, 1e-2, 0.1, 1.0)])
    assert model.history["choice"]["ridge"] == np.max(best.ridge) > 0
    assert model.fused.lam == pytest.approx(choice.lam)
    assert np.allclose(model.coef[:, 0], fedkin.solve(best.with_lam(choice.lam)).theta, atol=1e-4)
    assert np.allclose(FedADMMRegressor(ridge="cv", **plain).fit(X, y, site=site).coef_, model.coef[:, 0])
    mcp = fit(fed, None, FitOptions(method="fused", lam=0.02, debias="mcp", **plain))
    assert np.allclose(mcp.coef[:, 0], solve_debiased(problem.with_lam(0.02))[-1].theta, atol=1e-4)
    assert not np.allclose(mcp.coef, fit(fed, None, FitOptions(method="fused", lam=0.02, **plain)).coef, atol=5e-4)
    with pytest.raises(ParameterError, match="is chosen together with lam"):
        FitOptions(method="fused", ridge="cv", lam=0.1)
    with pytest.raises(ParameterError, match="'cv', got 'big'"):
        FitOptions(method="fused", ridge="big")


def levels_apart(v=15, n=8, seed=0):
    """Sites with one slope, nearly, and levels that differ much; and as many rows again."""
    rng = np.random.default_rng(seed)
    site = np.repeat(np.arange(v), 2 * n)
    X = rng.normal(size=(site.size, 3))
    slope, level = 1.0 + 0.05 * rng.normal(size=(v, 3)), 3.0 * rng.normal(size=v)
    y = (X * slope[site]).sum(axis=1) + level[site] + rng.normal(size=site.size)
    late = np.tile(np.arange(2 * n) >= n, v)
    return [fedkin.Federation.from_arrays(X[rows], y[rows], site[rows]) for rows in (~late, late)]


def test_coefficients_that_differ_much_are_pulled_less():
    train, test = levels_apart()
    errors = {}
    for name, model in (
        ("after", fit_after_kin(train)),
        ("plain", fit(train, None, FitOptions(method="fused", select="none"))),
    ):
        found = model.predict(test.X, test.site_index)
        errors[name] = float(np.mean((found - test.y) ** 2))
        assert model.fused.gap <= 1e-6
    assert errors["after"] < 0.95 * errors["plain"]


def test_a_power_of_the_spread_is_a_change_of_units():
    train, _ = levels_apart(v=6)
    options = FitOptions(method="fused", lam=0.02, tol=1e-9)
    model = fit_after_kin(train, options)
    assert model.options["sd_power"] == 1.0
    prepared = prepare(train, options)
    spread = find_kin(prepared.rows).sd
    stretch = spread / np.exp(np.log(spread).mean())
    rows = prepared.rows.replaced(X=prepared.rows.X * stretch)
    solution = fedkin.solve(fedkin.Problem(rows, Graph.complete(train.sites), lam=0.02), 1e-9)
    again = prepared.model(Estimate(solution.theta * stretch, Graph.complete(train.sites)), options)
    assert np.allclose(model.coef, again.coef, atol=1e-4)


@pytest.mark.parametrize("loss", ["linear", "logistic"])
def test_groups_are_cliques(loss):
    design = paper_design(n_sites=10, n_samples=80, n_features=3, n_clusters=2, signal=3, seed=0, loss=loss, noise=0.5)
    model = fit_after_kin(design.federation, FitOptions(method="fused", loss=loss, cv_folds=3))
    # kin resolves the groups of least squares; where it resolves none, all pairs are edges
    assert (model.graph.n_edges, model.graph.n_components) in [(20, 2)] + [(45, 1)] * (loss == "logistic")
    assert model.fused.gap <= 1e-6
    assert model.options["sd_power"] in (0.0, 0.5, 1.0)
