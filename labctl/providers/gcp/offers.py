"""Offers for a need: machines and prices from gpuhunt's catalog, less what no quota allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from labctl.model import Need, Offer
from labctl.providers.gcp import hardware
from labctl.providers.gcp.labels import PROVIDER
from labctl.providers.gcp.quotas import QuotaTable
from labctl.providers.gcp.settings import GcpSettings
from labctl.providers.offer_filter import (
    DEFAULT_ARCH,
    OfferFilter,
    filter_by_gpu_model,
    filter_by_gpu_size,
    filter_by_price,
    list_gpu_groups,
    make_no_offer_error,
    rank,
)
from labctl.providers.price_catalog import PriceCatalog, find_address, load_catalog


def load_prices(settings: GcpSettings, cache_dir: Path | None) -> PriceCatalog:
    address = settings.prices_from or find_address()
    return load_catalog(PROVIDER, cache_dir, address, hardware.is_offered)


def select_offers(
    need: Need,
    catalog: PriceCatalog,
    regions: Iterable[str],
    quotas: QuotaTable | None,
    *,
    any_driver: bool,
) -> list[Offer]:
    """List the offers that fit, the best first; NoOfferError says what each condition ruled out.

    Without `quotas` they are unknown, and rule out nothing.
    """
    wanted = tuple(regions)
    everywhere = _list_offers(catalog)
    in_regions = [offer for offer in everywhere if offer.region in wanted]
    lines: list[str] = []
    for with_gpu in list_gpu_groups(need):
        funnel = OfferFilter()
        some = [offer for offer in in_regions if bool(offer.gpu_count) == with_gpu]
        fitting = _select_fitting(need, some, quotas, funnel, any_driver=any_driver)
        if fitting:
            return sorted(fitting, key=lambda offer: rank(offer, need))
        group = f"{'with' if with_gpu else 'without'} a GPU: " if need.gpu.kind == "auto" else ""
        lines += [f"{group}{line}" for line in funnel.lines]
    what = f"Google Cloud has no machine in {', '.join(wanted)} that fits"
    raise make_no_offer_error(what, lines, "the price catalog")


def _list_offers(catalog: PriceCatalog) -> list[Offer]:
    on_demand: Mapping[tuple[str, str, str, int], float] = {
        (row.type, row.location, row.gpu_name, row.gpu_count): row.price_usd_per_hour
        for row in catalog.rows
        if not row.spot
    }
    return [
        hardware.make_offer(
            row,
            catalog.published_at,
            on_demand.get((row.type, row.location, row.gpu_name, row.gpu_count)),
        )
        for row in catalog.rows
    ]


def _select_fitting(
    need: Need,
    some: list[Offer],
    quotas: QuotaTable | None,
    funnel: OfferFilter,
    *,
    any_driver: bool,
) -> list[Offer]:
    if some and some[0].gpu_count:
        some = filter_by_gpu_model(need, some, funnel)
        if not any_driver:
            condition = "the default image's driver (set server.gcp.image)"
            some = funnel.keep(condition, some, lambda o: o.gpu_name not in hardware.OLD_GPUS)
        some = filter_by_gpu_size(need, some, funnel)
    arch = need.arch or DEFAULT_ARCH
    some = funnel.keep(f"arch {arch}", some, lambda o: o.arch == arch)
    if need.spot != "prefer":
        some = funnel.keep(f"spot {need.spot}", some, lambda o: o.spot == (need.spot == "only"))
    some = funnel.keep("an unknown price", some, lambda o: o.price_usd_per_hour > 0)
    some = filter_by_price(need, some, funnel)
    return some if quotas is None else _filter_by_quota(some, quotas, funnel)


def _filter_by_quota(some: list[Offer], quotas: QuotaTable, funnel: OfferFilter) -> list[Offer]:
    """Keep what the quotas allow, apart from what runs now, which may end before the request."""
    for name in sorted({lack for offer in some if (lack := quotas.find_lack(offer))}):
        some = funnel.keep(
            f"the quota {name}",
            some,
            lambda o, name=name: quotas.find_lack(o) != name,  # type: ignore[misc]
            "ask for more at the page that labctl doctor --provider gcp names",
        )
    return some
