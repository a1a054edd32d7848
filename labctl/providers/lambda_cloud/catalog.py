"""Lambda's instance types in gpuhunt's catalog, for offers without a key."""

from __future__ import annotations

from labctl.providers.catalog_offers import CatalogSource
from labctl.providers.lambda_cloud.tags import PROVIDER
from labctl.providers.price_catalog import CatalogRow


def _select(row: CatalogRow) -> tuple[str, str] | None:
    """Take every type. The catalog names all regions for each, whether they have it or not."""
    return row.location, row.location


CATALOG = CatalogSource(
    provider=PROVIDER, title="Lambda", catalog="lambdalabs", select=_select, memory_unit_bytes=10**9
)
