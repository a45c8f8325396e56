"""Studies: what a cell computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedkin
from algorithm1 import Algorithm1, prox_l1
from fedkin.datasets import paper_design
from fedkin.errors import ParameterError
from fedkin.studies import Replication, check_study, load_study, parse_study, read_rows
from fedkin.studies.config import task_function
from fedkin.studies.replications import false_edge_design, sparse_design
from fedkin.studies.run import run_cell
from fedkin.studies.tasks import (
    METHODS,
    SPARSE,
    VARIANTS,
    Tuning,
    Workbench,
    availability,
    convergence,
    edge_selection,
    printed_algorithm,
    support,
)
from small_studies import ESTIMATION, SMALL, without_times

pytestmark = pytest.mark.studies


def test_penalised_estimators_solve_their_own_problem():
    design = paper_design(12, 40, 3, 3, varrho=0.2, seed=4)
    bench = Workbench(design, Tuning(n_lams=6, tol=1e-8), seed=1)
    for name in ("fedadmm", "es", "local-es", "oracle"):
        found = bench.estimate(name)
        exact = fedkin.solve(fedkin.Problem(design.federation, found.graph, lam=found.lam), 1e-10)
        np.testing.assert_allclose(found.theta, exact.theta, atol=1e-3)
    kept = {tuple(edge) for edge in bench.estimate("es").graph.edges}
    assert kept <= {tuple(edge) for edge in design.graph.edges}
    assert bench.estimate("oracle").graph == design.truth


@pytest.mark.parametrize(
    ("task", "option", "message"),
    [
        ("selection", 'variances = "model"', r"variances must be a list .*write variances = \['model'\]"),
        (
            "selection",
            'variances = ["modle"]',
            "variances has an unknown name 'modle'; choose from model, sandwich, bart",
        ),
        ("convergence", 'methods = ["fedadmm"]', "methods has an unknown name 'fedadmm'; choose from fedadmm-full"),
        ("estimation", 'estimators = ["local", "local"]', "estimators has 'local' twice, which would count its rows"),
        ("estimation", "fold = 5", "unknown entry 'fold'; known ones are batch_size, design, estimators, folds"),
    ],
)
def test_names_among_the_options_of_built_in_tasks(task: str, option: str, message: str):
    study = parse_study(f'[study]\nname = "s"\ntask = "{task}"\n[options]\n{option}\n', "some.toml")
    with pytest.raises(ParameterError, match=rf"some\.toml, \[options\]: {message}"):
        check_study(study)


def test_a_job_gives_the_same_rows_every_time(tmp_path: Path):
    cells = parse_study(ESTIMATION, "test").cells()
    for cell in cells:
        assert not any(run_cell(cell, tmp_path / name) for name in ("first", "second"))
        first, second = (read_rows(tmp_path / name).rows for name in ("first", "second"))
        assert [without_times(row) for row in first] == [without_times(row) for row in second]
        by_name = {row["estimator"]: row for row in first if row["replication"] == 0}
        S = cell.replications[0].params["false_edges"]
        K = 1 if S else 2
        assert by_name["fedadmm"]["edges_across"] == S and by_name["fedadmm"]["edges"] == 12 + S
        assert by_name["fedadmm"]["rate"] == pytest.approx(2 * (K + S) / (30 * 8))
        assert by_name["oracle"]["components"] == 2


def test_warnings_stay_with_their_rows(small_study: Path, tmp_path: Path):
    own = small_study.with_name("loud.py")
    own.write_text("import warnings\ndef task(r):\n    warnings.warn('careful')\n    yield {'value': 1.0}\n")
    small_study.write_text(SMALL.replace("own:task", "loud:task"))
    study = load_study(small_study)
    assert not run_cell(study.cells()[0], tmp_path / "rows")
    rows, seconds = read_rows(tmp_path / "rows")
    assert [row["warnings"] for row in rows] == ["careful", "careful"] and seconds >= 0


def test_false_edges_are_exactly_as_many_and_all_false():
    design = false_edge_design(12, 10, 2, 3, false_edges=9, seed=5)
    across = design.labels[design.graph.edges[:, 0]] != design.labels[design.graph.edges[:, 1]]
    assert across.sum() == 9 and (~across).sum() == design.truth.n_edges
    with pytest.raises(ParameterError, match="between 0 and the 48 pairs"):
        false_edge_design(12, 10, 2, 3, false_edges=49)


GENERATORS = """
def plain(n_sites, jump: float, *, kind: str = "a", seed):
    raise AssertionError("preflight looks at its arguments, it does not call it")
def seedless(n_sites): ...
def anything(**arguments): ...
number = 3
"""
CALLS = """
[study]
name = "calls"
task = "estimation"
[[grid]]
n_sites = [10, 20]
level = [0.1]
[options]
generator = "gens:plain"
design = { jump = 1.0 }
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("{ jump = 1.0 }", "{}"), "[options]: generator 'gens:plain': missing a required argument: 'jump'"),
        (("{ jump", "{ jum = 1, jump"), "got an unexpected keyword argument 'jum'; it is called with seed, design"),
        (("jump = 1.0", 'jump = "far"'), "generator 'gens:plain': jump = 'far': Expected `float`, got `str`"),
        (("level = [0.1]", "seed = [0]"), "multiple values for keyword argument 'seed'"),
        (("gens:plain", "gens:seedless"), "got an unexpected keyword argument 'seed'"),
        (("gens:plain", "gens:number"), "'gens:number' is a int, not a function in a .py file"),
        (("gens:plain", "sys:exit"), "'sys:exit' is a builtin_function_or_method, not a function in a .py file"),
    ],
)
def test_a_generator_that_cannot_be_called_is_named_before_anything_runs(
    tmp_path: Path, change: tuple[str, str], message: str
):
    (tmp_path / "gens.py").write_text(GENERATORS)
    check_study(parse_study(CALLS, "calls.toml", folder=tmp_path))
    check_study(parse_study(CALLS.replace("gens:plain", "gens:anything"), "calls.toml", folder=tmp_path))
    assert CALLS.replace(*change) != CALLS
    with pytest.raises(ParameterError) as caught:
        check_study(parse_study(CALLS.replace(*change), "calls.toml", folder=tmp_path))
    assert message in str(caught.value) and str(caught.value).startswith("calls.toml, [")


def test_edge_selection_rows_against_scipy():
    from scipy.stats import chi2

    options = {"design": {"n_sites": 10, "n_features": 3, "n_clusters": 2, "varrho": 0.3}, "variances": ["bartlett"]}
    replication = Replication({"n_samples": 400, "signal": 5.0}, options, 0, 8)
    (row,) = edge_selection(replication)
    assert row["exact"] == 1.0 and row["true_dropped"] == row["false_kept"] == 0
    design = paper_design(10, 400, 3, 2, varrho=0.3, signal=5.0, seed=8)
    i, j = design.graph.edges.T
    squared = ((design.theta_star[i] - design.theta_star[j]) ** 2).sum(axis=1)
    least = squared[squared > 0].min()
    assert row["signal_ratio"] == pytest.approx(400 * least / 2 / (4 * chi2.isf(0.05 / design.graph.n_edges, 3)))
    weak = Replication({"n_samples": 20, "signal": 0.01}, options, 0, 8)
    (row,) = edge_selection(weak)
    assert row["exact"] == 0.0 and row["false_kept"] > 0 and row["signal_ratio"] < 1


TINY = {"design": {"n_sites": 8, "n_samples": 30, "n_features": 2, "n_clusters": 2, "varrho": 0.1}, "n_lams": 5}


def test_availability_rows_are_paired():
    options = {**TINY, "rounds": 200}
    rows = {row["variant"]: row for row in availability(Replication({"availability": 0.5}, options, 0, 6))}
    assert set(rows) == set(VARIANTS)
    for weighting in ("known", "estimated"):
        assert rows[f"{weighting}-central"]["distance"] == rows[f"{weighting}-replicas"]["distance"]
    assert rows["known-central"]["distance"] != rows["estimated-central"]["distance"]
    always = {row["variant"]: row for row in availability(Replication({"availability": 1.0}, options, 0, 6))}
    assert always["known-central"]["distance"] == always["estimated-central"]["distance"]
    assert always["known-central"]["distance"] < rows["known-central"]["distance"]
    with pytest.raises(ParameterError, match=r"needs availability = \[...\] under \[\[grid\]\], got None"):
        list(availability(Replication({}, options, 0, 6)))


def test_convergence_rows_end_at_the_minimiser():
    rows = list(convergence(Replication({}, {**TINY, "rounds": 300}, 0, 6)))
    curves = {name: [row for row in rows if row["method"] == name] for name in METHODS}
    assert all(curve[-1]["round"] == 300 for curve in curves.values())
    assert all(len({row["round"] for row in curve}) == len(curve) for curve in curves.values())
    end = curves["fedadmm-full"][-1]
    assert end["distance"] < 1e-8 and end["error"] == pytest.approx(end["error_of_minimiser"], abs=1e-3)
    for name in ("sgd", "printed-full", "printed-batch"):
        assert curves[name][-1]["distance"] < curves[name][0]["distance"], name


def test_the_printed_algorithm_against_six_vectors_on_every_edge():
    design = paper_design(6, 30, 2, 2, varrho=0.2, seed=3)
    federation, graph = design.federation, design.graph
    problem = fedkin.Problem(federation, graph, lam=0.02)
    local = np.array([np.linalg.lstsq(federation[u].X, federation[u].y)[0] for u in range(6)])
    hessians = [federation[u].X.T @ federation[u].X / 30 for u in range(6)]
    values = np.concatenate([np.linalg.eigvalsh(one) for one in hessians])
    kappa, T = max(values.max(), 1 / values.min()), 40
    rho = fedkin.admm.plan_run(problem).rho
    reference = Algorithm1(
        np.zeros((6, 2)),
        [tuple(edge) for edge in graph.edges.tolist()],
        [0.02 * 6] * graph.n_edges,
        rho,
        lambda i, t: kappa / t,
        lambda i, theta, t: hessians[i] @ (theta - local[i]),
        prox_l1,
    )
    total = np.zeros((6, 2))
    for t in range(1, T + 1):
        total += reference.stacked()
        reference.round(t)
    found = printed_algorithm(problem, T, project=False)
    np.testing.assert_allclose(found.theta, total / T, rtol=1e-8)
    inside = printed_algorithm(problem, T)
    assert np.linalg.norm(inside.theta, axis=1).max() <= 2 * np.linalg.norm(local, axis=1).max()


def test_sparse_rows_against_scikit_learn():
    from sklearn.linear_model import Lasso

    design = sparse_design(6, 12, 20, 2, nonzero=3, varrho=0.0, seed=1)
    assert ((design.theta_star != 0).sum(axis=1) == 3).all() and design.graph == design.truth
    options = {
        "generator": "sparse",
        "design": {"n_sites": 6, "n_samples": 12, "n_features": 20, "n_clusters": 2, "nonzero": 3, "varrho": 0.0},
        "sparsities": [0.0, 0.05, 0.2],
        "n_lams": 4,
        "folds": 3,
        "tol": 1e-8,
    }
    rows = {row["estimator"]: row for row in task_function("sparse")(Replication({}, options, 0, 1))}
    assert set(rows) == set(SPARSE)
    local = np.array(
        [
            Lasso(rows["local-lasso"]["sparsity"], fit_intercept=False, tol=1e-10, max_iter=10**5).fit(*one).coef_
            for one in ((design.federation[u].X, design.federation[u].y) for u in range(6))
        ]
    )
    assert rows["local-lasso"]["error"] == pytest.approx(design.error(local), rel=1e-3)
    at = [
        fedkin.Problem(design.federation, design.graph, sparsity=s, lam=rows["told-levels"]["lam"])
        for s in (0, 0.05, 0.2)
    ]
    others = [design.error(fedkin.solve(problem, 1e-8).theta) for problem in at]
    assert rows["told-levels"]["error"] == pytest.approx(min(others), rel=0.01) and max(others) > 1.2 * min(others)
    assert rows["fused"]["sparsity"] == 0 < rows["local-lasso"]["sparsity"] and rows["fused"]["found"] == 1.0
    true = np.array([[1.0, 0.0, 2.0]])
    assert support(np.array([[1.0, 1.0, 0.0]]), true) == {"found": 0.5, "false": 0.5, "exact_sites": 0.0}
    with pytest.raises(ParameterError, match="between 1 and the 2 features, got 3"):
        sparse_design(n_features=2, nonzero=3)
