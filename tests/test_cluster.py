"""Engines and shards: results do not depend on where work runs, nor on what is lost meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedkin
from fedkin.cluster import Engine, LocalEngine, Shards, engine_of, partition
from fedkin.cluster.shards import Hosts, LostError
from fedkin.datasets import paper_design
from fedkin.errors import ParameterError, SolverError


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


# --- engines and partitions -------------------------------------------------------------------------------------------


def test_places_to_run() -> None:
    assert engine_of("local") is None
    given = LocalEngine(2)
    assert engine_of(given) is given
    with pytest.raises(ParameterError, match=r'on="nowhere" is no place to run; choose one of on="local", on="ray"'):
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
    with pytest.raises(ParameterError, match='rounds on a cluster take no backend="numba"'):
        fedkin.fed_admm(_problem(), 5, backend="numba", on=LocalEngine(2))


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
def test_ray_gives_the_bits_of_shards_in_threads(cluster: Any) -> None:
    problem = _problem()
    expected, found = (fedkin.solve(problem, 1e-9, on=engine) for engine in (LocalEngine(2), _ray()))
    np.testing.assert_array_equal(found.theta, expected.theta)
    assert found.gap == expected.gap


@pytest.mark.processes
def test_errors_of_tasks_come_as_they_were_raised(cluster: Any) -> None:
    assert list(_ray().map(abs, range(-5, 0))) == [5, 4, 3, 2, 1]
    with pytest.raises(ParameterError, match="no place to run"):
        list(_ray().map(engine_of, ["nowhere"]))


@pytest.mark.processes
def test_a_killed_actor_and_a_killed_node_change_nothing(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    problem, save = _problem(), Shards.save
    expected = fedkin.solve(problem, 1e-9, on=LocalEngine(2))
    sets: list[Shards] = []

    def killing(shards: Shards) -> None:
        save(shards)
        sets.append(shards)
        if len(sets) == 1:
            ray.kill(shards._hosts._actors[1])  # type: ignore[union-attr]
        if len(sets) == 3:
            cluster.remove_node(cluster.list_all_nodes()[1])

    monkeypatch.setattr(Shards, "save", killing)
    found = fedkin.solve(problem, 1e-9, on=_ray(storage=str(tmp_path), save_every=10))
    np.testing.assert_array_equal(found.theta, expected.theta)
    np.testing.assert_array_equal(found.alpha, expected.alpha)
    assert sets[0].lost >= 2 and not list(tmp_path.iterdir())
    rounds = fedkin.fed_admm(problem, 40, 5, gradient="saga", on=_ray())  # on the core that is left
    np.testing.assert_array_equal(rounds.theta, fedkin.fed_admm(problem, 40, 5, gradient="saga", backend="numpy").theta)
