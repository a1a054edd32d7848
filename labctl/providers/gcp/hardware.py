"""Google's machine types with GPUs: which labctl offers, and what they need beyond their name."""

from __future__ import annotations

from labctl.model import GIB, Offer, Value
from labctl.providers.gcp.labels import PROVIDER, get_region
from labctl.providers.price_catalog import CatalogRow

# Families whose machine types have their GPUs built in, with the disks that they can boot from
# (cloud.google.com/compute/docs/accelerator-optimized-machines).
GPU_FAMILIES = {
    "a2": "pd-balanced",
    "a3": "pd-balanced",
    "g2": "pd-balanced",
    "g4": "hyperdisk-balanced",
    "a4": "hyperdisk-balanced",
}
# Newer A3 types boot only from Hyperdisk.
HYPERDISK_TYPES = ("a3-ultragpu-",)
# A GPU is attached to a general machine: by (name, GiB), the accelerator's name at Google.
ATTACHED_FAMILY = "n1"
ACCELERATORS = {("T4", 16): "nvidia-tesla-t4", ("V100", 16): "nvidia-tesla-v100"}
# Fewer CPUs cannot feed a GPU, more only cost.
CPUS_PER_GPU = (4, 8)
CPU_TYPES = frozenset(
    {
        "e2-standard-2",
        "e2-standard-4",
        "e2-standard-8",
        "e2-standard-16",
        "n2-standard-4",
        "n2-standard-8",
        "n2-standard-16",
    }
)
DEFAULT_DISK = "pd-balanced"
# Too old for the open NVIDIA driver of the default image, which supports Turing and newer.
OLD_GPUS = frozenset({"V100"})
# The part of the names of quotas, by (name, GiB) of the GPU.
QUOTA_NAMES = {
    ("T4", 16): "NVIDIA_T4_GPUS",
    ("L4", 24): "NVIDIA_L4_GPUS",
    ("V100", 16): "NVIDIA_V100_GPUS",
    ("A100", 40): "NVIDIA_A100_GPUS",
    ("A100", 80): "NVIDIA_A100_80GB_GPUS",
    ("H100", 80): "NVIDIA_H100_GPUS",
}
# vCPUs of other families count against the quota CPUS.
CPU_QUOTAS = {"n2": "N2_CPUS", "a2": "A2_CPUS"}


class QuotaUse(Value, frozen=True):
    """How much a machine takes of a quota: `region` is "" for one that holds in all regions."""

    metric: str
    amount: float
    region: str = ""


def is_offered(row: CatalogRow) -> bool:
    """Whether labctl offers a machine of the price catalog."""
    family = get_family(row.type)
    if not row.gpu_count:
        return row.type in CPU_TYPES
    if row.gpu_maker != "nvidia":
        return False
    if family == ATTACHED_FAMILY:
        low, high = CPUS_PER_GPU
        return (
            row.type.startswith("n1-standard-")
            and (row.gpu_name, int(row.gpu_memory_gib)) in ACCELERATORS
            and low * row.gpu_count <= row.cpus <= high * row.gpu_count
        )
    return family in GPU_FAMILIES


def make_offer(row: CatalogRow, published_at: float, on_demand: float | None) -> Offer:
    return Offer(
        provider=PROVIDER,
        type=row.type,
        region=get_region(row.location),
        zone=row.location,
        cpus=row.cpus,
        memory_bytes=int(row.memory_gib * GIB),
        arch=row.arch,
        gpu_name=row.gpu_name if row.gpu_count else "",
        gpu_count=row.gpu_count,
        gpu_memory_bytes=int(row.gpu_memory_gib * GIB) if row.gpu_count else 0,
        price_usd_per_hour=row.price_usd_per_hour,
        spot=row.spot,
        on_demand_usd_per_hour=on_demand,
        priced_at=published_at,
    )


def get_family(machine_type: str) -> str:
    return machine_type.partition("-")[0]


def get_disk_type(machine_type: str) -> str:
    """Return the type of the boot disk."""
    if machine_type.startswith(HYPERDISK_TYPES):
        return "hyperdisk-balanced"
    return GPU_FAMILIES.get(get_family(machine_type), DEFAULT_DISK)


def get_accelerator(offer: Offer) -> str:
    """Return the accelerator to attach; "" for a machine type that has its GPUs built in."""
    if get_family(offer.type) != ATTACHED_FAMILY:
        return ""
    return ACCELERATORS.get(_describe_gpu(offer), "")


def list_quota_uses(offer: Offer) -> list[QuotaUse]:
    """List what a machine takes of the quotas of its region and of all regions."""
    region = offer.region
    uses = [
        QuotaUse(
            metric=CPU_QUOTAS.get(get_family(offer.type), "CPUS"), amount=offer.cpus, region=region
        ),
        QuotaUse(metric="CPUS_ALL_REGIONS", amount=offer.cpus),
    ]
    if not offer.gpu_count:
        return uses
    uses.append(QuotaUse(metric="GPUS_ALL_REGIONS", amount=offer.gpu_count))
    if name := QUOTA_NAMES.get(_describe_gpu(offer)):
        uses.append(QuotaUse(metric=name, amount=offer.gpu_count, region=region))
    return uses


def _describe_gpu(offer: Offer) -> tuple[str, int]:
    return offer.gpu_name, offer.gpu_memory_bytes // GIB
