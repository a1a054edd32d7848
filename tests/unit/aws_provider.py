"""A provider of its own account, region and cache, on the cloud of aws_cloud.py."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from aws_cloud import REGION, Cloud

from labctl.model import GIB, Boot, CreateServerRequest, GpuNeed, Need, Offer, Server
from labctl.providers import ProviderContext
from labctl.providers.aws import AwsProvider, AwsSettings
from labctl.servers.host_keys import ensure_key_pair

ROOT = Path(__file__).parents[2]
ZONE = f"{REGION}a"
ROLE = "arn:aws:iam::123456789012:role/labctl-deadline"
NEED = Need(gpu=GpuNeed(kind="any", count=1), ttl_s=3600)


def context(directory: Path, owner: str = "ada") -> ProviderContext:
    def unexpected(*_: Any) -> Any:
        raise AssertionError("the AWS provider needs no connection")

    return ProviderContext(
        data_dir=ROOT,
        owner=owner,
        connect=unexpected,
        settle_host_key=unexpected,
        progress=lambda text, done, total: None,
        cache_dir=directory / "cache",
    )


def provider(directory: Path, settings: AwsSettings | None = None) -> AwsProvider:
    chosen = settings or AwsSettings(ssh_from=("192.0.2.0/24",), scheduler_role=ROLE)
    return AwsProvider(chosen, context(directory))


def an_offer(*, spot: bool = False, zone: str = ZONE) -> Offer:
    return Offer(
        provider="aws",
        type="g4dn.xlarge",
        region=REGION,
        zone=zone,
        cpus=4,
        memory_bytes=16 * GIB,
        arch="x86_64",
        gpu_name="T4",
        gpu_count=1,
        gpu_memory_bytes=16 * GIB,
        price_usd_per_hour=0.16 if spot else 0.526,
        spot=spot,
        on_demand_usd_per_hour=0.526,
    )


def a_request(aws: AwsProvider, directory: Path, lab: str = "digits") -> CreateServerRequest:
    identity, first = directory / "id_ed25519", directory / "host_ed25519"
    public, host_key = ensure_key_pair(identity), ensure_key_pair(first).rpartition(" ")[0]
    boot = Boot(
        lab=lab,
        public_key=public,
        host_key=host_key,
        host_private_key=first.read_text(),
        ttl_s=NEED.ttl_s,
    )
    return CreateServerRequest(
        lab=lab,
        lab_id=secrets.token_hex(6),
        token=secrets.token_hex(8),
        public_key=public,
        identity=str(identity),
        need=NEED,
        tags={"labctl:budget": "5.0000"},
        host_key=host_key,
        first_boot=aws.build_first_boot(boot),
    )


def a_server(aws: AwsProvider, directory: Path, *, spot: bool = False) -> Server:
    return aws.create(an_offer(spot=spot), a_request(aws, directory))


def with_market(cloud: Cloud) -> None:
    """List prices, an image by parameter, and quotas, which moto does not have; and no scores."""
    cloud.never("GetSpotPlacementScores", "UnsupportedOperation")
    cloud.reply("GetProducts", lambda asked: {"PriceList": _products(asked)})
    cloud.reply("GetParameter", lambda asked: {"Parameter": {"Value": an_image(cloud)}})
    cloud.reply("GetServiceQuota", {"Quota": {"Value": 8.0}})


def an_image(cloud: Cloud) -> str:
    import boto3

    # Not the default session, which an earlier test may have made with another home.
    ec2 = boto3.Session().client("ec2", region_name=REGION)
    found = ec2.describe_images(Owners=["099720109477"])["Images"]
    ec2.close()
    return str(found[0]["ImageId"])


LISTED = {"g4dn.xlarge": 0.526, "g5.xlarge": 1.006, "m7i-flex.large": 0.09576}


def _products(asked: dict[str, Any]) -> list[str]:
    fields = {one["Field"]: one["Value"] for one in asked["Filters"]}
    wanted = fields.get("instanceType")
    return [
        product(name, price)
        for name, price in LISTED.items()
        if (wanted is None and name.startswith("g")) or name == wanted
    ]


def product(name: str, price: float) -> str:
    dimension = {"unit": "Hrs", "pricePerUnit": {"USD": f"{price:.10f}"}}
    return json.dumps(
        {
            "product": {"attributes": {"instanceType": name}},
            "terms": {"OnDemand": {"T": {"priceDimensions": {"D": dimension}}}},
        }
    )
