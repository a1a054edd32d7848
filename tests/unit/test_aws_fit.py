"""Which of AWS's machines fit a need, and what is said where none does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
from msgspec.structs import replace

from labctl.errors import NoOfferError
from labctl.model import GIB, GpuNeed, Need, Offer, Spot
from labctl.providers.aws import fit
from labctl.providers.aws.catalog import VERSION, Catalog, Hardware, Market, Prices, SpotPrice
from labctl.providers.aws.market import parse_hardware
from labctl.providers.aws.placement import describe_gang

if TYPE_CHECKING:
    from mypy_boto3_ec2.type_defs import InstanceTypeInfoTypeDef

ZONES = ("us-east-1a", "us-east-1b")
MIB = 1024**2


def gpu_type(name: str, gpu: str, count: int, mib: int) -> Hardware:
    return Hardware(
        type=name,
        cpus=4 * count,
        memory_bytes=16 * GIB,
        arch="x86_64",
        gpu_name=gpu,
        gpu_maker="NVIDIA",
        gpu_count=count,
        gpu_memory_bytes=mib * MIB,
    )


T4 = gpu_type("g4dn.xlarge", "T4", 1, 16384)
FOUR_T4 = gpu_type("g4dn.12xlarge", "T4", 4, 16384)
L4 = gpu_type("g6.xlarge", "L4", 1, 22888)
A100 = gpu_type("p4d.24xlarge", "A100", 8, 40960)
OLD = gpu_type("p3.2xlarge", "V100", 1, 16384)
ARM = replace(gpu_type("g5g.xlarge", "T4g", 1, 16384), arch="arm64")
RADEON = replace(gpu_type("g4ad.xlarge", "Radeon Pro V520", 1, 8192), gpu_maker="AMD")
SLICE = replace(gpu_type("g6f.large", "L4", 0, 2861), part=0.125)
RESERVED = replace(gpu_type("p5.48xlarge", "H100", 8, 81920), on_demand=False, spot=False)
ALL = (T4, FOUR_T4, L4, A100, OLD, ARM, RADEON, SLICE, RESERVED)
LISTED = {
    "g4dn.xlarge": 0.526,
    "g4dn.12xlarge": 3.912,
    "g6.xlarge": 0.8048,
    "p4d.24xlarge": 32.77,
    "p3.2xlarge": 3.06,
    "g5g.xlarge": 0.42,
    "g4ad.xlarge": 0.378,
    "g6f.large": 0.2,
}
SPOT = {
    "g4dn.xlarge": {"us-east-1a": (0.21, 0.15, 0.3), "us-east-1b": (0.16, 0.14, 0.2)},
    "g6.xlarge": {"us-east-1a": (0.31, 0.3, 0.4)},
    "p4d.24xlarge": {"us-east-1b": (12.0, 9.0, 14.0)},
    "g5g.xlarge": {"us-east-1a": (0.12, 0.1, 0.2)},
}
CPU = Hardware(type="m7i-flex.large", cpus=2, memory_bytes=8 * GIB, arch="x86_64")


def market(hardware: tuple[Hardware, ...] = ALL, region: str = "us-east-1") -> Market:
    spot = {
        name: {zone: SpotPrice(now=n, low=low, high=h) for zone, (n, low, h) in zones.items()}
        for name, zones in SPOT.items()
    }
    return Market(
        region=region,
        catalog=Catalog(
            version=VERSION,
            made_at=1.0,
            hardware=hardware,
            zones={one.type: ZONES for one in hardware},
        ),
        prices=Prices(
            version=VERSION,
            made_at=2.0,
            spot=spot,
            on_demand={**LISTED, "m7i-flex.large": 0.09576},
        ),
    )


def fitting(need: Need, *, surplus: fit.AwsConditions | None = None) -> list[Offer]:
    return fit.offers(need, [market()], surplus or fit.AwsConditions())


def names(offers: list[Offer]) -> list[str]:
    return [f"{o.type} {o.zone} {'spot' if o.spot else 'listed'}" for o in offers]


def test_cheapest_comes_first_whatever_its_market() -> None:
    found = fitting(Need(gpu=GpuNeed(kind="any", count=1)))
    assert names(found)[:4] == [
        "g4dn.xlarge us-east-1b spot",
        "g4dn.xlarge us-east-1a spot",
        "g6.xlarge us-east-1a spot",
        "g4dn.xlarge us-east-1a listed",
    ]
    prices = [offer.price_usd_per_hour for offer in found]
    assert prices == sorted(prices)


def test_offer_tells_all_that_is_known() -> None:
    assert fitting(Need(gpu=GpuNeed(kind="any", count=1)))[0] == Offer(
        provider="aws",
        type="g4dn.xlarge",
        region="us-east-1",
        zone="us-east-1b",
        cpus=4,
        memory_bytes=16 * GIB,
        arch="x86_64",
        gpu_name="T4",
        gpu_count=1,
        gpu_memory_bytes=16 * GIB,
        price_usd_per_hour=0.16,
        spot=True,
        on_demand_usd_per_hour=0.526,
        week_low_usd_per_hour=0.14,
        week_high_usd_per_hour=0.2,
        priced_at=2.0,
    )


@pytest.mark.parametrize(
    ("need", "types"),
    [
        (Need(gpu=GpuNeed(kind="L4", count=1)), {"g6.xlarge"}),
        (Need(gpu=GpuNeed(kind="T4", count=2)), {"g4dn.12xlarge"}),
        (Need(gpu=GpuNeed(kind="any", count=1, min_memory_bytes=24 * 10**9)), {"g6.xlarge", "p4d"}),
        (Need(gpu=GpuNeed(kind="T4G", count=1), arch="arm64"), {"g5g.xlarge"}),
        (Need(gpu=GpuNeed(kind="any", count=1), max_price_usd_per_hour=0.5), {"g4dn", "g6.xlarge"}),
    ],
)
def test_conditions_hold(need: Need, types: set[str]) -> None:
    found = {offer.type for offer in fitting(need)}
    assert found
    assert all(any(name.startswith(part) for part in types) for name in found)


@pytest.mark.parametrize(("spot", "markets"), [("never", {False}), ("only", {True})])
def test_spot_is_taken_only_where_wanted(spot: Spot, markets: set[bool]) -> None:
    need = Need(gpu=GpuNeed(kind="any", count=1), spot=spot)
    assert {offer.spot for offer in fitting(need)} == markets


def test_what_the_default_image_cannot_drive_needs_another_image() -> None:
    need = Need(gpu=GpuNeed(kind="V100", count=1), spot="never")
    with pytest.raises(NoOfferError) as raised:
        fitting(need)
    assert "server.aws.ami" in raised.value.why
    found = fitting(need, surplus=fit.AwsConditions(any_driver=True))
    assert {offer.type for offer in found} == {"p3.2xlarge"}


def test_slices_other_makers_and_other_architectures_are_not_offered() -> None:
    found = {offer.type for offer in fitting(Need(gpu=GpuNeed(kind="any", count=1)))}
    assert not found & {"g6f.large", "g4ad.xlarge", "g5g.xlarge", "p3.2xlarge", "p5.48xlarge"}


def test_subnet_allows_its_zone_alone() -> None:
    surplus = fit.AwsConditions(zone="us-east-1a")
    found = fitting(Need(gpu=GpuNeed(kind="any", count=1)), surplus=surplus)
    assert {offer.zone for offer in found} == {"us-east-1a"}


def test_auto_takes_a_gpu_where_one_fits_and_none_where_not() -> None:
    known = [market(), market((CPU,))]
    assert fit.offers(Need(), known, fit.AwsConditions())[0].gpu_name == "T4"
    cheap = Need(max_price_usd_per_hour=0.1)
    assert {o.type for o in fit.offers(cheap, known, fit.AwsConditions())} == {"m7i-flex.large"}
    none = Need(gpu=GpuNeed(kind="none"))
    assert {o.gpu_count for o in fit.offers(none, known, fit.AwsConditions())} == {0}


def test_work_ranks_by_price_per_unit_of_it() -> None:
    gpu = GpuNeed(kind="any", count=1)
    by_hour = fitting(Need(gpu=gpu, spot="never"))
    by_fp16 = fitting(Need(gpu=gpu, spot="never", work="fp16"))
    by_bandwidth = fitting(Need(gpu=gpu, spot="never", work="bandwidth"))
    assert by_hour[0].type == "g4dn.xlarge"
    # 0.8048 / 121 < 0.526 / 65 < 32.77 / (8 x 312)
    assert by_fp16[0].type == "g6.xlarge"
    # 0.526 / 320 < 0.8048 / 300
    assert by_bandwidth[0].type == "g4dn.xlarge"


def test_nothing_that_fits_says_which_condition_ruled_out_what_and_the_nearest_miss() -> None:
    need = Need(gpu=GpuNeed(kind="T4", count=1), spot="only", max_price_usd_per_hour=0.1)
    with pytest.raises(NoOfferError) as raised:
        fitting(need)
    lines = raised.value.why.splitlines()
    assert "us-east-1" in raised.value.what
    assert [line.split(" rules out")[0] for line in lines] == [
        "a whole NVIDIA GPU",
        "gpu T4",
        "spot only",
        "an unknown price",
        "max_price 0.1",
    ]
    assert lines[-1].endswith("the cheapest is g4dn.xlarge spot in us-east-1b, $0.16/h")


def test_unknown_gpu_is_told_what_there_is() -> None:
    with pytest.raises(NoOfferError) as raised:
        fitting(Need(gpu=GpuNeed(kind="T5", count=1)))
    assert "there are A100, L4, T4" in raised.value.why


def test_too_many_gpus_are_told_the_most() -> None:
    with pytest.raises(NoOfferError) as raised:
        fitting(Need(gpu=GpuNeed(kind="T4", count=8)))
    assert "8 GPUs rules out" in raised.value.why
    assert "at most 4" in raised.value.why


def test_region_without_any_says_so() -> None:
    with pytest.raises(NoOfferError) as raised:
        fit.offers(Need(gpu=GpuNeed(kind="any", count=1)), [market(())], fit.AwsConditions())
    assert "no machine with a GPU" in raised.value.why


def test_types_say_how_servers_of_a_gang_are_connected() -> None:
    """The entries are shortened ones of DescribeInstanceTypes."""
    entry: dict[str, Any] = {
        "InstanceType": "p5.48xlarge",
        "VCpuInfo": {"DefaultVCpus": 192},
        "MemoryInfo": {"SizeInMiB": 2097152},
        "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
        "PlacementGroupInfo": {"SupportedStrategies": ["cluster", "partition", "spread"]},
        "NetworkInfo": {"EfaSupported": True},
    }
    best = parse_hardware(cast("InstanceTypeInfoTypeDef", entry))
    assert (best.cluster, best.efa) == (True, True)
    entry["PlacementGroupInfo"] = {"SupportedStrategies": ["partition", "spread"]}
    plain = parse_hardware(cast("InstanceTypeInfoTypeDef", {**entry, "NetworkInfo": {}}))
    assert (plain.cluster, plain.efa) == (False, False)
    offer = Offer(provider="aws", type="x", cluster_placement=True)
    assert describe_gang(offer) == "the servers are placed close together, with a placement group"
    assert "and the fast network EFA" in describe_gang(replace(offer, rdma=True))
    assert "only share a zone" in describe_gang(replace(offer, cluster_placement=False))
