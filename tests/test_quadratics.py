"""Quadratics: sums by site and fold that add up, from rows, from files and from summaries, in any units of columns."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fedkin
from fedkin import Federation
from fedkin.core import Columns, Quadratics, RowData, rows_in_files, site_summary
from fedkin.errors import DataError
from fedkin.losses import make_loss


def federation(loss: str, sizes=(12, 1, 30), q=2) -> Federation:
    rng = np.random.default_rng(0)

    def target(n: int):
        return {"linear": rng.normal(size=n), "logistic": np.arange(n) % 2, "poisson": rng.poisson(2.0, n)}[loss]

    rows = {
        f"s{u}": (np.column_stack([np.ones(n), rng.normal(2.0, 3.0, (n, q))]), target(n)) for u, n in enumerate(sizes)
    }
    return Federation(rows, feature_names=("(intercept)", *(f"x{k}" for k in range(q))))


@pytest.mark.parametrize("loss", ["linear", "logistic", "poisson"])
def test_sums_of_rows_are_the_loss_and_its_derivatives_and_folds_add_up(loss: str) -> None:
    fed, made = federation(loss), make_loss(loss)
    theta = 0.1 * np.random.default_rng(1).normal(size=(3, 3))
    data = RowData(fed, loss)
    whole, cut = data.expand(theta), data.expand(theta, folds=4)
    for u, site in enumerate(fed.sites):
        rows = fed[site]
        assert whole.value[u, 0] == pytest.approx(rows.n_samples * made.value(theta[u], *rows.arrays))
        np.testing.assert_allclose(whole.gradient[u, 0], rows.n_samples * made.gradient(theta[u], *rows.arrays))
        np.testing.assert_allclose(whole.hessian[u, 0], rows.n_samples * made.hessian(theta[u], *rows.arrays))
    for name in ("count", "value", "gradient", "hessian"):
        np.testing.assert_allclose(getattr(cut.total(), name), getattr(whole, name), rtol=1e-12)
        left = getattr(cut.total(without=2), name) + getattr(cut, name)[:, 2:3]
        np.testing.assert_allclose(left, getattr(whole, name), rtol=1e-12)
    assert cut.count[1].tolist() == [0, 0, 0, 0, 1]  # a single row is in no fold
    np.testing.assert_array_equal(data.take(np.array([2, 0])).expand(theta[[2, 0]]).gradient, whole.gradient[[2, 0]])


def test_a_quadratic_is_the_same_around_any_point_and_in_any_units() -> None:
    data, rng = RowData(federation("linear"), "linear"), np.random.default_rng(2)
    at, theta = rng.normal(size=(2, 3, 3))
    near, far = data.expand(theta), data.expand(at)
    for part in zip(near.coefficients(), far.coefficients(), strict=True):
        np.testing.assert_allclose(*part, atol=1e-8)
    np.testing.assert_allclose(near.count[:, 0] * far.terms().values(theta), near.value[:, 0])
    columns = Columns(("(intercept)", "a", "b"), np.array([0.0, 2.0, -1.0]), np.array([1.0, 3.0, 0.5]))
    fitted = columns.to_fitted(theta)
    np.testing.assert_allclose(columns.theta(fitted), theta)
    mapped = far.map(columns.A, columns.shift).terms()
    np.testing.assert_allclose(far.count[:, 0] * mapped.values(fitted), near.value[:, 0])
    X = np.column_stack([np.ones(5), rng.normal(size=(5, 2))])
    np.testing.assert_allclose(((X - columns.mean) / columns.scale) @ fitted.T, X @ theta.T)
    several = Columns(("(intercept)", "a"), np.zeros(2), np.ones(2), 2, labels=["B", "C"])
    assert several.parameter_names == ("(intercept) [B]", "a [B]", "(intercept) [C]", "a [C]")
    assert several.intercepts.tolist() == [True, False, True, False]
    assert several.per_parameter(0.3).tolist() == [0.0, 0.3, 0.0, 0.3]


@pytest.mark.parametrize("loss", ["linear", "logistic", "poisson"])
def test_files_and_summaries_expand_like_rows(tmp_path, loss: str) -> None:
    fed, theta = federation(loss), 0.1 * np.random.default_rng(1).normal(size=(3, 3))
    table = {"site": np.repeat(fed.sites, fed.n_samples), "y": fed.y, "x0": fed.X[:, 1], "x1": fed.X[:, 2]}
    order = np.random.default_rng(0).permutation(len(fed.X))
    pq.write_table(pa.table({name: cells[order] for name, cells in table.items()}), tmp_path / "a.parquet")
    data = rows_in_files(tmp_path / "a.parquet", site="site", target="y", loss=loss)
    place = [data.sites.index(site) for site in fed.sites]
    rows, said = RowData(fed, data.loss), fedkin.summarise(fed, loss, at=theta)
    for ours in (
        data.take(np.array(place)).expand(theta),
        said.expand(theta),
        data.expand(theta[np.argsort(place)], 4),
    ):
        ours = ours.total() if ours.folds else ours
        ours = ours.take(np.array(place)) if not np.array_equal(ours.at, theta) else ours
        for name in ("count", "value", "gradient", "hessian"):
            np.testing.assert_allclose(getattr(ours, name), getattr(rows.expand(theta), name), rtol=1e-9)
    with pytest.raises(DataError, match="needs rows"):
        next(iter(said.batches()))


def test_sums_of_more_rows_are_added_in_place() -> None:
    data = RowData(federation("linear"), "linear")
    sums = Quadratics.zeros(data.zeros, 1)
    for u in (2, 0, 1):
        sums.add(np.array([u]), data.take(np.array([u])).expand(data.zeros[:1]))
    np.testing.assert_allclose(sums.hessian, data.expand(data.zeros).hessian)
    one = site_summary("s0", data.rows["s0"], data.loss, feature_names=data.rows.feature_names)
    np.testing.assert_allclose(one.hessian.sum(axis=0), sums.hessian[0, 0])
