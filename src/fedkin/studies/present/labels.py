"""Columns and their values as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedkin.studies.tasks.estimators import LABELS as ESTIMATOR_LABELS

COLUMN_LABELS: Mapping[str, str] = {
    "n_samples": "n",
    "n_devices": "|V|",
    "varrho": "ϱ",
    "n_clusters": "K₀",
    "false_edges": "|S|",
}
VALUE_LABELS: Mapping[str, str] = {
    **ESTIMATOR_LABELS,
    "fedadmm-full": "Fed-ADMM, all samples",
    "fedadmm-batch": "Fed-ADMM, batches of 10",
    "gd": "GD, all samples",
    "sgd": "SGD, batches of 10",
    "known-central": "p known, central S",
    "estimated-central": "p estimated, central S",
    "known-replicas": "p known, S-less",
    "estimated-replicas": "p estimated, S-less",
    "bartlett": "the paper's (Bartlett)",
    "model": "noise estimated, F test",
}


def column_label(name: str) -> str:
    """A column's name as people read it."""
    return COLUMN_LABELS.get(name, name)


def label_of(value: Any) -> str:
    """A value as people read it."""
    return VALUE_LABELS.get(value, value) if isinstance(value, str) else f"{value:g}"


def point_label(names: Sequence[str], point: Sequence[object]) -> str:
    """A grid point: ``ϱ = 0.2, n = 100, |V| = 20``."""
    return ", ".join(f"{column_label(name)} = {label_of(value)}" for name, value in zip(names, point, strict=True))
