"""The instance types of a rehearsed Lambda: a part of those at lambda.ai in 2025, at its prices."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from labctl.rehearsal.lambda_cloud.replies import InstanceTypeReply, SpecsReply
from labctl.rehearsal.lambda_cloud.scenario import LambdaScenario

# name -> GPU, GPUs, vCPUs, memory and disk in GiB, cents an hour
TYPES = {
    "gpu_1x_rtx6000": ("RTX 6000 (24 GB)", 1, 14, 46, 512, 50),
    "gpu_1x_a10": ("A10 (24 GB PCIe)", 1, 30, 200, 1400, 75),
    "gpu_1x_a6000": ("A6000 (48 GB)", 1, 14, 100, 512, 80),
    "gpu_1x_a100_sxm4": ("A100 (40 GB SXM4)", 1, 30, 200, 512, 129),
    "gpu_1x_gh200": ("GH200 (96 GB)", 1, 64, 432, 4096, 149),
    "gpu_1x_h100_pcie": ("H100 (80 GB PCIe)", 1, 26, 200, 1024, 249),
    "gpu_1x_h100_sxm5": ("H100 (80 GB SXM5)", 1, 26, 225, 2816, 329),
    "gpu_8x_v100": ("Tesla V100 (16 GB)", 8, 92, 448, 6041, 440),
    "gpu_8x_a100_80gb_sxm4": ("A100 (80 GB SXM4)", 8, 240, 1800, 20480, 1432),
}


def list_types(scenario: LambdaScenario) -> Iterator[InstanceTypeReply]:
    """Yield the types of the scenario, at its prices."""
    for name, (gpu, gpus, vcpus, memory_gib, storage_gib, cents) in TYPES.items():
        if scenario.types and not any(fnmatchcase(name, one) for one in scenario.types):
            continue
        price = scenario.prices.get(name)
        yield InstanceTypeReply(
            name=name,
            description=f"{gpus}x {gpu}",
            gpu_description=gpu,
            price_cents_per_hour=cents if price is None else round(price * 100),
            specs=SpecsReply(
                vcpus=vcpus, memory_gib=memory_gib, storage_gib=storage_gib, gpus=gpus
            ),
        )


def find_type(scenario: LambdaScenario, name: str) -> InstanceTypeReply | None:
    return next((kind for kind in list_types(scenario) if kind.name == name), None)
