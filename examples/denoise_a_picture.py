"""A picture as a federation: every pixel is a site with one number, joined to its neighbours on a grid.

With the mean loss and the l1 penalty, the problem is total-variation denoising: neighbours that agree become exactly
equal, and the edges of the picture stay sharp. With a file name as argument, the script draws the picture.
"""

import sys

import numpy as np

from fedkin import Federation, Graph, Problem, solve

SIDE = 16
rng = np.random.default_rng(0)
picture = np.zeros((SIDE, SIDE))
picture[3:9, 4:13] = 1.0
picture[10:14, 2:7] = -1.0
noisy = picture + 0.3 * rng.normal(size=picture.shape)

graph = Graph.grid(SIDE, SIDE)
pixels = Federation({(r, c): [[noisy[r, c]]] for r, c in graph.sites})
solution = solve(Problem(pixels, graph, loss="mean", penalty="l1", lam=0.35 / SIDE**2))
denoised = solution.theta.reshape(SIDE, SIDE)

for row in denoised:
    print("".join("#" if value > 0.4 else "o" if value < -0.4 else "." for value in row))
before, after = (float(np.mean((image - picture) ** 2)) for image in (noisy, denoised))
print(f"mean squared error {before:.3f} before, {after:.3f} after")
print(f"{SIDE * SIDE} pixels, {len(np.unique(solution.clusters(graph)))} fused regions; {solution.message}")

if len(sys.argv) > 1:
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "fedkin"
    figure, axes = plt.subplots(1, 3, figsize=(8, 2.8), layout="constrained")
    for ax, (title, image) in zip(axes, {"truth": picture, "rows": noisy, "fused": denoised}.items(), strict=True):
        ax.imshow(image, cmap="RdBu", vmin=-1.5, vmax=1.5)
        ax.set_title(title)
        ax.set_axis_off()
    figure.savefig(sys.argv[1], metadata={"Date": None})
