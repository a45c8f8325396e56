"""Draw docs/figures/methods.svg: one coefficient of 24 sites under Local, Global, the fused estimator and kin."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

import fedkin
from fedkin.datasets import paper_design

TARGET = Path(__file__).resolve().parent.parent / "docs" / "figures" / "methods.svg"


def main() -> None:
    """Fit the four, and draw them side by side."""
    design = paper_design(n_sites=24, n_samples=40, n_features=8, n_clusters=3, varrho=0.2, signal=0.4, seed=4)
    federation, shown = design.federation, int(np.ptp(design.theta_star, axis=0).argmax())
    kept = fedkin.select_edges(federation, design.graph).graph
    lam = fedkin.cross_validate_lam(fedkin.Problem(federation, kept)).lam
    kin = fedkin.find_kin(federation, design.graph)
    found = {
        "Local": fedkin.local_fit(federation).theta,
        "Global": np.tile(fedkin.global_fit(federation), (24, 1)),
        "Fused": fedkin.solve(fedkin.Problem(federation, kept, lam=lam)).theta,
        "Kin": kin.theta,
    }
    mpl.rcParams["svg.hashsalt"] = "fedkin"
    figure, axes = plt.subplots(1, 4, figsize=(11, 2.8), sharey=True, layout="constrained")
    sites = np.arange(24)
    for ax, (name, theta) in zip(axes, found.items(), strict=True):
        error = ((theta - design.theta_star) ** 2).sum(axis=1).mean()
        ax.step(sites, design.theta_star[:, shown], where="mid", color="0.7", lw=2, zorder=0)
        ax.plot(sites, theta[:, shown], "o", ms=4, color="#00796b")
        if name == "Kin":
            low, high = kin.confint(0.95)[:, shown].T
            ax.vlines(sites, low, high, color="#00796b", lw=1, alpha=0.6)
        ax.set_title(f"{name}: error {error:.3f}", fontsize=10)
        ax.set_xlabel("site")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("coefficient")
    figure.savefig(TARGET, metadata={"Date": None})


if __name__ == "__main__":
    main()
