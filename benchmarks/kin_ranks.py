"""What short messages of many coefficients cost and save: one `find_kin` from summaries of a rank.

    python benchmarks/kin_ranks.py [--coefficients 200] [--rows 200] [--rank 50] [--loss linear] [--signal 0.2]
        [--sites 60] [--groups 4] [--seed 0]

Rows of groups with normal parameters, as in `kin_sizes.py`. Without a rank, messages are whole. Prints one line of a
table: the size of a message (without folds, as the file has it), processor time and peak memory of the fit, the error
over that of an oracle who is told the groups and sees the rows, the coverage of 95% intervals and the noise that was
found. Set OMP_NUM_THREADS=1 to measure one thread.
"""

from __future__ import annotations

import json
import resource
import time
import warnings
from dataclasses import replace

import numpy as np
from sklearn.metrics import adjusted_rand_score

from fedkin import Federation, Summaries, find_kin, oracle_fit, summarise
from kin_sizes import drawn, sized


def whole_message(rows: Federation, loss: str) -> Summaries:
    """Summaries of everything, over all rows: one site after another, since sums by fold are large."""
    parts = []
    for site in rows.sites:
        one = summarise(rows.subset([site]), loss, folds=2)[site]
        sums = {name: getattr(one, name) for name in ("count", "value", "gradient", "hessian")}
        moved = {name: np.stack([np.zeros_like(each[0])] * 2 + [each.sum(axis=0)]) for name, each in sums.items()}
        parts.append(replace(one, **moved))
    return Summaries.stack(parts)


def main() -> None:
    parser = sized(__doc__, signal=0.2, sites=60, coefficients=200, groups=4, rows=200, seed=0)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--loss", choices=("linear", "logistic"), default="linear")
    asked = parser.parse_args()
    V, n = asked.sites, asked.rows
    rng, labels, centres, X = drawn(asked)
    p = centres.shape[1]
    eta = np.concatenate([X[u * n : (u + 1) * n] @ centres[labels[u]] for u in range(V)])
    y = eta + rng.standard_normal(V * n) if asked.loss == "linear" else rng.random(V * n) < 1 / (1 + np.exp(-eta))
    rows = Federation.from_arrays(X, y.astype(np.float64), np.repeat(np.arange(V), n))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sites with fewer rows than coefficients have no fit of their own
        told = oracle_fit(rows, labels, loss=asked.loss)
        said = whole_message(rows, asked.loss) if asked.rank is None else summarise(rows, asked.loss, rank=asked.rank)
    message = replace(said[0], site="0").to_plain()
    if asked.rank is None:
        message["folds"] = message["folds"][-1:]  # those without rows say nothing
    del rows, X, eta, y
    before, processor = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, time.process_time()
    kin = find_kin(said)
    processor = time.process_time() - processor
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    truth = centres[labels]
    ratio = ((kin.theta - truth) ** 2).sum() / ((told - truth) ** 2).sum()
    inside = np.sqrt(np.einsum("ujj->uj", kin.covariance)) * 1.96 > np.abs(kin.theta - truth)
    rand = adjusted_rand_score(labels, kin.groups)
    size, memory = f"{len(json.dumps(message)) / 1e6:.2f} MB", f"{peak:.2f} GB ({before:.2f} before)"
    found = f"{ratio:.2f} | {inside.mean():.3f} | {kin.noise.mean():.2f} | {rand:.2f}"
    print(f"| {asked.loss} | {p} | {n} | {asked.rank or 'all'} | {size} | {processor:.1f} | {memory} | {found} |")


if __name__ == "__main__":
    main()
