"""The processes of one training, each with its share of every batch.

    torchrun --standalone --nproc-per-node=gpu train.py     # one for each GPU

This is data parallelism. torchrun starts the processes and tells each its rank
in the environment. Without it there is one process, and nothing here does
anything.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Ranks:
    """This process among those of the training."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0  # among those of this machine: the number of its GPU

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes logs and checkpoints."""
        return self.rank == 0

    def device(self, wish: str) -> str:
        """Give each process a GPU of its own; other devices they share."""
        is_gpu = wish == "cuda" or (wish == "auto" and torch.cuda.is_available())
        return f"cuda:{self.local_rank}" if is_gpu and self.count > 1 else wish

    def part_of(self, images: int) -> int:
        """Return how many of so many images each rank gets, rounded up."""
        return -(-images // self.count)

    def share(self, batch: Sequence[int]) -> list[int]:
        """Return this rank's part of a batch of image numbers.

        All ranks get equally many. Where the images do not suffice, the bitwise complement of a
        number (which is negative) stands for one that does not count.
        """
        part = list(batch[self.rank :: self.count])
        is_short = len(part) < self.part_of(len(batch))
        return [*part, ~batch[0]] if is_short else part

    def wrap(self, model: nn.Module) -> nn.Module:
        """Make `backward` average the gradients over all ranks."""
        return DistributedDataParallel(model) if self.count > 1 else model

    def add(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks, on the device of `values`."""
        if self.count > 1:
            distributed.all_reduce(values)
        return values

    def largest(self, number: int) -> int:
        """Return the largest of all ranks' numbers, the same on each."""
        if self.count == 1:
            return number
        value = torch.tensor(number)
        distributed.all_reduce(value, distributed.ReduceOp.MAX)
        return int(value)

    @contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """Run the body on the first rank, then on the others, which find what it made."""
        if not self.is_first:
            distributed.barrier()
        yield
        if self.is_first and self.count > 1:
            distributed.barrier()

    def seed_step(self, seed: int, step: int) -> None:
        """Give each rank random numbers of its own, which depend on nothing but the step.

        A checkpoint has the random state of one rank. With this, no other is needed.
        """
        if self.count > 1:
            torch.manual_seed(seed * 1_000_003 + step * self.count + self.rank)


def join(environ: Mapping[str, str] = os.environ) -> Ranks:
    """Join the processes that torchrun started; alone without it.

    GPUs exchange gradients by NCCL; everything else, and CPUs, by gloo.
    """
    count = int(environ.get("WORLD_SIZE", 1))
    if count == 1:
        return Ranks()
    ranks = Ranks(int(environ["RANK"]), count, int(environ["LOCAL_RANK"]))
    if torch.cuda.is_available():
        torch.cuda.set_device(ranks.local_rank)
        distributed.init_process_group("cpu:gloo,cuda:nccl")
    else:
        distributed.init_process_group("gloo")
    return ranks


def leave(ranks: Ranks) -> None:
    """End the connections between the processes."""
    if ranks.count > 1:
        # What still uses gloo's threads when Python ends would abort it.
        gc.collect()
        distributed.destroy_process_group()
