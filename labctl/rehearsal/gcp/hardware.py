"""The machine types of the simulated project, with list prices of us-central1 in 2025."""

from __future__ import annotations

from labctl.model import Value

# Spot machines cost this share of the list price; Google changes it at most once a day.
SPOT_SHARE = 0.35


class MachineType(Value, frozen=True):
    """A machine type, with the GPUs that are built in or, for n1, attached (`accelerator`)."""

    name: str
    cpus: int
    memory_gib: float
    usd_per_hour: float
    gpu: str = ""
    gpus: int = 0
    gpu_memory_gib: float = 0.0
    accelerator: str = ""


TYPES = (
    MachineType(name="e2-standard-2", cpus=2, memory_gib=8, usd_per_hour=0.067),
    MachineType(name="e2-standard-4", cpus=4, memory_gib=16, usd_per_hour=0.134),
    MachineType(
        name="n1-standard-4",
        cpus=4,
        memory_gib=15,
        usd_per_hour=0.54,
        gpu="T4",
        gpus=1,
        gpu_memory_gib=16,
        accelerator="nvidia-tesla-t4",
    ),
    MachineType(
        name="n1-standard-8",
        cpus=8,
        memory_gib=30,
        usd_per_hour=1.08,
        gpu="T4",
        gpus=2,
        gpu_memory_gib=16,
        accelerator="nvidia-tesla-t4",
    ),
    MachineType(
        name="g2-standard-4",
        cpus=4,
        memory_gib=16,
        usd_per_hour=0.71,
        gpu="L4",
        gpus=1,
        gpu_memory_gib=24,
    ),
    MachineType(
        name="g2-standard-24",
        cpus=24,
        memory_gib=96,
        usd_per_hour=2.0,
        gpu="L4",
        gpus=2,
        gpu_memory_gib=24,
    ),
    MachineType(
        name="a2-highgpu-1g",
        cpus=12,
        memory_gib=85,
        usd_per_hour=3.67,
        gpu="A100",
        gpus=1,
        gpu_memory_gib=40,
    ),
    MachineType(
        name="a2-ultragpu-1g",
        cpus=12,
        memory_gib=170,
        usd_per_hour=5.07,
        gpu="A100",
        gpus=1,
        gpu_memory_gib=80,
    ),
)
BY_NAME = {one.name: one for one in TYPES}
# The quota of a GPU, by its name and memory.
GPU_METRICS = {
    ("T4", 16.0): "NVIDIA_T4_GPUS",
    ("L4", 24.0): "NVIDIA_L4_GPUS",
    ("A100", 40.0): "NVIDIA_A100_GPUS",
    ("A100", 80.0): "NVIDIA_A100_80GB_GPUS",
}
CPU_METRICS = {"a2": "A2_CPUS"}


def find_cpu_metric(name: str) -> str:
    return CPU_METRICS.get(name.partition("-")[0], "CPUS")
