"""Intervals, contrasts, predictions and new sites: against closed forms, statsmodels, quadrature and simulations."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import expit, softmax
from scipy.stats import multivariate_normal, norm, poisson

import fedkin
from fedkin import Federation, KinClassifier, find_kin
from fedkin.core import site_summary
from fedkin.data import Column, Rows, Schema
from fedkin.datasets import paper_design
from fedkin.errors import DataError, ParameterError, UnknownSiteError
from fedkin.fitting import FitOptions, fit, naive_confint
from fedkin.kin import predicted
from fedkin.kin.learned import combined_covariance, covariance_of_sum
from fedkin.kin.partitions import SHARES, log_partitions, log_prior
from fedkin.losses import LogisticLoss, MultinomialLoss


def design(signal=1.0, seed=0, V=12, n=40, p=3, groups=2, **more):
    return paper_design(
        n_sites=V, n_samples=n, n_features=p, n_clusters=groups, signal=signal, seed=seed, varrho=0.1, **more
    )


@pytest.fixture(scope="module")
def clear():
    made = design(3.0, n=60, p=5)
    return made, fit(made.federation)


@pytest.fixture(scope="module")
def three():
    """Too few sites for groups: the mixed model, which has closed forms."""
    rng = np.random.default_rng(0)
    y = {u: rng.normal(size=1) + rng.normal(size=30) for u in "abc"}
    return y, find_kin(Federation({u: (np.ones((30, 1)), value) for u, value in y.items()}, ["(intercept)"]))


def test_contrasts_of_a_mixed_model_have_a_closed_form(three):
    _, kin = three
    learned = kin.learned
    # joint precision of the mean and three effects, in standardised units
    S = learned.precision[:, 0, 0]
    joint = np.zeros((4, 4))
    joint[0, 0] = S.sum() + 1e-8
    joint[0, 1:] = joint[1:, 0] = S
    joint[1:, 1:] = np.diag(S + 1 / learned.variance[0])
    covariance = np.linalg.inv(joint)
    for weights in ([1.0, -1.0, 0.0], [0.5, 0.5, -1.0], [1 / 3] * 3):
        a = np.array([sum(weights), *weights])
        expected = a @ covariance @ a * learned.units.A[0, 0] ** 2
        found = combined_covariance(learned, np.arange(3), np.array(weights))
        assert found[0, 0] == pytest.approx(expected, rel=1e-5)
    found = kin.contrast("a", "b")
    assert found.estimate == pytest.approx(kin.theta[0] - kin.theta[1])
    both = kin.covariance[0] + kin.covariance[1]
    assert found.covariance[0, 0] < both[0, 0]  # the mean is common to both


def test_sites_that_are_together_in_all_kept_states_are_not_told_apart():
    """The kept states are few: that two sites are apart with a small probability shows in their estimates only."""
    made = paper_design(n_sites=12, n_samples=40, n_features=5, n_clusters=2, signal=2, seed=0)
    kin = find_kin(made.federation)
    alike = [(a, b) for a in range(12) for b in range(a) if made.labels[a] == made.labels[b]]
    together = [(a, b) for a, b in alike if (kin.learned.states.z[:, a] == kin.learned.states.z[:, b]).all()]
    assert together and kin.resolved
    for a, b in together:
        found = kin.contrast(a, b)
        assert found.wald[2] > 0.05 and found.p_values.min() > 0.05
        # a difference that is there with a small probability is larger by as much, and so is its error
        chance = min(kin.probability[a, b], 0.999)
        most = np.sqrt(chance / (1 - chance)) * np.abs(found.estimate)
        assert (found.standard_error >= 0.9 * most).all()
    assert kin.contrast(0, 11).wald[2] < 1e-6


def test_contrasts_know_that_perhaps_no_site_differs():
    """By simulation: with that probability all sites have one model, else they are as their contrasts say."""
    kin = find_kin(design(0.1, seed=1, V=10, n=30).federation)
    learned, rng, n = kin.learned, np.random.default_rng(0), 200_000
    assert 0.3 < learned.one < 0.99
    sites = np.array([0, 7])
    for weights in (np.array([1.0, -1.0]), np.array([0.5, 0.5])):
        given, whole = combined_covariance(learned, sites, weights), weights.sum()
        common = whole * learned.units.theta(learned.one_mean)
        estimate = weights @ kin.theta[sites]
        differ = (estimate - learned.one * common) / (1 - learned.one)  # where sites differ
        draws = np.where(
            rng.random(n)[:, None] < learned.one,
            rng.multivariate_normal(common, whole**2 * learned.units.covariance(learned.one_covariance), n),
            rng.multivariate_normal(differ, given, n),
        )
        assert draws.mean(axis=0) == pytest.approx(estimate, abs=5 * np.sqrt(given.diagonal().max() / n))
        made = covariance_of_sum(learned, kin.theta, sites, weights)
        assert made == pytest.approx(np.cov(draws.T), abs=0.02 * made.diagonal().max())
        if not whole:
            assert (made.diagonal() < 0.8 * given.diagonal()).all()
            assert kin.contrast(0, 7).covariance == pytest.approx(made)
    # a site's own interval is that of sites that differ, around the average
    own = np.diag(kin.covariance[0])
    assert (own > np.diag(learned.units.covariance(learned.one_covariance))).all()
    apart = learned.one / (1 - learned.one) * (kin.theta[0] - learned.units.theta(learned.one_mean))
    assert (own > apart**2).all()


def test_weighted_contrasts_and_what_cannot_be_compared(clear):
    _, model = clear
    kin = model.kin
    groups = kin.contrast(kin.members(0), kin.members(1))
    assert (groups.standard_error < model.contrast(0, 11).standard_error).all()
    one, R = kin.contrast(0, weights={"x0": 1.0, "x2": -2.0}), np.array([0.0, 1.0, 0.0, -2.0, 0.0, 0.0])
    assert one.estimate[0] == pytest.approx(R @ kin.theta[0])
    assert one.covariance[0, 0] == pytest.approx(R @ kin.covariance[0] @ R)
    with pytest.raises(ParameterError, match="on both sides"):
        kin.contrast(3, [3, 4])
    with pytest.raises(ParameterError, match="there is no parameter 'age'"):
        kin.contrast(0, weights={"age": 1.0})
    with pytest.raises(ParameterError, match="there is no group 7"):
        kin.members(7)
    with pytest.raises(UnknownSiteError):
        kin.contrast("x", 0)


def test_fused_models_have_naive_intervals_only():
    made = design(2.0, V=6)
    model = fit(made.federation, made.graph, FitOptions(method="fused"))
    with pytest.raises(ParameterError, match='method="kin"'):
        model.confint()
    ends = naive_confint(model, made.federation)
    for k in range(model.n_groups):
        members = np.flatnonzero(model.groups == k)
        assert (ends[members] == ends[members[0]]).all()
    pooled = made.federation.with_intercept()
    mine = np.isin(pooled.site_index, np.flatnonzero(model.groups == 0))
    theta = np.linalg.lstsq(pooled.X[mine], pooled.y[mine], rcond=None)[0]
    assert ends[0].mean(axis=1) == pytest.approx(theta)


def test_prediction_intervals_cover_new_rows():
    rng = np.random.default_rng(0)
    theta, X = rng.normal(size=(30, 2)), rng.normal(size=(30, 40, 2))
    y = np.einsum("unp,up->un", X, theta) + rng.normal(size=(30, 40))
    train, test = Federation({u: (X[u], y[u]) for u in range(30)}).split(0.3, seed=0)
    model = fit(train)
    ids = [test.sites[u] for u in test.site_index]
    new = model.predict_interval(test.X, ids, level=0.9, interval="observation")
    assert 0.86 < ((new.low < test.y) & (test.y < new.high)).mean() < 0.94
    mean = model.predict_interval(test.X, ids, level=0.9)
    truth = np.einsum("np,np->n", test.X, theta[test.site_index])
    assert 0.82 < ((mean.low < truth) & (truth < mean.high)).mean() < 0.98
    assert mean.mean == pytest.approx(model.predict(test.X, ids))
    assert (new.low < mean.low).all()


def test_prediction_intervals_of_other_losses():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(600, 1))
    site = np.repeat(np.arange(6), 100)
    counts = rng.poisson(np.exp(1.0 + 0.5 * X[:, 0]))
    model = fit(Federation.from_arrays(X, counts, site), None, FitOptions("poisson"))
    found = model.predict_interval([[0.0]], 2, level=0.9, interval="observation")
    rate = model.predict([[0.0]], 2)[0]
    ends = poisson.ppf([0.05, 0.95], rate)
    assert abs(found.low[0] - ends[0]) <= 1
    assert abs(found.high[0] - ends[1]) <= 1
    labels = np.where(X[:, 0] + rng.logistic(size=600) > 0, "yes", "no")
    classes = fit(Federation.from_arrays(X, labels, site))
    found = classes.predict_interval([[0.5]], 1)
    assert 0 < found.low[0] < classes.predict_proba([[0.5]], 1)[0, 1] < found.high[0] < 1
    with pytest.raises(ParameterError, match="logistic loss has no prediction intervals"):
        classes.predict_interval([[0.5]], 1, interval="observation")


def test_new_sites_come_as_rows_tables_and_summaries():
    made = design(2.0, V=8)
    fed = made.federation
    names = fed.feature_names
    schema = Schema(tuple(Column(name, low=-8.0, high=9.0) for name in names), Column("y"))
    columns = {name: fed.X[:, j] for j, name in enumerate(names)} | {"y": fed.y}
    columns["site"] = np.array([f"s{u}" for u in fed.site_index])
    own = columns["site"] == "s0"
    agreed = Federation.from_schema({name: values[~own] for name, values in columns.items()}, schema, site="site")
    model = fit(agreed, None, schema=schema)
    table = {name: values[own] for name, values in columns.items()}
    first = model.join(table).model
    for other in (model.join((fed[0].X, fed[0].y)), model.join(Rows(fed[0].X, fed[0].y))):
        assert other.model.coef == pytest.approx(first.coef, rel=1e-9)
    prepared = schema.rows(table, intercept=True)
    summary = site_summary("s0", prepared, model.loss, feature_names=("(intercept)", *names))
    said = model.join(summary).model
    assert said.coef == pytest.approx(first.coef, rel=1e-7)
    assert said.intercept == pytest.approx(first.intercept, rel=1e-7)
    assert said.confint() == pytest.approx(first.confint(), rel=1e-6)
    with pytest.raises(DataError, match="no target 'y'"):
        model.join({name: values for name, values in table.items() if name != "y"})
    with pytest.raises(DataError, match="a new site must be given as"):
        model.join(7)


# --- new sites, as mixtures of normal models with densities of scipy


@cache
def small_fit(V):
    made = paper_design(n_sites=V, n_samples=25, n_features=2, n_clusters=2, signal=0.7, seed=4)
    return find_kin(made.federation, sweeps=30)


def fitted(V, one, weight=None, **more):
    """A small fit that is told how probable it is that no site differs."""
    kin = small_fit(V)
    given = {
        "one": one,
        "one_mean": kin.learned.mean + 0.1,
        "one_covariance": np.array([[0.02, 0.01], [0.01, 0.03]]),
        **({} if weight is None else {"weight": weight}),
        **more,
    }
    return replace(kin, learned=replace(kin.learned, **given))


def new_rows(n, at, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 2))
    return Rows(X, X @ np.asarray(at) + rng.normal(size=n))


def kinds_of_sites(learned):
    """What a site may be if sites differ: chances, means and covariances in the units of the fit."""
    states, F = learned.states, learned.F
    assert np.allclose(F @ F.T, np.diag(learned.variance))
    made = [(learned.weight, learned.mean, F @ F.T)]
    V = len(learned.score)
    before, after = (log_partitions(count, count) for count in (V, V + 1))
    for s, (sizes, Hs, cs) in enumerate(learned.group_sums):
        m, w, share = states.m[s], np.diag(states.w[s]), SHARES[states.share[s]]
        for group in range(len(sizes) + 1):
            joined, centre, left = np.append(sizes, 1), m, w
            if group < len(sizes):
                joined = sizes + (np.arange(len(sizes)) == group)
                left = np.linalg.inv(Hs[group] + np.linalg.inv(w))
                centre = m + left @ (cs[group] - Hs[group] @ m)
            odds = np.exp(log_prior(after, joined) - log_prior(before, sizes))
            total = F @ (left + share * np.eye(2)) @ F.T
            made.append(((1 - learned.weight) * states.weight[s] * odds, learned.mean + F @ centre, total))
    chances = np.array([chance for chance, _, _ in made])
    return chances / chances.sum(), [mean for _, mean, _ in made], [total for _, _, total in made]


def mixture(learned, chances, means, totals, rows):
    """Mean, covariance and weights of a mixture of normal models given rows; in the units of the rows."""
    units, noise = learned.units, learned.noise * learned.units.target**2
    logs, found, left = [], [], []
    for mean, total in zip(means, totals, strict=True):
        mean, total = units.theta(mean), units.covariance(total)
        if rows is not None:
            spread = rows.X @ total @ rows.X.T + noise * np.eye(len(rows.y))
            logs.append(multivariate_normal(rows.X @ mean, spread).logpdf(rows.y))
            gain = total @ rows.X.T @ np.linalg.inv(spread)
            mean, total = mean + gain @ (rows.y - rows.X @ mean), total - gain @ rows.X @ total
        found.append(mean)
        left.append(total)
    weights = np.asarray(chances) * (np.exp(np.array(logs) - max(logs)) if logs else 1.0)
    weights /= weights.sum()
    middle = weights @ np.array(found)
    apart = np.array(found) - middle
    return middle, np.tensordot(weights, left, 1) + (weights[:, None] * apart).T @ apart, weights


@pytest.mark.parametrize("rows", [None, new_rows(1, (0, 0)), new_rows(3, (0.3, -0.2)), new_rows(12, (2.0, -1.0))])
@pytest.mark.parametrize("weight", [0.3, 1.0])
@pytest.mark.parametrize("one", [0.0, 0.6, 1.0])
def test_a_new_site_is_a_mixture_of_all_that_sites_may_be(rows, weight, one):
    kin = fitted(8, one, weight, mean_covariance=np.zeros((2, 2)))
    learned = kin.learned
    chances, means, totals = kinds_of_sites(learned)
    one = min(one, 9 / 10)  # never certain: one in V + 2 may differ
    everything = np.append((1 - one) * chances, one)
    theta, covariance, weights = mixture(
        learned, everything, [*means, learned.one_mean], [*totals, learned.one_covariance], rows
    )
    joined = kin.join(rows)
    assert joined.theta == pytest.approx(theta, abs=1e-9)
    assert joined.covariance == pytest.approx(covariance, abs=1e-9)
    assert (joined.probability >= weights[-1] - 1e-9).all()


@pytest.mark.parametrize("n", [0, 2, 10])
def test_without_groups_what_is_open_about_the_mean_counts(n):
    kin = fitted(3, 0.5)
    learned, rows = kin.learned, new_rows(n, (0.5, 0.5)) if n else None
    assert learned.states is None
    priors = [np.diag(learned.variance) + learned.mean_covariance, learned.one_covariance]
    _, _, (_, one) = mixture(learned, [0.5, 0.5], [learned.mean, learned.one_mean], priors, rows)
    differs = replace(kin, learned=replace(learned, one=0.0)).join(rows)
    alike, left, _ = mixture(learned, [1.0], [learned.one_mean], [learned.one_covariance], rows)
    joined, apart = kin.join(rows), alike - differs.theta
    assert joined.theta == pytest.approx(differs.theta + one * apart, abs=1e-9)
    expected = (1 - one) * differs.covariance + one * left + one * (1 - one) * np.outer(apart, apart)
    assert joined.covariance == pytest.approx(expected, abs=1e-9)
    assert joined.probability == pytest.approx(np.full(3, one))


@pytest.mark.parametrize("related", [0.6, 0.0])
def test_sites_without_rows_are_predicted_across_sites_where_effects_within_them_differ(related):
    """Intercepts that rise with a site's mean of a column (Mundlak 1978), or do not."""
    rng = np.random.default_rng(0)
    V, n = 300, 8
    level = rng.normal(size=(V, 1, 2))
    X = level + 0.5 * rng.normal(size=(V, n, 2))
    y = related * level[:, :, 0] + X @ [0.2, -0.1] + 0.3 * rng.normal(size=(V, 1)) + 0.3 * rng.normal(size=(V, n))
    fed = Federation({u: (X[u], y[u]) for u in range(100)}).with_intercept()
    kin = find_kin(fed, sweeps=4)
    rows, told = np.concatenate(X[:100]), np.concatenate(y[:100])
    pooled = np.linalg.lstsq(np.column_stack([np.ones(len(rows)), rows]), told)[0]
    error = {}
    for name, theta in (("mean", kin.mean), ("new", kin.join().theta), ("all rows", pooled)):
        error[name] = float(((y[100:] - theta[0] - X[100:] @ theta[1:]) ** 2).mean())
    assert error["new"] < 1.01 * min(error["mean"], error["all rows"])
    assert ("within and between sites differ" in kin.summary()) == (related > 0)
    assert kin.mean[1] == pytest.approx(0.2, abs=0.15 if related else 0.1)  # the population's effect stays that within


# --- probabilities of classes: means over what is not known about a site


def integral(eta, variance):
    """The mean of ``expit`` over a normal, by adaptive quadrature."""
    width = np.sqrt(variance)
    how = {"epsabs": 1e-12, "epsrel": 1e-12, "points": [max(min(-eta / width, 11.9), -11.9)], "limit": 200}
    return quad(lambda z: expit(eta + width * z) * norm.pdf(z), -12, 12, **how)[0]


def averaged(eta, variance):
    loss = LogisticLoss()
    return loss.response(loss.averaged_predictor(np.array([[eta]]), np.array([[[variance]]])))[0]


@pytest.mark.parametrize("variance", [1e-6, 0.3, 4.0, 100.0, 1e4])
def test_two_classes_are_averaged_exactly(variance):
    for eta in (-9.0, -3.0, -0.2, 0.0, 0.5, 2.0, 6.0):
        assert averaged(eta, variance) == pytest.approx(integral(eta, variance), abs=5e-8)


def test_averages_far_out_are_finite_ordered_and_symmetric():
    eta = np.linspace(-700.0, 700.0, 2001)[:, None]
    for variance in (0.0, 1e-9, 1.0, 1e6):
        found = LogisticLoss().averaged_predictor(eta, np.full((len(eta), 1, 1), variance))[:, 0]
        assert np.isfinite(found).all()
        assert (np.diff(found) > 0).all()
        assert found == pytest.approx(-found[::-1])
        assert (np.abs(found) <= np.abs(eta[:, 0]) * (1 + 1e-9) + 1e-12).all()
    assert np.array_equal(LogisticLoss().averaged_predictor(eta, np.zeros((len(eta), 1, 1))), eta)


def test_more_classes_are_averaged_nearly():
    rng = np.random.default_rng(0)
    loss, worst, plain = MultinomialLoss(4), 0.0, 0.0
    for _ in range(12):
        eta, root = rng.normal(size=3) * 2, rng.normal(size=(3, 3))
        drawn = eta + rng.normal(size=(200_000, 3)) @ root.T
        exact = softmax(np.column_stack([np.zeros(len(drawn)), drawn]), axis=1).mean(axis=0)
        found = loss.response(loss.averaged_predictor(eta[None], (root @ root.T)[None]))[0]
        assert found.sum() == pytest.approx(1.0)
        worst, plain = max(worst, np.abs(found - exact).max()), max(plain, np.abs(loss.response(eta) - exact).max())
    assert worst < 0.02 < 0.1 < plain
    assert np.isfinite(loss.averaged_predictor(np.full((1, 3), 900.0), np.eye(3)[None])).all()


def test_probabilities_are_the_same_wherever_they_are_asked(tmp_path):
    made = paper_design(n_sites=15, n_samples=15, n_features=3, n_clusters=2, signal=3, seed=0, loss="logistic")
    fed, model = made.federation, fit(made.federation, None, FitOptions(loss="logistic"))
    site = [fed.sites[u] for u in fed.site_index]
    chances = model.predict_proba(fed.X, site)
    model.save(tmp_path / "model")
    assert np.array_equal(fedkin.load(tmp_path / "model").predict_proba(fed.X, site), chances)
    assert np.array_equal(model.part([3]).predict_proba(fed[3].X), model.predict_proba(fed[3].X, 3))
    assert model.predict_interval(fed.X, site).mean == pytest.approx(chances[:, 1])
    assert model.kin.predict(fed.with_intercept()[3].X, 3).mean == pytest.approx(chances[fed.site_index == 3, 1])
    estimator = KinClassifier().fit(fed.X, fed.y, site=site)
    assert estimator.predict_proba(fed.X, site=site) == pytest.approx(chances)
    assert expit(estimator.decision_function(fed.X, site=site)) == pytest.approx(chances[:, 1])
    fused = fit(
        fed, None, FitOptions(method="fused", loss="logistic", lam=0.02)
    )  # at its estimates: it has no covariances
    eta = fused.linear_predictor(fed.X, site)
    assert fused.predict_proba(fed.X, site)[:, 1] == pytest.approx(expit(eta[:, 0]))


@pytest.mark.parametrize("level", [0.05, 0.5, 0.95])
def test_intervals_of_probabilities_hold_the_mean_and_what_they_promise(level):
    """Small probabilities are skewed: their mean may lie beyond either end of an interval with equal tails."""
    design = paper_design(n_sites=4, n_samples=30, n_features=2, n_clusters=1, seed=0, loss="logistic")
    kin = find_kin(design.federation, loss="logistic")
    rng = np.random.default_rng(0)
    X = rng.normal(size=(400, 2)) * np.linspace(0, 40, 400)[:, None]
    theta, covariance = np.array([1.0, 0.5]), np.array([[0.3, 0.1], [0.1, 0.4]])
    found = predicted(kin, X, theta, covariance, 1.0, level=level, interval="mean")
    assert (found.low <= found.mean).all() and (found.mean <= found.high).all()
    plain = predicted(kin, X[:5], theta, 1e-6 * covariance, 1.0, level=level, interval="mean")
    error = np.sqrt(np.einsum("np,pq,nq->n", X[:5], 1e-6 * covariance, X[:5]))
    draws = X[:5] @ theta + error * rng.normal(size=(20_000, 5))
    inside = ((1 / (1 + np.exp(-draws)) >= plain.low) & (1 / (1 + np.exp(-draws)) <= plain.high)).mean(axis=0)
    np.testing.assert_allclose(inside[1:], level, atol=0.02)
    # where equal tails would leave the mean out, too
    wide = slice(20, 60)
    error = np.sqrt(np.einsum("np,pq,nq->n", X[wide], covariance, X[wide]))
    draws = 1 / (1 + np.exp(-(X[wide] @ theta + error * rng.normal(size=(20_000, 40)))))
    inside = ((draws >= found.low[wide]) & (draws <= found.high[wide])).mean(axis=0)
    np.testing.assert_allclose(inside, level, atol=0.02)
    with pytest.raises(ParameterError, match=r"say 0\.9 for 90%"):
        predicted(kin, X, theta, covariance, 1.0, level=90, interval="mean")
