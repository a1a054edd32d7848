"""Azure's machine sizes with GPUs that labctl offers, and a few without.

The Retail Prices API names sizes only, so their hardware is listed here, from Microsoft's pages of
each series (learn.microsoft.com/azure/virtual-machines/sizes). The NV series is left out: its GPUs
are virtual and need NVIDIA's GRID driver, which the default image does not have.
"""

from __future__ import annotations

from labctl.model import Value

PRICES_URL = "https://prices.azure.com/api/retail/prices"
# Sizes whose names contain this have GPUs.
GPU_PREFIX = "Standard_N"


class VmSize(Value, frozen=True):
    """The hardware of a size; memory in GiB, `gpu_memory_gib` of each GPU."""

    cpus: int
    memory_gib: float
    gpu: str = ""
    gpus: int = 0
    gpu_memory_gib: float = 0.0


def _size(
    cpus: int, memory_gib: float, gpu: str = "", gpus: int = 0, gpu_memory_gib: float = 0.0
) -> VmSize:
    return VmSize(
        cpus=cpus, memory_gib=memory_gib, gpu=gpu, gpus=gpus, gpu_memory_gib=gpu_memory_gib
    )


SIZES: dict[str, VmSize] = {
    "Standard_D2s_v5": _size(2, 8),
    "Standard_D4s_v5": _size(4, 16),
    "Standard_D8s_v5": _size(8, 32),
    "Standard_D16s_v5": _size(16, 64),
    "Standard_NC4as_T4_v3": _size(4, 28, "T4", 1, 16),
    "Standard_NC8as_T4_v3": _size(8, 56, "T4", 1, 16),
    "Standard_NC16as_T4_v3": _size(16, 110, "T4", 1, 16),
    "Standard_NC64as_T4_v3": _size(64, 440, "T4", 4, 16),
    "Standard_NC24ads_A100_v4": _size(24, 220, "A100", 1, 80),
    "Standard_NC48ads_A100_v4": _size(48, 440, "A100", 2, 80),
    "Standard_NC96ads_A100_v4": _size(96, 880, "A100", 4, 80),
    "Standard_NC40ads_H100_v5": _size(40, 320, "H100", 1, 94),
    "Standard_NC80adis_H100_v5": _size(80, 640, "H100", 2, 94),
    "Standard_ND96asr_v4": _size(96, 900, "A100", 8, 40),
    "Standard_ND96amsr_A100_v4": _size(96, 1900, "A100", 8, 80),
    "Standard_ND96isr_H100_v5": _size(96, 1900, "H100", 8, 80),
}
CPU_SIZES = tuple(name for name, size in SIZES.items() if not size.gpus)
