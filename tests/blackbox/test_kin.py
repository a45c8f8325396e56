"""Kin: groups and their probabilities, shrinkage, intervals, contrasts, new sites, hints and summaries."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
from scipy.stats import norm

import fedkin
from fedkin import Federation, FedkinError, Graph, find_kin
from fedkin.datasets import paper_design


def design(signal=1.0, seed=0, sites=20, n=40, p=4, groups=2, **more):
    return paper_design(n_sites=sites, n_samples=n, n_features=p, n_clusters=groups, signal=signal, seed=seed, **more)


def groups_of(kin):
    return np.asarray(kin.groups)


def squared_error(theta, truth):
    return float(((theta - truth) ** 2).sum())


CENTRE = np.array([1.0, 2.0, -1.0, 3.0])


def continuum(sites=40, n=25, p=4, seed=1):
    """Sites that differ by degrees, with a standard deviation of 0.5: rows and true parameters."""
    rng = np.random.default_rng(seed)
    theta = CENTRE + 0.5 * rng.normal(size=(sites, p))
    X = rng.normal(size=(sites, n, p))
    y = np.einsum("unp,up->un", X, theta) + rng.normal(size=(sites, n))
    return Federation({u: (X[u], y[u]) for u in range(sites)}), theta


@pytest.fixture(scope="module")
def clear():
    """Two groups that are plain to see, and what is found."""
    made = design(signal=1.5, seed=1)
    return made, find_kin(made.federation)


@pytest.fixture(scope="module")
def gradual():
    fed, theta = continuum()
    return fed, theta, find_kin(fed)


# --- groups ---------------------------------------------------------------------------------------------------


def test_two_clear_groups_are_found_and_sure(clear):
    made, kin = clear
    labels = np.asarray(made.labels)
    same = labels[:, None] == labels
    assert kin.resolved
    assert np.array_equal(groups_of(kin)[:, None] == groups_of(kin), same)
    assert kin.probability[same].min() > 0.95
    assert kin.probability[~same].max() < 0.05
    assert kin.n_groups.sum() == pytest.approx(1.0)
    assert int(np.argmax(kin.n_groups)) == 2
    assert np.allclose(kin.probability, kin.probability.T)
    assert kin.agreement() > 0.9


def test_estimates_of_clear_groups_are_those_of_one_who_knows_them(clear):
    made, kin = clear
    labels, star = np.asarray(made.labels), np.asarray(made.theta_star)
    oracle = np.empty_like(star)
    for label in np.unique(labels):
        members = [made.federation[u] for u in np.flatnonzero(labels == label)]
        X, y = np.vstack([m.X for m in members]), np.concatenate([m.y for m in members])
        oracle[labels == label] = sm.OLS(y, X).fit().params
    assert squared_error(kin.theta, star) < 1.2 * squared_error(oracle, star)
    assert kin.theta == pytest.approx(oracle, abs=0.1)


def test_members_and_graphs_follow_the_groups(clear):
    _, kin = clear
    found = groups_of(kin)
    for group in (0, 1):
        assert sorted(kin.members(group)) == np.flatnonzero(found == group).tolist()
    assert (found == 0).sum() >= (found == 1).sum()  # the largest first
    cliques = kin.graph("groups")
    assert all(found[i] == found[j] for i, j in cliques.edges)
    assert cliques.n_edges == sum(k * (k - 1) // 2 for k in np.bincount(found))
    weighted = kin.graph("probability")
    for (i, j), weight in zip(weighted.edges, weighted.weights, strict=True):
        assert weight == pytest.approx(kin.probability[i, j])


def test_sites_that_are_alike_are_one_model_without_groups():
    made = design(groups=1, sites=25, p=5)
    kin = find_kin(made.federation)
    assert not kin.resolved
    assert len(np.unique(groups_of(kin))) == 1
    assert int(np.argmax(kin.n_groups)) == 1
    star = np.asarray(made.theta_star)
    one = sm.OLS(made.federation.y, made.federation.X).fit()
    local = np.stack([np.linalg.lstsq(made.federation[u].X, made.federation[u].y, rcond=None)[0] for u in range(25)])
    assert np.abs(kin.theta - one.params).max() < 4 * one.bse.max()
    assert squared_error(kin.theta, star) < 0.2 * squared_error(local, star)


def test_a_continuum_has_no_groups(gradual):
    _, _, kin = gradual
    assert not kin.resolved
    assert len(np.unique(groups_of(kin))) == 1
    assert kin.probability[~np.eye(40, dtype=bool)].max() < 0.1
    assert kin.graph("groups").n_edges == 0


# --- shrinkage without groups ---------------------------------------------------------------------------------


def test_a_continuum_is_shrunk_like_a_mixed_model(gradual):
    from statsmodels.regression.mixed_linear_model import MixedLM, MixedLMParams

    fed, theta, kin = gradual
    independent = MixedLMParams.from_components(fe_params=np.ones(4), cov_re=np.eye(4))
    peer = MixedLM(fed.y, fed.X, fed.site_index, exog_re=fed.X).fit(free=independent, method="lbfgs")
    blups = np.stack([np.asarray(peer.random_effects[u]) for u in range(40)]) + peer.fe_params
    assert np.abs(kin.theta - blups).mean() < 0.02
    assert kin.mean == pytest.approx(peer.fe_params, abs=0.02)
    assert np.sqrt(np.diag(kin.mean_covariance)) == pytest.approx(peer.bse_fe, rel=0.1)
    assert kin.noise == pytest.approx(np.full(40, peer.scale), rel=0.1)
    # one who knows mean and variances
    known = [
        CENTRE + np.linalg.solve(m.X.T @ m.X + 4 * np.eye(4), m.X.T @ (m.y - m.X @ CENTRE))
        for m in (fed[u] for u in range(40))
    ]
    assert squared_error(kin.theta, theta) < 1.15 * squared_error(np.stack(known), theta)


def test_balanced_means_are_shrunk_by_the_analysis_of_variance():
    rng = np.random.default_rng(3)
    count, n = 30, 6
    y = 1.5 * rng.normal(size=(count, 1)) + rng.normal(size=(count, n))
    kin = find_kin(Federation({u: (np.ones((n, 1)), y[u]) for u in range(count)}, ["(intercept)"]))
    within = ((y - y.mean(axis=1, keepdims=True)) ** 2).sum() / (count * (n - 1))
    between = n * y.mean(axis=1).var(ddof=1)
    keep = 1 - within / between
    assert kin.theta[:, 0] == pytest.approx(y.mean() + keep * (y.mean(axis=1) - y.mean()), abs=0.05)


def test_sites_are_shrunk_as_by_statsmodels():
    rng = np.random.default_rng(0)
    y = {u: rng.normal(size=1) + rng.normal(size=30) for u in "abcdefghijkl"}
    kin = find_kin(Federation({u: (np.ones((30, 1)), v) for u, v in y.items()}, ["(intercept)"]))
    theirs = sm.MixedLM(np.concatenate(list(y.values())), np.ones((360, 1)), groups=np.repeat(list(y), 30)).fit()
    effects = np.array([float(np.asarray(theirs.random_effects[u])[0]) for u in y]) + float(theirs.fe_params[0])
    assert kin.theta[:, 0] == pytest.approx(effects, abs=0.02)
    assert kin.noise == pytest.approx(theirs.scale, rel=0.02)
    assert not kin.resolved


# --- intervals and contrasts ----------------------------------------------------------------------------------


def test_intervals_cover_as_promised():
    inside, own, pairs = [], [], []
    for seed in range(10):
        made = design(0.6, seed, sites=14, p=3, varrho=0.1)
        kin = find_kin(made.federation, sweeps=40)
        star = np.asarray(made.theta_star)
        for kind, kept in (("average", inside), ("site", own)):
            low, high = np.moveaxis(kin.confint(0.95, kind), 2, 0)
            kept.append(((low < star) & (star < high)).mean())
        for other in (1, 7, 13):
            ends, truth = kin.contrast(0, other).confint(0.95), star[0] - star[other]
            pairs.append(((ends[:, 0] <= truth) & (truth <= ends[:, 1])).mean())
    assert 0.91 < np.mean(inside) < 0.99
    assert 0.91 < np.mean(own) < 0.99
    assert 0.88 < np.mean(pairs) <= 1.0


def test_intervals_of_own_rows_are_least_squares():
    fed = design(sites=8, p=3).federation
    kin = find_kin(fed)
    ends = kin.confint(0.9, kind="site")
    fits = [sm.OLS(fed[u].y, fed[u].X).fit() for u in range(8)]
    for u, theirs in enumerate(fits):
        assert ends[u].mean(axis=1) == pytest.approx(theirs.params, abs=1e-8)
        half = norm.ppf(0.95) * np.sqrt(np.diag(theirs.cov_params()) / theirs.scale * kin.noise[u])
        assert np.ptp(ends[u], axis=1) / 2 == pytest.approx(half, rel=1e-6)
    apart = kin.contrast(0, 7, kind="site")
    covariance = sum(fits[u].cov_params() / fits[u].scale * kin.noise[u] for u in (0, 7))
    d = fits[0].params - fits[7].params
    assert apart.estimate == pytest.approx(d, abs=1e-8)
    assert apart.covariance == pytest.approx(covariance, rel=1e-6)
    assert apart.wald[0] == pytest.approx(d @ np.linalg.solve(covariance, d), rel=1e-6)


def test_contrasts_are_differences_with_a_probability(clear):
    made, kin = clear
    labels = np.asarray(made.labels)
    friend, stranger = (int(np.flatnonzero(labels == k)[-1]) for k in (labels[0], 1 - labels[0]))
    same, apart = kin.contrast(0, friend), kin.contrast(0, stranger)
    assert apart.estimate == pytest.approx(kin.theta[0] - kin.theta[stranger])
    assert apart.probability == pytest.approx(kin.probability[0, stranger])
    assert same.probability > 0.95 > 0.05 > apart.probability
    assert apart.wald[2] < 1e-6 < 0.05 < same.wald[2]
    assert kin.difference_errors()[0, stranger] == pytest.approx(apart.standard_error, rel=1e-6)
    first, second = kin.members(0), kin.members(1)
    between = kin.contrast(first, second)
    assert between.estimate == pytest.approx(kin.theta[first].mean(axis=0) - kin.theta[second].mean(axis=0))
    names = kin.names
    one = kin.contrast(0, stranger, weights={names[0]: 1.0, names[1]: -2.0})
    assert one.estimate == pytest.approx([apart.estimate[0] - 2 * apart.estimate[1]])


def test_predictions_have_intervals_of_the_mean_and_of_new_rows(clear):
    made, kin = clear
    X = np.random.default_rng(5).normal(size=(400, 4))
    mean = kin.predict(X, 3)
    new = kin.predict(X, 3, interval="observation")
    assert mean.mean == pytest.approx(X @ kin.theta[3])
    z = norm.ppf(0.975)
    variance = np.einsum("np,pq,nq->n", X, kin.covariance[3], X)
    assert (mean.high - mean.low) / 2 == pytest.approx(z * np.sqrt(variance))
    assert (new.high - new.low) / 2 == pytest.approx(z * np.sqrt(variance + kin.noise[3]))
    y = X @ np.asarray(made.theta_star)[3] + np.random.default_rng(6).normal(size=400)
    assert 0.92 < ((new.low < y) & (y < new.high)).mean() < 0.98


# --- new sites ------------------------------------------------------------------------------------------------


def test_a_new_site_joins_its_kin(clear):
    made, _ = clear
    labels, star = np.asarray(made.labels), np.asarray(made.theta_star)
    kin = find_kin(made.federation.subset(range(1, 20)))
    nothing, whole = kin.join(), kin.join(made.federation[0])
    assert whole.probability[labels[1:] == labels[0]].min() > 0.9
    assert whole.probability[labels[1:] != labels[0]].max() < 0.1
    assert squared_error(whole.theta, star[0]) < 0.1 * squared_error(nothing.theta, star[0])
    assert np.trace(whole.covariance) < 0.1 * np.trace(nothing.covariance)
    told = kin.join(fedkin.summarise(made.federation.subset([0]))[0])
    assert told.theta == pytest.approx(whole.theta, abs=1e-8)


def test_a_site_unlike_all_others_is_nobodys_kin(clear):
    _, kin = clear
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 4))
    y = X @ [6.0, -6, 6, -6] + rng.normal(size=200)
    stranger = kin.join(Federation({"new": (X, y)})["new"])
    assert stranger.probability.max() < 0.05
    assert stranger.theta == pytest.approx([6, -6, 6, -6], abs=0.5)


def test_a_new_site_without_groups_is_shrunk_to_the_mean(gradual):
    _, _, kin = gradual
    before = kin.join()
    assert before.theta == pytest.approx(kin.mean, abs=0.05)
    rng = np.random.default_rng(9)
    X = rng.normal(size=(10, 4))
    y = X @ (CENTRE + np.array([0.5, 0, -0.5, 1.0])) + rng.normal(size=10)
    after = kin.join(Federation({"new": (X, y)})["new"])
    # before its rows a new site has the covariance of join(); conjugate normal updating gives the rest
    precision = np.linalg.inv(before.covariance) + X.T @ X / kin.noise.mean()
    score = np.linalg.solve(before.covariance, before.theta) + X.T @ y / kin.noise.mean()
    assert after.theta == pytest.approx(np.linalg.solve(precision, score), abs=0.05)
    assert np.sqrt(np.diag(after.covariance)) == pytest.approx(np.sqrt(np.diag(np.linalg.inv(precision))), rel=0.1)


# --- hints ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weak():
    """Groups that rows alone hardly show, and the fit without a hint."""
    made = design(signal=0.35, sites=30, p=5, groups=3, varrho=0.1)
    return made, find_kin(made.federation)


def test_a_good_graph_helps_and_its_opposite_is_read_inverted(weak):
    made, bare = weak
    star = np.asarray(made.theta_star)
    told = find_kin(made.federation, made.graph)
    listed = {(int(i), int(j)) for i, j in made.graph.edges}
    others = [(i, j) for i in range(30) for j in range(i) if (i, j) not in listed]
    opposite = find_kin(made.federation, Graph.from_indices(made.graph.sites, others))
    assert (bare.graph_use, told.graph_use, opposite.graph_use) == ("none", "used", "inverted")
    for kin in (told, opposite):
        assert squared_error(kin.theta, star) < 0.8 * squared_error(bare.theta, star)


@pytest.mark.parametrize("seed", range(3))
def test_a_graph_about_something_else_does_little_harm(weak, seed):
    made, bare = weak
    star = np.asarray(made.theta_star)
    shuffled = np.random.default_rng(seed).permutation(30) % 3
    wrong = find_kin(made.federation, Graph.clusters(shuffled.tolist()))
    assert squared_error(wrong.theta, star) < 1.2 * squared_error(bare.theta, star)


def test_covariates_help_where_they_are_about_the_groups(weak):
    made, bare = weak
    labels, star = np.asarray(made.labels), np.asarray(made.theta_star)
    rng = np.random.default_rng(0)
    told = find_kin(made.federation, covariates={u: {"soil": "abc"[labels[u]]} for u in range(30)})
    assert told.graph_use == "used"
    assert squared_error(told.theta, star) < 0.8 * squared_error(bare.theta, star)
    noise = find_kin(made.federation, covariates=rng.normal(size=(30, 2)))
    assert squared_error(noise.theta, star) < 1.2 * squared_error(bare.theta, star)
    with pytest.raises(FedkinError, match="covariates"):
        find_kin(made.federation, made.graph, covariates=rng.normal(size=(30, 2)))


def test_edge_tests_are_a_start_and_no_data():
    made = design(sites=20, p=5, groups=3)
    kept = fedkin.select_edges(made.federation, Graph.complete(range(20)), method="bh").graph
    for start in (kept, (np.arange(20) % 4).tolist()):
        kin = find_kin(made.federation, start=start)
        assert groups_of(kin).tolist() == np.asarray(made.labels).tolist()
        assert kin.graph_use == "none"


# --- what results do not depend on ----------------------------------------------------------------------------


def test_a_seed_fixes_the_result_and_another_changes_little(clear):
    made, kin = clear
    again, other = find_kin(made.federation), find_kin(made.federation, seed=7)
    assert np.array_equal(kin.theta, again.theta)
    assert np.array_equal(kin.probability, again.probability)
    assert np.abs(other.theta - kin.theta).max() < 0.05
    assert np.array_equal(groups_of(other), groups_of(kin))


def test_order_of_sites_and_units_do_not_matter(clear):
    made, kin = clear
    order = np.random.default_rng(0).permutation(20)
    moved = find_kin(made.federation.subset(order.tolist()))
    assert moved.theta == pytest.approx(kin.theta[order], abs=1e-6)
    assert moved.probability == pytest.approx(kin.probability[np.ix_(order, order)], abs=1e-6)
    units = np.array([1000.0, 0.01, 1.0, 7.0])
    fed = made.federation
    scaled = Federation({u: (fed[u].X * units, 3 * fed[u].y) for u in fed.sites})
    assert find_kin(scaled).theta * units / 3 == pytest.approx(kin.theta, abs=1e-6)


def test_summaries_of_least_squares_say_as_much_as_rows(clear):
    made, kin = clear
    summaries = fedkin.summarise(made.federation)
    told = find_kin(summaries)
    assert told.theta == pytest.approx(kin.theta, abs=1e-7)
    assert told.probability == pytest.approx(kin.probability, abs=1e-7)
    assert told.confint() == pytest.approx(kin.confint(), abs=1e-6)
    assert groups_of(told).tolist() == groups_of(kin).tolist()
    alone = fedkin.summarise(made.federation.subset([5]))[5]  # a site needs nobody else to make its own
    assert np.array_equal(np.asarray(alone.hessian), np.asarray(summaries[5].hessian))


def test_summaries_of_classes_asked_twice_come_close_to_rows():
    made = design(signal=4.0, sites=12, n=200, p=3, loss="logistic")
    rows = find_kin(made.federation, loss="logistic")
    first = find_kin(fedkin.summarise(made.federation, "logistic"))
    second = find_kin(fedkin.summarise(made.federation, "logistic", at=first.theta))
    assert np.abs(second.theta - rows.theta).max() < 0.15
    assert groups_of(second).tolist() == groups_of(rows).tolist() == np.asarray(made.labels).tolist()


@pytest.mark.parametrize("loss", ["logistic", "poisson", "huber", "mean"])
def test_other_losses_find_clear_groups(loss):
    rng = np.random.default_rng(0)
    data, truth = {}, np.repeat([[0.8, -0.4], [-0.8, 0.6]], 6, axis=0)
    for u in range(12):
        X = rng.normal(size=(150, 2))
        eta = X @ truth[u]
        data[u] = {
            "logistic": lambda X=X, eta=eta: (X, (eta + rng.logistic(size=150) > 0).astype(float)),
            "poisson": lambda X=X, eta=eta: (X, rng.poisson(np.exp(eta)).astype(float)),
            "huber": lambda X=X, eta=eta: (X, eta + rng.standard_t(2, size=150)),
            "mean": lambda X=X, u=u: X + truth[u],
        }[loss]()
    kin = find_kin(Federation(data), loss=loss)
    assert kin.resolved
    assert groups_of(kin).tolist() == [0] * 6 + [1] * 6
    assert kin.theta == pytest.approx(truth, abs=0.25)
    low, high = np.moveaxis(kin.confint(0.95), 2, 0)
    assert ((low < truth) & (truth < high)).mean() > 0.7


def test_sites_with_few_rows_constant_columns_or_one_class_do_no_harm():
    rng = np.random.default_rng(0)
    data = {}
    for u in range(8):
        X = np.column_stack([np.ones(40), rng.normal(size=40)])
        data[u] = (X, (2 * X[:, 1] + rng.logistic(size=40) > 0).astype(float))
    data["one class"] = (data[0][0], np.ones(40))
    data["one row"] = (np.array([[1.0, 0.5]]), np.array([1.0]))
    data["constant"] = (np.ones((30, 2)), (rng.random(30) < 0.5).astype(float))
    kin = find_kin(Federation(data), loss="logistic")
    assert np.isfinite(kin.theta).all()
    assert np.abs(kin.theta).max() < 6
    assert kin.theta[9, 1] == pytest.approx(kin.mean[1], abs=1.0)  # one row: nearly what all have in common
