"""A site's own rules, ``site.toml``: from how many rows on it shares sums, and whether it shares its result.

They may be stricter than the contract's, never laxer. The file is for people; a digest of its values tells a damaged
file, or one that was changed by hand, from the one that the site's owner confirmed.
"""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fedkin._base import write_file
from fedkin.errors import DataError
from fedkin.federate.contract.contract import Contract, Thresholds
from fedkin.federate.contract.words import in_words
from fedkin.federate.trust import canonical, check_private

_WORDS = """\
# The rules of this site. Nothing is shared below these thresholds. They may be stricter than the contract's, not laxer.
# After a change by hand:  fedkin site settings {place} --confirm
rows = {rows}                  # fewest rows
rows_per_parameter = {rows_per_parameter}    # fewest rows for each parameter of the model
cell = {cell}                  # fewest rows with any level of a category, or any class of the target, that occurs
share_result = {share_result}       # whether the organiser may have this site's fitted parameters
digest = "{digest}"
"""


class SiteSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A site's own rules.

    Attributes
    ----------
    rows : int
        Fewest rows.
    rows_per_parameter : float
        Fewest rows for each parameter of the model.
    cell : int
        Fewest rows with a level of a category or a class of the target, where the level occurs at all.
    share_result : bool
        Whether the organiser may have the site's fitted parameters.
    """

    rows: Annotated[int, Meta(ge=1)]
    rows_per_parameter: Annotated[float, Meta(ge=0)]
    cell: Annotated[int, Meta(ge=1)]
    share_result: bool = False

    @classmethod
    def of(cls, contract: Contract) -> SiteSettings:
        """The contract's thresholds, and nothing shared beyond."""
        given = contract.thresholds
        return cls(rows=given.rows, rows_per_parameter=given.rows_per_parameter, cell=given.cell)

    @property
    def thresholds(self) -> Thresholds:
        """The thresholds among them."""
        return Thresholds(rows=self.rows, rows_per_parameter=self.rows_per_parameter, cell=self.cell)

    def check(self, contract: Contract, where: str) -> None:
        """Raise `DataError` when a threshold is laxer than the contract's."""
        for name in ("rows", "rows_per_parameter", "cell"):
            own, agreed = getattr(self, name), getattr(contract.thresholds, name)
            if own < agreed:
                raise DataError(
                    f"{where}: {name} is {own}, laxer than the {agreed} of the contract; a site may only be stricter"
                )

    def plain(self) -> dict[str, Any]:
        """Values by name."""
        return msgspec.structs.asdict(self)

    def write(self, path: Path) -> None:
        """Write the file, with its digest."""
        values = self.plain()
        shown = {name: str(value).lower() for name, value in values.items()}
        write_file(path, _WORDS.format(place=path.parent, digest=_digest(values), **shown), private=True)


def read_settings(path: Path, contract: Contract, *, confirmed: bool = True) -> SiteSettings:
    """The settings in a file.

    Parameters
    ----------
    path : path
        ``site.toml``.
    contract : Contract
        Whose thresholds are the laxest.
    confirmed : bool
        Whether the digest must fit.
    """
    check_private(path)
    try:
        values = tomllib.loads(path.read_bytes().decode())
        digest = values.pop("digest", None)
        found = msgspec.convert(values, type=SiteSettings)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is damaged, or not TOML ({error}); mend it, or remove it and join again") from None
    except msgspec.ValidationError as error:
        raise DataError(f"{path} {in_words(error)}") from None
    if confirmed and digest != _digest(found.plain()):
        raise DataError(
            f"{path} was changed by hand, or damaged: look at it, then say that it is right with "
            f"fedkin site settings {path.parent} --confirm"
        )
    found.check(contract, str(path))
    return found


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(canonical(values)).hexdigest()[:16]
