"""Select the AWS machines that fit a need; offer_filter.py says how a need is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from labctl.model import Need, Offer, Value
from labctl.providers.aws.catalog import Hardware, Market
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

PROVIDER = "aws"
# Too old for the open NVIDIA driver of the default image, which supports Turing and newer.
OLD_GPUS = frozenset({"K80", "M60", "V100"})


class AwsConditions(Value, frozen=True):
    """AWS's own conditions beyond a need: the image's driver, and the zone of a given subnet."""

    any_driver: bool = False
    zone: str = ""


def offers(need: Need, markets: Iterable[Market], surplus: AwsConditions) -> list[Offer]:
    """List the offers that fit, by price per hour or per unit of `need.work`.

    NoOfferError if none does.
    """
    all_markets = list(markets)
    lines: list[str] = []
    for with_gpu in list_gpu_groups(need):
        funnel = OfferFilter()
        fitting = _select_fitting(need, all_markets, surplus, with_gpu, funnel)
        if fitting:
            return sorted(fitting, key=lambda offer: rank(offer, need))
        group = f"{'with' if with_gpu else 'without'} a GPU: " if need.gpu.kind == "auto" else ""
        lines += [f"{group}{line}" for line in funnel.lines]
    where = ", ".join(sorted({market.region for market in all_markets}))
    raise make_no_offer_error(f"AWS has no machine in {where} that fits", lines, "AWS")


def _select_fitting(
    need: Need, markets: list[Market], surplus: AwsConditions, with_gpu: bool, funnel: OfferFilter
) -> list[Offer]:
    machines = [
        (market, hardware)
        for market in markets
        for hardware in market.catalog.hardware
        if (hardware.gpu_name != "") == with_gpu
    ]
    if not machines:
        funnel.lines.append(f"AWS lists no machine {'with' if with_gpu else 'without'} a GPU there")
        return []
    some = [offer for market, hardware in machines for offer in _list_offers(market, hardware)]
    by_type = {hardware.type: hardware for _, hardware in machines}
    if with_gpu:
        some = _filter_by_gpu(need, some, by_type, surplus, funnel)
    arch = need.arch or DEFAULT_ARCH
    some = funnel.keep(f"arch {arch}", some, lambda o: o.arch == arch)
    if surplus.zone:
        some = funnel.keep("server.aws.subnet", some, lambda o: o.zone == surplus.zone)
    if need.spot != "prefer":
        some = funnel.keep(f"spot {need.spot}", some, lambda o: o.spot == (need.spot == "only"))
    some = funnel.keep("an unknown price", some, lambda o: o.price_usd_per_hour > 0)
    return filter_by_price(need, some, funnel)


def _filter_by_gpu(
    need: Need,
    some: list[Offer],
    hardware: dict[str, Hardware],
    surplus: AwsConditions,
    funnel: OfferFilter,
) -> list[Offer]:
    some = funnel.keep(
        "a whole NVIDIA GPU",
        some,
        lambda o: hardware[o.type].gpu_maker == "NVIDIA" and hardware[o.type].part >= 1,
    )
    some = filter_by_gpu_model(need, some, funnel)
    if not surplus.any_driver:
        condition = "the default image's driver (set server.aws.ami)"
        some = funnel.keep(condition, some, lambda o: o.gpu_name not in OLD_GPUS)
    return filter_by_gpu_size(need, some, funnel)


def _list_offers(market: Market, hardware: Hardware) -> Iterator[Offer]:
    """Yield one offer for each zone that has the type, and for each of spot and on demand."""
    list_price = market.prices.on_demand.get(hardware.type)
    for zone in market.catalog.zones.get(hardware.type, ()):
        spot = market.prices.spot.get(hardware.type, {}).get(zone)
        base = Offer(
            provider=PROVIDER,
            type=hardware.type,
            region=market.region,
            zone=zone,
            cpus=hardware.cpus,
            memory_bytes=hardware.memory_bytes,
            arch=hardware.arch,
            gpu_name=hardware.gpu_name,
            gpu_count=hardware.gpu_count,
            gpu_memory_bytes=hardware.gpu_memory_bytes,
            on_demand_usd_per_hour=list_price,
            week_low_usd_per_hour=spot.low if spot else None,
            week_high_usd_per_hour=spot.high if spot else None,
            priced_at=market.prices.made_at,
            cluster_placement=hardware.cluster,
            rdma=hardware.efa,
        )
        if hardware.on_demand:
            yield replace(base, price_usd_per_hour=list_price or 0.0)
        if hardware.spot:
            yield replace(base, price_usd_per_hour=spot.now if spot else 0.0, spot=True)
