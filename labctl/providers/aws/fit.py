"""Select the AWS machines that fit a need, the best first; if none does, say what ruled them out.

`gpu: auto` prefers a machine with a GPU if one fits the rest of the need, since that is what such
a lab is for, and the user confirms each price before anything starts. A machine without GPU is
offered for `none`, and for `auto` only if no machine with a GPU fits. A machine of another
architecture than x86_64 is offered only if `arch` names it: most images run only on x86_64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from labctl.errors import NoOfferError
from labctl.errors.subject import Subject
from labctl.estimate.cards import NOMINAL, find_peak_speed, plain_name
from labctl.model import Need, Offer, Value
from labctl.providers.aws.catalog import Hardware, Market
from labctl.text import decimal_bytes_text, price_text

PROVIDER = "aws"
DEFAULT_ARCH = "x86_64"
# Too old for the open NVIDIA driver of the default image, which supports Turing and newer.
OLD_GPUS = frozenset({"K80", "M60", "V100"})


class AwsConditions(Value, frozen=True):
    """AWS's own conditions beyond a need: the image's driver, and the zone of a given subnet."""

    any_driver: bool = False
    zone: str = ""


class OfferFilter:
    """Filters offers, and counts in order what each condition rules out."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def keep(
        self, condition: str, offers: list[Offer], fits: Callable[[Offer], bool], note: str = ""
    ) -> list[Offer]:
        """Return the offers that fit; `note` is added to the line if none does."""
        fitting = [offer for offer in offers if fits(offer)]
        if len(fitting) < len(offers):
            self.lines.append(
                f"{condition} rules out {len(offers) - len(fitting)} of {len(offers)}"
                + (f": {note}" if note and not fitting else "")
            )
        return fitting


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
            return sorted(fitting, key=lambda offer: _rank(offer, need))
        group = f"{'with' if with_gpu else 'without'} a GPU: " if need.gpu.kind == "auto" else ""
        lines += [f"{group}{line}" for line in funnel.lines]
    where = ", ".join(sorted({market.region for market in all_markets}))
    raise NoOfferError(
        f"AWS has no machine in {where} that fits",
        why="\n".join(lines) or "AWS lists no such machine there",
        hint=_render_filter_hint,
    )


def _render_filter_hint(subject: Subject) -> str:
    if subject.kind != "lab":
        return subject.offers
    return f"{subject.offers} --gpu any   # without the condition that rules out most"


def list_gpu_groups(need: Need) -> tuple[bool, ...]:
    """Return whether to try machines with a GPU (True) or without (False), in this order."""
    if need.gpu.kind == "none":
        return (False,)
    return (True, False) if need.gpu.kind == "auto" else (True,)


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
    return _filter_by_price(need, some, funnel)


def _filter_by_gpu(
    need: Need,
    some: list[Offer],
    hardware: dict[str, Hardware],
    surplus: AwsConditions,
    funnel: OfferFilter,
) -> list[Offer]:
    gpu = need.gpu
    some = funnel.keep(
        "a whole NVIDIA GPU",
        some,
        lambda o: hardware[o.type].gpu_maker == "NVIDIA" and hardware[o.type].part >= 1,
    )
    if gpu.kind not in ("auto", "any"):
        models = ", ".join(sorted({o.gpu_name for o in some}))
        model = plain_name(gpu.kind)
        some = funnel.keep(
            f"gpu {gpu.kind}",
            some,
            lambda o: plain_name(o.gpu_name) == model,
            f"there are {models}",
        )
    if not surplus.any_driver:
        condition = "the default image's driver (set server.aws.ami)"
        some = funnel.keep(condition, some, lambda o: o.gpu_name not in OLD_GPUS)
    return _filter_by_gpu_size(need, some, funnel)


def _filter_by_gpu_size(need: Need, some: list[Offer], funnel: OfferFilter) -> list[Offer]:
    gpu = need.gpu
    if gpu.count > 1:
        most = max((o.gpu_count for o in some), default=0)
        some = funnel.keep(
            f"{gpu.count} GPUs", some, lambda o: o.gpu_count >= gpu.count, f"at most {most}"
        )
    if gpu.min_memory_bytes:
        most_bytes = max((o.gpu_memory_bytes for o in some), default=0)
        some = funnel.keep(
            f"{decimal_bytes_text(gpu.min_memory_bytes)} of GPU memory",
            some,
            lambda o: o.gpu_memory_bytes * (1 + NOMINAL) >= gpu.min_memory_bytes,
            f"at most {decimal_bytes_text(most_bytes)} each",
        )
    return some


def _filter_by_price(need: Need, some: list[Offer], funnel: OfferFilter) -> list[Offer]:
    ceiling = need.max_price_usd_per_hour
    if ceiling is None or not some:
        return some
    best = min(some, key=lambda o: o.price_usd_per_hour)
    market = "spot" if best.spot else "on-demand"
    price = price_text(best.price_usd_per_hour)
    note = f"the cheapest is {best.type} {market} in {best.zone}, {price}"
    return funnel.keep(
        f"max_price {ceiling:.4g}", some, lambda o: o.price_usd_per_hour <= ceiling, note
    )


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


def _rank(offer: Offer, need: Need) -> tuple[bool, float, float, bool, str, str]:
    """Return the sort key: price per unit of work if the need names one; unknown speeds last."""
    price = offer.price_usd_per_hour
    measure, unknown = price, False
    if need.work and offer.gpu_count:
        gpu_speed = find_peak_speed(offer.gpu_name, offer.gpu_memory_bytes, need.work)
        unknown = gpu_speed is None
        measure = price / (gpu_speed * offer.gpu_count) if gpu_speed else price
    return unknown, measure, price, not offer.spot, offer.type, offer.zone
