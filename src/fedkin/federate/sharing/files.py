"""What is in the files by which sums and models travel: a summary, a question, a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fedkin.federate.contract.contract import Count
from fedkin.federate.enrol.files import Name, Run

SUMMARY_SUFFIX, ASK_SUFFIX, MODEL_SUFFIX = ".summary", ".ask", ".model"
SENT = "sent"  #: in a site's directory: all that it has said


class SummaryFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A site's message (kind ``summary``): its first one, or the answer to a question of a later round."""

    run: Run
    contract: str
    site: Name
    round: Count
    day: str
    summary: dict[str, Any]
    ask: str | None = None  #: digest of the question


class AskFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The organiser's question to a site (kind ``ask``)."""

    run: Run
    contract: str
    site: Name
    ask: dict[str, Any]


class ModelFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of one site (kind ``model``): from the organiser to the site, or from the site to the organiser.

    ``files`` are the files of a model directory; ``dropped`` are neighbours whose edge the edge tests dropped.
    """

    run: Run
    contract: str
    site: Name
    day: str
    files: dict[str, str]
    dropped: tuple[Name, ...] = ()


def round_file(folder: Path, site: str, number: int, suffix: str) -> Path:
    """``north.summary`` in the first round, ``north@2.summary`` in the second; no site has an @ in its name."""
    return folder / f"{site}{'' if number == 1 else f'@{number}'}{suffix}"
