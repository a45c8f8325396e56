"""Error against epsilon: least squares from one noisy message of every site, beside Local and Global.

    python benchmarks/privacy.py [SEEDS]

Mean squared error of the coefficients (in units of columns between -1 and 1), over sites and seeds. Local and Global
get the same noisy sums. The last line has no noise.
"""

from __future__ import annotations

import sys
import warnings

import numpy as np

from fedkin.core import Budget, Summaries, Summary, local_fit, private_summary, site_summary
from fedkin.data import Federation, Rows
from fedkin.fitting import FitOptions, fit
from fedkin.losses import LinearLoss

SITES, ROWS, FEATURES, GROUPS, DELTA = 30, 500, 5, 3, 1e-5
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, np.inf)
NAMES = ("(intercept)", *(f"x{k}" for k in range(FEATURES)))


def main(seeds: int) -> None:
    print(f"{SITES} sites with {ROWS} rows, {FEATURES} features, {GROUPS} groups, delta {DELTA:g}, {seeds} seeds")
    print("| epsilon | Local | Global | Fedkin | edges kept within groups | between |")
    print("|---|---|---|---|---|---|")
    for epsilon in EPSILONS:
        cells = np.mean([errors(epsilon, seed) for seed in range(seeds)], axis=0)
        shown = " | ".join([*(f"{one:.2g}" for one in cells[:3]), *(f"{one:.0%}" for one in cells[3:])])
        print(f"| {epsilon:g} | {shown} |", flush=True)


def errors(epsilon: float, seed: int) -> list[float]:
    fed, truth, group = design(seed)
    summaries = Summaries.stack(said(site, fed[site], epsilon) for site in fed)
    options = FitOptions("linear", standardize=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        local = local_fit(summaries)
        model = fit(summaries, None, options)
    fitted = np.column_stack([model.intercept[:, 0], model.coef[:, 0]])
    total = summaries.repaired().sums.total()
    common = np.linalg.solve(total.hessian[:, 0].sum(axis=0), -total.gradient[:, 0].sum(axis=0))
    alike = group[model.graph.edges[:, 0]] == group[model.graph.edges[:, 1]]
    pairs = np.equal.outer(group, group)[np.triu_indices(SITES, 1)]
    means = [float(((one - truth) ** 2).mean()) for one in (local.theta, np.tile(common, (SITES, 1)), fitted)]
    return [*means, alike.sum() / pairs.sum(), (~alike).sum() / (~pairs).sum()]


def said(site: object, rows: Rows, epsilon: float) -> Summary:
    if np.isinf(epsilon):
        return site_summary(str(site), rows, LinearLoss(), feature_names=NAMES)
    return private_summary(str(site), rows, LinearLoss(), Budget(epsilon, DELTA), feature_names=NAMES)


def design(seed: int) -> tuple[Federation, np.ndarray, np.ndarray]:
    """Columns between -1 and 1, and targets as well, nearly all of them."""
    rng = np.random.default_rng(seed)
    centres = rng.uniform(-0.3, 0.3, size=(GROUPS, FEATURES + 1))
    group = np.arange(SITES) % GROUPS
    rows = {}
    for u in range(SITES):
        X = np.column_stack([np.ones(ROWS), rng.uniform(-1, 1, size=(ROWS, FEATURES))])
        rows[f"site {u}"] = (X, np.clip(X @ centres[group[u]] + 0.2 * rng.normal(size=ROWS), -1, 1))
    return Federation(rows, NAMES), centres[group], group


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
