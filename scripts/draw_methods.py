"""Draw docs/figures: one coefficient of 24 sites under four methods, and how kin moves two of them."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

import fedkin
from fedkin.datasets import paper_design

TARGET = Path(__file__).resolve().parent.parent / "docs" / "figures"
COLOURS, MARKERS = ("#0072b2", "#d55e00", "#009e73"), "os^"


def main() -> None:
    """Fit the four, draw them side by side, and draw what kin does."""
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
    figure.savefig(TARGET / "methods.svg", metadata={"Date": None})
    shrinkage()


def shrinkage() -> None:
    """Draw two coefficients of 24 sites: the sites' own estimates, and those of kin."""
    design = paper_design(n_sites=24, n_samples=30, n_features=4, n_clusters=3, varrho=0.2, signal=0.5, seed=11)
    own, kin = fedkin.local_fit(design.federation).theta, fedkin.find_kin(design.federation)
    first, second = np.argsort(-np.ptp(design.theta_star, axis=0))[:2]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharex=True, sharey=True, layout="constrained")
    for group in range(3):
        of = design.labels == group
        look = {"color": COLOURS[group], "marker": MARKERS[group], "linestyle": ""}
        axes[0].plot(own[of, first], own[of, second], ms=5, **look)
        axes[1].plot(kin.theta[of, first], kin.theta[of, second], ms=5, **look, label=f"group {group + 1}")
        truth = design.theta_star[of][0]
        for ax in axes:
            cross = {"color": "0.2", "ms": 14, "mew": 1.5, "label": "truth" if group == 2 else None}
            ax.plot(truth[first], truth[second], "+", **cross)
    for u in range(24):
        start, end = own[u, [first, second]], kin.theta[u, [first, second]]
        axes[1].annotate("", end, start, arrowprops={"arrowstyle": "-", "color": "0.75", "lw": 0.8}, zorder=0)
    for ax, title in zip(axes, ("Each site alone", "Kin"), strict=True):
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("coefficient 1")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("coefficient 2")
    axes[1].legend(frameon=False, fontsize=9, loc="best")
    figure.savefig(TARGET / "kin-shrinkage.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
