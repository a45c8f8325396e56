"""Engines and shards: results do not depend on where work runs, nor on what is lost meanwhile."""

from __future__ import annotations

import os
import pickle
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedkin
import fedkin.core
import fedkin.data
import fedkin.data.files
import fedkin.fitting
from fedkin.cluster import Engine, LocalEngine, Shards, engine_of, partition, running_engine, running_on
from fedkin.cluster.engine import Hosts, LostError
from fedkin.datasets import paper_design
from fedkin.errors import DataError, ParameterError, SolverError


def _problem(loss: str = "linear", penalty: str = "l1", **options: Any) -> fedkin.Problem:
    design = paper_design(n_sites=40, n_samples=25, n_features=3, n_clusters=3, seed=0, loss=loss)
    places = np.random.default_rng(0).random((40, 2))
    graph = fedkin.Graph.knn(places, 4, sites=design.federation.sites)
    return fedkin.Problem(design.federation, graph, loss, penalty, lam=0.02, **options)


class _Faulty(LocalEngine):
    """Loses all shards whenever the number of calls comes to one of those given."""

    def __init__(self, workers: int, losses: set[int], **options: Any) -> None:
        super().__init__(workers, **options)
        self.losses, self.calls, self.iterations = losses, 0, 0

    def _start(self, count: int) -> Hosts:
        hosts = super()._start(count)
        run = hosts.run

        def losing(method: str, arguments: Any) -> list[Any]:
            self.calls += 1
            found = run(method, arguments)
            if method == "do" and arguments[0][0] == "run":
                self.iterations += int(arguments[0][1][0])
            if self.calls in self.losses:
                raise LostError("after the work was done, before anybody knew")
            return found

        hosts.run = losing  # type: ignore[method-assign]
        return hosts


class _Elsewhere(LocalEngine):
    """Works on copies whose arrays are read-only, as they are in tasks of Ray."""

    def map(self, function: Any, items: Any) -> Iterator[Any]:
        return (_sent(_sent(function)(_sent(item))) for item in items)


def _sent(given: Any) -> Any:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(given, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(one.raw()) for one in buffers])


# --- engines and partitions -------------------------------------------------------------------------------------------


def test_places_to_run() -> None:
    assert engine_of("local") is None
    given = LocalEngine(2)
    assert engine_of(given) is given
    with pytest.raises(ParameterError, match=r'on="nowhere" is not an engine; choose one of on="local", on="ray"'):
        engine_of("nowhere")
    with pytest.raises(ParameterError, match="workers"):
        LocalEngine(0)


def test_a_partition_cuts_few_edges_and_is_even() -> None:
    places = np.random.default_rng(1).random((2000, 2))
    edges = fedkin.Graph.knn(places, 5).edges
    labels = partition(2000, edges, 4)
    sizes = np.bincount(labels)
    assert sizes.size == 4 and sizes.max() < 1.1 * 500
    assert np.mean(labels[edges[:, 0]] != labels[edges[:, 1]]) < 0.1


def test_a_partition_without_edges_is_even() -> None:
    assert np.bincount(partition(10, np.empty((0, 2), dtype=np.int64), 3)).max() == 4


# --- the exact solver -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", ["l1", "l2", "linf"])
@pytest.mark.parametrize("options", [{}, {"sparsity": 0.02}, {"radius": 1.5}], ids=["plain", "sparse", "ball"])
def test_shards_find_the_same_certified_minimiser(penalty: str, options: dict[str, float]) -> None:
    problem = _problem(penalty=penalty, **options)
    alone = fedkin.solve(problem, 1e-9)
    for shards in (1, 3):
        found = fedkin.solve(problem, 1e-9, on=LocalEngine(shards))
        assert found.status == "converged" and found.gap <= 1e-9 and found.radius is None
        assert found.objective == pytest.approx(problem.objective(found.theta), rel=1e-12)
        if not options:  # by numpy, the certificate holds for what came back
            gap, _ = problem.fused.gap(found.theta, found.alpha, None, problem.fused.balance(found.alpha))
            assert gap <= 1e-9 * problem.n_sites * found.objective
        np.testing.assert_allclose(found.theta, alone.theta, atol=1e-7)
        assert (found.clusters(problem.graph) == alone.clusters(problem.graph)).all()


def test_shards_serve_every_model_of_newton() -> None:
    problem = _problem("logistic", ridge=0.01)
    alone, found = fedkin.solve(problem, 1e-8), fedkin.solve(problem, 1e-8, on=LocalEngine(3))
    assert found.gap <= 1e-8
    np.testing.assert_allclose(found.theta, alone.theta, atol=1e-4)
    assert found.objective == pytest.approx(alone.objective, rel=1e-7)


def test_shards_go_on_from_a_warm_start() -> None:
    problem = _problem(sparsity=0.01)
    first = fedkin.solve(problem, 1e-8)
    again = fedkin.solve(problem, 1e-8, warm_start=first, on=LocalEngine(3))
    assert again.n_iter < first.n_iter / 2


def test_singular_sites_are_certified_too() -> None:
    rng = np.random.default_rng(0)
    rows = {u: (rng.standard_normal((1 if u % 3 else 9, 3)), rng.standard_normal(1 if u % 3 else 9)) for u in range(20)}
    problem = fedkin.Problem(fedkin.Federation(rows), fedkin.Graph.knn(rng.random(20), 3), lam=0.05)
    alone, found = fedkin.solve(problem, 1e-6), fedkin.solve(problem, 1e-6, on=LocalEngine(3))
    assert found.gap <= 1e-6 and found.objective == pytest.approx(alone.objective, rel=1e-6)


def test_numpy_does_not_run_in_shards() -> None:
    with pytest.raises(ParameterError, match="needs compiled kernels: leave out backend="):
        fedkin.solve(_problem(), backend="numpy", on=LocalEngine(2))


def test_large_cliques_need_no_shards() -> None:
    design = paper_design(n_sites=110, n_samples=10, n_features=2, n_clusters=2, seed=0)
    problem = fedkin.Problem(design.federation, fedkin.Graph.complete(design.federation.sites), lam=0.001)
    np.testing.assert_array_equal(fedkin.solve(problem, on=LocalEngine(2)).theta, fedkin.solve(problem).theta)


# --- losses -----------------------------------------------------------------------------------------------------------


def test_a_loss_costs_the_iterations_since_the_last_state_and_changes_nothing(tmp_path: Path) -> None:
    problem = _problem()
    calm = _Faulty(3, set(), storage=str(tmp_path), save_every=8)
    expected = fedkin.solve(problem, 1e-9, on=calm)
    assert not list(tmp_path.iterdir())  # nothing is left behind
    for at in (2, 9, 25, 26):
        engine = _Faulty(3, {at}, storage=str(tmp_path), save_every=8)
        found = fedkin.solve(problem, 1e-9, on=engine)
        np.testing.assert_array_equal(found.theta, expected.theta)
        np.testing.assert_array_equal(found.alpha, expected.alpha)
        assert (found.gap, found.n_iter) == (expected.gap, expected.n_iter)
        assert engine.calls > calm.calls and engine.iterations <= calm.iterations + 8


def test_without_storage_a_loss_costs_all_iterations_and_changes_nothing() -> None:
    problem = _problem()
    expected = fedkin.solve(problem, 1e-9, on=LocalEngine(3))
    found = fedkin.solve(problem, 1e-9, on=_Faulty(3, {20, 21, 60}))
    np.testing.assert_array_equal(found.theta, expected.theta)


def test_shards_that_are_always_lost_are_given_up() -> None:
    with pytest.raises(SolverError, match="lost 5 times in a row"):
        fedkin.solve(_problem(), on=_Faulty(2, set(range(1000))))


class _Failing:
    """A shard whose second one fails while the others wait for it."""

    def __init__(self, peers: Any, number: int) -> None:
        self._peers, self._number = peers, number

    def run(self) -> None:
        if self._number == 1:
            raise ValueError("the second one")
        self._peers.exchange({1: np.zeros(1)})


def test_an_error_in_one_shard_ends_all() -> None:
    shards = LocalEngine(3).shards(lambda k: (_Failing, (k,)), 3)
    with pytest.raises(ValueError, match="the second one"):
        shards.call("run")
    shards.close()


# --- Fed-ADMM ---------------------------------------------------------------------------------------------------------

_RUNS: dict[str, dict[str, Any]] = {
    "all rows": {},
    "saga": {"gradient": "saga", "batch_size": 5},
    "svrg": {"gradient": "svrg", "batch_size": 5},
    "coming and going": {"batch_size": 5, "availability": fedkin.Availability.bernoulli(0.6)},
}


@pytest.mark.filterwarnings("ignore::fedkin.errors.ConvergenceWarning")
@pytest.mark.parametrize("run", list(_RUNS))
def test_rounds_have_the_same_bits_in_any_number_of_shards(run: str) -> None:
    problem = _problem(penalty="l2")
    alone = fedkin.fed_admm(problem, 60, backend="numpy", tol=1e-12, **_RUNS[run])
    for shards in (1, 2, 5):
        engine = _Faulty(shards, {3, 7, 8})
        engine.save_every = 7
        found = fedkin.fed_admm(problem, 60, tol=1e-12, on=engine, **_RUNS[run])
        np.testing.assert_array_equal(found.theta, alone.theta)
        np.testing.assert_array_equal(found.alpha, alone.alpha)
        for name, column in alone.trace.items():
            np.testing.assert_array_equal(found.trace[name], column)


@pytest.mark.filterwarnings("ignore::fedkin.errors.ConvergenceWarning")
def test_rounds_in_shards_resume_from_a_checkpoint(tmp_path: Path) -> None:
    problem, file = _problem(), tmp_path / "state.sqlite"
    alone = fedkin.fed_admm(problem, 50, 5, backend="numpy", gradient="saga")
    fedkin.fed_admm(problem, 20, 5, gradient="saga", checkpoint=file, on=LocalEngine(2))
    found = fedkin.fed_admm(problem, 50, 5, gradient="saga", checkpoint=file, resume=True, on=LocalEngine(3))
    np.testing.assert_array_equal(found.theta, alone.theta)


def test_compiled_rounds_do_not_run_in_shards() -> None:
    with pytest.raises(ParameterError, match='rounds on a cluster do not support backend="numba"'):
        fedkin.fed_admm(_problem(), 5, backend="numba", on=LocalEngine(2))


# --- kin --------------------------------------------------------------------------------------------------------------


def _many_sites() -> fedkin.Federation:
    """Return sites of two groups, more than are sampled in one piece."""
    rng, V = np.random.default_rng(0), 3200
    group = rng.integers(2, size=V)
    X, site = rng.normal(size=(5 * V, 2)), np.repeat(np.arange(V), 5)
    y = np.where(group[site] == 1, X[:, 0], -X[:, 0]) + rng.normal(size=5 * V)
    return fedkin.Federation.from_arrays(X, y, site).with_intercept()


_SHORT: dict[str, int] = {"sweeps": 8, "chains": 2}  # enough to compare bits


@pytest.fixture(scope="module")
def short_kin() -> fedkin.Kin:
    return fedkin.find_kin(_many_sites(), on=LocalEngine(2), **_SHORT)


@pytest.mark.exhaustive
def test_kin_in_shards_differs_from_kin_in_one_piece_as_that_does_between_seeds() -> None:
    data, sampling = _many_sites(), {"sweeps": 24, "chains": 2}
    kin_in_shards = fedkin.find_kin(data, on=LocalEngine(2), **sampling)
    alone = [fedkin.find_kin(data, seed=seed, **sampling) for seed in (0, 1)]
    sd = np.sqrt(np.einsum("ujj->uj", alone[0].covariance))

    def apart(one: fedkin.Kin, other: fedkin.Kin) -> float:
        return float(np.sqrt((((one.theta - other.theta) / sd) ** 2).mean()))

    assert apart(kin_in_shards, alone[0]) < 1.3 * apart(*alone)
    np.testing.assert_allclose(
        np.einsum("ujj->uj", kin_in_shards.covariance)[:, 1].mean(), (sd[:, 1] ** 2).mean(), rtol=0.25
    )


def test_kin_has_the_same_bits_in_any_number_of_shards_and_after_losses(short_kin: fedkin.Kin, tmp_path: Path) -> None:
    data = _many_sites()
    for engine in (LocalEngine(1), _Faulty(2, {5, 9, 60}, storage=tmp_path.as_uri(), save_every=4)):
        found = fedkin.find_kin(data, on=engine, **_SHORT)
        np.testing.assert_array_equal(found.theta, short_kin.theta)
        np.testing.assert_array_equal(found.covariance, short_kin.covariance)
    assert not list(tmp_path.iterdir())


# --- predictions and comparisons --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, fedkin.fitting.FittedModel]:
    """Return files of six sites with several row groups each, and a model of the sites of the first file."""
    folder = tmp_path_factory.mktemp("rows")
    _files(folder, row_group_size=40)
    known = fedkin.Federation.read(folder / "0.parquet", site="site", target="sick", features=["a", "b"])
    return folder, fedkin.fit(known)


def _bytes_of_predictions(predicted: tuple[Path, fedkin.fitting.FittedModel], out: Path, on: Any) -> bytes:
    folder, model = predicted
    with pytest.warns(fedkin.errors.TableWarning, match="new site 5: a model from 0 labelled rows"):
        n = fedkin.fitting.predict_files(model, folder, out, site="site", level=0.9, new_sites=True, on=on)
    assert n == 600
    return out.read_bytes()


def test_predictions_have_the_same_bytes_in_any_pieces(
    predicted: tuple[Path, fedkin.fitting.FittedModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow.parquet as pq

    folder, model = predicted
    whole = _bytes_of_predictions(predicted, tmp_path / "a.parquet", None)
    assert _bytes_of_predictions(predicted, tmp_path / "b.parquet", _Elsewhere(2)) == whole
    monkeypatch.setattr(fedkin.data.files, "_PIECE_ROWS", 80)  # two pieces of 80 and 70 rows for each file
    assert len(fedkin.data.open_files(folder)[0].pieces()) == 8
    assert _bytes_of_predictions(predicted, tmp_path / "c.parquet", _Elsewhere(2)) != whole  # other row groups
    table, rows = pq.read_table(tmp_path / "c.parquet"), pq.read_table(folder)
    assert table.equals(pq.read_table(tmp_path / "a.parquet"))
    assert table["row"].to_pylist() == list(range(600)) and table["site"].to_pylist() == rows["site"].to_pylist()
    own = np.flatnonzero(np.array(table["site"]) != 5)
    X = np.column_stack([rows["a"], rows["b"]])[own]
    sites = np.array(table["site"])[own].tolist()
    np.testing.assert_array_equal(np.array(table["prediction"])[own], model.predict(X, sites))
    np.testing.assert_array_equal(np.array(table["low:yes"])[own], model.predict_interval(X, sites, level=0.9).low)


def test_rows_are_named_in_any_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"site": ["u", "v"] * 30, "a": np.arange(60.0) % 7, "y": np.arange(60.0)}
    pq.write_table(pa.table(columns), tmp_path / "good.parquet")
    columns["a"][50] = np.nan
    pq.write_table(pa.table(columns), tmp_path / "bad.parquet", row_group_size=20)
    model = fedkin.fit(fedkin.Federation.read(tmp_path / "good.parquet", site="site", target="y"))
    monkeypatch.setattr(fedkin.data.files, "_PIECE_ROWS", 10)
    for on in ("local", _Elsewhere(2)):
        with pytest.raises(DataError, match=r"bad\.parquet: .*a: is missing in 1 of 20 rows, first in row 51"):
            fedkin.fitting.predict_files(model, tmp_path / "bad.parquet", tmp_path / "out.csv", site="site", on=on)
        with pytest.raises(DataError, match=r"1 in 'a' .first in row 51"), running_on(on):
            fedkin.summarise_files(tmp_path / "bad.parquet", site="site", target="y")
    assert not (tmp_path / "out.csv").exists()


def _comparisons(on: Any) -> list[fedkin.fitting.Comparison]:
    """Compare over splits of rows, and over folds of summaries."""
    federation = paper_design(n_sites=12, n_samples=25, n_features=3, n_clusters=2, seed=0).federation
    by_folds = fedkin.summarise(federation.with_intercept(), folds=3)
    return [fedkin.fitting.compare(federation, repeats=2, on=on), fedkin.fitting.compare(by_folds, on=on)]


def _check_equal(found: list[fedkin.fitting.Comparison], expected: list[fedkin.fitting.Comparison]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.verdict == other.verdict and one.errors.keys() == other.errors.keys()
        for name in other.errors:
            np.testing.assert_array_equal(one.errors[name], other.errors[name])
            np.testing.assert_array_equal(one.site_errors[name], other.site_errors[name])


def test_comparisons_are_the_same_on_an_engine() -> None:
    _check_equal(_comparisons(_Elsewhere(2)), _comparisons("local"))


# --- Ray --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes with a core each, on this machine."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    memory = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    made = Cluster(initialize_head=True, head_node_args={**memory, "include_dashboard": False})
    made.add_node(**memory)
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def _ray(**options: Any) -> Engine:
    from fedkin.cluster.ray import RayEngine

    return RayEngine(workers=2, **options)


@pytest.mark.processes
def test_ray_predicts_and_compares_as_here(
    cluster: Any, predicted: tuple[Path, fedkin.fitting.FittedModel], tmp_path: Path
) -> None:
    found = [_bytes_of_predictions(predicted, tmp_path / "out.parquet", on) for on in (_ray(), None)]
    assert found[0] == found[1]
    _check_equal(_comparisons(_ray()), _comparisons("local"))


@pytest.mark.processes
def test_errors_of_tasks_come_as_they_were_raised(cluster: Any) -> None:
    assert list(_ray().map(abs, range(-5, 0))) == [5, 4, 3, 2, 1]
    with pytest.raises(ParameterError, match="is not an engine"):
        list(_ray().map(engine_of, ["nowhere"]))


PYTHON = {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")  # of the engines
@pytest.mark.parametrize("name", ["duckdb", "polars", "dask", "spark"])
def test_the_example_of_every_engine(name: str, tmp_path: Path) -> None:
    pytest.importorskip({"dask": "dask.dataframe", "spark": "pyspark"}.get(name, name))
    if name == "spark" and shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    _example_sums(name, tmp_path)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore")
def test_the_example_of_ray_data(cluster: Any, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    _example_sums("ray", tmp_path)


def _example_sums(name: str, tmp_path: Path) -> None:
    """Assert that an engine's sums are those of `fedkin.summarise`."""
    script = Path(__file__).resolve().parent.parent / "examples" / "engines.py"
    import pandas

    visits = pandas.read_csv(script.parent.parent / "docs" / "tables" / "visits.csv")
    for k in range(3):
        visits.iloc[k::3].to_parquet(tmp_path / f"{k}.parquet")
    if name == "spark":  # whose processes end with that of the script
        command = [sys.executable, str(script), name, str(tmp_path)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | PYTHON)
        assert done.stdout == "Kin(12 sites, 3 parameters, 2 groups)\n"
        return
    found = runpy.run_path(str(script))[name](str(tmp_path))
    rows = visits[["clinic", "age", "dose", "days"]]
    whole = fedkin.Federation.from_frame(rows, site="clinic", target="days").with_intercept()
    expected = fedkin.summarise(whole, "linear").expand(np.zeros((12, 3))).hessian
    order = np.argsort(np.array(found.sites)), np.argsort(np.array(whole.sites))
    np.testing.assert_allclose(found.expand(np.zeros((12, 3))).hessian[order[0]], expected[order[1]], rtol=1e-12)


@pytest.mark.processes
def test_a_killed_actor_and_a_killed_node_change_nothing(
    cluster: Any, short_kin: fedkin.Kin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    problem, save, sets = _problem(), Shards.save, list[Shards]()
    expected = fedkin.solve(problem, 1e-4, on=LocalEngine(2))

    def killing(shards: Shards) -> None:
        save(shards)
        sets.append(shards)
        if len(sets) == 1:
            ray.kill(shards._hosts._actors[1])  # type: ignore[union-attr]
        if len([one for one in sets if one is not sets[0]]) == 2:  # in the middle of kin
            cluster.remove_node(cluster.list_all_nodes()[1])

    monkeypatch.setattr(Shards, "save", killing)
    found = fedkin.solve(problem, 1e-4, on=_ray(storage=str(tmp_path), save_every=10))
    np.testing.assert_array_equal(found.theta, expected.theta)
    np.testing.assert_array_equal(found.alpha, expected.alpha)
    assert found.gap == expected.gap and sets[0].lost == 1
    kin = fedkin.find_kin(_many_sites(), on=_ray(storage=tmp_path.as_uri(), save_every=5), **_SHORT)
    np.testing.assert_array_equal(kin.theta, short_kin.theta)
    np.testing.assert_array_equal(kin.covariance, short_kin.covariance)
    assert sets[-1].lost >= 1 and not list(tmp_path.iterdir())
    rounds = fedkin.fed_admm(problem, 40, 5, gradient="saga", on=_ray())  # on the core that is left
    np.testing.assert_array_equal(rounds.theta, fedkin.fed_admm(problem, 40, 5, gradient="saga", backend="numpy").theta)


# --- sums -------------------------------------------------------------------------------------------------------------


def _files(folder: Path, n: int = 600, row_group_size: int | None = None) -> tuple[Path, dict[str, Any]]:
    """Write rows of 6 sites, one of them with a single row, to four Parquet files."""
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    rng = np.random.default_rng(0)
    site = rng.integers(5, size=n)
    site[n // 2] = 5
    X = rng.normal(size=(n, 2))
    y = X @ [1.0, -1.0] + 0.3 * site + rng.normal(size=n)
    columns = {"site": site, "a": X[:, 0], "b": X[:, 1], "y": y, "sick": np.where(y > 0, "yes", "no")}
    for k, part in enumerate(np.array_split(np.arange(n), 4)):
        some = pa.table({name: values[part] for name, values in columns.items()})
        pq.write_table(some, folder / f"{k}.parquet", row_group_size=row_group_size)
    return folder, columns


@pytest.mark.parametrize("folds", [1, 4])
def test_passes_over_files_are_shared_out_and_give_the_same_sums(tmp_path: Path, folds: int) -> None:
    folder, _ = _files(tmp_path)
    rows = fedkin.core.rows_in_files(folder, site="site", target="sick", features=["a", "b"])
    theta = np.random.default_rng(1).normal(size=(6, 3))
    alone = rows.expand(theta, folds)
    with running_on(_Elsewhere(2)):
        found = rows.expand(theta, folds)
    np.testing.assert_array_equal(found.count, alone.count)
    for name in ("value", "gradient", "hessian"):
        np.testing.assert_allclose(getattr(found, name), getattr(alone, name), rtol=1e-12, atol=1e-12)
    assert running_engine() is None


def test_the_first_pass_over_files_is_shared_out(tmp_path: Path) -> None:
    folder, _ = _files(tmp_path)
    how: dict[str, Any] = {"site": "site", "target": "sick", "features": ["a", "b"]}

    def read() -> tuple[fedkin.core.FileRows, fedkin.core.Streamed]:
        rows = fedkin.core.rows_in_files(folder, **how)
        return rows, fedkin.summarise_files(folder, site="site", target="y", drop=["sick"])

    one, sums = read()
    with running_on(_Elsewhere(2)):
        other, same_sums = read()
    assert (other.sites, other.notes, other.schema.target) == (one.sites, one.notes, one.schema.target)
    np.testing.assert_allclose(other.schema.fill, one.schema.fill, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(other.column_squares, one.column_squares, rtol=1e-12)
    found, expected = (each.summaries.expand(np.zeros((6, 3)), 5) for each in (same_sums, sums))
    np.testing.assert_array_equal(found.count, expected.count)
    np.testing.assert_allclose(found.hessian, expected.hessian, rtol=1e-11, atol=1e-11)


def test_a_row_is_named_wherever_it_is_read(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for k in range(3):
        b = [1.0, 2.0, None if k == 2 else 3.0]
        pq.write_table(
            pa.table({"site": ["u", "v", "u"], "a": [0.0, 1.0, 3.0], "b": b, "y": [1.0, 2.0, 0.5]}),
            tmp_path / f"{k}.parquet",
        )
    messages = []
    for engine in ("local", _Elsewhere(2)):
        with running_on(engine), pytest.raises(DataError) as refused:
            fedkin.summarise_files(tmp_path, **_COLUMNS)
        messages.append(str(refused.value))
    assert messages[0] == messages[1] and "2.parquet" in messages[0]


def test_a_fit_runs_its_final_solve_where_it_is_told() -> None:
    problem, engine = _problem(), _Faulty(2, set())
    options = fedkin.fitting.FitOptions(method="fused", lam=0.02)
    alone = fedkin.fit(problem.federation, problem.graph, options)
    with running_on(engine):
        found = fedkin.fit(problem.federation, problem.graph, options)
    assert engine.iterations > 0
    np.testing.assert_allclose(found.coef, alone.coef, atol=1e-6)


_COLUMNS: dict[str, Any] = {"site": "site", "target": "y", "features": ["a", "b"]}


def _batches(kind: str, columns: dict[str, Any]) -> Iterator[Any]:
    """Yield rows as engines hand them over: Arrow batches (Ray Data, Spark, DuckDB), pandas (Dask), polars, arrays."""
    import pandas
    import polars
    import pyarrow as pa

    for some in np.array_split(np.arange(len(columns["y"])), 7):
        part = {name: values[some] for name, values in columns.items()}
        makers: dict[str, Any] = {"arrow": pa.table, "pandas": pandas.DataFrame, "polars": polars.DataFrame}
        made = makers.get(kind, dict)(part)
        yield from made.to_batches() if kind == "arrow" else [made]


@pytest.mark.parametrize("kind", ["arrow", "pandas", "polars", "arrays"])
def test_partial_sums_of_any_engine_add_up_to_the_summaries_of_all_rows(tmp_path: Path, kind: str) -> None:
    import pyarrow as pa

    _, columns = _files(tmp_path)
    parts = [fedkin.partial_sums(batch, **_COLUMNS) for batch in _batches(kind, columns)]
    found = fedkin.merge_sums(parts, features=["a", "b"])
    X = np.column_stack([columns["a"], columns["b"]])
    whole = fedkin.Federation.from_arrays(X, columns["y"], columns["site"], feature_names=["a", "b"]).with_intercept()
    expected = fedkin.summarise(whole)
    order = [found.sites.index(site) for site in expected.sites]
    zero = np.zeros((6, 3))
    one, other = found.expand(zero).take(np.array(order)), expected.expand(zero)
    for name in ("count", "value", "gradient", "hessian"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-11, atol=1e-11)
    # a site's rows go to folds in turn, over all batches; a single row trains
    counts = found.expand(zero, 5).count
    assert np.ptp(counts[counts.sum(axis=1) > 1][:, :5], axis=1).max() <= 1
    assert counts[found.sites.index(5)].tolist() == [0, 0, 0, 0, 0, 1]
    # parts may be joined to one table on the way
    again = fedkin.merge_sums([pa.concat_tables(parts)], features=["a", "b"])
    np.testing.assert_allclose(again.expand(zero).hessian, found.expand(zero).hessian, rtol=1e-12)


def test_fractional_weights_are_not_rounded() -> None:
    table = {"site": list("uuvv"), "a": [1.0, 2.0, 3.0, 5.0], "y": [2.0, 1.0, 0.0, 4.0], "w": [0.5, 1.5, 0.3, 0.4]}
    part = fedkin.partial_sums(table, site="site", target="y", features=["a"], weight="w", folds=2)
    weight = fedkin.merge_sums([part], features=["a"], folds=2).n_samples
    np.testing.assert_allclose(weight, [2.0, 0.7], rtol=1e-15)


def test_partial_sums_refuse_what_they_cannot_add() -> None:
    table = {"site": ["u", "v"], "a": [1.0, np.nan], "b": [0.0, 1.0], "y": [1.0, 2.0]}
    with pytest.raises(DataError, match="column 'a' has missing or infinite values: drop these rows"):
        fedkin.partial_sums(table, **_COLUMNS)
    part = fedkin.partial_sums({**table, "a": [1.0, 2.0]}, **_COLUMNS)
    with pytest.raises(DataError, match="do not match 1 feature in 5 folds"):
        fedkin.merge_sums([part], features=["a"])
    with pytest.raises(DataError, match="there are no sums to add"):
        fedkin.merge_sums([], features=["a"])
