"""Thresholds below which nothing leaves a site, and a site's own rules, which may only be stricter."""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from fedkin._base import write_file
from fedkin.errors import DataError
from fedkin.federate import trust

if TYPE_CHECKING:
    from fedkin.federate.contract import Contract

#: Text in one line, without characters that change what a terminal shows.
LINE = r"^[^\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
District = Annotated[str, Meta(pattern=LINE + r"{0,60}\Z")]  #: empty for none

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


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Minimum counts for any computation from a site's rows; a site may raise them, never lower them.

    ``rows_per_parameter`` and ``cell`` are DataSHIELD's defaults: nfilter.glm = 0.33 parameters per row, and
    nfilter.tab = 3 rows in every cell that is not empty. For ``rows`` its nfilter.subset is 3; here it is 10, the value
    to which it says census offices are moving (https://wiki.datashield.org/en/statdev/disclosure-checks). ``pair`` is
    nfilter.tab for pairs of levels of two features, which sums of products count. ``effective_rows`` is the minimum
    number of rows with weight in the answer to a query.
    """

    rows: Annotated[int, Meta(ge=1)] = 10
    rows_per_parameter: Annotated[float, Meta(ge=0)] = 3.0
    cell: Annotated[int, Meta(ge=1)] = 3
    pair: Annotated[int, Meta(ge=1)] = 3
    effective_rows: Annotated[float, Meta(ge=1)] = 5.0

    def stricter(self, other: Thresholds | None) -> Thresholds:
        """Return the larger of each pair of thresholds."""
        names = Thresholds.__struct_fields__
        return Thresholds(**{name: max(getattr(self, name), getattr(other or self, name)) for name in names})

    @property
    def lowers_minima(self) -> bool:
        """Whether the site's custodian has lifted the hard `MINIMA`."""
        return False


#: Minima that no contract can lower, only the custodian of a site (``below_minima`` in ``site.toml``).
MINIMA = Thresholds(rows=5, rows_per_parameter=2.0, cell=3, pair=3, effective_rows=3.0)


def required(contract: Contract, own: Thresholds | None = None) -> Thresholds:
    """Return the strictest of the contract's thresholds, the site's own and the hard minima."""
    least = contract.thresholds.stricter(own)
    return least if own is not None and own.lowers_minima else least.stricter(MINIMA)


def fewest_rows(contract: Contract, own: Thresholds | None = None) -> int:
    """Return the minimum number of rows in sums."""
    least = required(contract, own)
    return max(least.rows, math.ceil(least.rows_per_parameter * contract.n_params))


def fewest_in_fold(contract: Contract, own: Thresholds | None = None) -> int:
    """Return the minimum number of rows in a fold: sums of whole numbers with as many rows as columns are decoded."""
    each = MINIMA.rows_per_parameter if own is None or not own.lowers_minima else 1.0
    return max(required(contract, own).rows, math.ceil(each * contract.n_params))


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
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:16]
