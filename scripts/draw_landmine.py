"""Draw docs/images/landmine.svg: which of 29 mine fields are kin. `FEDKIN_DATA` is the folder of the public tables."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

import fedkin

TARGET = Path(__file__).resolve().parent.parent / "docs" / "images" / "landmine.svg"
FOLIATED = range(1, 16)  # as the literature has it; the fit is not told
COLOURS = {"foliated ground": "#2e7d32", "bare ground or desert": "#e07b39"}


def main() -> None:
    """Fit all rows without a graph, and draw the probabilities with the fields in the order of their groups."""
    table = Path(os.environ.get("FEDKIN_DATA", "data")) / "landmine" / "landmine.csv"
    if not table.exists():
        sys.exit(f"no {table}: set FEDKIN_DATA to the folder that has landmine/landmine.csv")
    federation = fedkin.Federation.read(table, device="task", target="label").with_intercept()
    kin = fedkin.find_kin(federation, loss="logistic")
    order = np.lexsort((np.arange(len(kin.devices)), kin.groups))
    names = [kin.devices[u] for u in order]
    mpl.rcParams["svg.hashsalt"] = "fedkin"
    figure, ax = plt.subplots(figsize=(6.4, 5.0), layout="constrained")
    image = ax.imshow(kin.probability[np.ix_(order, order)], cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, ax=ax, label="probability of being kin", shrink=0.8)
    ax.set_xticks(range(len(names)), names, fontsize=7)
    ax.set_yticks(range(len(names)), names, fontsize=7)
    kinds = ["foliated ground" if name in FOLIATED else "bare ground or desert" for name in names]
    for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
        for label, kind in zip(labels, kinds, strict=True):
            label.set_color(COLOURS[kind])
            label.set_fontweight("bold")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ends = np.flatnonzero(np.diff(kin.groups[order])) + 0.5
    for end in ends:
        ax.axhline(end, color="white", lw=2)
        ax.axvline(end, color="white", lw=2)
    handles = [plt.Line2D([], [], marker="s", ls="", color=colour, label=kind) for kind, colour in COLOURS.items()]
    ax.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    if len(sys.argv) > 1:
        figure.savefig(sys.argv[1], dpi=110)
    else:
        figure.savefig(TARGET, metadata={"Date": None})


if __name__ == "__main__":
    main()
