"""A site's own rules, which may be stricter than the contract's."""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fedkin._base import write_file
from fedkin.errors import DataError
from fedkin.federate import messages, trust
from fedkin.federate.contract import Contract
from fedkin.federate.disclosure import Thresholds
from fedkin.federate.messages import District

_SETTINGS = """\
# The rules of this site. Nothing is shared below these thresholds. They may be stricter than the contract's, not laxer.
# After a change by hand:  fedkin site settings {place} --confirm
rows = {rows}                  # minimum number of rows
rows_per_parameter = {rows_per_parameter}    # minimum rows for each parameter of the model
cell = {cell}                  # minimum rows with any level of a category, or any class of the target, that occurs
pair = {pair}                  # minimum rows with any pair of levels of two features that occurs
effective_rows = {effective_rows}      # minimum effective number of rows in the answer to a query
epsilon = {epsilon}             # maximum total epsilon of all messages with noise; 0 for a single message
share_result = {share_result}       # whether the organiser may have this site's fitted parameters
below_minima = {below_minima}       # whether the hard minima of Fedkin (docs/contract.md) are waived
district = {district}           # the district of this site, if the contract asks for it; sent with summaries
digest = "{digest}"
"""


class SiteSettings(Thresholds, frozen=True, kw_only=True):
    """A site's own rules, ``site.toml``: thresholds at least as strict as the contract's, and what else it shares.

    People edit the file; a digest of its values reveals damage, and changes by hand that the site's owner has not
    confirmed. ``epsilon``: the total budget of all messages with noise, 0 for that of the first message;
    ``share_result``: whether the organiser may receive the site's fitted parameters;
    ``below_minima``: whether only these thresholds and the contract's apply, not the hard minima of Fedkin;
    ``district``: the district of the site, if the contract asks for one.
    """

    epsilon: Annotated[float, Meta(ge=0)] = 0.0
    share_result: bool = False
    below_minima: bool = False
    district: District = ""

    @classmethod
    def from_contract(cls, contract: Contract, **more: Any) -> SiteSettings:
        """Return settings with the contract's thresholds that share nothing else."""
        return cls(**msgspec.structs.asdict(contract.thresholds), **more)

    @property
    def lowers_minima(self) -> bool:
        return self.below_minima

    @classmethod
    def read(cls, path: Path, contract: Contract, *, confirmed: bool = True, **changes: Any) -> SiteSettings:
        """Read the settings in a file and change some; the digest must match if they are ``confirmed``."""
        trust.check_private(path)
        try:
            values = tomllib.loads(path.read_bytes().decode())
            digest = values.pop("digest", None)
            found, wanted = (msgspec.convert(given, cls) for given in (values, {**values, **changes}))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{path} is damaged, or not TOML ({error}); fix it, or remove it and join again") from None
        except msgspec.ValidationError as error:
            raise DataError(f"{path}: {error}") from None
        if confirmed and digest != found.digest:
            raise DataError(
                f"{path} was changed by hand, or damaged: look at it, then confirm that it is right with "
                f"fedkin site settings {path.parent} --confirm"
            )
        for name, agreed in msgspec.structs.asdict(contract.thresholds).items():
            if (own := getattr(wanted, name)) < agreed:
                raise DataError(
                    f"{path}: {name} is {own}, laxer than the {agreed} of the contract; a site may only be stricter"
                )
        return wanted

    def write(self, path: Path) -> None:
        """Write the file with its digest."""
        shown = {name: json.dumps(value, ensure_ascii=False) for name, value in msgspec.structs.asdict(self).items()}
        write_file(path, _SETTINGS.format(place=path.parent, digest=self.digest, **shown), private=True)

    @property
    def digest(self) -> str:
        """Digest of these values."""
        return hashlib.sha256(messages.canonical(self)).hexdigest()[:16]
