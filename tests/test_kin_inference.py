"""Intervals, contrasts, predictions and new sites: against closed forms, statsmodels, and simulated truths."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import norm, poisson

from fedkin import Federation, find_kin
from fedkin.core import site_summary
from fedkin.data import Column, Rows, Schema
from fedkin.datasets import paper_design
from fedkin.errors import DataError, ParameterError, UnknownSiteError
from fedkin.fitting import FitOptions, fit, naive_confint
from fedkin.kin.groups import MOSTLY_ONE, Grouped, outer
from fedkin.kin.learned import combined_covariance, covariance_of_sum
from fedkin.kin.mixed import OneModel


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


# --- the mixed model ------------------------------------------------------------------------------------------


def test_intervals_of_a_random_intercept_are_statsmodels_own(three):
    import statsmodels.api as sm

    y, kin = three
    values, site = np.concatenate(list(y.values())), np.repeat(list(y), 30)
    theirs = sm.MixedLM(values, np.ones((90, 1)), groups=site).fit(reml=True)
    tau, sigma2 = (
        float(theirs.cov_re.iloc[0, 0]) if hasattr(theirs.cov_re, "iloc") else float(theirs.cov_re[0, 0]),
        theirs.scale,
    )
    assert kin.noise == pytest.approx(sigma2, rel=0.02)
    assert kin.sd[0] == pytest.approx(np.sqrt(tau), rel=0.1)  # three sites, and a weak prior
    tau, sigma2 = float(kin.sd[0] ** 2), float(kin.noise[0])
    keep = tau / (tau + sigma2 / 30)
    blup = {u: kin.mean[0] + keep * (y[u].mean() - kin.mean[0]) for u in y}
    assert kin.theta[:, 0] == pytest.approx(list(blup.values()), abs=1e-6)
    blups = np.array([float(np.asarray(theirs.random_effects[u])[0]) for u in y]) + float(theirs.fe_params[0])
    assert kin.theta[:, 0] == pytest.approx(blups, abs=0.02)
    conditional = np.array([float(np.asarray(theirs.random_effects_cov[u]).ravel()[0]) for u in y])
    total = conditional + (1 - keep) ** 2 * float(np.asarray(theirs.cov_params())[0, 0])
    assert kin.covariance[:, 0, 0] == pytest.approx(total, rel=0.05)


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


def test_own_rows_are_least_squares():
    import statsmodels.api as sm

    made = design(V=8).federation
    kin = find_kin(made)
    ends = kin.confint(0.9, "site")
    for u in range(8):
        theirs = sm.OLS(made[u].y, made[u].X).fit()
        assert ends[u].mean(axis=1) == pytest.approx(theirs.params, abs=1e-8)
        ratio = np.ptp(ends[u], axis=1) / (2 * norm.ppf(0.95) * theirs.bse)
        # theirs is the noise of one site, ours leans on all
        assert ratio == pytest.approx(np.sqrt(kin.noise[u] / theirs.scale), rel=1e-6)
    apart = kin.contrast(0, 7, kind="site")
    first, last = (sm.OLS(made[u].y, made[u].X).fit() for u in (0, 7))
    expected = first.cov_params() / first.scale * kin.noise[0] + last.cov_params() / last.scale * kin.noise[7]
    assert apart.covariance == pytest.approx(expected, rel=1e-6)
    d = first.params - last.params
    assert apart.wald[0] == pytest.approx(d @ np.linalg.solve(expected, d), rel=1e-6)


# --- groups ---------------------------------------------------------------------------------------------------


def test_intervals_and_contrasts_cover(monkeypatch):
    """The truth is inside as often as promised, on average over sites, pairs and federations."""
    inside, pairs, wald = [], [], []
    for seed in range(12):
        made = design(0.6, seed, V=14)
        kin = find_kin(made.federation, made.graph, sweeps=40)
        low, high = np.moveaxis(kin.confint(0.95), 2, 0)
        inside.append(((low < made.theta_star) & (made.theta_star < high)).mean())
        for other in (1, 7, 13):
            found = kin.contrast(0, other)
            truth = made.theta_star[0] - made.theta_star[other]
            ends = found.confint(0.95)
            pairs.append(((ends[:, 0] <= truth) & (truth <= ends[:, 1])).mean())
            wald.append(kin.contrast(0, other, kind="site").wald[2] < 0.05 if (truth == 0).all() else np.nan)
    assert 0.92 < np.mean(inside) < 0.985
    assert 0.9 < np.mean(pairs) <= 1.0
    assert np.nanmean(wald) < 0.2  # the test of equal sites keeps its level


@pytest.mark.parametrize("signal", [2.0, 0.3, 0.05])
def test_errors_of_all_differences_are_those_of_contrasts(signal):
    kin = find_kin(design(signal, seed=1, V=10, n=30).federation)
    errors = kin.difference_errors()
    assert errors.shape == (10, 10, 3) and (errors == errors.transpose(1, 0, 2)).all() and (errors[0, 0] == 0).all()
    for a, b in [(0, 1), (0, 9), (4, 5), (7, 2)]:
        np.testing.assert_allclose(errors[a, b], kin.contrast(a, b).standard_error, rtol=1e-9)


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
    # a site's own covariance is that of one of the two, around the average
    common = learned.units.covariance(learned.one_covariance)
    off = learned.units.theta(learned.one_mean) - kin.theta[0]
    assert learned.one > MOSTLY_ONE
    assert kin.covariance[0] == pytest.approx(common + np.outer(off, off))


def test_covariances_are_of_sites_that_differ_or_of_one_model_for_all():
    rng = np.random.default_rng(0)
    V, p = 6, 2
    theta, S = rng.normal(size=(V, p)), np.tile(50 * np.eye(p), (V, 1, 1))
    score = 50 * (theta + 0.1 * rng.normal(size=(V, p)))
    covariance = np.tile(0.02 * np.eye(p), (V, 1, 1))
    nothing = np.zeros((p, 0))
    found = Grouped(theta, covariance, 6.0, np.ones(p), np.zeros(p), np.eye(p), nothing)
    model = SimpleNamespace(precision=S, score=score)
    differ = found.with_one_model(model, OneModel(2.0, score.mean(axis=0) / 50, 1e-3 * np.eye(p)))
    assert differ.one < 0.1 and differ.covariance == pytest.approx(covariance + outer(theta - differ.theta))
    far = replace(found, theta=np.tile(score.mean(axis=0) / 50, (V, 1)) + 1e-3 * theta)
    alike = far.with_one_model(model, OneModel(-60.0, score.mean(axis=0) / 50, 1e-3 * np.eye(p)))
    assert alike.one > MOSTLY_ONE
    assert alike.covariance == pytest.approx(1e-3 * np.eye(p) + outer(score.mean(axis=0) / 50 - alike.theta))


def test_differences_of_sites_and_groups(clear):
    made, model = clear
    apart, alike = model.contrast(0, 11), model.contrast(0, 1)
    assert apart.wald[2] < 1e-8
    assert alike.wald[2] > 0.05
    assert alike.probability > 0.8
    assert apart.probability < 0.05
    kin = model.kin
    groups = kin.contrast(kin.members(0), kin.members(1))
    truth = made.theta_star[0] - made.theta_star[11]
    assert groups.estimate[1:] == pytest.approx(truth, abs=0.25)
    assert (groups.standard_error < apart.standard_error).all()
    one = kin.contrast(0, weights={"x0": 1.0, "x2": -2.0})
    assert one.names == ("+1 x0 -2 x2",)
    assert one.estimate[0] == pytest.approx(kin.theta[0, 1] - 2 * kin.theta[0, 3])
    R = np.array([0.0, 1.0, 0.0, -2.0, 0.0, 0.0])
    assert one.covariance[0, 0] == pytest.approx(R @ kin.covariance[0] @ R)
    with pytest.raises(ParameterError, match="on both sides"):
        kin.contrast(3, [3, 4])
    with pytest.raises(ParameterError, match="there is no parameter 'age'"):
        kin.contrast(0, weights={"age": 1.0})
    with pytest.raises(ParameterError, match="there is no group 7"):
        kin.members(7)
    with pytest.raises(UnknownSiteError):
        kin.contrast("x", 0)


def test_texts_look_like_statsmodels(clear):
    _, model = clear
    site, group = model.summary(site=3), model.summary(group=1)
    for text in (site, group, repr(model.contrast(0, 11))):
        assert max(map(len, text.splitlines())) <= 90
        for word in ("coef", "std err", "P>|z|", "[0.025", "0.975]", "(intercept)", "on average over sites"):
            assert word in text
    assert "likely kin" in site
    assert "mean of 6 sites" in group
    assert "at every single site" in model.summary(site=3, kind="site")
    assert "Wald test" in repr(model.contrast(0, 11))


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


# --- predictions ----------------------------------------------------------------------------------------------


def test_prediction_intervals_cover_new_rows():
    rng = np.random.default_rng(0)
    theta, X = rng.normal(size=(30, 2)), rng.normal(size=(30, 40, 2))
    y = np.einsum("unp,up->un", X, theta) + rng.normal(size=(30, 40))
    train, test = Federation({u: (X[u], y[u]) for u in range(30)}).split(0.3, seed=0)
    model = fit(train)
    ids = [test.sites[u] for u in test.site_index]
    new = model.predict_interval(test.X, ids, level=0.9, target="observation")
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
    found = model.predict_interval([[0.0]], 2, level=0.9, target="observation")
    rate = model.predict([[0.0]], 2)[0]
    ends = poisson.ppf([0.05, 0.95], rate)
    assert abs(found.low[0] - ends[0]) <= 1
    assert abs(found.high[0] - ends[1]) <= 1
    labels = np.where(X[:, 0] + rng.logistic(size=600) > 0, "yes", "no")
    classes = fit(Federation.from_arrays(X, labels, site))
    found = classes.predict_interval([[0.5]], 1)
    assert 0 < found.low[0] < classes.predict_proba([[0.5]], 1)[0, 1] < found.high[0] < 1
    with pytest.raises(ParameterError, match="no intervals for new observations of the logistic loss"):
        classes.predict_interval([[0.5]], 1, target="observation")


# --- new sites ------------------------------------------------------------------------------------------------


def test_a_new_sites_intervals_shrink_with_rows():
    made = design(3.0, n=60, p=5)
    kept = list(range(1, 12))
    model = fit(made.federation.subset(kept))
    rows, truth = made.federation[0], np.concatenate([[0.0], made.theta_star[0]])
    steps = [model.join(name="new")] + [model.join(rows.take(slice(0, n)), name="new") for n in (3, 10, 60)]
    widths = [np.ptp(one.model.confint(), axis=2).sum() for one in steps]
    assert widths == sorted(widths, reverse=True)
    errors = [((one.model.kin.theta[0] - truth) ** 2).sum() for one in steps]
    assert errors[3] < 0.1 * errors[0]
    assert steps[3].groups.argmax() == model.kin.groups[0]
    assert steps[3].groups.max() > 0.8
    assert steps[0].groups.max() < 0.8
    last = steps[3].model
    assert last.sites == ("new",)
    assert last.n_samples.tolist() == [60]
    assert last.predict(rows.X[:2]) == pytest.approx(rows.X[:2] @ last.coef[0, 0] + last.intercept[0, 0])
    assert np.isfinite(last.confint(kind="site")).all()
    assert np.isinf(steps[0].model.confint(kind="site")).all()
    with pytest.raises(ParameterError, match="can join only all of them"):
        last.join()


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
    with pytest.raises(DataError, match="a new site comes with"):
        model.join(7)


# --- command line ---------------------------------------------------------------------------------------------
