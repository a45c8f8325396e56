"""What of a run is for one device only: its steps, its batch and where its deal begins, in a signed file of its own.

These numbers say something about rows (steps come from the curvature of a device's loss, deals from row counts), so
they are not in the manifest, which every device gets. A plan is bound to a run and a device. Whoever steps for absent
devices needs their steps, too: the central machine those of all, a replica those of its component.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

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


class PlanError(FedkinError, ValueError):
    """A plan that cannot be read, or is of another run."""


class DevicePlan(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="format",
    tag=FORMAT,
):
    """Numbers by the name of a device; None for what is not known.

    ``device`` is the device whose plan it is; None for who organises the run and has planned for all.
    """

    run: str
    device: str | None
    start: dict[str, float] | None = None
    growth: dict[str, float] | None = None
    damping: dict[str, float] | None = None
    batch: dict[str, int] | None = None
    deal: dict[str, int] | None = None

    def columns(self) -> dict[str, Mapping[str, float]]:
        """Those of `COLUMNS` that are known."""
        found = {name: getattr(self, name) for name in COLUMNS}
        return {name: values for name, values in found.items() if values is not None}

    def to_bytes(self) -> bytes:
        """The text that is signed."""
        return to_text(msgspec.to_builtins(self))

    @classmethod
    def from_bytes(cls, text: bytes) -> DevicePlan:
        """The plan in ``text``."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise PlanError(in_words(error)) from None


def to_text(content: Mapping[str, Any]) -> bytes:
    """JSON that people can read."""
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def in_words(error: Exception) -> str:
    """What is wrong with a file, beginning with a verb and naming the field.

    Examples
    --------
    >>> import msgspec
    >>> from fedkin.federate.contract.plans import in_words
    >>> in_words(msgspec.ValidationError("Expected `int` >= 1 - at `$.rounds`"))
    'has a wrong rounds: expected `int` >= 1'
    """
    where = re.fullmatch(r"(.*) - at `\$\.?(.*)`", str(error), re.DOTALL)
    if where is None:
        return f"cannot be read: {error}"
    words, field = where[1][0].lower() + where[1][1:], where[2]
    if field == "format":
        return f"is not of the format that this fedkin reads ({words}): use the fedkin version that made it"
    return f"has a wrong {field}: {words}" if field else f"cannot be read: {words}"
