"""The GPUs of a rehearsed RunPod: a part of those of 2025, at their list prices then."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET
from msgspec.structs import replace

from labctl.rehearsal.runpod.replies import (
    DataCenterReply,
    GpuTypeReply,
    StockReply,
    TierCountReply,
    TierPriceReply,
)
from labctl.rehearsal.runpod.scenario import RunPodScenario

# id -> name, memory in GB, USD per hour secure and community, most GPUs in a pod of each
GPUS = {
    "NVIDIA RTX A4000": ("RTX A4000", 16, 0.25, 0.17, 8, 4),
    "NVIDIA A40": ("A40", 48, 0.40, 0.0, 8, 0),
    "NVIDIA L4": ("L4", 24, 0.43, 0.0, 8, 0),
    "NVIDIA GeForce RTX 4090": ("RTX 4090", 24, 0.69, 0.34, 8, 4),
    "NVIDIA A100 80GB PCIe": ("A100 PCIe", 80, 1.64, 1.19, 8, 2),
    "NVIDIA H100 PCIe": ("H100 PCIe", 80, 2.39, 1.99, 8, 1),
    "NVIDIA H100 80GB HBM3": ("H100 SXM", 80, 2.99, 2.69, 8, 1),
    "AMD Instinct MI300X OAM": ("MI300X", 192, 2.99, 0.0, 8, 0),
}
CONTINENTS = {"EU": "EUROPE", "US": "NORTH_AMERICA", "CA": "NORTH_AMERICA", "AP": "ASIA"}


def list_gpus(scenario: RunPodScenario) -> Iterator[GpuTypeReply]:
    """Yield the GPUs at the scenario's prices, without their stock."""
    for gpu_id, (name, memory, secure, community, most, community_most) in GPUS.items():
        price = scenario.prices.get(gpu_id)
        yield GpuTypeReply(
            id=gpu_id,
            name=name,
            pool=None,
            manufacturer=gpu_id.partition(" ")[0],
            memory=memory,
            secure=most > 0,
            community=community_most > 0,
            price=TierPriceReply(
                secure=secure if price is None else price,
                community=community if price is None else price,
            ),
            max_count=TierCountReply(secure=most, community=community_most),
        )


def find_gpu(scenario: RunPodScenario, gpu_id: str) -> GpuTypeReply | None:
    return next((gpu for gpu in list_gpus(scenario) if gpu.id == gpu_id), None)


def get_price(gpu: GpuTypeReply, cloud: str, count: int) -> float:
    """Return the price of a pod in USD per hour."""
    return count * (gpu.price.secure if cloud == "SECURE" else gpu.price.community)


def with_stock(gpu: GpuTypeReply, centers: list[str]) -> GpuTypeReply:
    """Add the stock: these data centers have some."""
    stock = tuple(StockReply(id=name, name=name, availability="HIGH") for name in centers)
    return replace(
        gpu,
        availability="HIGH" if centers else "NONE",
        # Left out where a model is in stock nowhere.
        data_centers=stock or UNSET,
    )


def make_data_center(name: str) -> DataCenterReply:
    return DataCenterReply(
        id=name,
        name=f"{name}, rehearsed",
        region=CONTINENTS.get(name.partition("-")[0], "UNKNOWN"),
        network_volume_types=("STANDARD",),
        compliance=(),
        global_network=False,
    )
