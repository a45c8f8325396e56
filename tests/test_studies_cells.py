"""Studies: what a cell computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedkin
from fedkin.datasets import paper_design
from fedkin.errors import ParameterError
from fedkin.studies import Replication, check_study, load_study, parse_study
from fedkin.studies.run import run_cell
from fedkin.studies.tasks import (
    VARIANTS,
    Tuning,
    Workbench,
    availability,
    convergence,
    edge_selection,
    false_edge_design,
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
        ("estimation", "fold = 5", "unknown entry 'fold'; known ones are design, estimators, folds"),
    ],
)
def test_names_among_the_options_of_built_in_tasks(task: str, option: str, message: str):
    study = parse_study(f'[study]\nname = "s"\ntask = "{task}"\n[options]\n{option}\n', "some.toml")
    with pytest.raises(ParameterError, match=rf"some\.toml, \[options\]: {message}"):
        check_study(study)


def test_a_job_gives_the_same_rows_every_time():
    cells = parse_study(ESTIMATION, "test").cells()
    for cell in cells:
        first, second = (run_cell(cell).rows for _ in range(2))
        assert [without_times(row) for row in first] == [without_times(row) for row in second]
        by_name = {row["estimator"]: row for row in first if row["replication"] == 0}
        S = cell.params["false_edges"]
        K = 1 if S else 2
        assert by_name["fedadmm"]["edges_across"] == S and by_name["fedadmm"]["edges"] == 12 + S
        assert by_name["fedadmm"]["rate"] == pytest.approx(2 * (K + S) / (30 * 8))
        assert by_name["oracle"]["components"] == 2


def test_warnings_stay_with_their_rows(small_study: Path):
    own = small_study.with_name("loud.py")
    own.write_text("import warnings\ndef task(r):\n    warnings.warn('careful')\n    yield {'value': 1.0}\n")
    small_study.write_text(SMALL.replace("own:task", "loud:task"))
    study = load_study(small_study)
    outcome = run_cell(study.cells()[0], folder=study.folder)
    assert [row["warnings"] for row in outcome.rows] == ["careful", "careful"] and outcome.seconds >= 0


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
        (
            ("{ jump = 1.0 }", "{}"),
            "[options]: generator 'gens:plain' needs jump: give it in every [[grid]] or in design",
        ),
        (("{ jump", "{ jum = 1, jump"), "takes no 'jum' (design); it takes n_sites, jump, kind"),
        (
            ("jump = 1.0", 'jump = "far"'),
            "[options], design: jump must be a number, got 'far' (generator 'gens:plain')",
        ),
        (("level = [0.1]", "seed = [0]"), "[[grid]]: leave out seed: every replication gets its own"),
        (("gens:plain", "gens:seedless"), "takes no seed; add seed to its arguments"),
        (("gens:plain", "gens:number"), "gens.py is a int, not a function"),
        (("gens:plain", "sys:exit"), "generator = 'sys:exit': the module 'sys' has no file"),
        (('task = "estimation"', 'task = "availability"'), "needs availability = [...], probabilities above 0"),
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


def test_convergence_rows_end_at_the_minimiser():
    rows = list(convergence(Replication({}, {**TINY, "rounds": 300}, 0, 6)))
    curves = {
        name: [row for row in rows if row["method"] == name] for name in ("fedadmm-full", "fedadmm-batch", "gd", "sgd")
    }
    assert all(curve[-1]["round"] == 300 for curve in curves.values())
    assert all(len({row["round"] for row in curve}) == len(curve) for curve in curves.values())
    end = curves["fedadmm-full"][-1]
    assert end["distance"] < 1e-8 and end["error"] == pytest.approx(end["error_of_minimiser"], abs=1e-3)
    assert curves["sgd"][-1]["distance"] < curves["sgd"][0]["distance"]
