"""`find_kin`: groups and their number, continua, rows that do harm, groups to show, and public data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

import fedkin
from builders import expectile, federation, log_cosh
from fedkin import Federation, Graph, find_kin
from fedkin.core import oracle_fit
from fedkin.data import Rows
from fedkin.datasets import paper_design
from fedkin.errors import DataError, GraphError, ParameterError, SolverError, TableWarning, UnknownSiteError
from fedkin.kin import Pairs, display_groups, find, smooth
from fedkin.kin.partitions import agreement, capacity, log_partitions, resolved
from fedkin.kin.sources import Source
from fedkin.losses import COMPILED_LOSSES, LOSSES


def design(signal=1.0, varrho=0.1, seed=0, V=30, n=40, p=5, groups=3, **more):
    return paper_design(
        n_sites=V, n_samples=n, n_features=p, n_clusters=groups, varrho=varrho, signal=signal, seed=seed, **more
    )


def error(theta, truth):
    return float(((theta - truth) ** 2).sum())


@pytest.fixture(scope="module")
def clear():
    """A design whose groups are plain to see, and what is found in it."""
    made = design()
    return made, find_kin(made.federation, made.graph)


def test_many_sites_have_probabilities_on_demand():
    V, n = 3200, 12
    rng = np.random.default_rng(0)
    labels = np.arange(V) % 2
    X = rng.normal(size=(V * n, 2))
    y = (X * np.array([[1.5, -1.0], [-1.5, 1.0]])[np.repeat(labels, n)]).sum(axis=1) + rng.normal(size=V * n)
    kin = find_kin(Federation.from_arrays(X, y, np.repeat(np.arange(V), n)), sweeps=8, chains=2)
    assert isinstance(kin.probability, Pairs)
    block = kin.probability.block([0, 1, 2], [0, 2, 3])
    kin_pairs = np.array([[1, 1, 0], [0, 0, 1], [1, 1, 0]], dtype=bool)
    assert block[~kin_pairs].max() < 0.05
    assert np.diag(block[:, [0, 1, 1]])[0] == 1.0
    assert np.abs(kin.theta - np.array([[1.5, -1.0], [-1.5, 1.0]])[labels]).mean() < 0.1
    with pytest.raises(ParameterError, match="too many pairs"):
        kin.graph()
    assert kin.reordered(np.arange(V)[::-1]).probability[0, 2] == kin.probability[V - 1, V - 3]


def test_edges_count_by_their_weight():
    made = design(signal=0.35)
    i, j = np.tril_indices(30, -1)
    right = made.labels[i] == made.labels[j]
    everything = Graph.from_indices(made.graph.sites, np.column_stack([i, j]), np.where(right, 1.0, 0.1))
    kin = find_kin(made.federation, everything)
    assert kin.graph_use == "used"
    assert kin.rates == pytest.approx((1.0, 0.1), abs=0.05)
    assert kin.groups.tolist() == made.labels.tolist()


def test_a_graph_may_leave_sites_out_but_not_name_others(clear):
    made, _ = clear
    with pytest.raises(GraphError, match="names site 'x', which has no data"):
        find_kin(made.federation, Graph([*made.federation.sites, "x"], [(0, "x")]))
    part = Graph.from_indices(range(10), [[1, 0], [2, 1]])
    assert find_kin(made.federation, part, sweeps=4).groups.tolist() == made.labels.tolist()


@pytest.mark.parametrize("make", [log_cosh, expectile])
def test_custom_losses(make):
    fed = federation("linear", (60,) * 8, q=2, seed=3, groups=2)
    kin = find_kin(fed, loss=make())
    pooled = fedkin.oracle_fit(fed, [u % 2 for u in range(8)], make())
    assert np.abs(kin.theta - pooled).max() < 0.3


def test_rows_far_out_that_are_badly_predicted_are_harmless():
    """Such a row has a large gradient and next to no curvature: quadratics must not be trusted far from a fit."""
    made = design(signal=3.0, n=120, groups=2, V=16, p=3, loss="logistic")
    data = {u: made.federation[u] for u in made.federation.sites}
    for u in (0, 5, 9):
        X, y = data[u].X.copy(), data[u].y.copy()
        X[:2] *= 60.0
        y[:2] = (X[:2] @ made.theta_star[u] < 0).astype(float)
        data[u] = replace(data[u], X=X, y=y)
    kin = find_kin(Federation(data).with_intercept(), loss="logistic")
    clean = [u for u in range(16) if u not in (0, 5, 9)]
    assert np.abs(kin.theta).max() < 10
    assert error(kin.theta[clean, 1:], made.theta_star[clean]) < 0.15 * len(clean)
    assert kin.sure["kin"] > -1e4


@pytest.mark.parametrize("V", [1, 2, 3])
def test_few_sites_have_no_groups(V):
    made = design(V=6, groups=2)
    kin = find_kin(made.federation.subset(range(V)))
    assert not kin.resolved
    assert kin.diagnostics is None
    others = kin.probability[~np.eye(V, dtype=bool)]  # they have the same parameters, and nothing else can be told
    assert np.diag(kin.probability).tolist() == [1.0] * V
    assert others == pytest.approx(np.full(V * (V - 1), others[0] if V > 1 else 0.0))
    assert (others > 0.5).all()
    assert np.isfinite(kin.theta).all()


@pytest.mark.parametrize("name", [one.name for one in COMPILED_LOSSES if not one.quadratic])
def test_canonical_losses_have_curvatures_that_do_not_depend_on_targets(name):
    loss, eta = LOSSES[name](), np.linspace(-1.0, 1.0, 5)[:, None]
    low, high = (loss.curvature_at(eta, np.full(5, y)) for y in (0.5, 1.0))
    assert np.array_equal(low, high) == loss.canonical


def test_join_from_logistic_rows():
    made = design(signal=4.0, n=200, groups=2, V=12, p=3, loss="logistic")
    kin = find_kin(made.federation.subset(range(1, 12)), loss="logistic")
    joined = kin.join(made.federation[0])
    assert joined.probability[made.labels[1:] == 0].min() > 0.8
    assert error(joined.theta, made.theta_star[0]) < error(kin.mean, made.theta_star[0])


@pytest.mark.parametrize(("V", "K"), [(60, 13), (60, 20), (40, 20)])
def test_many_groups_are_found(V, K):
    """As many groups as there are, not a number that the code knows: 12 was the most it found up to 155 sites."""
    p, n, rng = 20, 50, np.random.default_rng(K)
    labels, X, centres = np.arange(V) * K // V, rng.normal(size=(V, n, p)), rng.normal(size=(K, p))
    y = (X @ centres[labels][:, :, None])[:, :, 0] + rng.normal(size=(V, n))
    rows = Federation.from_arrays(X.reshape(-1, p), y.ravel(), np.repeat(np.arange(V), n))
    kin = find_kin(rows)
    told = oracle_fit(rows, labels.tolist())
    assert error(kin.theta, centres[labels]) < 1.2 * error(told, centres[labels])
    assert kin.resolved
    assert int(np.argmax(kin.n_groups)) == K
    assert adjusted_rand_score(labels, kin.groups) == 1.0


def test_a_continuum_is_not_cut_into_small_groups():
    """Pairs of sites that happen to be near each other are no groups, though there may be as many as sites."""
    rng = np.random.default_rng(0)
    theta, X = 0.3 + 0.4 * rng.normal(size=(200, 1, 5)), rng.normal(size=(200, 40, 5))
    y = (X * theta).sum(axis=2) + rng.normal(size=(200, 40))
    kin = find_kin(Federation.from_arrays(X.reshape(-1, 5), y.ravel(), np.repeat(np.arange(200), 40)))
    assert kin.weight_mixed > 0.99
    assert kin.n_groups[1] > 0.99
    assert np.median(kin.probability) < 0.01
    assert not kin.resolved and 0.35 < kin.sd.mean() < 0.45
    low, high = np.moveaxis(kin.confint(0.95), 2, 0)
    assert 0.93 < ((low < theta[:, 0]) & (theta[:, 0] < high)).mean() < 0.97


def test_partitions_grow_with_the_groups():
    """Arrays of many sites have room for the groups there are; what it is does not change what is drawn."""
    V, most = 700, capacity(700, 20)
    assert most < V == capacity(V, V) == capacity(V, V // 2)
    few, all_of_them = log_partitions(V, most), log_partitions(V, V)
    assert few[:, 1:-1] == pytest.approx(all_of_them[:, 1 : most + 1], rel=1e-12)


def test_bad_arguments(clear):
    made, kin = clear
    with pytest.raises(UnknownSiteError, match="was not part of the fit"):
        kin.position("x")
    assert kin.position("3") == kin.position(3)
    with pytest.raises(DataError, match="expected a Federation or Summaries, got"):
        find_kin({"a": 1})
    with pytest.raises(DataError, match="the new site has 2 parameters, but the fit has 5"):
        kin.join(Rows(np.ones((3, 2)), np.ones(3)))
    with pytest.raises(DataError, match="Rows, a Summary or None"):
        kin.join([1.0])
    with pytest.raises(ParameterError, match="sweeps must be a whole number of at least 4"):
        find_kin(made.federation, sweeps=2)
    empty = made.federation.take(np.arange(40), allow_empty=True)
    with pytest.raises(DataError, match="site 1 has no rows"):
        find_kin(empty)


def test_groups_to_show_from_drawn_partitions():
    draws = np.array([[0, 0, 1, 1, 2], [0, 0, 1, 1, 1], [0, 0, 1, 1, 2], [5, 5, 5, 0, 1]])
    pairs = Pairs(draws, np.full(4, 0.2), 0.1)
    dense = (draws[:, :, None] == draws[:, None, :]).sum(axis=0) * 0.2 + 0.1
    np.fill_diagonal(dense, 1.0)
    assert pairs.block(np.arange(5), np.arange(5)) == pytest.approx(dense)
    assert display_groups(pairs).tolist() == display_groups(dense).tolist() == [0, 0, 1, 1, 2]
    assert pairs.take(np.array([4, 0])).block([0], [1]) == pytest.approx(dense[[4]][:, [0]])


def test_groups_are_resolved_where_they_are_expected_to_agree_with_the_truth():
    labels = np.repeat([0, 1, 2], [12, 8, 4])
    same = np.where(labels[:, None] == labels, 0.97, 0.01)
    np.fill_diagonal(same, 1.0)
    assert resolved(same, labels)
    assert not resolved(0.6 * same + 0.4 * np.eye(24), labels)  # a model without groups has a weight of 0.4
    assert not resolved(same, np.zeros(24, dtype=np.int64))
    assert not resolved(np.eye(3), np.arange(3))
    same[20:, 20:] = 0.4
    np.fill_diagonal(same, 1.0)
    assert agreement(same, labels) > 0.9
    assert not resolved(same, labels)  # the large groups are certain, the small one is not


def test_expected_agreement_is_that_with_drawn_partitions():
    """Against scikit-learn's adjusted Rand index, averaged over draws; and dense against `Pairs`."""
    rng = np.random.default_rng(0)
    truth = np.repeat(np.arange(4), 10)
    drawn = np.array([np.where(rng.random(40) < 0.1, rng.integers(0, 4, 40), truth) for _ in range(200)])
    same = np.mean(drawn[:, :, None] == drawn[:, None, :], axis=0)
    index = np.mean([adjusted_rand_score(truth, z) for z in drawn])
    assert agreement(same, truth) == pytest.approx(index, abs=0.005)
    pairs = Pairs(drawn, np.full(200, 0.7 / 200), 0.1)
    assert agreement(pairs, truth) == pytest.approx(agreement(pairs.block(np.arange(40), np.arange(40)), truth))


def test_long_chains_run_where_an_expansion_is_not_taken(monkeypatch):
    """What short chains have found is not the result, also where the next expansion explains the rows too badly."""
    made = design(signal=3.0, V=12, n=60, p=2, groups=2, loss="logistic")
    held, value, refused = smooth._within_limits, Source.value, []

    def held_once(*parts):
        refused.append(True)
        return held(*parts)

    def value_of(self, theta):
        if refused == [True]:
            refused.append(False)
            return np.inf
        return value(self, theta)

    monkeypatch.setattr(smooth, "_within_limits", held_once)
    monkeypatch.setattr(Source, "value", value_of)
    kin = find_kin(made.federation, loss="logistic")
    assert refused == [True, False]
    assert kin.diagnostics.draws >= 70


def monthly(V=30):
    """Sites of very different size, columns of very different scale, the last the sum of two others; and a target."""
    rng, (year, month), data = np.random.default_rng(0), np.divmod(np.arange(180.0), 12), {}
    for u in range(V):
        price = 12 + 0.2 * rng.normal() + (0.035 + 0.01 * rng.normal()) * year + 0.05 * rng.normal(size=180)
        size = rng.normal(5, 1.3) + 0.25 * np.sin(month / 2) + np.cumsum(rng.normal(0, 0.03, 180))
        sales = np.exp(size + 0.12 * rng.normal(size=180))
        offers = sales * np.exp(1.8 + 0.3 * np.sin(year / 2) + 0.1 * rng.normal(size=180))
        columns = [sales, sales * np.exp(price), offers, offers / sales, year, month, year + month / 12]
        data[u] = np.column_stack(columns), price
    return data


@pytest.mark.parametrize("interface", ["rows", "summaries", "estimator"])
def test_a_column_that_others_add_up_to_changes_nothing(interface):
    """Year, month and date: what nobody can tell apart does not count, neither as freedom nor as doubt."""
    data, errors = monthly(), []
    X, y = (np.concatenate([each[k] for each in data.values()]) for k in (0, 1))
    site = np.repeat(np.arange(len(data)), 180)
    for q in (6, 7):
        rows = Federation({u: (x[:, :q], z) for u, (x, z) in data.items()}).with_intercept()
        if interface == "estimator":
            model = fedkin.KinRegressor().fit(X[:, :q], y, site=site)
            left, noise = y - model.predict(X[:, :q], site=site), model.kin_.noise
        else:
            kin = find_kin(rows if interface == "rows" else fedkin.summarise(rows))
            left, noise = y - np.einsum("np,np->n", rows.X, kin.theta[rows.site_index]), kin.noise
            assert kin.learned.one < 1e-6
        errors.append(float((left**2).mean()))
        assert errors[-1] == pytest.approx(noise.mean(), rel=0.25)
    assert errors[1] == pytest.approx(errors[0], rel=0.02)


@pytest.mark.parametrize("loss", ["huber", "poisson", "logistic"])
def test_copies_of_columns_change_no_prediction_of_smooth_losses(loss):
    rng, site = np.random.default_rng(1), np.repeat(np.arange(20), 60)
    X = rng.normal(size=(1200, 3)) * [1.0, 1e3, 1e-3] + [0.0, 2e3, 0.0]
    eta = (X - X.mean(axis=0)) / X.std(axis=0) @ [0.6, -0.4, 0.2] + 0.4 * rng.normal(size=20)[site]
    y = {
        "huber": eta + 0.3 * rng.standard_t(3, size=1200),
        "poisson": rng.poisson(np.exp(eta)),
        "logistic": rng.random(1200) < 1 / (1 + np.exp(-2 * eta)),
    }[loss]
    predicted = []
    for more in ([], [X[:, 0], X[:, 1] + 2000, X[:, 0] + X[:, 2], np.ones(1200)]):
        rows = np.column_stack([X, *more])
        estimator = fedkin.KinClassifier() if loss == "logistic" else fedkin.KinRegressor(loss=loss)
        model = estimator.fit(rows, y, site=site).model_
        predicted.append(model.averaged_predictor(rows, site)[:, 0])
    apart = np.sqrt(((predicted[1] - predicted[0]) ** 2).mean()) / predicted[0].std()
    assert apart < 0.05


def test_a_fit_that_leaves_more_than_its_noise_is_refused(monkeypatch):
    made = design(signal=3.0)
    monkeypatch.setattr(find.Grouped, "with_one_model", lambda found, *_: replace(found, theta=found.theta + 5.0))
    with pytest.raises(SolverError, match="times the variance of the learned noise"):
        find_kin(made.federation)


@pytest.mark.parametrize("loss", ["logistic", "poisson"])
@pytest.mark.parametrize("interface", ["rows", "summaries"])
def test_a_smooth_fit_that_suits_rows_less_than_no_model_is_refused(loss, interface, monkeypatch):
    fed = design(signal=1.0, loss="logistic").federation
    if loss == "poisson":
        fed = fed.replaced(y=np.random.default_rng(0).poisson(np.exp(0.5 * fed.X[:, 0])).astype(float))
    data = fed if interface == "rows" else fedkin.summarise(fed, loss)
    found = find_kin(data, loss=loss, sweeps=4, chains=2)
    monkeypatch.setattr(find.Grouped, "with_one_model", lambda found, *_: replace(found, theta=found.theta + 5.0))
    with pytest.raises(SolverError, match="of one model for all"):
        find_kin(data, loss=loss, sweeps=4, chains=2)
    assert np.isfinite(found.theta).all()


@pytest.mark.realdata
def test_house_prices_by_zip_have_no_groups(real_data):
    table = real_data / "sacramento" / "sacramento_real_estate.csv"
    with pytest.warns(TableWarning, match="49 of 985 rows are copies"):  # houses without a size, at the same price
        fed = Federation.read(table, site="zip", target="price", features=["beds", "baths", "sq__ft"])
    kin = find_kin(fed.with_intercept())
    assert not kin.resolved  # one large group, and some that nobody is sure of
    assert set(kin.groups.tolist()) == {0}
