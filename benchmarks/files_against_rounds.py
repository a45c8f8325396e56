"""Rounds of files against rounds of Fed-ADMM, until the certified relative gap is below 1e-6.

    python benchmarks/files_against_rounds.py

Same sites, edges and lam for both. Bytes are those of all sites together: summaries, questions and answers as JSON
(without signatures), and frames with a theta along every edge in both directions for Fed-ADMM, which uses all rows in
every round, or batches of 10 with a gradient whose variance vanishes (SAGA).
"""

from __future__ import annotations

import json
import warnings

import numpy as np

import fedkin
from fedkin.core import site_answer
from fedkin.data import Federation
from fedkin.federate.inbox import HEADER_BYTES
from fedkin.fitting import FitOptions, FittedModel, Queries, fit
from fedkin.graph import Graph

TOL = 1e-6
ROUNDS, BATCH = 20_000, 10
SIZES = ((12, 100, 5, 3), (30, 100, 10, 3))  # sites, rows of each, features, groups


def main() -> None:
    print(
        "| loss | sites | n | p | edges | files: rounds | bytes | all rows: rounds | bytes | batches: rounds | bytes |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for loss in ("logistic", "poisson"):
        for n_sites, n, q, groups in SIZES:
            row(loss, n_sites, n, q, groups)


def row(loss: str, n_sites: int, n: int, q: int, groups: int) -> None:
    fed, graph = design(loss, n_sites, n, q, groups)
    model, sent = by_files(fed, graph, FitOptions(loss, method="fused", standardize=False, tol=TOL))
    cells = [f"{loss} | {n_sites} | {n} | {q + 1} | {model.graph.n_edges}", f"{rounds_of(model)} | {sent:,}"]
    problem = fedkin.Problem(fed, model.graph, loss, lam=model.fused.lam)
    for how in ({}, {"batch_size": BATCH, "gradient": "saga"}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            solution = fedkin.fed_admm(problem, ROUNDS, tol=TOL, **how)
        reached = f"{solution.n_iter:,}" if solution.gap <= TOL else f"over {ROUNDS:,} (gap {solution.gap:.0e})"
        frames = 2 * model.graph.n_edges * solution.n_iter
        cells.append(f"{reached} | {frames * (HEADER_BYTES + 8 * (q + 1)):,}")
    print(f"| {' | '.join(cells)} |", flush=True)


def rounds_of(model: FittedModel) -> int:
    assert model.origin is not None
    return int(model.origin["rounds"])


def design(loss: str, n_sites: int, n: int, q: int, groups: int) -> tuple[Federation, Graph]:
    """Groups of sites with their own parameters, an intercept first; edges within groups, and as many between."""
    rng = np.random.default_rng(0)
    centres = 0.6 * rng.normal(size=(groups, q + 1))
    rows = {}
    for u in range(n_sites):
        X = np.column_stack([np.ones(n), rng.normal(size=(n, q))])
        eta = X @ centres[u % groups]
        y = rng.random(n) < 1 / (1 + np.exp(-eta)) if loss == "logistic" else rng.poisson(np.exp(0.5 * eta))
        rows[f"site {u}"] = (X, y.astype(float))
    pairs = np.column_stack(np.triu_indices(n_sites, 1))
    alike = pairs[:, 0] % groups == pairs[:, 1] % groups
    keep = np.where(alike, 0.8, 0.4) > rng.random(len(pairs))
    fed = Federation(rows, ["(intercept)", *(f"x{k}" for k in range(q))])
    return fed, Graph.from_indices(fed.sites, pairs[keep])


def by_files(fed: Federation, graph: Graph, options: FitOptions) -> tuple[FittedModel, int]:
    """The model, and the bytes of all messages."""
    queries, said, sent = None, fedkin.summarise(fed, str(options.loss)), 0
    while True:
        sent += sum(len(json.dumps(said[site].to_plain())) for site in fed)
        found = fit(said, graph, options, queries=queries)
        if not isinstance(found, Queries):
            return found, sent
        queries = found
        sent += sum(len(json.dumps(question.to_plain())) for question in found.questions)
        said = fedkin.Summaries.stack(
            site_answer(question, fed[question.site], said.loss, feature_names=fed.feature_names)
            for question in found.questions
        )


if __name__ == "__main__":
    main()
