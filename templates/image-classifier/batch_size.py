"""`--batch-size auto`: the largest power of two that fits."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from dataset import Batch
from learner import Learner
from model import Shape

LARGEST = 4096  # beyond it a GPU gains nothing on images this small
# Fewer and larger steps would learn less from the same images.
STEPS_PER_EPOCH = 16


def largest_that_fits(fits: Callable[[int], bool], cap: int) -> int:
    """Double from 1 until `fits` is false or `cap` is passed; return the last size that fitted.

    Raises MemoryError if not even one image fits.
    """
    if not fits(1):
        raise MemoryError("not even one image fits in memory; try a smaller --image-size")
    size = 1
    while 2 * size <= cap and fits(2 * size):
        size *= 2
    return size


def choose(
    model: nn.Module,
    shape: Shape,
    images: int,
    device: torch.device,
    precision: torch.dtype | None,
    ranks: int = 1,
) -> int:
    """Find a batch size for a training set of `images` images. Keeps model and random state.

    It is that of all ranks together, each of which has a device of its own or a share of the CPU.
    """
    cap = max(1, min(LARGEST, images // STEPS_PER_EPOCH))
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        if device.type == "cuda":
            return largest_that_fits(
                lambda size: _fits_gpu(model, shape, -(-size // ranks), device, precision), cap
            )
        budget = available_memory_bytes() // 2
        per_image = _activation_bytes(model, shape, device)
        return largest_that_fits(lambda size: size * per_image <= budget, cap)


def _fits_gpu(
    model: nn.Module, shape: Shape, size: int, device: torch.device, precision: torch.dtype | None
) -> bool:
    """Try a full training step on a copy of the model: only a real step shows what fits."""
    try:
        learner = Learner(copy.deepcopy(model), device, precision)
        learner.step([_blank(shape, size)], rate=0.0, clip=1.0)
        torch.cuda.synchronize(device)
        return True
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        # Memory of the failed step would otherwise be missing in the real
        # training.
        learner = None  # type: ignore[assignment]
        gc.collect()
        torch.cuda.empty_cache()


def _activation_bytes(model: nn.Module, shape: Shape, device: torch.device) -> int:
    """Measure the memory of a training step per image, since a CPU out of memory kills the process.

    Counts what autograd keeps for the backward pass, and the same again for the gradients.
    """
    kept = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    probe = copy.deepcopy(model).to(device)
    images, _ = _blank(shape, 2)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        probe(images.to(device))
    # Measured with two images: half for activations, half for gradients.
    return kept


def _blank(shape: Shape, size: int) -> Batch:
    images = torch.zeros(
        size, shape.channels, shape.image_size, shape.image_size, dtype=torch.uint8
    )
    return images, torch.zeros(size, dtype=torch.int64)


def available_memory_bytes() -> int:
    """Return the memory available to this process: the machine's, or less in a container."""
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    available = os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            free = int(_cgroup(limit)) - int(_cgroup(used))
        except (OSError, ValueError):
            # The other cgroup version, no cgroups, or "max".
            continue
        available = min(available, max(0, free))
    return available


def _cgroup(name: str) -> str:
    return (Path("/sys/fs/cgroup") / name).read_text()
