"""Rows of several sites, stacked in site order, and what can be read off them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fedkin._base import AnyArray, Array, Index, count, frozen, html_card, listed, some_of
from fedkin.data.ids import HasSites
from fedkin.data.rows import Rows
from fedkin.errors import UnknownSiteError

if TYPE_CHECKING:
    from fedkin.data.schema import TableSchema


@dataclass(frozen=True, eq=False, repr=False, init=False)
class StackedRows(HasSites):
    """What a `fedkin.Federation` holds, which makes and changes it."""

    sites: tuple[Hashable, ...]
    rows: Rows
    starts: Index
    row_order: Index
    feature_names: tuple[str, ...]
    target_name: str | None
    schema: TableSchema | None
    notes: tuple[str, ...]
    ordered: bool

    @property
    def n_features(self) -> int:
        """Number of features q."""
        return int(self.X.shape[1])

    @cached_property
    def n_samples(self) -> Index:
        """Rows of each site, int64 array of shape (V,)."""
        return frozen(np.diff(self.starts))

    @cached_property
    def site_index(self) -> Index:
        """Position of the site of each stacked row, int64 array of shape (N,)."""
        return frozen(np.repeat(np.arange(self.n_sites, dtype=np.int64), self.n_samples))

    @property
    def X(self) -> Array:
        """Features of all rows, array of shape (N, q)."""
        return self.rows.X

    @property
    def y(self) -> AnyArray | None:
        """Target of all rows, array of shape (N,) or None."""
        return self.rows.y

    @property
    def offset(self) -> Array | None:
        """Offset of all rows, array of shape (N,) or None."""
        return self.rows.offset

    @property
    def weight(self) -> Array | None:
        """Weight of all rows, array of shape (N,) or None."""
        return self.rows.weight

    @cached_property
    def weight_sums(self) -> Array:
        """As how many rows those of each site count, array of shape (V,)."""
        if self.weight is None:
            return frozen(self.n_samples.astype(np.float64))
        return frozen(np.bincount(self.site_index, self.weight, self.n_sites).astype(np.float64))

    def __getitem__(self, site: Hashable) -> Rows:
        u = self._position(site)
        return self.rows.take(slice(int(self.starts[u]), int(self.starts[u + 1])))

    def _position(self, site: Hashable) -> int:
        try:
            return self.index[site]
        except (KeyError, TypeError):
            plain = site.item() if isinstance(site, np.generic) else site
            raise UnknownSiteError(
                f"site {plain!r} is not among the {self.n_sites} sites of the federation ({listed(self.sites)})"
            ) from None

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.sites)

    def __contains__(self, site: object) -> bool:
        try:
            return site in self.index
        except TypeError:
            return False

    def __repr__(self) -> str:
        counts = [count(self.n_sites, "site"), count(len(self.X), "row"), count(self.n_features, "feature")]
        return f"Federation({', '.join(counts)})"

    def _repr_html_(self) -> str:
        rows = self.n_samples
        per_site = f"{rows.min()} to {rows.max()}" if rows.size else "none"
        facts = {
            "sites": f"{self.n_sites}: {some_of(self.sites)}",
            "rows": f"{len(self.X)}, {per_site} at a site",
            "features": f"{self.n_features}: {some_of(self.feature_names)}",
            "target": "none" if self.y is None else self.target_name or "y",
        }
        return html_card("Federation", facts)
