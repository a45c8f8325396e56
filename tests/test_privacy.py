"""What others learn: single rows from thetas, where contracts refuse it; and noisy sums, with what they promise."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

import fedkin
import heart
from fedkin.admm import Shard, site_keys
from fedkin.admm.availability import draw_batches, round_states
from fedkin.core import Budget, Summaries, Summary, local_fit, private_summary, site_summary
from fedkin.core.privacy import noise_multiplier
from fedkin.data import Rows
from fedkin.errors import DataError, ParameterError
from fedkin.federate import (
    Contract,
    Journal,
    Participant,
    Patience,
    Site,
    SitePlan,
    SiteSettings,
    describe_summary,
    site_plan,
    steps_of,
    whole_plan,
)
from fedkin.federate.disclosure import check_rounds, concentration
from fedkin.federate.inbox import Kind, encode
from fedkin.fitting import FitOptions, fit
from fedkin.graph import Graph
from fedkin.losses import LinearLoss, LogisticLoss, MeanLoss
from memory_network import MemoryNetwork
from processes import wait_for

CONTRACT = """
name = "heart"
method = "fused"
loss = "linear"
[features]
age = {}
weight = {}
height = {}
[target]
name = "days"
[rounds]
lam = 0.02
batch_size = 1
"""
ONE = np.array([1])


def site_with_a_neighbour(contract: Contract, n: int = 40) -> tuple[SitePlan, dict[int, Rows]]:
    """Site 1 is attacked by site 0, its only neighbour."""
    rows = {}
    for u in range(2):
        rng = np.random.default_rng(u)
        X = np.column_stack([np.ones(n), rng.normal(size=(n, 3))])
        rows[u] = Rows(X, X @ [3.0, 1.0, -2.0, 0.5] + rng.normal(size=n))
    return whole_plan(contract, Graph([0, 1], [(0, 1)]), rows, run="0" * 16), rows


def nearest(guess: np.ndarray, rows: Rows) -> float:
    """How far a guess of a row, whose first entry is the intercept's 1, is from the nearest true one."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = guess / guess[0]
    return float(np.linalg.norm(rows.X - scaled, axis=1).min())


def theta_after(shard: Shard, rounds: int) -> list[np.ndarray]:
    """What the neighbour sees: a theta per round; it sends 0 all the time."""
    seen = []
    for t in range(1, rounds + 1):
        shard.node_step(t)
        seen.append(shard.theta[0].copy())
        shard.edge_step()
    return seen


def test_from_zero_the_first_theta_was_a_row_and_from_an_own_estimate_it_is_not() -> None:
    plan, rows = site_with_a_neighbour(Contract.from_toml(CONTRACT))
    (first,) = theta_after(Shard(replace(plan, theta=np.zeros_like(plan.theta)).part(ONE)), 1)
    assert nearest(first, rows[1]) < 1e-12  # as it was: theta(1) = step * y * x
    (first,) = theta_after(Shard(plan.part(ONE)), 1)
    assert nearest(first, rows[1]) > 0.1


def gradient_of_the_second_round(plan: SitePlan) -> np.ndarray:
    """Worked out by a neighbour that knows the step, from two thetas and the dual that it holds itself."""
    shard = Shard(plan.part(ONE))
    (first,) = theta_after(shard, 1)
    pull = shard.pull()[0]
    shard.node_step(2)
    return (first - shard.theta[0]) / shard.steps.eta(2)[0] - pull


def rows_solved_from_batches(plan: SitePlan, n: int, size: int, rounds: int) -> np.ndarray:
    """All rows of a site, from its thetas: who knows the seed knows which rows were in each batch."""
    shard, rng, lines, known = Shard(plan.part(ONE)), np.random.default_rng(5), [], []
    p, moments = plan.n_params, np.triu_indices(plan.n_params)
    states = round_states(site_keys([1]), plan.seed, np.arange(rounds + 1))
    drawn = draw_batches(states, np.array([n]), size)[:, 0]
    for t in range(1, rounds + 1):
        before, pull = shard.theta[0].copy(), shard.pull()[0].copy()
        shard.node_step(t)
        gradient = (before - shard.theta[0]) / shard.steps.eta(t)[0] - pull
        for k in range(p):  # x_k (x' theta - y), summed over the batch, in the moments of each row
            line = np.zeros((n, moments[0].size + p))
            for column, (a, b) in enumerate(zip(*moments, strict=True)):
                line[drawn[t], column] = (before[b] if a == k else before[a] if b == k else 0.0) / size
            line[drawn[t], moments[0].size + k] = -1.0 / size
            lines.append(line.ravel())
            known.append(gradient[k])
        shard.take({0: before + rng.choice([-1.0, 1.0], p)})
        shard.edge_step()
    return np.linalg.lstsq(np.array(lines), np.array(known), rcond=None)[0].reshape(n, -1)[:, :p]


def test_rows_can_be_solved_from_rounds_in_batches_so_sites_refuse_them() -> None:
    """The first moments of a row, with the intercept, are the row."""
    plan, rows = site_with_a_neighbour(Contract.from_toml(CONTRACT))
    assert nearest(gradient_of_the_second_round(plan), rows[1]) < 1e-9
    contract = Contract.from_toml(CONTRACT.replace("batch_size = 1", "batch_size = 10"))
    plan, rows = site_with_a_neighbour(contract)
    assert np.abs(rows_solved_from_batches(plan, 40, 10, 200) - rows[1].X).max() < 1e-6
    (found,) = check_rounds(contract, rows[1], plan.theta[1])
    assert found.code == "batches" and "batch_size is 10, but these are 40 rows" in str(found)
    agreed = SiteSettings.from_contract(contract, below_minima=True)
    assert check_rounds(contract, rows[1], plan.theta[1], agreed) == []
    whole = Contract.from_toml(CONTRACT.replace("batch_size = 1", "batch_size = 40"))
    assert check_rounds(whole, rows[1], plan.theta[1]) == []


def test_a_sandwich_variance_in_which_one_row_has_the_weight_is_not_told() -> None:
    """It sums products of rows times squared residuals: with one large residual its first direction is that row."""
    text = CONTRACT.replace("batch_size = 1\n", "") + '[rounds.select]\nvariance = "sandwich"\n'
    contract, rng = Contract.from_toml(text), np.random.default_rng(3)
    X = np.column_stack([np.ones(60), rng.normal(size=(60, 3))])
    y = X @ [3.0, 1.0, -2.0, 0.5] + rng.normal(size=60)
    theta = np.linalg.lstsq(X, y, rcond=None)[0]
    assert check_rounds(contract, Rows(X, y), theta) == []
    few = X.copy()
    few[:, 3] = np.arange(60) < 3  # squared residuals of three patients, and with their other sums the rows
    (found,) = check_rounds(contract, Rows(few, y), theta)
    assert "only 3 rows with" in str(found) and "sandwich" in str(found)
    y[7] += 40.0
    theta = np.linalg.lstsq(X, y, rcond=None)[0]
    fit = local_fit(fedkin.Federation({0: Rows(X, y)}), "linear", variance="sandwich")
    bread = X.T @ X
    scores = bread @ fit.covariance[0] @ bread
    assert nearest(np.linalg.eigh(scores)[1][:, -1], Rows(X[7:8], y[7:8])) < 0.1
    (found,) = check_rounds(contract, Rows(X, y), theta)
    assert "in the sandwich variance" in str(found)
    assert check_rounds(Contract.from_toml(text.replace("sandwich", "model")), Rows(X, y), theta) == []


def test_with_all_rows_the_first_theta_is_the_sites_own_estimate() -> None:
    whole = CONTRACT.replace("batch_size = 1\n", "")
    plan, rows = site_with_a_neighbour(Contract.from_toml(whole))
    (first,) = theta_after(Shard(plan.part(ONE)), 1)
    np.testing.assert_allclose(first, np.linalg.lstsq(rows[1].X, rows[1].y, rcond=None)[0], atol=1e-10)


def gram_error(rounds: int, move: float, noise: float = 0.0) -> float:
    """Return how far the X'X/n that a neighbour works out is off, if it moves near the site's theta at random."""
    whole = CONTRACT.replace("batch_size = 1\n", "")
    plan, rows = site_with_a_neighbour(Contract.from_toml(whole))
    shard, rng, points, gradients = Shard(plan.part(ONE)), np.random.default_rng(5), [], []
    for t in range(1, rounds + 1):
        before, pull = shard.theta[0].copy(), shard.pull()[0].copy()
        shard.node_step(t)
        shard.theta[0] += noise * rng.normal(size=4)
        points.append([*before, 1.0])
        gradients.append((before - shard.theta[0]) / shard.steps.eta(t)[0] - pull)
        shard.take({0: before + move * rng.choice([-1.0, 1.0], 4)})
        shard.edge_step()
    found = np.linalg.lstsq(np.array(points), np.array(gradients), rcond=None)[0][:4]
    gram = rows[1].X.T @ rows[1].X / rows[1].n_samples
    return float(np.abs(found - gram).max() / np.abs(gram).max())


def test_a_neighbour_learns_the_products_of_columns_and_neither_small_moves_nor_noise_hide_them() -> None:
    """The officer's page says so: limits on rounds, moves or noise would promise more than they keep."""
    assert gram_error(30, 100.0) < 1e-9 and gram_error(30, 0.01) < 1e-9
    assert 1e-4 < gram_error(1200, 100.0, noise=0.1) < 0.2


LOGISTIC = CONTRACT.split("[target]")[0].replace("linear", "logistic") + (
    '[target]\nname = "died"\nlevels = ["no", "yes"]\n[rounds]\nlam = 0.5\n'
)


def test_a_site_stops_before_a_neighbour_has_drawn_it_to_where_single_rows_have_the_weight() -> None:
    """A strong penalty draws a theta to a point that is steep in age: gradients change there by single rows."""
    contract, n, rows = Contract.from_toml(LOGISTIC), 60, {}
    for u in range(2):
        rng = np.random.default_rng(u)
        X = np.column_stack([np.ones(n), rng.normal(size=(n, 3))])
        rows[u] = Rows(X, (rng.random(n) < 1 / (1 + np.exp(-X @ [0.2, 1.0, -0.5, 0.3]))).astype(float))
    plan = whole_plan(contract, Graph([0, 1], [(0, 1)]), rows, run="0" * 16)
    shard, gradients, stopped = Shard(plan.part(ONE)), [], 0
    for t in range(1, 1001):
        before, pull = shard.theta[0].copy(), shard.pull()[0].copy()
        if not stopped and concentration(contract.loss_object(), rows[1], before, 5.0) is not None:
            stopped = t
        shard.node_step(t)
        gradients.append((before - shard.theta[0]) / shard.steps.eta(t)[0] - pull)
        shard.take({0: 500.0 * np.array([2.0 - t / 250, 1.0, 0.0, 0.0])})
        shard.edge_step()
    found = [nearest(one, rows[1]) < 0.01 for one in np.diff(np.array(gradients), axis=0)]
    assert sum(found) > 20 and not any(found[: stopped - 2])
    assert concentration(contract.loss_object(), rows[1], plan.theta[1], 5.0) is None


def test_a_central_machine_gets_no_gradient_at_a_point_where_single_rows_have_the_weight(tmp_path: Path) -> None:
    """It sets the parameters of a site in every round: gradients at two steep points differ by a row."""
    text = f'method = "fused"\n{heart.LOGISTIC}[rounds]\nlam = 0.1\nplacement = "central"\n'
    made = heart.organiser(tmp_path, text, centre="127.0.0.1:7446")
    table = heart.write_deaths(tmp_path / "t.csv")
    site, _ = Site.join(heart.invite_of(made, "north"), table, tmp_path / "north", steps=steps_of)
    site.accept(made.admit(site.request).path)
    plan, network = site_plan(site.directory), MemoryNetwork()
    centre, heard = network.join(), []
    centre.subscribe(plan.key(Kind.THETA, 0, 4), heard.append)

    def asked(theta: list[float], t: int) -> None:
        question = np.concatenate([theta, np.zeros(4), [1.0]])
        centre.publish(plan.key(Kind.DOWN, 4, 0), encode(plan.run_bytes, Kind.DOWN, 4, t, question))

    try:
        for steep, words in (([0.0, 900.0, 0.0, 0.0], "rows in effect"), ([0.0, 1e6, 0.0, 0.0], "the contract's ball")):
            worker = Participant(plan, network.join(), Journal("north"), patience=Patience(give_up=20.0))
            running = ThreadPoolExecutor(1).submit(worker.run)
            heard.clear()
            asked([0.0, 0.1, 0.0, 0.0], 1)
            wait_for(lambda: bool(heard))
            asked(steep, 2)
            with pytest.raises(DataError, match=words):
                running.result(20.0)
            network.settle()
            assert len(heard) == 1
    finally:
        network.close()


# --- noisy sums


NAMES = ("(intercept)", "x1", "x2")
THETA = np.array([0.2, 0.4, -0.3])


def rows_of(n: int = 400, seed: int = 0, theta: np.ndarray = THETA) -> Rows:
    rng = np.random.default_rng(seed)
    X = np.column_stack([np.ones(n), rng.uniform(-1, 1, (n, 2))])
    return Rows(X, np.clip(X @ theta + 0.1 * rng.normal(size=n), -1, 1))


def noisy(rows: Rows, budget: Budget, seed: int = 0, **how) -> Summary:
    rng = np.random.default_rng(seed)
    return private_summary("north", rows, LinearLoss(), budget, feature_names=NAMES, rng=rng, **how)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-5), (3.0, 1e-6)])
def test_noise_is_calibrated_as_the_gaussian_mechanism_needs(epsilon: float, delta: float) -> None:
    """Against the exact formula (Balle and Wang 2018) with twice the length of a row: one goes, another comes."""
    sigma, sensitivity = noise_multiplier(epsilon, delta), 2.0

    def failure(sigma: float) -> float:
        a, b = sensitivity / (2 * sigma), epsilon * sigma / sensitivity
        return float(norm.cdf(a - b) - np.exp(epsilon) * norm.cdf(-a - b))

    assert failure(sigma) <= delta * 1.001
    assert failure(0.99 * sigma) > delta


@pytest.mark.parametrize("bound", [None, 1.3])
def test_one_row_changes_the_sums_by_no_more_than_was_accounted_for(bound: float | None) -> None:
    budget = Budget(1.0, 1e-5, bound=bound)
    rows = rows_of(60)
    one = noisy(rows, budget)
    assert one.privacy is not None
    allowed = 2 * one.privacy.noise / noise_multiplier(1.0, 1e-5)
    worst = 0.0
    for x, y in ((1e6, -1e6), (0.0, 0.0), (-1.0, 1.0), (1.0, 1.0)):
        X, target = rows.X.copy(), rows.y.copy()
        X[7, 1:], target[7] = x, y
        other = noisy(Rows(X, target), budget)  # with the same noise
        assert ((one.value != other.value) | (one.gradient != other.gradient).any(axis=1)).sum() <= 1  # one fold
        upper = np.triu_indices(3)
        parts = [2 * (one.value - other.value), one.gradient - other.gradient, (one.hessian - other.hessian)[:, *upper]]
        worst = max(worst, float(np.sqrt(sum((np.asarray(part) ** 2).sum() for part in parts))))
    assert 0.2 * allowed < worst <= allowed


@pytest.mark.exhaustive
def test_noise_has_the_size_that_the_summary_states() -> None:
    rows, budget = rows_of(200), Budget(2.0, target_limit=3.0, limits=(1.0, 1.0, 2.0))
    drawn = [noisy(rows, budget, seed) for seed in range(300)]
    sd = Summaries.stack([drawn[0]]).noise()[0]
    gradient = np.array([one.gradient.sum(axis=0) for one in drawn])
    hessian = np.array([one.hessian.sum(axis=0) for one in drawn])
    np.testing.assert_allclose(gradient.std(axis=0), sd[:-1, -1], rtol=0.15)
    np.testing.assert_allclose(hessian.std(axis=0), sd[:-1, :-1], rtol=0.15, atol=1e-12)
    np.testing.assert_allclose(np.std([2 * one.value.sum() for one in drawn]), sd[-1, -1], rtol=0.15)
    assert drawn[0].hessian[:, 0, 0].sum() == 200  # the number of rows is public
    exact = site_summary("north", rows, LinearLoss(), feature_names=NAMES)
    assert abs(gradient.mean(axis=0) - exact.gradient.sum(axis=0)).max() < 4 * sd.max() / np.sqrt(300)
    whole = noisy(rows, budget, by_fold=False)
    assert whole.count.tolist() == [0, 0, 0, 0, 0, 200]
    assert Summaries.stack([whole]).noise()[0, -1, -1] == pytest.approx(sd[-1, -1] / np.sqrt(5))


@pytest.mark.exhaustive
def test_private_sums_lie_on_a_grid_that_depends_on_no_row() -> None:
    """The last bits of a sum of floats tell which sums were possible before noise (Mironov, 2012)."""
    budget, grids = Budget(1.0, 1e-5), []
    for seed in range(2):
        said = noisy(rows_of(seed=seed), budget, seed)
        assert said.privacy is not None
        grid = 2.0 ** (np.floor(np.log2(said.privacy.noise)) - 20)
        for sums in (said.hessian, said.gradient, 2 * said.value):
            np.testing.assert_array_equal(sums / grid, np.round(sums / grid))
        grids.append(grid)
    assert grids[0] == grids[1]


def test_estimates_are_as_uncertain_as_they_say() -> None:
    scores = []
    for seed in range(120):
        fit = local_fit(Summaries.stack([noisy(rows_of(3000, seed), Budget(4.0), seed)]))
        error = fit.theta[0] - THETA
        scores.append(error @ np.linalg.solve(fit.covariance[0], error))
        assert np.linalg.eigvalsh(fit.covariance[0])[0] > 0
    exact = local_fit(Summaries.stack([site_summary("a", rows_of(3000), LinearLoss(), feature_names=NAMES)]))
    assert fit.covariance[0, 1, 1] > 5 * exact.covariance[0, 1, 1]
    assert 2.4 < np.mean(scores) < 4.0  # chi-square with 3 degrees of freedom has mean 3


def test_a_fit_of_noisy_sums_says_what_was_promised(tmp_path) -> None:
    parts = []
    for k in range(6):
        rows, rng = rows_of(4000, k, THETA if k < 3 else -THETA), np.random.default_rng(k)
        budget = Budget(8.0 if k else 3.0)
        parts.append(private_summary(f"site {k}", rows, LinearLoss(), budget, feature_names=NAMES, rng=rng))
    summaries = Summaries.stack(Summary.from_plain(json.loads(json.dumps(part.to_plain()))) for part in parts)
    model = fit(summaries, None, FitOptions("linear", "fused", standardize=False))
    model.save(tmp_path / "model")
    promised = fedkin.load(tmp_path / "model").origin
    assert promised == model.origin == {
        "from": "summaries", "rounds": 1, "privacy": {"epsilon": 8.0, "delta": 1e-5, "sites": 6}
    }  # fmt: skip
    assert model.members() == (("site 0", "site 1", "site 2"), ("site 3", "site 4", "site 5"))
    assert abs(model.coef[0, 0] - THETA[1:]).max() < 0.1
    with pytest.raises(ParameterError, match="standardize=False"):
        fit(summaries, None, FitOptions("linear", "fused"))


@pytest.mark.parametrize("loss", ["linear", "mean"])
def test_noise_that_drowns_the_rows_still_gives_a_fit(loss: str) -> None:
    made = LinearLoss() if loss == "linear" else MeanLoss()
    names = NAMES if loss == "linear" else ("a", "b")
    parts = []
    for k in range(5):
        rows = rows_of(30, k) if loss == "linear" else Rows(rows_of(30, k).X[:, 1:])
        rng = np.random.default_rng(k)
        parts.append(private_summary(f"site {k}", rows, made, Budget(0.3), feature_names=names, rng=rng))
    summaries = Summaries.stack(parts)
    model = fit(summaries, None, FitOptions(loss, "fused", standardize=False))
    assert np.isfinite(model.coef).all()
    assert model.status == "converged"
    assert model.graph.n_edges == 10  # nobody can tell the sites apart


def test_what_noise_is_not_for() -> None:
    rows = rows_of(50)
    labels = Rows(rows.X, (rows.y > 0).astype(float))
    with pytest.raises(ParameterError, match="logistic loss needs several messages"):
        private_summary("a", labels, LogisticLoss(), Budget(1.0), feature_names=NAMES)
    with pytest.raises(ParameterError, match="delta must lie between 0 and 1"):
        Budget(1.0, 0.0)
    with pytest.raises(ParameterError, match="bound must be greater than 1"):
        noisy(rows, Budget(1.0, bound=1.0))
    with pytest.raises(ParameterError, match="limits must be 3 positive numbers"):
        noisy(rows, Budget(1.0, limits=(1.0, 2.0)))
    with pytest.raises(DataError, match="is not 1 in every row"):
        noisy(Rows(2 * rows.X, rows.y), Budget(1.0))
    with pytest.raises(DataError, match=r"> 0.*privacy\.noise"):
        plain = noisy(rows, Budget(1.0)).to_plain()
        Summary.from_plain(plain | {"privacy": plain["privacy"] | {"noise": 0.0}})
    told = {one.name: one for one in describe_summary(noisy(rows, Budget(1.0)))}
    assert "2.72" in told["privacy"].tells
