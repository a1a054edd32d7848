"""Select the offers that fit a need, the best first; if none does, say what ruled them out.

`gpu: auto` prefers a machine with a GPU if one fits the rest of the need, since that is what such
a lab is for, and the user confirms each price before anything starts. A machine without GPU is
offered for `none`, and for `auto` only if no machine with a GPU fits. A machine of another
architecture than x86_64 is offered only if `arch` names it: most images run only on x86_64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from labctl.errors import NoOfferError
from labctl.errors.subject import Subject
from labctl.estimate.cards import NOMINAL, find_peak_speed, plain_name
from labctl.model import Need, Offer
from labctl.text import decimal_bytes_text, price_text

DEFAULT_ARCH = "x86_64"


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


def select_offers(
    cloud: str,
    need: Need,
    listed: Sequence[Offer],
    has_capacity: Callable[[Offer], bool] = lambda offer: True,
    find_lack: Callable[[Offer], str] = lambda offer: "",
) -> list[Offer]:
    """List the offers that fit, by price per hour or per unit of `need.work`.

    For a cloud that lists everything with one call. `cloud` is its name for users. `find_lack` says
    what the account lacks for an offer, "" if nothing. Offers without capacity are ruled out last,
    so that the error says what would fit. NoOfferError if none fits.
    """
    lines: list[str] = []
    for with_gpu in list_gpu_groups(need):
        funnel = OfferFilter()
        some = [offer for offer in listed if (offer.gpu_count > 0) == with_gpu]
        fitting = _filter(need, some, with_gpu, funnel)
        fitting = _filter_by_lack(fitting, find_lack, funnel)
        if fitting := funnel.keep("no capacity now", fitting, has_capacity):
            return sorted(fitting, key=lambda offer: rank(offer, need))
        group = f"{'with' if with_gpu else 'without'} a GPU: " if need.gpu.kind == "auto" else ""
        lines += [f"{group}{line}" for line in funnel.lines]
    raise make_no_offer_error(f"{cloud} has no machine that fits", lines, cloud)


def _filter(need: Need, some: list[Offer], with_gpu: bool, funnel: OfferFilter) -> list[Offer]:
    if with_gpu:
        some = filter_by_gpu_model(need, some, funnel)
        some = filter_by_gpu_size(need, some, funnel)
    arch = need.arch or DEFAULT_ARCH
    some = funnel.keep(f"arch {arch}", some, lambda o: o.arch == arch)
    if need.spot != "prefer":
        some = funnel.keep(f"spot {need.spot}", some, lambda o: o.spot == (need.spot == "only"))
    some = funnel.keep("an unknown price", some, lambda o: o.price_usd_per_hour > 0)
    return filter_by_price(need, some, funnel)


def _filter_by_lack(
    some: list[Offer], find_lack: Callable[[Offer], str], funnel: OfferFilter
) -> list[Offer]:
    lacks = {id(offer): find_lack(offer) for offer in some}
    for lack in sorted(set(filter(None, lacks.values()))):
        some = funnel.keep(lack, some, lambda offer, lack=lack: lacks[id(offer)] != lack)  # type: ignore[misc]
    return some


def make_no_offer_error(what: str, lines: Sequence[str], cloud: str) -> NoOfferError:
    why = "\n".join(lines) or f"{cloud} lists no such machine"
    return NoOfferError(what, why=why, hint=_render_filter_hint)


def filter_by_gpu_model(need: Need, some: list[Offer], funnel: OfferFilter) -> list[Offer]:
    if need.gpu.kind in ("auto", "any"):
        return some
    models = ", ".join(sorted({offer.gpu_name for offer in some}))
    model = plain_name(need.gpu.kind)
    return funnel.keep(
        f"gpu {need.gpu.kind}",
        some,
        lambda o: plain_name(o.gpu_name) == model,
        f"there are {models}",
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


def filter_by_gpu_size(need: Need, some: list[Offer], funnel: OfferFilter) -> list[Offer]:
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


def filter_by_price(need: Need, some: list[Offer], funnel: OfferFilter) -> list[Offer]:
    ceiling = need.max_price_usd_per_hour
    if ceiling is None or not some:
        return some
    best = min(some, key=lambda o: o.price_usd_per_hour)
    market = "spot" if best.spot else "on-demand"
    price = price_text(best.price_usd_per_hour)
    where = f" in {best.zone}" if best.zone else ""
    note = f"the cheapest is {best.type} {market}{where}, {price}"
    return funnel.keep(
        f"max_price {ceiling:.4g}", some, lambda o: o.price_usd_per_hour <= ceiling, note
    )


def rank(offer: Offer, need: Need) -> tuple[bool, float, float, bool, str, str]:
    """Return the sort key: price per unit of work if the need names one; unknown speeds last."""
    price = offer.price_usd_per_hour
    measure, unknown = price, False
    if need.work and offer.gpu_count:
        gpu_speed = find_peak_speed(offer.gpu_name, offer.gpu_memory_bytes, need.work)
        unknown = gpu_speed is None
        measure = price / (gpu_speed * offer.gpu_count) if gpu_speed else price
    return unknown, measure, price, not offer.spot, offer.type, offer.zone
