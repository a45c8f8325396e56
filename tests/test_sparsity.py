"""The l1 term, tuned together with lam: near the best level, the problem of cvxpy, the same from rows and summaries."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import fedkin
import heart
from cvxpy_reference import reference
from fedkin import FedADMMRegressor, Federation, Graph, Problem, solve
from fedkin.cli import main
from fedkin.core import Summaries, site_answer
from fedkin.errors import ParameterError
from fedkin.federate import Contract, ContractError
from fedkin.fitting import FitOptions, Queries, compare, fit
from fedkin.losses import make_loss
from fedkin.solvers import cross_validate_lam, cross_validate_sparsity

PLAIN = {"select": "none", "standardize": False, "fit_intercept": False}


def sparse_sites(V=8, n=20, p=40, nonzero=4, seed=0):
    """Sites of two groups, more parameters than rows, few of them not 0; the parameters and a graph of the groups."""
    rng = np.random.default_rng(seed)
    group, centres = np.arange(V) % 2, np.zeros((2, p))
    for k in range(2):
        centres[k, rng.choice(p, nonzero, replace=False)] = rng.choice([-1.0, 1.0], nonzero)
    theta, X = centres[group], rng.normal(size=(V, n, p))
    y = np.einsum("vnp,vp->vn", X, theta) + rng.normal(size=(V, n))
    edges = [(i, j) for i in range(V) for j in range(i) if group[i] == group[j] or (i, j) == (1, 0)]
    return Federation({u: (X[u], y[u]) for u in range(V)}), theta, Graph(range(V), edges)


def error(found, theta):
    return float(((found - theta) ** 2).sum(axis=1).mean())


@pytest.fixture(scope="module")
def chosen():
    """The problem of `sparse_sites` at the level and lam that cross-validation chooses."""
    fed, _, graph = sparse_sites()
    problem, choice = cross_validate_sparsity(Problem(fed, graph))
    return problem.with_lam(choice.lam)


def test_the_chosen_level_is_near_the_best_and_its_solution_that_of_cvxpy(chosen):
    (fed, theta, graph), problem = sparse_sites(), chosen
    found = solve(problem, 1e-9)
    known = []
    for level in (0.0, 0.02, 0.04, 0.08, 0.16, 0.32):
        given = Problem(fed, graph, sparsity=level)
        known.append(error(solve(given.with_lam(cross_validate_lam(given).lam)).theta, theta))
    assert error(found.theta, theta) < 1.25 * min(known) < 0.7 * known[0]
    np.testing.assert_allclose(found.theta, reference(problem).theta, atol=1e-4)
    support = (found.theta != 0)[theta != 0], (found.theta != 0)[theta == 0]
    assert support[0].mean() > 0.9 > 0.5 > support[1].mean()


def test_rows_summaries_and_the_estimator_choose_alike(chosen):
    fed, _, graph = sparse_sites()
    options = FitOptions(method="fused", sparsity="cv", **PLAIN)
    model = fit(fed, graph, options)
    level = model.history["choice"]["sparsity"]
    assert level == np.max(chosen.sparsity) > 0
    assert model.fused.lam == pytest.approx(chosen.lam)
    np.testing.assert_allclose(model.coef[:, 0], solve(chosen).theta, atol=1e-4)
    summed = fit(fedkin.summarise(fed, folds=5), graph, options)
    assert summed.history["choice"]["sparsity"] == pytest.approx(level)
    np.testing.assert_allclose(summed.coef, model.coef, atol=1e-4)
    by_folds = compare(fedkin.summarise(fed, folds=5), graph, options, model=summed)
    assert by_folds.mean("Fedkin") < by_folds.mean("Local")
    estimator = FedADMMRegressor(sparsity="cv", **PLAIN).fit(fed.X, fed.y, site=fed.site_index, graph=graph)
    assert estimator.sparsity_ == level
    np.testing.assert_array_equal(estimator.coef_, model.coef[:, 0])


def test_intercepts_are_spared_also_where_edges_do_not_pull_at_them():
    fed, _, graph = sparse_sites(n=30, p=10, nonzero=2)
    shifted = fed.replaced(y=fed.y + 1000.0 + 10.0 * fed.site_index)
    for fuse in (True, False):
        model = fit(shifted, graph, FitOptions(method="fused", sparsity="cv", select="none", fuse_intercept=fuse))
        assert 0 < model.history["choice"]["sparsity"] < 10
        assert np.abs(model.intercept[:, 0] - 1000.0 - 10.0 * np.arange(8)).max() < (1.0 if not fuse else 40.0)


def test_sites_have_levels_of_their_own_where_that_is_beyond_doubt():
    """Half of the sites with few parameters that count, half with none but small ones; no edges."""
    rng = np.random.default_rng(0)
    V, n, p = 8, 60, 30
    dense = np.arange(V) % 2 == 1
    theta = np.where(dense[:, None], rng.normal(size=(V, p)), 0.0)
    theta[~dense, :2] = 2.0
    X = rng.normal(size=(V, n, p))
    y = np.einsum("vnp,vp->vn", X, theta) + np.where(dense, 0.2, 3.0)[:, None] * rng.normal(size=(V, n))
    fed, graph = Federation({u: (X[u], y[u]) for u in range(V)}), Graph.empty(range(V))
    one, each = (fit(fed, graph, FitOptions(method="fused", sparsity=how, **PLAIN)) for how in ("cv", "cv-sites"))
    levels = np.array(each.history["choice"]["sparsity"])
    assert levels.shape == (V,) and levels[~dense].min() > levels[dense].max()
    assert error(each.coef[:, 0], theta) < 0.9 * error(one.coef[:, 0], theta)
    problem = Problem(fed, graph, sparsity=levels)
    np.testing.assert_allclose(each.coef[:, 0], reference(problem).theta, atol=1e-3)
    estimator = FedADMMRegressor(sparsity="cv-sites", **PLAIN).fit(fed.X, fed.y, site=fed.site_index, graph=graph)
    np.testing.assert_array_equal(estimator.sparsity_, levels)


def test_the_command_chooses_it_too(tmp_path, capsys):
    fed, _, _ = sparse_sites(V=4, n=25, p=6, nonzero=1)
    table = pd.DataFrame(fed.X, columns=fed.feature_names).assign(site=fed.site_index, y=fed.y)
    table.to_csv(tmp_path / "rows.csv", index=False)
    words = [
        "fit",
        str(tmp_path / "rows.csv"),
        "--site",
        "site",
        "--target",
        "y",
        "--method",
        "fused",
        "--test-size",
        "0",
    ]
    assert main([*words, "--sparsity", "cv", "--out", str(tmp_path / "model")]) == 0
    assert fedkin.load(tmp_path / "model").history["choice"]["sparsity"] > 0
    capsys.readouterr()
    assert main([*words, "--sparsity", "cv", "--lam", "0.1", "--out", str(tmp_path / "m")]) == 2
    assert "--sparsity cv is chosen together with lam" in capsys.readouterr().err


def test_a_contract_may_leave_it_to_the_fit(tmp_path, capsys):
    text = heart.CONTRACT.replace("[features]", 'method = "fused"\nsparsity = "cv"\n[features]', 1)
    contract = Contract.from_toml(text)
    assert Contract.from_bytes(contract.to_bytes()).sparsity == "cv"
    with pytest.raises(ContractError, match=r'sparsity = "cv" is chosen .* rounds need a number'):
        contract.check_rounds("heart")
    (tmp_path / "heart.toml").write_text(text)
    (tmp_path / "rows").mkdir()
    for k, name in enumerate(heart.SITES):
        heart.write_table(tmp_path / "rows" / f"{name}.csv", seed=k)
    words = ["fit", str(tmp_path / "rows"), "--contract", str(tmp_path / "heart.toml"), "--test-size", "0"]
    assert main([*words, "--out", str(tmp_path / "model")]) == 0, capsys.readouterr().err
    model = fedkin.load(tmp_path / "model")
    assert model.options["sparsity"] == "cv" and model.history["choice"]["sparsity"] >= 0


def test_what_cannot_be_chosen_is_refused():
    for wrong in ({"sparsity": "some"}, {"sparsity": "cv", "lam": 0.1}, {"sparsity": "cv", "ridge": "cv"}):
        with pytest.raises(ParameterError, match="sparsity"):
            FitOptions(**wrong)
    fed, _, graph = sparse_sites(V=4, n=25, p=4, nonzero=1)
    with pytest.raises(ParameterError, match="weights must be 4 numbers"):
        cross_validate_sparsity(Problem(fed, graph), weights=np.zeros(4))


@pytest.mark.parametrize("how", ["cv", "cv-sites"])
def test_rounds_of_messages_choose_it_from_expansions_by_fold(how):
    """Sites with labels: levels near those of the rows, and the minimum that rows give at the chosen levels."""
    fed, _, graph = sparse_sites(V=6, n=120, p=8, nonzero=2)
    names = [f"s{u}" for u in range(6)]
    rows = Federation.from_arrays(fed.X, (fed.y > 0).astype(float), [names[u] for u in fed.site_index])
    graph, options = (
        Graph.from_indices(names, graph.edges),
        FitOptions("logistic", method="fused", sparsity=how, **PLAIN),
    )
    loss = make_loss("logistic")

    def answer(asked):
        asked = Queries.from_plain(json.loads(json.dumps(asked.to_plain())))
        return Summaries.stack([site_answer(asked[s], rows[s], loss, feature_names=rows.feature_names) for s in names])

    model = fit(fedkin.summarise(rows, "logistic"), graph, options, answer=answer)
    levels, known = (np.array(one.history["choice"]["sparsity"]) for one in (model, fit(rows, graph, options)))
    assert levels.shape == known.shape and (levels > 0).all()
    problem = Problem(rows, graph, "logistic", lam=model.fused.lam, sparsity=levels if levels.ndim else float(levels))
    assert model.fused.gap <= options.tol
    np.testing.assert_allclose(model.coef[:, 0], solve(problem, 1e-10).theta, atol=1e-2)
    score = [cross_validate_lam(replace(problem, sparsity=one)).mean.min() for one in (levels, known)]
    assert score[0] <= 1.01 * score[1]
