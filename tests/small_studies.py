"""Small studies, as a user would write them, and what the tests of studies share."""

from __future__ import annotations

SMALL = """
[study]
name = "small"
title = "A small study"
task = "own:task"
seed = 3
replications = 6
block = 2

[[grid]]
n = [10, 20]
kind = ["a", "b"]

[[table]]
name = "means"
value = "value"
columns = "kind"
rows = ["n"]

[[figure]]
name = "picture"
x = "n"
y = "value"
series = "kind"
columns = "side"
"""

#: The same without its figure, which takes longer to draw than all the rest.
UNDRAWN = SMALL.partition("[[figure]]")[0]

OWN = """
import os, time
from pathlib import Path
import numpy as np

def task(replication):
    log = replication.options.get("log")
    if log:
        with open(log, "a") as handle:  # one short write: lines of two processes do not mix
            handle.write(f"{os.getpid()} {replication.params} {replication.number}\\n")
    time.sleep(replication.options.get("sleep", 0.0))
    rng = np.random.default_rng(replication.seed)
    for side in ("left", "right"):
        value = float(rng.normal(loc=replication.params["n"]))
        yield {"side": side, "value": value, "threads": os.environ["OMP_NUM_THREADS"]}

def dying(replication):
    if replication.params == {"n": 20, "kind": "b"} and not Path(replication.options["cured"]).exists():
        os.kill(os.getpid(), 9)
    return task(replication)

def no_arguments():
    return []

def failing(replication):
    raise ZeroDivisionError("seven over nothing")
"""

ESTIMATION = """
[study]
name = "tiny"
task = "estimation"
replications = 2
block = 2
[[grid]]
n_sites = [8]
false_edges = [0, 3]
[options]
generator = "false_edges"
design = { n_samples = 30, n_features = 2, n_clusters = 2 }
n_lams = 5
"""


def without_times(row: dict[str, object]) -> dict[str, object]:
    """A row without what differs between two runs."""
    return {name: value for name, value in row.items() if name != "cpu_seconds"}
