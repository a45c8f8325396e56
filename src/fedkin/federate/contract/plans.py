"""What of a run is for one device only: its steps, its batch and where its deal begins, in a signed file of its own.

These numbers say something about rows (steps come from the curvature of a device's loss, deals from row counts), so
they are not in the manifest, which every device gets. A plan is bound to a run and a device. Whoever steps for absent
devices needs their steps, too: the central machine those of all, a replica those of its component.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from fedkin.errors import FedkinError

FORMAT = "fedkin-plan-1"
PLAN, PLAN_SIGNATURE = "plan.json", "plan.sig"
STEPS = ("start", "growth", "damping")  #: what is needed to step for a device
OWN = ("batch", "deal")  #: what only the device itself needs
COLUMNS = (*STEPS, *OWN)

#: Why parameters diverge, and what helps.
TOO_LONG = (
    "the planned steps are too long for its rows; make the federation again with fedkin peer init on the rows that are "
    "there now, or with a larger --batch-size or some --ridge"
)

Columns = Mapping[str, Mapping[str, float]]


class PlanError(FedkinError, ValueError):
    """A plan that cannot be read, or is of another run."""


def encode_plan(run: str, device: str | None, columns: Columns) -> bytes:
    """The text that is signed.

    Parameters
    ----------
    run : str
        Run id.
    device : str or None
        Name of the device whose plan it is; None for who organises the run and has planned for all.
    columns : mapping {column: {device: number}}
        Of `COLUMNS`, those that are known.
    """
    content = {"format": FORMAT, "run": run, "device": device, **{name: dict(columns[name]) for name in columns}}
    return (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()


def decode_plan(text: bytes, run: str) -> tuple[str | None, Columns]:
    """The device and the columns in ``text``.

    Raises
    ------
    PlanError
        When it is no plan, or one of another run.

    Examples
    --------
    >>> from fedkin.federate.contract.plans import decode_plan, encode_plan
    >>> decode_plan(encode_plan("0123456789abcdef", "north", {"batch": {"north": 10}}), "0123456789abcdef")
    ('north', {'batch': {'north': 10}})
    """
    try:
        content = json.loads(text)
        if content.pop("format") != FORMAT:
            raise PlanError(f"is not of the format {FORMAT}: use the fedkin version that made it")
        of, device = content.pop("run"), content.pop("device")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"cannot be read: {error!r}") from None
    if of != run:
        raise PlanError(f"is of run {of}, but the manifest is of run {run}")
    right = all(
        name in COLUMNS and isinstance(column, dict) and all(isinstance(one, int | float) for one in column.values())
        for name, column in content.items()
    )
    if not right or not isinstance(device, str | None):
        raise PlanError("does not hold numbers by device")
    return device, content
