"""Which of AWS's machines fit a need, the best first; and, where none does, what ruled them out.

`gpu: auto` means a GPU wherever one fits the rest of the need, since that is what such a lab is
for, and each price is agreed to before anything starts; a machine without one is offered for
`none`, and for `auto` only where no machine with a GPU fits. A machine of another architecture
than x86_64 is offered only where `arch` asks for it: most images run on x86_64 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from labctl.errors import NoOfferError
from labctl.estimate.cards import NOMINAL, plain_name, speed
from labctl.model import Need, Offer, Value
from labctl.providers.aws.catalog import Hardware, Market

PROVIDER = "aws"
DEFAULT_ARCH = "x86_64"
# Older than the open NVIDIA driver of the default image, which begins with Turing.
OLD_GPUS = frozenset({"K80", "M60", "V100"})


class Surplus(Value, frozen=True):
    """What of AWS a need does not speak of: the image's driver, and the zone of a given subnet."""

    any_driver: bool = False
    zone: str = ""


class Funnel:
    """Counts, in order, what each condition rules out."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def keep(
        self, condition: str, some: list[Offer], fits: Callable[[Offer], bool], said: str = ""
    ) -> list[Offer]:
        kept = [one for one in some if fits(one)]
        if len(kept) < len(some):
            self.lines.append(
                f"{condition} rules out {len(some) - len(kept)} of {len(some)}"
                + (f": {said}" if said and not kept else "")
            )
        return kept


def offers(need: Need, markets: Iterable[Market], surplus: Surplus) -> list[Offer]:
    """What fits, by price per hour or per unit of `need.work`. NoOfferError where nothing does."""
    known = list(markets)
    lines: list[str] = []
    for with_gpu in wanted_groups(need):
        funnel = Funnel()
        found = _fitting(need, known, surplus, with_gpu, funnel)
        if found:
            return sorted(found, key=lambda offer: _rank(offer, need))
        of = f"{'with' if with_gpu else 'without'} a GPU: " if need.gpu.kind == "auto" else ""
        lines += [f"{of}{line}" for line in funnel.lines]
    where = ", ".join(sorted({market.region for market in known}))
    raise NoOfferError(
        f"AWS has nothing in {where} that fits",
        why="\n".join(lines) or "it lists no such machine there",
        hint="labctl offers --gpu any   # without the condition that rules out most",
    )


def wanted_groups(need: Need) -> tuple[bool, ...]:
    """With a GPU (True), without (False), in the order in which they are tried."""
    if need.gpu.kind == "none":
        return (False,)
    return (True, False) if need.gpu.kind == "auto" else (True,)


def _fitting(
    need: Need, markets: list[Market], surplus: Surplus, with_gpu: bool, funnel: Funnel
) -> list[Offer]:
    machines = [
        (market, one)
        for market in markets
        for one in market.catalog.hardware
        if (one.gpu_name != "") == with_gpu
    ]
    if not machines:
        funnel.lines.append(f"AWS lists no machine {'with' if with_gpu else 'without'} a GPU there")
        return []
    some = [offer for market, one in machines for offer in _each_place(market, one)]
    hardware = {one.type: one for _, one in machines}
    if with_gpu:
        some = _by_gpu(need, some, hardware, surplus, funnel)
    arch = need.arch or DEFAULT_ARCH
    some = funnel.keep(f"arch {arch}", some, lambda o: o.arch == arch)
    if surplus.zone:
        some = funnel.keep("server.aws.subnet", some, lambda o: o.zone == surplus.zone)
    if need.spot != "prefer":
        some = funnel.keep(f"spot {need.spot}", some, lambda o: o.spot == (need.spot == "only"))
    some = funnel.keep("no price known", some, lambda o: o.price_usd_per_hour > 0)
    return _by_price(need, some, funnel)


def _by_gpu(
    need: Need,
    some: list[Offer],
    hardware: dict[str, Hardware],
    surplus: Surplus,
    funnel: Funnel,
) -> list[Offer]:
    gpu = need.gpu
    some = funnel.keep(
        "a whole NVIDIA GPU",
        some,
        lambda o: hardware[o.type].gpu_maker == "NVIDIA" and hardware[o.type].part >= 1,
    )
    if gpu.kind not in ("auto", "any"):
        there = ", ".join(sorted({o.gpu_name for o in some}))
        wanted = plain_name(gpu.kind)
        some = funnel.keep(
            f"gpu {gpu.kind}",
            some,
            lambda o: plain_name(o.gpu_name) == wanted,
            f"there are {there}",
        )
    if not surplus.any_driver:
        condition = "the default image's driver (set server.aws.ami)"
        some = funnel.keep(condition, some, lambda o: o.gpu_name not in OLD_GPUS)
    return _by_gpu_size(need, some, funnel)


def _by_gpu_size(need: Need, some: list[Offer], funnel: Funnel) -> list[Offer]:
    gpu = need.gpu
    if gpu.count > 1:
        most = max((o.gpu_count for o in some), default=0)
        some = funnel.keep(
            f"{gpu.count} GPUs", some, lambda o: o.gpu_count >= gpu.count, f"at most {most}"
        )
    if gpu.min_memory_bytes:
        most_gb = max((o.gpu_memory_bytes for o in some), default=0) / 1e9
        some = funnel.keep(
            f"{gpu.min_memory_bytes / 1e9:.0f} GB of GPU memory",
            some,
            lambda o: o.gpu_memory_bytes * (1 + NOMINAL) >= gpu.min_memory_bytes,
            f"at most {most_gb:.0f} GB each",
        )
    return some


def _by_price(need: Need, some: list[Offer], funnel: Funnel) -> list[Offer]:
    ceiling = need.max_price_usd_per_hour
    if ceiling is None or not some:
        return some
    near = min(some, key=lambda o: o.price_usd_per_hour)
    market = "spot" if near.spot else "on-demand"
    said = f"the cheapest is {near.type} {market} in {near.zone}, {near.price_usd_per_hour:.4g} USD"
    return funnel.keep(
        f"max_price {ceiling:.4g}", some, lambda o: o.price_usd_per_hour <= ceiling, said
    )


def _each_place(market: Market, one: Hardware) -> Iterator[Offer]:
    """One offer for each zone that has the type, and each way to pay for it."""
    listed = market.prices.on_demand.get(one.type)
    for zone in market.catalog.zones.get(one.type, ()):
        spot = market.prices.spot.get(one.type, {}).get(zone)
        base = Offer(
            provider=PROVIDER,
            type=one.type,
            region=market.region,
            zone=zone,
            cpus=one.cpus,
            memory_bytes=one.memory_bytes,
            arch=one.arch,
            gpu_name=one.gpu_name,
            gpu_count=one.gpu_count,
            gpu_memory_bytes=one.gpu_memory_bytes,
            on_demand_usd_per_hour=listed,
            week_low_usd_per_hour=spot.low if spot else None,
            week_high_usd_per_hour=spot.high if spot else None,
            priced_at=market.prices.made_at,
        )
        if one.on_demand:
            yield replace(base, price_usd_per_hour=listed or 0.0)
        if one.spot:
            yield replace(base, price_usd_per_hour=spot.now if spot else 0.0, spot=True)


def _rank(offer: Offer, need: Need) -> tuple[bool, float, float, bool, str, str]:
    """By price per unit of work where that is asked for; what is not known comes last."""
    price = offer.price_usd_per_hour
    measure, unknown = price, False
    if need.work and offer.gpu_count:
        fast = speed(offer.gpu_name, offer.gpu_memory_bytes, need.work)
        unknown = fast is None
        measure = price / (fast * offer.gpu_count) if fast else price
    return unknown, measure, price, not offer.spot, offer.type, offer.zone
