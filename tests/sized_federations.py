"""A table with a row per observation, and federations whose devices have given numbers of rows."""


import numpy as np

from fedkin.data import Federation

TABLE = {
    "site": ["n", "s", "n"],
    "age": [40, 50, 60],
    "smoker": [True, False, True],
    "score": [1.5, 2.5, 3.5],
    "log_time": [0.0, 0.1, 0.2],
}


def of_sizes(*sizes, q=2):
    """Devices d0, d1, ... with that many rows; y is the row's number."""
    n = sum(sizes)
    X = np.random.default_rng(0).standard_normal((n, q))
    return Federation.from_arrays(X, np.arange(n), np.repeat([f"d{u}" for u in range(len(sizes))], sizes))
