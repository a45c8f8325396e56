"""A clinic that joins later: its model from no rows, a few and many, with intervals that shrink.

Nineteen clinics have been fitted. The twentieth asks for a model before it has any rows, then with the first of them.
With a file name as argument, the script draws its coefficients as rows come in.
"""

import sys

import numpy as np

from fedkin import find_kin
from fedkin.datasets import paper_design

design = paper_design(n_sites=20, n_samples=60, n_features=4, n_clusters=2, signal=1.0, seed=3)
newcomer = design.federation[19]
kin = find_kin(design.federation.subset(range(19)))
kind = design.labels[:19] == design.labels[19]

steps = (0, 2, 5, 10, 20, 60)
estimates, widths = [], []
for n in steps:
    joined = kin.join(newcomer.take(slice(n)) if n else None)
    error = float(np.linalg.norm(joined.theta - design.theta_star[19]))
    half = 1.96 * np.sqrt(np.diag(joined.covariance))
    estimates.append(joined.theta)
    widths.append(half)
    chance = joined.probability[kind].mean()
    print(
        f"{n:2d} rows: error {error:.2f}, intervals of +-{half.mean():.2f}, kin to its own kind with P = {chance:.2f}"
    )

if len(sys.argv) > 1:
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "fedkin"
    figure, axes = plt.subplots(1, 4, figsize=(10, 2.6), sharey=True, layout="constrained")
    for j, ax in enumerate(axes):
        ax.axhline(design.theta_star[19, j], color="0.7", lw=2)
        ax.errorbar(range(6), [e[j] for e in estimates], [w[j] for w in widths], fmt="o", color="#00796b", capsize=2)
        ax.set_xticks(range(6), [str(n) for n in steps])
        ax.set_xlabel("rows")
        ax.set_title(f"coefficient {j + 1}", fontsize=10)
    figure.savefig(sys.argv[1], metadata={"Date": None})
