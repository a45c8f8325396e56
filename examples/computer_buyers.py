"""190 people rate 20 computers each: what does each of them care about?

Sixteen ratings are hardly enough for a model with 14 coefficients; the other 189 people help. FEDKIN_DATA names the
folder with computer_survey/computer_survey.csv; without it, a generated table of the same shape is used. With a file
name as argument, the script draws two of the coefficients:

    python examples/computer_buyers.py computer-buyers.svg
"""

import os
import sys

from fedkin.datasets import load_table, look_alike
from fedkin.fitting import compare

real = "FEDKIN_DATA" in os.environ
table = load_table("computer survey") if real else look_alike("computer survey")
found = compare(table.federation, repeats=2, test_size=table.test_size)  # four ratings of each person are held out

for name in found.errors:
    print(f"{name:<15} {found.metric} on held-out ratings {found.mean(name):.2f} ({found.standard_error(name):.2f})")
print(found.verdict)

if len(sys.argv) > 1:
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "fedkin"
    models, names = found.models[0], list(table.federation.feature_names)
    x, y = (names.index("price"), names.index("cpu_speed")) if real else (0, 1)
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharex=True, sharey=True, layout="constrained")
    for ax, method, words in zip(axes, ("Local", "Fedkin"), ("each person alone", "all help each other"), strict=True):
        ax.axhline(0, color="0.8", lw=1, zorder=0)
        ax.axvline(0, color="0.8", lw=1, zorder=0)
        coef = models[method].coef[:, 0]
        ax.plot(coef[:, x], coef[:, y], "o", color="#00796b", alpha=0.5, markersize=5)
        ax.set_title(f"{words}: held-out error {found.mean(method):.2f}", fontsize=11)
        ax.set_xlabel(f"effect of {names[x]}")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel(f"effect of {names[y]}")
    figure.savefig(sys.argv[1], metadata={"Date": None})
