"""Who is out, for good: notices that the organiser signed (expelled), or the site itself (left).

A neighbour that finds a notice closes the link and drops the edge, dual included. The notice of a site that left stays
good when its certificate has ended.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec

from fedkin._base import in_file
from fedkin.federate.enrol.files import Notice, checked, read_text
from fedkin.federate.trust import SecurityError, Signer, seal, unseal

NOTICE_SUFFIX = ".notice"


def make_notice(run: str, site: str, what: Literal["left", "expelled"], signer: Signer) -> bytes:
    """The text of a notice."""
    notice = Notice(run=run, site=site, what=what, day=f"{datetime.now(UTC):%Y-%m-%d}")
    return seal("notice", msgspec.to_builtins(notice), signer)


def read_notice(path: Path, run: str, authority: bytes) -> Notice:
    """A notice that was signed by the authority, or by the site that it is about.

    Raises
    ------
    SecurityError
        When it was not, or belongs to another federation.
    """
    with in_file(path, SecurityError):
        sealed = unseal(read_text(path), "notice", authority, ended=True)
        notice = checked(sealed.body, Notice)
        if notice.run != run:
            raise SecurityError(f"it belongs to another federation (run {notice.run})")
        if sealed.certificate is not None and (notice.what != "left" or sealed.signer != notice.site):
            raise SecurityError(f"{sealed.signer} signed it, but only the organiser may say that of {notice.site}")
    return notice


def read_notices(folder: Path, run: str, authority: bytes) -> frozenset[str]:
    """Names of the sites that are out, by the notices in a folder; raises `SecurityError` when one is not valid."""
    found = sorted(folder.glob(f"*{NOTICE_SUFFIX}")) if folder.is_dir() else []
    names = set()
    for path in found:
        notice = read_notice(path, run, authority)
        if path.name != f"{notice.site}{NOTICE_SUFFIX}":
            raise SecurityError(f"{path} is about {notice.site}: remove it, and let fedkin file it anew")
        names.add(notice.site)
    return frozenset(names)
