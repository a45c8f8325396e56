"""The task: predict which ticket a county preferred, with a model per state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np

from fedkin._base import Array
from fedkin.data import Federation
from fedkin.errors import ParameterError
from fedkin.graph import Graph
from fedkin.stats import select_edges
from fedkin.studies.tasks.election.data import Election, load_election
from fedkin.studies.tasks.election.split import Found, Protocol, Split
from fedkin.studies.tasks.replication import Replication, settle_backend

#: Methods by their names in rows, with the names that tables show.
LABELS: Mapping[str, str] = {
    "always-republican": "Always Republican (floor)",
    "state-majority": "Majority of the state (floor)",
    "local": "Local, ridge validated",
    "global": "Global, ridge validated",
    "fed-loc": "Fed-ADMM, D_loc",
    "fed-his": "Fed-ADMM, D_his",
    "local-steps": "Local, 10 gradient steps",
    "global-steps": "Global, 10 gradient steps",
    "boosting": "Gradient boosting, pooled (ceiling)",
}

OPTIONS = {
    "election": {**dict.fromkeys(["allow_incomplete", *Protocol.__dataclass_fields__], ()), "methods": tuple(LABELS)}
}


def election(replication: Replication) -> Iterator[dict[str, Any]]:
    """A row per method on one split: accuracy, balanced accuracy, log-loss, and what was chosen."""
    if replication.data is None:
        raise ParameterError("the election study needs the directory of its data (--data DIR)")
    backend = settle_backend()
    protocol = Protocol.of({**replication.options, **replication.params})
    loaded = _loaded(replication.data, protocol.more_than)
    split = Split(loaded, protocol, replication.seed % 2**31)
    for name in replication.options.get("methods", list(LABELS)):
        if name not in METHODS:
            raise ParameterError(f"unknown method {name!r}; choose from {', '.join(METHODS)}")
        started = process_time()
        found = METHODS[name](split)
        yield {
            "method": name,
            **scores(split.test.y, found.probability),
            "ridge": found.ridge,
            "lam": found.lam,
            "inner_log_loss": found.inner_log_loss,
            "kept_edges": None if found.graph is None else found.graph.n_edges,
            "components": None if found.graph is None else found.graph.n_components,
            "states": list(split.train.devices),
            "group": None if found.graph is None else found.graph.components().tolist(),
            "common_share": found.common_share,
            "cpu_seconds": process_time() - started,
            "backend": backend,
        }


@lru_cache(maxsize=2)
def _loaded(folder: Path, more_than: int) -> Election:
    return load_election(folder, more_than)


def scores(y: Any, probability: Array) -> dict[str, float]:
    """Accuracy, balanced accuracy and log-loss (nats) of probabilities of the label 1."""
    label, says = np.asarray(y) > 0.5, probability > 0.5
    right = says == label
    each = [float(right[label == side].mean()) for side in (False, True) if (label == side).any()]
    clipped = np.clip(probability, 1e-12, 1 - 1e-12)
    return {
        "accuracy": float(right.mean()),
        "balanced_accuracy": float(np.mean(each)),
        "log_loss": float(-np.log(np.where(label, clipped, 1 - clipped)).mean()),
    }


def historical_graph(election: Election, devices: Sequence[Any]) -> Graph:
    """D_his: the states of each lean (red, blue, swing) are all joined."""
    return Graph.clusters([election.lean[state] for state in devices], devices=devices)


def _as_they_are(rows: Federation) -> Federation:
    return rows


def _all_in_one(rows: Federation) -> Federation:
    return Federation.from_arrays(rows.X, rows.y, ["all"] * len(rows.X), feature_names=rows.feature_names)


def _always_republican(split: Split) -> Found:
    share = float(np.asarray(split.train.y).mean())
    return Found(np.full(len(split.test.X), min(share, 0.5)))


def _state_majority(split: Split) -> Found:
    # one county of each kind is added, so that a state of one kind is not certain
    train = split.train
    ahead = np.bincount(train.device_index, weights=train.y, minlength=train.n_devices)
    return Found(((ahead + 1) / (train.n_samples + 2))[split.test.device_index])


def _selected(split: Split) -> Found:
    protocol = split.protocol
    chosen = select_edges(split.train, None, "logistic", protocol.level, variance=protocol.variance)
    return split.penalised(chosen.graph)


def _boosting(split: Split) -> Found:
    from sklearn.ensemble import HistGradientBoostingClassifier

    train, test = split.raw
    model = HistGradientBoostingClassifier(random_state=split.seed).fit(train.X, train.y)
    return Found(np.asarray(model.predict_proba(test.X)[:, 1]))


METHODS: Mapping[str, Callable[[Split], Found]] = {
    "always-republican": _always_republican,
    "state-majority": _state_majority,
    "local": lambda split: split.ridged(_as_they_are),
    "global": lambda split: split.ridged(_all_in_one),
    "fed-loc": _selected,
    "fed-his": lambda split: split.penalised(historical_graph(split.election, split.train.devices)),
    "local-steps": lambda split: split.stepped(_as_they_are),
    "global-steps": lambda split: split.stepped(_all_in_one),
    "boosting": _boosting,
}
