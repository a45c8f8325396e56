"""A custom loss: expectile regression, from its value and its gradient.

The 0.8 expectile of a site is a level above most of its outcomes. Neighbours on a ring borrow from each other.
"""

import numpy as np

from fedkin import Federation, Graph, Problem, solve
from fedkin.losses import UserLoss

SHARE = 0.8


def value(theta, X, y, offset):
    """Mean loss of the rows of one site."""
    residual = y - X @ theta
    return float(np.mean(np.where(residual > 0, SHARE, 1 - SHARE) * residual**2))


def gradient(theta, X, y, offset):
    """Its gradient with respect to theta."""
    residual = y - X @ theta
    return -2 * X.T @ (np.where(residual > 0, SHARE, 1 - SHARE) * residual) / len(y)


rng = np.random.default_rng(0)
sites = [f"site {k}" for k in range(10)]
rows = {site: (np.ones((30, 1)), (k >= 5) + rng.normal(size=30)) for k, site in enumerate(sites)}
ring = Graph(sites, [(sites[k], sites[(k + 1) % 10]) for k in range(10)])

solution = solve(Problem(Federation(rows), ring, loss=UserLoss(value, gradient, name="expectile"), lam=0.03), tol=1e-4)
for site, level in zip(sites, solution.theta[:, 0], strict=True):
    print(f"{site}: {level:6.3f}")
print(solution.message)
