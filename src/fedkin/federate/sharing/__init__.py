"""One message instead of rounds: sums over a site's rows as a signed, readable file; and what is asked next.

In: a site's directory, a question. Out: a summary file (`share`), refused below the site's own `thresholds`; at the
organiser, or whoever may fit, the summaries of all sites, checked file by file (`collect`); models that travel between
them (`models`). Imports: `enrol`, `contract`, `trust`, and the packages below `federate`.
"""

from __future__ import annotations

from fedkin.federate.sharing.collect import Collected, read_state, read_summaries, write_asks
from fedkin.federate.sharing.models import accept_model, deliver, publish, read_published, unpack
from fedkin.federate.sharing.share import Shared, answer, share
from fedkin.federate.sharing.thresholds import too_little

__all__ = [
    "Collected",
    "Shared",
    "accept_model",
    "answer",
    "deliver",
    "publish",
    "read_published",
    "read_state",
    "read_summaries",
    "share",
    "too_little",
    "unpack",
    "write_asks",
]
