"""139 schools: what the same pupil would score in each of them, with intervals.

Schools have different pupils, so their mean scores are not a fair comparison. Here every school has its own model,
which predicts the same average pupil. FEDKIN_DATA names the folder with school/school.csv; without
it, a generated table of the same shape is used. With a file name as argument, the script draws the predictions:

    python examples/school_scores.py school.svg
"""

import os
import sys

import numpy as np

from fedkin import KinRegressor
from fedkin.datasets import load_table, look_alike

table = load_table("school") if "FEDKIN_DATA" in os.environ else look_alike("school")
rows = table.federation
schools = [rows.sites[u] for u in rows.site_index]
model = KinRegressor().fit(rows.X, rows.y, site=schools)

same = np.tile(rows.X.mean(axis=0), (len(rows.sites), 1))  # one average pupil for each school
score = model.model_.predict_interval(same, list(rows.sites))
raw = np.array([rows.y[rows.site_index == u].mean() for u in range(len(rows.sites))])

print(f"mean scores of schools: from {raw.min():.1f} to {raw.max():.1f}, standard deviation {raw.std():.1f}")
print(f"the same pupil: from {score.mean.min():.1f} to {score.mean.max():.1f}, {score.mean.std():.1f}")
middle = score.mean.mean()
above, below = int((score.low > middle).sum()), int((score.high < middle).sum())
print(f"clearly above the average school: {above}; clearly below: {below}; of {len(raw)}")

if len(sys.argv) > 1:
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "fedkin"
    order = np.argsort(score.mean)
    at = np.arange(len(order))
    clear = ((score.low > middle) | (score.high < middle))[order]
    figure, ax = plt.subplots(figsize=(9, 4), layout="constrained")
    ax.plot(at, raw[order], ".", color="0.65", markersize=5, label="mean of its own pupils")
    ax.axhline(middle, color="0.5", lw=1)
    kinds = ((~clear, "#7ba9a3", "the same pupil, 95% interval"), (clear, "#00695c", "clearly apart"))
    for chosen, colour, words in kinds:
        ax.vlines(at[chosen], score.low[order][chosen], score.high[order][chosen], color=colour, lw=1.2)
        ax.plot(at[chosen], score.mean[order][chosen], "o", color=colour, markersize=3.2, label=words)
    ax.set(xlabel="schools, by the score of the same pupil", ylabel="exam score", xticks=[])
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, loc="upper left")
    figure.savefig(sys.argv[1], metadata={"Date": None})
