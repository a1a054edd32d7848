"""The same addition in Triton: Python that is compiled for the GPU.

A program here works on a block of elements, not on one. Triton chooses how the
threads share it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024  # elements for each program; a power of two


@triton.jit
def _add(a, b, total, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = places < count
    tl.store(
        total + places,
        tl.load(a + places, mask=is_inside) + tl.load(b + places, mask=is_inside),
        mask=is_inside,
    )


def add(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> None:
    """Write a + b to `total`; all are contiguous and of one size."""
    count = total.numel()
    _add[(triton.cdiv(count, BLOCK),)](a, b, total, count, BLOCK=BLOCK)
