"""Who is who: certificates, signed files and private files. Knows nothing of runs or rows.

In: names, keys, files. Out: certificates (`certificates`), the one envelope of all files that travel (`envelope`),
private files (`private`). (Access lists are the links': `links.access`.) Imports: `_base`, `errors`.
"""

from __future__ import annotations

from fedkin.federate.trust.certificates import (
    RENEW_DAYS,
    Pair,
    belong_together,
    check_issued,
    common_name,
    fingerprint,
    issue,
    make_authority,
    make_key,
    make_request,
    read_authority_files,
    same_fingerprint,
    validity,
)
from fedkin.federate.trust.envelope import (
    Sealed,
    Signer,
    canonical,
    kind_of,
    seal,
    unseal,
    unseal_by_authority,
    unseal_invitation,
    unseal_request,
)
from fedkin.federate.trust.private import (
    SecurityError,
    check_place,
    check_private,
    open_private,
    read_private,
    read_whole,
)

__all__ = [
    "RENEW_DAYS",
    "Pair",
    "Sealed",
    "SecurityError",
    "Signer",
    "belong_together",
    "canonical",
    "check_issued",
    "check_place",
    "check_private",
    "common_name",
    "fingerprint",
    "issue",
    "kind_of",
    "make_authority",
    "make_key",
    "make_request",
    "open_private",
    "read_authority_files",
    "read_private",
    "read_whole",
    "same_fingerprint",
    "seal",
    "unseal",
    "unseal_by_authority",
    "unseal_invitation",
    "unseal_request",
    "validity",
]
