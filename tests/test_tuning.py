"""The choice of lam by cross-validation within devices."""

from __future__ import annotations

import numpy as np
import pytest

from builders import federation, log_cosh, random_graph
from fedkin import Federation, Graph, Problem, cross_validate_lam, lam_max, lam_path
from fedkin.datasets import paper_design
from fedkin.errors import DataError, ParameterError
from fedkin.fitting import FitOptions, compare
from fedkin.solvers.crossvalidation import LamChoice


@pytest.fixture(scope="module")
def problem() -> Problem:
    design = paper_design(10, 20, 3, 2, seed=1)
    return Problem(design.federation, design.truth)


def test_shapes_and_the_rule_of_the_minimum(problem: Problem) -> None:
    choice = cross_validate_lam(problem, n_lams=7, folds=4)
    assert choice.lams.shape == choice.mean.shape == choice.error.shape == (7,)
    assert choice.scores.shape == (4, 7)
    assert (np.diff(choice.lams) < 0).all()
    assert choice.lams[0] == pytest.approx(lam_max(problem), rel=0.02)
    np.testing.assert_allclose(choice.mean, choice.scores.mean(axis=0))
    np.testing.assert_allclose(choice.error, choice.scores.std(axis=0, ddof=1) / 2)
    assert choice.lam == choice.lams[choice.mean.argmin()]
    assert choice.rule == "min"


def test_scores_are_held_out_losses_with_every_device_weighted_alike() -> None:
    """Written down again with numpy, on devices of very different size."""
    rng = np.random.default_rng(0)
    sizes = (6, 40, 11)
    fed = Federation({u: (rng.normal(size=(n, 2)), rng.normal(size=n)) for u, n in enumerate(sizes)})
    problem = Problem(fed, Graph.complete(range(3)), "linear", "l2")
    lams = [0.3, 0.01]
    choice = cross_validate_lam(problem, lams, folds=3, seed=5, tol=1e-9)
    fold_of = fed.folds(3, 5)
    for fold in range(3):
        train = fold_of != fold
        path = lam_path(Problem(fed.take(train), problem.graph, "linear", "l2"), lams, tol=1e-9)
        for k, (_, solution) in enumerate(path):
            losses = []
            for u in range(3):
                rows = (fed.device_index == u) & ~train
                assert rows.any(), "every device gives rows to every fold"
                losses.append(0.5 * np.mean((fed.y[rows] - fed.X[rows] @ solution.theta[u]) ** 2))
            # other starts: their solutions agree with these ones up to the tolerance only
            assert choice.scores[fold, k] == pytest.approx(np.mean(losses), rel=1e-4)


def test_one_standard_error_fuses_more() -> None:
    design = paper_design(10, 20, 3, 2, varrho=0.3, seed=1)
    problem = Problem(design.federation, design.graph)
    best = cross_validate_lam(problem, n_lams=12, backend="numpy")
    cautious = cross_validate_lam(problem, n_lams=12, rule="1se", backend="numpy")
    np.testing.assert_array_equal(best.scores, cautious.scores)
    k = int(best.mean.argmin())
    allowed = best.mean <= best.mean[k] + best.error[k]
    assert cautious.lam == best.lams[allowed].max()
    assert cautious.lam > best.lam


def test_the_truth_is_found_worth_fusing() -> None:
    """Alike devices want the largest lam, devices that have nothing in common the smallest."""
    alike = federation("linear", (15,) * 6, q=3, seed=1, groups=1)
    apart = federation("linear", (15,) * 6, q=3, seed=1)
    lams = [1.0, 1e-5]
    assert cross_validate_lam(Problem(alike, Graph.complete(range(6)), penalty="l2"), lams).lam == 1.0
    assert cross_validate_lam(Problem(apart, Graph.complete(range(6)), penalty="l2"), lams).lam == 1e-5


@pytest.mark.parametrize("backend", ["numpy", "auto"])
def test_two_processes_equal_one(problem: Problem, backend: str) -> None:
    one = cross_validate_lam(problem, n_lams=5, folds=3, backend=backend)
    two = cross_validate_lam(problem, n_lams=5, folds=3, backend=backend, n_jobs=2)
    # bits are promised by the numpy backend; compiled loops may round by where their arrays lie in memory
    np.testing.assert_allclose(one.scores, two.scores, rtol=0.0 if backend == "numpy" else 1e-9)
    assert one.lam == two.lam


def test_folds_depend_on_the_seed_and_on_nothing_else(problem: Problem) -> None:
    def scores(seed: int) -> np.ndarray:
        return cross_validate_lam(problem, [0.01], seed=seed, backend="numpy").scores

    np.testing.assert_array_equal(scores(3), scores(3))
    assert not np.array_equal(scores(3), scores(4))


def test_devices_with_fewer_rows_than_folds() -> None:
    fed = federation("linear", (2, 3, 20, 4), q=2, seed=3)
    choice = cross_validate_lam(Problem(fed, random_graph(4, 1.0)), n_lams=4, folds=5)
    assert np.isfinite(choice.scores).all()


def test_a_device_with_one_row_always_trains() -> None:
    """Its row is never held out: scores are those of the other devices, but its row pulls on them."""
    rng = np.random.default_rng(0)
    big = {u: (rng.normal(size=(12, 2)), rng.normal(size=12)) for u in "ab"}

    def scores(target: float) -> np.ndarray:
        fed = Federation({**big, "tiny": ([[1.0, 1.0]], [target])})
        return cross_validate_lam(Problem(fed, Graph.complete(fed.devices)), [0.5, 0.01], folds=3).scores

    assert np.isfinite(scores(0.5)).all()
    assert not np.allclose(scores(0.5), scores(50.0))


def test_folds_without_rows_are_left_out() -> None:
    rng = np.random.default_rng(0)
    data = {u: (rng.normal(size=(n, 1)), rng.normal(size=n)) for u, n in enumerate((2, 1, 1, 1, 1))}
    choice = cross_validate_lam(Problem(Federation(data), Graph.complete(range(5))), [0.5, 0.01], folds=5)
    assert choice.scores.shape == (2, 2)
    assert np.isfinite(choice.error).all()


def test_devices_with_one_row_each_leave_nothing_to_hold_out() -> None:
    fed = Federation({"a": ([[1.0]], [1.0]), "b": ([[1.0]], [0.5])})
    with pytest.raises(DataError, match=r"no device has two rows to train on.*give lam as a number"):
        cross_validate_lam(Problem(fed, Graph.complete(fed.devices)))


def test_devices_with_two_rows_are_not_said_to_have_one() -> None:
    """One of their rows is kept for the comparison, so none is left for cross-validation to hold out."""
    fed = Federation({u: ([[1.0], [2.0]], [1.0, u]) for u in (0.0, 0.5)})
    train, test = fed.split(test_size=0.5, seed=0)
    with pytest.raises(DataError, match="no device has two rows to train on") as caught:
        compare(train, test, Graph.complete(fed.devices), FitOptions(lam="cv"))
    assert "single row" not in str(caught.value)


@pytest.mark.parametrize(("loss", "classes"), [("logistic", 2), ("multinomial", 3)])
def test_a_class_that_some_folds_miss(loss: str, classes: int) -> None:
    """The last class occurs once on one device, so one training set has never seen it."""
    rng = np.random.default_rng(0)
    data = {}
    for u in range(3):
        y = rng.integers(0, classes - 1, size=12).astype(float) if loss == "multinomial" else np.zeros(12)
        data[u] = (rng.normal(size=(12, 2)), y)
    data[1][1][0] = classes - 1.0
    if loss == "logistic":
        # enough ones elsewhere to hold the pooled fit
        data[0][1][:6] = 1.0
    problem = Problem(Federation(data), Graph.complete(range(3)), loss, ridge=0.01)
    choice = cross_validate_lam(problem, n_lams=4, folds=3)
    assert np.isfinite(choice.scores).all()
    assert problem.n_params == 2 * (classes - 1)


@pytest.mark.parametrize("loss", ["mean", "poisson", "huber"])
def test_other_losses(loss: str) -> None:
    fed = federation(loss, (12, 15, 10), q=2, seed=2, offset=loss != "mean")
    choice = cross_validate_lam(Problem(fed, Graph.complete(range(3)), loss), n_lams=4, folds=3)
    assert isinstance(choice, LamChoice)
    assert np.isfinite(choice.mean).all()


def test_losses_of_ones_own_and_by_device() -> None:
    fed = federation("linear", (12, 15, 10), q=2, seed=2)
    loss = {0: log_cosh(), 1: "linear", 2: "huber"}
    choice = cross_validate_lam(Problem(fed, Graph.complete(range(3)), loss), n_lams=3, folds=3)
    assert np.isfinite(choice.mean).all()


def test_without_edges_lam_does_not_matter() -> None:
    fed = federation("linear", (12, 15), q=2)
    choice = cross_validate_lam(Problem(fed, Graph.empty(range(2))))
    assert choice.lam == 0.0
    assert choice.scores.shape == (5, 1)


def test_sparsity_and_ridge_belong_to_the_fit_not_to_the_score() -> None:
    fed = federation("linear", (20, 25), q=2)
    sparse = Problem(fed, Graph.complete(range(2)), sparsity=100.0)
    choice = cross_validate_lam(sparse, [0.1], folds=4)
    fold_of = fed.folds(4, 0)
    # everything is 0, so the score is that of predicting 0
    zero = [
        np.mean([0.5 * np.mean(fed.y[(fed.device_index == u) & (fold_of == fold)] ** 2) for u in range(2)])
        for fold in range(4)
    ]
    np.testing.assert_allclose(choice.scores[:, 0], zero)


def test_senseless_arguments(problem: Problem) -> None:
    with pytest.raises(ParameterError, match="rule must be 'min' or '1se', got '2se'"):
        cross_validate_lam(problem, rule="2se")
    with pytest.raises(ParameterError, match="folds must be a whole number of at least 2, got 1"):
        cross_validate_lam(problem, folds=1)
    with pytest.raises(ParameterError, match="n_jobs must not be 0"):
        cross_validate_lam(problem, n_jobs=0)
    with pytest.raises(ParameterError, match="seed must be a whole number of at least 0, got -1"):
        cross_validate_lam(problem, seed=-1)
    with pytest.raises(ParameterError, match="lams must be a list of finite numbers of at least 0, got 'abc'"):
        cross_validate_lam(problem, "abc")
    with pytest.raises(ParameterError, match="lams must be a list"):
        cross_validate_lam(problem, [-1.0])
