"""What the processes send to each other: gradients or parameters."""

from __future__ import annotations

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

COMPRESSIONS = ("none", "fp16", "powersgd")
RANK = 4  # of the two thin matrices that PowerSGD sends instead of a gradient
# On gloo, PowerSGD hangs if the gradients are sent in more than one bucket.
ONE_BUCKET_MB = 100_000


def wrap(
    model: nn.Module, compress: str, group: distributed.ProcessGroup | None = None
) -> DistributedDataParallel:
    """Make `backward` average the gradients of all processes, or of those in `group`."""
    if compress == "powersgd":
        wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=ONE_BUCKET_MB)
        # In its first two steps, DDP sends whole gradients and arranges its
        # buckets.
        state = PowerSGDState(group, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook)
        return wrapped
    wrapped = DistributedDataParallel(model, process_group=group)
    if compress == "fp16":
        wrapped.register_comm_hook(group, fp16_compress_hook)
    return wrapped


@torch.no_grad()
def average_parameters(model: nn.Module, group: distributed.ProcessGroup | None = None) -> None:
    """Give all processes the mean of their parameters (local SGD)."""
    parameters = list(model.parameters())
    values = nn.utils.parameters_to_vector(parameters)
    distributed.all_reduce(values, group=group)
    nn.utils.vector_to_parameters(values / distributed.get_world_size(group), parameters)


def count_bytes(model: nn.Module, compress: str, sync_every: int, processes: int) -> float:
    """Compute what a process sends per step: 2 (N-1)/N times the gradients.

    Source: P. Patarasuk, X. Yuan, J. Parallel Distrib. Comput. 69 (2009) 117, ring all-reduce.
    """
    numbers = sum(count_numbers(parameter.shape, compress) for parameter in model.parameters())
    bytes_per_number = 2 if compress == "fp16" else 4
    return 2 * (processes - 1) / processes * numbers * bytes_per_number / sync_every


def count_numbers(shape: torch.Size, compress: str) -> int:
    """Count the numbers that are sent for one gradient of this shape."""
    rows, columns = shape[0], shape[1:].numel()
    thin = RANK * (rows + columns)
    # PowerSGD sends vectors, and matrices that it would not halve, as they are.
    can_shrink = compress == "powersgd" and len(shape) > 1 and 2 * thin < rows * columns
    return thin if can_shrink else rows * columns
