"""What the training holds of the GPU's memory, for the curves."""

from __future__ import annotations

import torch

MIB = 1024**2


def read_gpu_memory(device: torch.device) -> dict[str, float]:
    """Return the curves of PyTorch's allocator, the peak since the last call; empty on a CPU.

    Allocated is what tensors use. Reserved is what PyTorch has taken from the
    GPU to hand it out again; nvidia-smi shows that.
    """
    if device.type != "cuda":
        return {}
    figures = {
        "gpu_memory/allocated_mib": torch.cuda.memory_allocated(device) / MIB,
        "gpu_memory/reserved_mib": torch.cuda.memory_reserved(device) / MIB,
        "gpu_memory/peak_mib": torch.cuda.max_memory_allocated(device) / MIB,
    }
    torch.cuda.reset_peak_memory_stats(device)
    return figures
