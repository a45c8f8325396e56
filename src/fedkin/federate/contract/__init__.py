"""What all sites agree on (`contract`, `manifest`), and one site's plan from its own rows (`reading`).

In: a TOML file (`files`) or signed JSON, checked field by field with msgspec. Out: a `Contract`, what its thresholds
refuse (`disclosure`), a `Manifest`, and with rows a `Plan` of the rounds (`reading`).
Imports: `frames`, and the packages below `federate`.
"""

from __future__ import annotations

from importlib.util import find_spec

from fedkin.errors import missing_dependency

if find_spec("msgspec") is None:
    raise missing_dependency("msgspec", "a federation of sites", "peer")
