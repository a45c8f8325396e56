"""The exact solver, its path, edge tests and theory: against cvxpy, scikit-learn, statsmodels and closed forms."""

from __future__ import annotations

import math

import cvxpy as cp
import numpy as np
import pytest
import statsmodels.api as sm
from scipy import stats
from sklearn.linear_model import LinearRegression
from statsmodels.stats.multitest import multipletests

import fedkin
from fedkin import Federation, Graph, Problem, solve
from fedkin.datasets import paper_design

NAMES = ("a", "b", "c", "d", "e")
EDGES = [("a", "b"), ("b", "c"), ("d", "c"), ("a", "d"), ("b", "d")]


def rows(loss, names=NAMES, p=2, seed=0, sizes=(30, 34, 38, 42, 46)):
    """Rows of each site, of unequal number, drawn from the model that the loss belongs to."""
    rng = np.random.default_rng(seed)
    made = {}
    for k, name in enumerate(names):
        X = rng.normal(size=(sizes[k % len(sizes)], p))
        eta = X @ (np.array([1.0, -0.5, 0.3])[:p] + 0.4 * rng.normal(size=p))
        noise = rng.normal(size=len(X))
        if loss == "logistic":
            made[name] = (X, (eta + rng.logistic(size=len(X)) > 0).astype(float))
        elif loss == "poisson":
            made[name] = (X, rng.poisson(np.exp(0.5 * eta)).astype(float))
        elif loss == "multinomial":
            made[name] = (X, np.digitize(eta + rng.logistic(size=len(X)), [-0.7, 0.7]).astype(float))
        else:
            made[name] = (X, eta + noise * np.where(rng.random(len(X)) < 0.1, 5.0, 1.0))
    return made


# --- the minimum ----------------------------------------------------------------------------------------------


def test_the_objective_is_the_documented_one():
    data = rows("linear")
    problem = Problem(Federation(data), Graph(NAMES, EDGES), lam=0.3)
    theta = np.random.default_rng(1).normal(size=(5, 2))
    losses = [((y - X @ theta[u]) ** 2).mean() / 2 for u, (X, y) in enumerate(data.values())]
    pairs = [np.abs(theta[NAMES.index(i)] - theta[NAMES.index(j)]).sum() for i, j in EDGES]
    assert problem.objective(theta) == pytest.approx(np.mean(losses) + 0.3 * sum(pairs))


def test_an_isolated_site_keeps_its_own_fit():
    data = rows("linear")
    lonely = [edge for edge in EDGES if "e" not in edge]
    theta = solve(Problem(Federation(data), Graph(NAMES, lonely), lam=0.5), tol=1e-10).theta
    assert theta[4] == pytest.approx(LinearRegression(fit_intercept=False).fit(*data["e"]).coef_, abs=1e-5)
    assert np.array_equal(theta[0], theta[3])  # the others are joined, and lam is large


def test_fused_sites_are_exactly_equal_and_labelled():
    design = paper_design(n_sites=12, n_samples=60, n_features=3, n_clusters=2, signal=3, varrho=0.0, seed=0)
    problem = Problem(design.federation, design.truth, penalty="l2", lam=0.05)
    solution = solve(problem, tol=1e-9)
    labels = np.asarray(design.labels)
    assert np.array_equal(solution.clusters(design.truth), labels)
    for label in (0, 1):
        assert len(np.unique(solution.theta[labels == label], axis=0)) == 1


def test_order_of_sites_and_edges_does_not_matter():
    data = rows("linear")
    one = solve(Problem(Federation(data), Graph(NAMES, EDGES), lam=0.02), tol=1e-10).theta
    back = {name: data[name] for name in reversed(NAMES)}
    turned = [(j, i) for i, j in reversed(EDGES)]
    two = solve(Problem(Federation(back), Graph(sorted(NAMES), turned), lam=0.02), tol=1e-10).theta
    assert two[::-1] == pytest.approx(one, abs=1e-5)


# --- special cases --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["linear", "logistic", "poisson", "multinomial"])
def test_without_penalty_every_site_has_its_own_fit(loss):
    data = rows(loss)
    problem = Problem(Federation(data), Graph(NAMES, EDGES), loss=loss, lam=0.0)
    theta = solve(problem, tol=1e-12).theta
    for u, (X, y) in enumerate(data.values()):
        own = {
            "linear": lambda X=X, y=y: sm.OLS(y, X).fit().params,
            "logistic": lambda X=X, y=y: sm.Logit(y, X).fit(disp=0).params,
            "poisson": lambda X=X, y=y: sm.GLM(y, X, family=sm.families.Poisson()).fit().params,
            "multinomial": lambda X=X, y=y: np.asarray(sm.MNLogit(y, X).fit(disp=0).params).T.ravel(),
        }[loss]()
        assert theta[u] == pytest.approx(own, abs=1e-4)
    assert fedkin.local_fit(Federation(data), loss).theta == pytest.approx(theta, abs=1e-4)


@pytest.mark.parametrize("loss", ["linear", "logistic"])
def test_with_a_large_penalty_all_sites_have_one_fit_in_which_each_counts_once(loss):
    data = rows(loss)
    fed = Federation(data)
    theta = solve(Problem(fed, Graph.complete(NAMES), loss=loss, lam=100.0), tol=1e-11).theta
    family = sm.families.Gaussian() if loss == "linear" else sm.families.Binomial()
    each = np.concatenate([np.full(len(X), 1 / len(X)) for X, _ in data.values()])
    one = sm.GLM(fed.y, fed.X, family=family, freq_weights=each).fit().params
    assert theta == pytest.approx(np.tile(one, (5, 1)), abs=1e-4)
    assert np.ptp(theta, axis=0).max() == 0.0


def test_pooled_fits_are_least_squares_of_all_rows_and_of_groups():
    data = rows("linear")
    fed, labels = Federation(data), dict(zip(NAMES, "xxyyy", strict=True))
    assert fedkin.global_fit(fed) == pytest.approx(sm.OLS(fed.y, fed.X).fit().params, abs=1e-8)
    oracle = fedkin.oracle_fit(fed, labels)
    for u, name in enumerate(NAMES):
        group = [data[k] for k in NAMES if labels[k] == labels[name]]
        X, y = np.vstack([X for X, _ in group]), np.concatenate([y for _, y in group])
        assert oracle[u] == pytest.approx(sm.OLS(y, X).fit().params, abs=1e-8)


def chain(n):
    return Graph(range(n), [(i, i + 1) for i in range(n - 1)])


def test_total_variation_on_a_grid_is_cvxpys():
    rng = np.random.default_rng(0)
    image = np.zeros((8, 9))
    image[2:6, 3:7] = 2.0
    image += 0.3 * rng.normal(size=image.shape)
    graph = Graph.grid(8, 9)
    fed = Federation({(r, c): [[image[r, c]]] for r in range(8) for c in range(9)})
    lam = 0.4 / 72
    x = cp.Variable((8, 9))
    variation = cp.sum(cp.abs(cp.diff(x, axis=0))) + cp.sum(cp.abs(cp.diff(x, axis=1)))
    task = cp.Problem(cp.Minimize(cp.sum_squares(x - image) / 144 + lam * variation))
    task.solve(solver=cp.CLARABEL)
    found = solve(Problem(fed, graph, loss="mean", lam=lam), tol=1e-9)
    assert found.objective == pytest.approx(task.value, rel=1e-6)
    assert found.theta.reshape(8, 9) == pytest.approx(x.value, abs=1e-3)


# --- the path and cross-validation ----------------------------------------------------------------------------


def test_lam_max_of_a_chain_has_a_closed_form():
    y = np.random.default_rng(0).normal(size=30)
    problem = Problem(Federation({i: [[v]] for i, v in enumerate(y)}), chain(30), loss="mean")
    expected = np.abs(np.cumsum(y - y.mean())).max() / 30
    found = fedkin.lam_max(problem)
    assert found == pytest.approx(expected, rel=5e-3)
    assert np.ptp(solve(problem.with_lam(1.01 * expected), tol=1e-10).theta) == 0.0
    assert np.ptp(solve(problem.with_lam(0.95 * expected), tol=1e-10).theta) > 0.0


@pytest.mark.parametrize("penalty", ["l2", "linf"])
def test_lam_max_is_where_sites_part(penalty):
    problem = Problem(Federation(rows("linear")), Graph.complete(NAMES), penalty=penalty)
    most = fedkin.lam_max(problem)
    assert np.ptp(solve(problem.with_lam(1.01 * most), tol=1e-10).theta, axis=0).max() == 0.0
    assert np.ptp(solve(problem.with_lam(0.95 * most), tol=1e-10).theta, axis=0).max() > 1e-6


def test_a_path_has_the_solutions_of_its_levels():
    problem = Problem(Federation(rows("linear", NAMES[:4])), Graph(NAMES[:4], EDGES))
    path = fedkin.lam_path(problem, n_lams=8, ratio=0.01, tol=1e-8)
    assert path.lams[0] == pytest.approx(fedkin.lam_max(problem), rel=1e-2)
    assert path.lams[-1] == pytest.approx(0.01 * path.lams[0], rel=1e-6)
    assert (np.diff(path.lams) < 0).all()
    for lam, solution in path:
        alone = solve(problem.with_lam(lam), tol=1e-8)
        assert solution.gap <= 1e-8
        assert solution.objective == pytest.approx(alone.objective, rel=3e-8)
    assert len(np.unique(path.solutions[0].theta, axis=0)) == 1


def test_the_rule_of_one_standard_error_takes_the_largest_lam_within_it():
    problem = Problem(Federation(rows("linear")), Graph.complete(NAMES))
    best = fedkin.cross_validate_lam(problem, n_lams=10)
    careful = fedkin.cross_validate_lam(problem, n_lams=10, rule="1se")
    at = int(np.argmin(best.mean))
    assert best.lam == best.lams[at]
    assert careful.lam == careful.lams[careful.mean <= best.mean[at] + best.error[at]].max()


# --- edge tests -----------------------------------------------------------------------------------------------


def test_the_papers_wald_statistic_is_chi_squared():
    data = rows("linear", p=3)
    chosen = fedkin.select_edges(Federation(data), Graph(NAMES, EDGES), variance="bartlett", level=0.1)
    own = {name: (sm.OLS(y, X).fit().params, np.linalg.inv(X.T @ X)) for name, (X, y) in data.items()}
    for k, (i, j) in enumerate(chosen.candidates.edge_ids()):
        d = own[i][0] - own[j][0]
        statistic = d @ np.linalg.solve(own[i][1] + own[j][1], d)
        assert chosen.statistic[k] == pytest.approx(statistic, rel=1e-6)
        assert chosen.p_value[k] == pytest.approx(stats.chi2.sf(statistic, 3), rel=1e-5)
    assert chosen.critical == pytest.approx(stats.chi2.isf(0.1 / len(EDGES), 3), rel=1e-6)
    assert np.array_equal(chosen.kept, chosen.statistic <= chosen.critical)


def test_the_default_test_takes_noise_variances_from_the_rows():
    data = rows("linear", p=1, sizes=(40, 40, 40, 40, 40))
    chosen = fedkin.select_edges(Federation(data))
    own = {name: sm.OLS(y, X).fit() for name, (X, y) in data.items()}
    for k, (i, j) in enumerate(chosen.candidates.edge_ids()):
        one, other = own[i], own[j]
        variance = float(one.cov_params()[0, 0] + other.cov_params()[0, 0])
        statistic = float((one.params - other.params)[0]) ** 2 / variance
        assert chosen.statistic[k] == pytest.approx(statistic, rel=1e-6)
        assert chosen.p_value[k] == pytest.approx(stats.f.sf(statistic, 1, chosen.reference_dof[k]), rel=1e-5)
        assert 39 - 1e-9 <= chosen.reference_dof[k] <= 78 + 1e-9  # Welch's limits


@pytest.mark.parametrize(
    ("method", "theirs"), [("bonferroni", "bonferroni"), ("holm", "holm"), ("bh", "fdr_bh"), ("by", "fdr_by")]
)
def test_corrections_are_those_of_statsmodels(method, theirs):
    design = paper_design(n_sites=12, n_samples=40, n_features=3, n_clusters=3, signal=0.5, seed=2)
    chosen = fedkin.select_edges(design.federation, Graph.complete(range(12)), method=method, level=0.1)
    dropped = multipletests(chosen.p_value, 0.1, theirs)[0]
    assert 0 < dropped.sum() < len(dropped)
    assert np.array_equal(chosen.kept, ~dropped)
    assert chosen.graph.n_edges == int((~dropped).sum())


def test_edge_tests_keep_true_edges_and_drop_false_ones():
    design = paper_design(n_sites=20, n_samples=100, n_features=5, n_clusters=2, signal=1.0, varrho=0.2, seed=0)
    chosen = fedkin.select_edges(design.federation, design.graph)
    assert design.graph.fidelity(design.truth) < 0.5
    assert chosen.graph.fidelity(design.truth) == 1.0


# --- theory ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def known():
    return paper_design(n_sites=12, n_samples=60, n_features=3, n_clusters=2, signal=1.0, varrho=0.1, seed=3)


def test_noise_and_curvature_are_those_of_the_definitions(known):
    fed, graph, star = known.federation, known.graph, np.asarray(known.theta_star)
    pairs = [(fed[u].X, fed[u].y) for u in fed.sites]
    psi = np.stack([X.T @ (X @ star[u] - y) / len(y) for u, (X, y) in enumerate(pairs)])
    D = graph.incidence().toarray()
    kernel = np.eye(12) - np.linalg.pinv(D) @ D
    theory = fedkin.theory
    assert theory.rho(fed, graph, star) == pytest.approx(np.linalg.norm(kernel @ psi) / math.sqrt(12), rel=1e-9)
    dual = np.linalg.pinv(D).T @ psi
    for penalty, size in [("l1", np.inf), ("l2", 2), ("linf", 1)]:
        expected = np.linalg.norm(dual, size, axis=1).max() / math.sqrt(12)
        assert theory.theorem1_lambda(fed, graph, star, penalty=penalty) == pytest.approx(expected, rel=1e-8)
    values = np.array([np.linalg.eigvalsh(X.T @ X / len(X)) for X, _ in pairs])
    assert theory.kappa(fed, star) == pytest.approx(max(values.max(), 1 / values.min(), 1.0), rel=1e-9)
    assert theory.gamma_squared(graph) == pytest.approx(
        min(v for v in np.linalg.eigvalsh(D.T @ D) if v > 1e-9), rel=1e-8
    )


def test_the_error_stays_below_the_bound_of_theorem_1(known):
    fed, graph, star, theory = known.federation, known.graph, np.asarray(known.theta_star), fedkin.theory
    lam, sizes = theory.theorem1_lambda(fed, graph, star), theory.Sizes.from_truth(fed, graph, star)
    false = sum(not np.array_equal(star[i], star[j]) for i, j in graph.edges)
    assert sizes.n_false_edges == false > 0
    compatible = theory.compatibility_lower_bound(graph, false, n_params=3)
    assert compatible == pytest.approx(1 / (2 * math.sqrt(min(graph.degree.max(), false)) * math.sqrt(3)))
    rho, kappa = theory.rho(fed, graph, star), theory.kappa(fed, star)
    bound = theory.theorem1_bound(rho, lam, false, kappa, compatible)
    assert bound == pytest.approx(2 * kappa**2 * (rho**2 + 4 * false * lam**2 / compatible**2))
    assert theory.objective_lam(lam, 12) == pytest.approx(lam / math.sqrt(12))
    theta = solve(Problem(fed, graph, lam=theory.objective_lam(lam, 12)), tol=1e-8).theta
    assert ((theta - star) ** 2).sum() / 12 <= bound


def test_rates_of_theorem_2_and_the_signal_of_theorem_3(known):
    theory = fedkin.theory
    sizes = theory.Sizes(100, 50, n_params=20, n_components=5, n_edges=900, n_false_edges=7)
    unit = 4 * 20 / (100 * 50)
    assert theory.theorem2_rate(sizes, sigma=2.0) == pytest.approx(unit * 12)
    bound = theory.theorem2_bound(sizes, gamma_squared=3.0, kappa=1.5, kappa_0=0.5, xi=0.1, sigma=2.0)
    noise, wrong = unit * 5 * math.log(10), 4 / (0.5 * 3.0) * unit * 7 * math.log(9000)
    assert bound == pytest.approx(2 * 1.5**2 * (noise + wrong))
    fed, graph, star = known.federation, known.graph, np.asarray(known.theta_star)
    check = theory.minimum_signal_check(fed, graph, star, level=0.05)
    grams = [fed[u].X.T @ fed[u].X for u in fed.sites]
    expected = [
        (star[i] - star[j]) @ np.linalg.inv(np.linalg.inv(grams[i]) + np.linalg.inv(grams[j])) @ (star[i] - star[j])
        for i, j in check.edges
    ]
    assert check.signal == pytest.approx(expected, rel=1e-8)
    assert check.required == pytest.approx(4 * stats.chi2.isf(0.05 / graph.n_edges, 3), rel=1e-8)
    assert check.holds == bool((check.signal >= check.required).all())


def test_fidelity_is_components_of_the_truth_over_components_and_false_edges():
    truth = Graph.clusters([0, 0, 0, 1, 1, 1])
    graph = Graph(range(6), [(0, 1), (1, 2), (2, 3), (3, 4)])  # site 5 is alone, (2, 3) is false
    assert fedkin.theory.graph_fidelity(graph, truth) == pytest.approx(2 / (2 + 1))
    assert graph.fidelity(truth) == fedkin.theory.graph_fidelity(graph, truth)
